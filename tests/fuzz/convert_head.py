"""For the fuzzer of `hfnn.convert`: logits of a head that are read late, and the tensors that are alive."""

import gc

import torch
from torch import nn

from hfnn.deferred import defer


class Head:
    """The steps of a `Session` with the head's logits."""

    def add_head(self, y):
        """Adds a loss of logits that nobody reads yet."""
        self.logits, self.ended = None, False
        if self.head is None or y.dtype is not self.dtype or y.shape != self.shape() or not y.numel():
            return
        given = (y * 1).contiguous(), self.head.weight, self.head.bias
        self.logits = defer(*given, prefer="memory") if self.ours else nn.functional.linear(*given)
        rows = self.logits.flatten(0, -2)
        target = torch.randint(0, 11, rows.shape[:1], generator=self.draws)
        self.losses[-1] = self.losses[-1] + nn.functional.cross_entropy(rows, target)

    def write_head(self, how):
        """What users do to weights after backward, without an optimizer."""
        unseen = how in ("data", "set", "row")  # a limit before another backward, which makes the logits again
        if self.logits is None or not self.ended or (unseen and self.retained):
            return
        weight = self.head.weight
        with torch.no_grad():
            if how == "sgd":
                weight -= 0.5 * weight.grad
            elif how == "clip":
                weight.clamp_(-0.1, 0.1)
            elif how == "data":
                weight.data.mul_(0.5)
            elif how == "set":
                weight.data = weight + 1
            else:
                weight.data[3].zero_()

    def read_logits(self):
        if self.logits is not None and self.ended:
            self.log.tensor(f"value {self.at} logits", self.logits)


def count_tensors() -> int:
    """The tensors with a Python object, except those that are kept by a view: torch's linear map returns a view of a
    tensor without one, and ours returns the tensor itself."""
    gc.collect()
    found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    bases = {id(x._base) for x in found if x._base is not None}
    return sum(id(x) not in bases for x in found)
