"""`TuneCallback` for transformers' Trainer: runs `hfnn.tune` before the first step."""

from collections.abc import Iterator, Mapping

import torch
import transformers
from torch.utils.data import IterableDataset

from hfnn.core.kernel import log
from hfnn.tune import tune
from hfnn.tuning import ranks
from hfnn.tuning.run import WARM


class TuneCallback(transformers.TrainerCallback):
    """`Trainer(..., callbacks=[TuneCallback()])` tunes the model when training begins. how: arguments of `hfnn.tune`.

    Batches are made from the first rows of the training data with the loader's own collate function, so no sampler
    advances. The loss is the model's own; if your Trainer overrides compute_loss, pass `loss`. With several ranks the
    optimizer and layouts are left alone, because a wrapper already holds the parameters. If `hfnn.tune` does not accept
    the model, or the data has no rows, nothing is changed and a line is logged.
    """

    def __init__(self, **how):
        self.how = how

    def on_train_begin(self, args, state, control, model=None, optimizer=None, train_dataloader=None, **others):
        steps = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        modes = [(module, module.training) for module in model.modules()]
        model.train()
        try:
            how = {"optimizer": optimizer if ranks.count() == 1 else None, **self.how}
            given = _batches(train_dataloader, args.train_batch_size, next(model.parameters()).device)
            tune(model, given, steps=max(steps, 1), **how)
        except ValueError as why:
            log.warning("the model is not tuned: %s", why)
            for module, mode in modes:
                module.training = mode


def _batches(loader, size: int, device: torch.device) -> Iterator[Mapping]:
    """The first rows; no rows if there are fewer than two batches. Raises ValueError for data without rows."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("its training data has no rows, but comes as a stream")
    for begin in range(0, min(WARM * size, len(loader.dataset) // size * size), size):
        batch = loader.collate_fn([loader.dataset[i] for i in range(begin, begin + size)])
        yield {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
