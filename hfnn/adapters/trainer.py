"""`TuneCallback`, for transformers' Trainer: `hfnn.tune` before its first step."""

from collections.abc import Iterator, Mapping

import torch
import transformers
from torch.utils.data import IterableDataset

from hfnn.core.kernel import log
from hfnn.tune import tune
from hfnn.tuning import ranks
from hfnn.tuning.run import WARM


class TuneCallback(transformers.TrainerCallback):
    """`Trainer(..., callbacks=[TuneCallback()])` tunes the model when training begins; how: arguments of `hfnn.tune`.

    Batches are made of the first rows of the training data, by the loader's own collate function, so that no sampler
    moves on. The loss is the model's own: where Trainer has a compute_loss of yours, give `loss`. With several ranks
    the optimizer is left alone, and so are layouts, for a wrapper knows its parameters already. A model that
    `hfnn.tune` does not take, and data without rows, are left as they are, with a line in the log.
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
    """The first rows; none of fewer than two batches. Raises ValueError for data without rows."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("its training data has no rows, but comes as a stream")
    for begin in range(0, min(WARM * size, len(loader.dataset) // size * size), size):
        batch = loader.collate_fn([loader.dataset[i] for i in range(begin, begin + size)])
        yield {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
