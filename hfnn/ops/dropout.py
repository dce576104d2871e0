"""Dropout that keeps only a seed.

    y = x / (1 - p) where word >= round(p * 2^32), else 0

Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014. The word of element i
is number i % 4 of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) at counter
offset + i / 4, computed in integers: a (seed, offset) pair gives the same mask on every device. The pair comes from
torch's generator, so `torch.manual_seed` and the recomputation of activation checkpoints reproduce it.
"""

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling, has_values
from hfnn.core.kernel import Kernel, Op, kernels


def reference(x, p=0.5, training=True, *, mask=None):
    """The definition for a given boolean mask of what is kept, in the dtype of x."""
    return x * mask / (1 - p) if training else x


def sample(case, dtype, device, generator=None):
    """Arguments of `dropout` for x of shape `case[:-1]`; the last entry of a case is p."""
    *shape, p = case
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    return (x.masked_fill(x == 0, 1), p, True), {}  # for a 0 it is unknown whether it was kept


OP = Op(
    "dropout",
    reference,
    torch.dropout,
    kernels=kernels("dropout", 1 << 13, Kernel("cuda", "hfnn._C:cuda.dropout", "cuda", min_elements=1 << 24)),
    sample=sample,
    cases=tuple((*shape, p) for shape in ((1,), (3, 769), (64, 1024), (0, 4)) for p in (0.1, 0.5)),
    traffic=(2, 2),
    probe=(0.5, True),
    small=(3, 5, 0.5),
    pin=lambda args, y: {"mask": (y != 0) | (args[0] == 0)},
    recipe_needs_recipe=True,
    bench=((16384, 8192, 0.1),),
)


def philox_seed(x, counters=None):
    """(seed, offset, pair) for a mask of x, drawn from torch's default generator of x's device.

    counters: how many Philox counters the mask uses, by default one per four elements of x. On CUDA these are the
    generator's own seed and offset, and the offset advances. Inside CUDA graph capture, a new `pair` {seed, offset} is
    drawn on the device at every replay. On the CPU a seed is drawn.
    """
    if not has_values(x):
        return 0, 0, None
    if not x.is_cuda:
        return torch.empty((), dtype=torch.int64).random_().item(), 0, None
    if torch.cuda.is_current_stream_capturing():
        return 0, 0, torch.empty(2, dtype=torch.int64, device=x.device).random_()
    generator = torch.cuda.default_generators[x.get_device()]
    offset = generator.get_offset()
    used = (x.numel() + 3) // 4 if counters is None else counters
    generator.set_offset(offset + (used + 3) // 4 * 4)  # torch requires multiples of 4
    seed = generator.initial_seed()
    return seed - (1 << 64) if seed >= 1 << 63 else seed, offset, None


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, prefer: str = "auto"
) -> Tensor:
    """`torch.nn.functional.dropout`, which keeps 16 bytes instead of a mask. Raises what torch raises.

    Args:
        input: Of any shape and dtype, which the result has.
        p: The probability of a zero, in [0, 1], exact to 2^-32. For 0 and 1 torch's own op runs.
        training: Whether there is dropout.
        inplace: Whether torch's own op runs, and writes the result to input.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> sorted(hfnn.functional.dropout(torch.ones(1000), p=0.5).unique().tolist())
    [0.0, 2.0]
    """
    if not training or inplace or not 0 < p < 1:
        return nn.functional.dropout(input, p, training, inplace)
    y = None if compiling() else _native(input, float(p), prefer)
    if y is NotImplemented:
        y = OP.left(input, prefer=prefer)
    return torch.dropout(input, p, training) if y is None else y


_native = native.call("dropout", OP)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        p: The probability of a zero, in [0, 1].
        inplace: Whether torch's own op runs, and writes the result to the input.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace, prefer=self.prefer)


OP.modules[nn.Dropout] = Dropout
