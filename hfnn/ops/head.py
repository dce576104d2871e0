"""A linear map into a vocabulary whose logits are only needed for a function of whole rows.

    logits_TV = hidden_TH weight_VH^T + bias_V        T tokens, V vocabulary, H hidden

The logits are often the largest tensor of a model. Here they are made for a chunk of tokens at a time, turned in place
into their own gradient, multiplied into the gradients of hidden, weight and bias, and discarded. The callers define the
function of a chunk (linear_cross_entropy.py, linear_log_probs.py, linear_distillation.py); this file has the products.

The products are torch's own. In one dtype, the gradient of the weight is rounded once per chunk; one product over all
tokens would round once. The errors add up, weighted by the partial sum at each rounding. `chunks_at_most` keeps the
total below twice the error of one rounding. Under autocast a float32 weight has a float32 gradient, and chunks are
added in float32. On CUDA the logits of the first tokens need no extra memory: they are stored, one column per token, in
the memory of the weight's gradient (`Gradients.inside`). To use fewer bytes than the chunks need, the logits are made
twice (`_by_slabs`): first for the sums of their rows, then for one slab of the vocabulary at a time with all tokens,
where each part of the weight's gradient is one product.
"""

import contextlib
from dataclasses import dataclass, replace

import torch

from hfnn.core import flops
from hfnn.core.context import compiling, has_values, is_plain, on_gpu
from hfnn.core.kernel import Op, forced, kernels

CHUNKS = 8  # for a wide gradient, so an eighth of the logits at a time
# Products of fewer tokens are slow: (CPU, CUDA).
FEWEST_TOKENS = (64, 1024)
FEWEST_INSIDE = 2048  # tokens: with fewer, the products of a slab are slow
SLABS = 64  # slabs of the vocabulary, while the gradient replaces the logits
WORTH_LOGITS = 1 << 21  # below this, torch makes the logits and keeps them
TILE = 128  # tokens of a chunk are a multiple of this on CUDA
ALIGNED, PADDED = 16, 128  # bytes: cuBLAS and the cross-entropy kernels are slow if the first does not divide the rows


@dataclass(frozen=True)
class Operands:
    """The operands of a product: hidden_TH, weight_VH, bias_V or None, in the dtype in which torch multiplies.

    classes: if V is larger, the last logits belong to no class and are -inf. again: whether the logits were made
    before, so that no counter of FLOPs may see them.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    classes: int
    again: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, vocabulary, hidden."""
        return self.hidden.shape[0], *self.weight.shape

    def logits(self, tokens: slice, out: torch.Tensor, slab: slice = slice(None)) -> torch.Tensor:
        """Logits of some tokens over the whole vocabulary or a slab of it, in `out`."""
        weight_HV = self.weight[slab].t()
        with flops.uncounted(profiled=True) if self.again else contextlib.nullcontext():
            if self.bias is not None:
                return torch.addmm(self.bias[slab], self.hidden[tokens], weight_HV, out=out)
            torch.mm(self.hidden[tokens], weight_HV, out=out)
        out[:, max(self.classes - (slab.start or 0), 0) :] = -torch.inf
        return out

    def logits_by_columns(self, tokens: slice, out: torch.Tensor) -> torch.Tensor:
        """Logits with one column per token, (V, T), in `out`."""
        hidden_HT = self.hidden[tokens].t()
        if self.bias is not None:
            return torch.addmm(self.bias[:, None], self.weight, hidden_HT, out=out)
        torch.mm(self.weight, hidden_HT, out=out)
        out[self.classes :] = -torch.inf
        return out


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which torch.nn.functional.linear multiplies x under the present autocast state."""
    device = "cuda" if x.is_cuda else "cpu"
    low = torch.is_autocast_enabled(device) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if low else x.dtype


def operands(hidden, weight, bias, dtype, pad: bool = False) -> Operands:
    """The operands of a product, without their graphs; pad: whether logits of no class are allowed."""
    hidden = hidden.detach().reshape(-1, hidden.shape[-1]).to(dtype)
    more = padding(weight.shape[0], dtype) if pad else 0
    weight, bias = (None if t is None else t.detach() for t in (weight, bias))
    classes = weight.shape[0]
    weight = _longer(weight, more, 0, dtype)
    return Operands(
        hidden.contiguous(), weight, None if bias is None else _longer(bias, more, -torch.inf, dtype), classes
    )


def padding(vocabulary: int, dtype: torch.dtype) -> int:
    """The number of extra logits that makes products of this vocabulary fast."""
    size = dtype.itemsize
    return 0 if vocabulary * size % ALIGNED == 0 else -vocabulary % (PADDED // size)


def _longer(x, more: int, value: float, dtype):
    """x in `dtype` with this many more rows of a value."""
    if not more:
        return x.to(dtype)
    y = x.new_empty(x.shape[0] + more, *x.shape[1:], dtype=dtype)
    y[: x.shape[0]] = x
    y[x.shape[0] :] = value
    return y


def gradient_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight's gradient is accumulated for products in `dtype`: its own, unless another 16-bit
    one."""
    wide = torch.promote_types(dtype, torch.float32)
    return wide if weight.dtype in (wide, torch.float64) else dtype


def gathered(weight):
    """A weight sharded by fully_shard or parallelize_module as a plain tensor, differentiably; plain ones unchanged.

    Its gradient goes back to the shards as the mean over the ranks. This is FSDP's reduction for gradients of different
    data; for equal gradients it is what tensor parallelism expects.
    """
    if weight is None or is_plain(weight) or type(weight).__name__ != "DTensor":
        return weight
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim)


def chunks_at_most(share: float, narrow: bool) -> int:
    """The number of chunks that the weight's gradient tolerates, after one product over the first `share` of the
    tokens.

    With partial sums that grow like a random walk, the variance of all roundings over that of the last is share +
    sum_k (share + (1 - share) k / chunks), and 1.3 (1 - share) more as measured: cuBLAS rounds a product before it is
    added. Below 4.4 of that, errors were measured to be at most twice those of one product.
    """
    return int((2.605 + 0.8 * share) / (0.5 + 0.5 * share)) if narrow else CHUNKS


@dataclass(frozen=True)
class Chunks:
    """How the tokens are divided: the first `inside`, then chunks of `step`; with or without slabs of the
    vocabulary."""

    inside: int
    step: int
    by_slabs: bool


def plan_for(
    given: Operands, needs, weight_dtype: torch.dtype, max_bytes: int | None, inside=False, group=None
) -> Chunks:
    """As many tokens per chunk as fit into `max_bytes`; if None, as few as errors and fast products allow.

    inside: whether the first logits may use the memory of the weight's gradient. The result is the same on all
    processes of a group: the process with the largest shard decides, and the host waits for it.
    """
    (tokens, vocabulary, hidden), dtype, cuda = given.shape, given.hidden.dtype, on_gpu(given.hidden)
    if group is not None and max_bytes is not None:
        vocabulary = max(size.item() for size in vocabulary_sizes(given.hidden, vocabulary, group))
    # In float32 the errors of the products are larger than those of the roundings between them.
    narrow = needs[1] and weight_dtype is dtype and dtype.itemsize == 2
    first = 0
    if inside and cuda and needs[1] and group is None and tokens >= FEWEST_INSIDE:
        first = min(tokens, hidden * weight_dtype.itemsize // dtype.itemsize) // TILE * TILE
    most, rest = chunks_at_most(first / max(tokens, 1), narrow), tokens - first
    if max_bytes is None:
        step = max(-(-rest // most), FEWEST_TOKENS[cuda])
        step = -(-step // TILE) * TILE if cuda else step
    else:
        step = max(1, max_bytes // (vocabulary * dtype.itemsize))
        step = step // TILE * TILE if cuda and step > TILE else step
    step = max(1, min(tokens, step))
    by_slabs = narrow and rest > most * step
    return Chunks(0 if by_slabs else first, step, by_slabs)


def vocabulary_sizes(like: torch.Tensor, vocabulary: int, group) -> list[torch.Tensor]:
    """The vocabulary size of each process of the group, on the device of `like`."""
    mine = torch.tensor([vocabulary], device=like.device)
    sizes = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(sizes, mine, group=group)
    return sizes


def chunks(given: Operands, step: int, first: int = 0):
    """(tokens, their logits) for chunks of `step` tokens from `first` on, all in the same memory."""
    tokens, vocabulary, _ = given.shape
    memory = given.hidden.new_empty(min(step, tokens - first), vocabulary)
    for begin in range(first, tokens, step):
        end = min(begin + step, tokens)
        yield slice(begin, end), given.logits(slice(begin, end), memory[: end - begin])


class Gradients:
    """The gradients of hidden, weight and bias, None if not needed: `add` takes the chunks of dlogits in turn.

    weight_dtype: the dtype of the weight's gradient, which may be wider than the operands.
    """

    def __init__(self, given: Operands, needs: tuple[bool, bool, bool], weight_dtype: torch.dtype):
        tokens, vocabulary, hidden = given.shape
        new = given.hidden.new_empty
        wide = torch.promote_types(given.hidden.dtype, torch.float32)
        self.given = given
        self.weight_dtype = weight_dtype
        self.hidden = new(tokens, hidden) if needs[0] else None
        self.weight = self.bias = None
        self._needs, self._first = needs, True
        if needs[1] and not tokens:
            self.weight = new(vocabulary, hidden, dtype=weight_dtype).zero_()
        if needs[2]:
            self.bias = new(vocabulary, dtype=wide).zero_()

    def inside(self, first: int, turn) -> None:
        """Adds the first tokens, before all others; `turn(logits_VT)` turns logits into their gradient, in place.

        The logits are at the end of the memory of the weight's gradient, which is longer by one slab. Each slab of the
        gradient is written before the logits that it is made from, over logits that are no longer needed.
        """
        given, (_, vocabulary, hidden) = self.given, self.given.shape
        width = max(vocabulary // SLABS // TILE, 1) * TILE
        self.weight = None
        memory = given.hidden.new_empty(vocabulary + width, hidden, dtype=self.weight_dtype)
        logits_VT = memory.view(-1).view(given.hidden.dtype)[-vocabulary * first :].view(vocabulary, first)
        turn(given.logits_by_columns(slice(0, first), logits_VT))
        if self.hidden is not None:
            torch.mm(logits_VT.t(), given.weight, out=self.hidden[:first])
        if self.bias is not None:
            torch.sum(logits_VT, 1, dtype=self.bias.dtype, out=self.bias)
        self.weight = memory[:vocabulary]
        for begin in range(0, vocabulary, width):
            slab = slice(begin, min(begin + width, vocabulary))
            accumulate(self.weight[slab], logits_VT[slab], given.hidden[:first], first=True)
        self._first = False

    def add(self, tokens: slice, dlogits: torch.Tensor) -> None:
        """Adds the dlogits of some tokens, whole rows of them."""
        if self.hidden is not None:
            torch.mm(dlogits, self.given.weight, out=self.hidden[tokens])
        if self._needs[1]:
            if self._first:
                self.weight = self.given.weight.new_empty(self.given.weight.shape, dtype=self.weight_dtype)
            accumulate(self.weight, dlogits.t(), self.given.hidden[tokens], first=self._first)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        self._first = False

    def all(self) -> tuple[torch.Tensor | None, ...]:
        return self.hidden, *(t if t is None else t[: self.given.classes] for t in (self.weight, self.bias))


def accumulate(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """into = a b, or += if it is not the first; the products are added in float32 and rounded once."""
    if into.dtype is a.dtype:
        torch.mm(a, b, out=into) if first else torch.addmm(into, a, b, out=into)
    elif into.is_cuda:
        wide = {"out_dtype": into.dtype, "out": into}
        torch.mm(a, b, **wide) if first else torch.addmm(into, a, b, **wide)
    else:
        into.copy_(a @ b) if first else into.add_(a @ b)


def counted_as_linear(hidden, weight, bias, needs=None):
    """A context in which FLOPs count as those of the logits, or with `needs` of their gradients."""
    return flops.instead(torch.nn.functional.linear, hidden, weight, bias, needs=needs)


def no_autocast(x: torch.Tensor):
    """Disables autocast: the products here have already chosen their dtype."""
    device = "cuda" if x.is_cuda else "cpu"
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def gradients(given: Operands, needs, weight_dtype: torch.dtype, max_bytes: int | None, backward, group=None):
    """The gradients of hidden, weight and bias, None if not needed, by chunks of tokens or slabs of the vocabulary.

    `backward(tokens, slab, logits)` turns logits of some tokens over a slab into their gradient, in place. The gradient
    of hidden is summed over the processes of `group`, which share the vocabulary.
    """
    plan, given = plan_for(given, needs, weight_dtype, max_bytes, group=group), replace(given, again=True)
    if plan.by_slabs:
        found = _by_slabs(given, needs, weight_dtype, plan.step * given.shape[1], backward)
    else:
        sums = Gradients(given, needs, weight_dtype)
        for tokens, logits in chunks(given, plan.step):
            backward(tokens, slice(0, given.shape[1]), logits)
            sums.add(tokens, logits)
        found = sums.all()
    if group is not None and found[0] is not None:
        torch.distributed.all_reduce(found[0], group=group)
    return found


def _by_slabs(given: Operands, needs, weight_dtype: torch.dtype, elements: int, backward):
    """`gradients` with slabs of the vocabulary whose logits for all tokens have at most this many elements."""
    tokens, vocabulary, hidden = given.shape
    new, wide = given.hidden.new_empty, torch.promote_types(given.hidden.dtype, torch.float32)
    width = max(1, elements // tokens)
    width = width // TILE * TILE or width
    memory = new(tokens * min(width, vocabulary))
    dhidden = new(tokens, hidden, dtype=wide) if needs[0] else None
    dweight = new(vocabulary, hidden) if needs[1] else None
    dbias = new(vocabulary, dtype=wide) if needs[2] else None
    for begin in range(0, vocabulary, width):
        slab = slice(begin, min(begin + width, vocabulary))
        logits = memory[: tokens * (slab.stop - begin)].view(tokens, -1)
        backward(slice(0, tokens), slab, given.logits(slice(None), logits, slab))
        if dhidden is not None:
            accumulate(dhidden, logits, given.weight[slab], first=begin == 0)
        if dweight is not None:
            accumulate(dweight[slab], logits.t(), given.hidden, first=True)
        if dbias is not None:
            torch.sum(logits, 0, dtype=wide, out=dbias[slab])
    return dhidden, *(t if t is None else t[: given.classes] for t in (dweight, dbias))


def check(input, linear_weight, target) -> None:
    """Raise ValueError if the shapes of hidden, weight and one class per token do not fit together."""
    if linear_weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"input (*, in) and linear_weight (vocabulary, in) do not go together: {tuple(input.shape)} and "
            f"{tuple(linear_weight.shape)}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target must have one class a token, the shape of input less its last {tuple(input.shape[:-1])}; "
            f"got {tuple(target.shape)}"
        )


def check_classes(target: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise IndexError for an invalid class, as torch does; on CUDA an asynchronous assertion fails.

    For plans whose kernels treat a class out of bounds as one of another process.
    """
    wrong = ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
    if target.is_cuda:
        torch._assert_async(~wrong.any(), f"a target is out of bounds: there are {vocabulary} classes")
    elif has_values(wrong) and wrong.any():
        raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")


def passes(rows: int, weight, prefer: str) -> bool:
    """Whether the logits of so many rows are so few that torch makes and keeps them."""
    return rows * weight.shape[0] < WORTH_LOGITS and prefer != "memory" and forced() is None


def choose(op: Op, input, weight, bias, target, group, prefer):
    """(kernel of `op` for the logits, dtype of the products), or None if torch's own ops must run, or raise.

    With a group, which torch's own ops do not support, it raises ValueError instead.
    """
    if compiling() or (group is None and (flops.watched() or passes(target.numel(), weight, prefer))):
        return _without(group)
    dtype = product_dtype(input)
    kernel = op.select(input, weight, bias, row=weight.shape[:1], out=dtype, prefer="memory", dtype=dtype)
    fits = is_plain(target) and target.dtype is torch.int64 and target.device == input.device and weight.shape[0]
    if kernel is None or not fits or (dtype is input.dtype and weight.dtype is not dtype):
        return _without(group)
    return kernel, dtype


def _without(group):
    if group is not None:
        raise ValueError("a vocabulary shared by a group needs hfnn's kernels: see `python -m hfnn.info`")
    return None


SCALE = Op(
    "scale",
    torch.mul,
    torch.mul,
    kernels=kernels("scale", 0, cuda=0),
    sample=lambda *_: None,
)


def finished(gradient, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """gradient * factor as `dtype`, in the gradient's own memory, which is not touched if the factor is 1.

    The factor has one element, float32 (float64); it may be None, as may the gradient.
    """
    if gradient is None or factor is None:
        return None if gradient is None else gradient.to(dtype)
    kernel = SCALE.find(gradient)
    if kernel is None:
        gradient.mul_(factor)
    else:
        kernel.forward(gradient, factor, gradient, kernel.queue(gradient))
    return gradient.to(dtype)
