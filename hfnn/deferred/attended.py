"""The products of attention that a module's own code writes out: of queries and keys, of weights and values.

In the first calls of a module, until their backward, everything is computed, and only watched. If the scores or weights
are read, also after the call, they are computed in the next call, too; after two such calls in a row for good, as after
a backward that makes a graph. Weights that live on unread (`return y, weights`) wait, unless what they are made of is
larger than they are.
"""

import functools
import logging
import math
import sys
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hfnn.core import flops, kernel
from hfnn.core.context import PLAIN, autocasting, capturing, context, has_values, in_checkpoint
from hfnn.deferred.hidden import Facts, Made
from hfnn.deferred.recorded import DTYPES, name_of
from hfnn.deferred.scored import LOWEST
from hfnn.deferred.scores import Call, Node, Plan, Result, Scores, Use, recorder
from hfnn.ops.attention import products, sdpa

log = logging.getLogger("hfnn")

CALLS = 2  # in a row with a read, after which a module computes its scores for good
FEWEST = {"cpu": 1 << 18, "cuda": 1 << 20}  # scores with prefer="auto"
WIDEST = 256  # of a head, for kernels


def product(call: Call, func, args, kwargs):
    """The scores of a product of queries and keys, not computed, or NotImplemented."""
    if kwargs or not torch.is_grad_enabled():
        return NotImplemented
    if name_of(func) == "einsum":
        found = _letters(args[0], args[1:])
        if found is None:
            return NotImplemented
        (a, b, out), (_, query, key) = found, args
        if len(out) < 3:
            return NotImplemented
        summed, q, k = [c for c in a if c in b and c not in out], out[-2], out[-1]
        batch = out[:-2]
        fits = (
            len(summed) == 1
            and sorted(a) == sorted(batch + q + summed[0])
            and sorted(b) == sorted(batch + k + summed[0])
        )
        if not fits or any(type(t) not in PLAIN for t in (query, key)):
            return NotImplemented
        query = query.permute([a.index(c) for c in batch + q + summed[0]])
        key = key.permute([b.index(c) for c in batch + k + summed[0]])
    elif len(args) == 2 and all(type(t) in PLAIN and t.dim() > 2 for t in args):
        query, key = args[0], args[1].transpose(-2, -1)
    else:
        return NotImplemented
    shape = (*query.shape[:-1], key.shape[-2])
    if query.dim() < 3 or query.shape[:-2] != key.shape[:-2] or query.shape[-1] != key.shape[-1] or 0 in shape:
        return NotImplemented
    if query.dtype is not key.dtype or query.dtype not in DTYPES.values() or query.device != key.device:
        return NotImplemented
    few = call.prefer != "memory" and math.prod(shape) < FEWEST.get(query.device.type, 0)
    if few or shape[-2] < 2 or query.shape[-1] > WIDEST or query.device.type not in FEWEST:
        return NotImplemented
    if not (query.requires_grad or key.requires_grad) or query.is_inference() or key.is_inference():
        return NotImplemented
    if in_checkpoint() or context(query, key) is not None or flops.watched() or kernel.forced() == "torch":
        return NotImplemented
    dtype = torch.get_autocast_dtype(query.device.type) if autocasting(query) else query.dtype
    step = lambda: func(*args)  # noqa: E731
    return Scores.of(Node(call, Plan(query, key), step), shape, dtype)


PRODUCTS = frozenset(
    (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.einsum)
)


class Watching(TorchFunctionMode):
    """Products in the given code give scores that are not computed."""

    hfnn_runs = True

    def __init__(self, call: Call, codes: frozenset):
        super().__init__()
        self.call, self.codes = call, codes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PRODUCTS:
            caller = sys._getframe(1)
            while caller.f_globals.get("__name__") in ("torch.overrides", "torch.functional"):
                caller = caller.f_back
            if caller.f_code in self.codes:
                result = product(self.call, func, args, kwargs)
                if result is not NotImplemented:
                    return result
        result = func(*args, **kwargs)
        self.call.made.note(func, args, kwargs, result)
        return result


def deferring(module, codes: frozenset, use: Use, forward: Callable, args, kwargs):
    """forward(module, *args, **kwargs) with its scores deferred, or only watched."""
    if use.read >= CALLS or in_checkpoint() or torch._C._current_graph_task_id() != -1:
        return forward(module, *args, **kwargs)
    if not use.watched and capturing():
        return forward(module, *args, **kwargs)
    call = Call(use, module.prefer, Made((*module._buffers.values(), *args, *kwargs.values())))
    with Watching(call, codes):
        result = forward(module, *args, **kwargs)
    if not call.members:
        return result
    if any(isinstance(x, Result) for x in tree_leaves(result)):
        result = tree_map_only(Result, Result.value, result)
    for name, value in vars(module).items():
        if type(value) is Result:
            vars(module)[name] = value.value()
    call.end()
    return result


def _watched(call, y, tokens=False):
    """A result of computed weights. Its backward ends the watch, or shows that second derivatives are wanted, which
    torch's op has not, or that the result has been written to, which torch's op keeps."""
    if not y.requires_grad or call.use.watched:
        return y
    rows = (y if tokens else y.transpose(1, 2)).contiguous() if y.dim() == 4 else y
    seen = [(rows.detach(), rows._version)]

    def began(grad):
        written = any(of._version != version for of, version in seen)
        seen.clear()
        if torch.is_grad_enabled() or written:
            call.use.read = CALLS
        elif not call.read:
            call.use.watched = True

    y.register_hook(began)
    return Result.of(call, rows, tokens) if y.dim() == 4 else y


@recorder("matmul", "__matmul__", "bmm")
def _with_values(x, func, args, kwargs):
    if len(args) != 2 or kwargs or args[0] is not x:
        return NotImplemented
    rows = _attention(x, args[1])
    if rows is None:
        return _watched(x._node.call, func(x.value(), args[1]))
    return rows if rows is NotImplemented else _ordered(x._node.call, rows, x.shape)


@recorder("einsum")
def _einsum_with_values(x, func, args, kwargs):
    found = _letters(args[0], args[1:]) if not kwargs else None
    if found is None or len(args) != 3 or args[1] is not x:
        return NotImplemented
    (a, b, out), (_, _, value) = found, args
    summed = a[-1]  # (batch ..., query, key), (batch ..., key, width) in any order
    width = [c for c in b if c not in a]
    tokens = a[0] + a[2] + a[1] + "".join(width) if len(a) == 4 else None
    if (
        summed in out
        or len(width) != 1
        or set(b) != {*a[:-2], summed, *width}
        or out not in (a[:-1] + width[0], tokens)
    ):
        return NotImplemented
    rows = _attention(x, value.permute([b.index(c) for c in (*a[:-2], summed, *width)]))
    if rows is None:
        return _watched(x._node.call, func(args[0], x.value(), value), out == tokens)
    return rows if rows is NotImplemented else _ordered(x._node.call, rows, x.shape, out == tokens)


def _letters(equation, operands):
    """(letters of two operands, of the result), or None."""
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    fits = len(terms) == 2 and all(len(set(t)) == len(t) == x.dim() for t, x in zip(terms, operands, strict=True))
    return (*terms, out) if fits and out and (inputs + out).replace(",", "").isalpha() else None


def _ordered(call, rows, shape, tokens=False):
    """(B, T, H, E) as the product's result, of whose scores `shape` is that."""
    if len(shape) == 4:
        return Result.of(call, rows, tokens)
    return rows.transpose(1, 2).reshape(*shape[:-1], rows.shape[-1]).contiguous()


def _attention(x: Scores, value):
    """The product of weights and values in the order (B, T, H, E); None if the weights have been computed, or
    NotImplemented."""
    node, plan = x._node, x._node.plan
    query, key = plan.query, plan.key
    if not plan.weights or type(value) not in PLAIN or not _alike(query, key, value, x.dtype):
        return NotImplemented
    if value.shape[:-1] != (*x.shape[:-2], x.shape[-1]) or not 0 < value.shape[-1] <= WIDEST:
        return NotImplemented
    if node.used:  # by another product, to which other dropout would belong
        return NotImplemented
    node.check()
    leading = x.shape[:-2] if plan.leading is None else plan.leading
    at = _heads(x, leading, [*plan.biases, *(mask for mask, _ in plan.hidden)])
    two = tuple(math.prod(leading[part]) for part in _parts(at))
    how = _masked(plan, (*two, *x.shape[-2:]), node.call.made)
    if how is not NotImplemented and node.call.prefer != "memory" and value.is_cpu and _slow(plan, how):
        how = NotImplemented
    if how is NotImplemented:
        return how
    if "attn_mask" in how:
        how["attn_mask"] = _in_four(how["attn_mask"], leading, at)
    ordered = x.dim() != 4 or two == x.shape[:2]
    if not ordered and how.get("attn_mask", query[:0]).numel() + query.numel() > x.numel():
        return NotImplemented  # its result is copied, so that torch's products keep less
    node.use()
    if node.computed():
        return None
    given = [t.reshape(*two, *t.shape[-2:]) for t in (query, key, value)]
    how["stock"] = products.Stock(True, "attn_mask" in how, shapes=tuple(t.shape for t in given), dropout_p=plan.p)
    o = sdpa.in_rows(*given, dropout_p=plan.p, scale=plan.scale, prefer=node.call.prefer, **how)
    if not ordered:
        o = o.reshape(*x.shape[:-1], o.shape[-1])
    return o.transpose(1, 2).contiguous()


def _heads(x, leading, masks) -> int:
    """From which of the leading dimensions on they are attention's heads: where masks stay smallest; where the result
    has the order of x; the last."""
    varies = [any(_lead(mask, leading)[i] > 1 for mask in masks) for i in range(len(leading))]

    def size(at):
        return math.prod(math.prod(leading[part]) for part in _parts(at) if any(varies[part]))

    def order(at):
        two, last = tuple(math.prod(leading[part]) for part in _parts(at)), max(len(leading) - 1, min(1, len(leading)))
        return size(at), two != x.shape[:2], at != last

    return min(range(len(leading) + 1), key=order)


def _parts(at) -> tuple[slice, slice]:
    return slice(at), slice(at, None)


def _lead(mask, leading) -> tuple[int, ...]:
    return (1,) * (len(leading) + 2 - max(mask.dim(), 2)) + mask.shape[:-2]


def _in_four(mask, leading, at):
    """A mask (leading ..., queries, keys) as (batch, heads, queries, keys)."""
    if mask.dim() < 3:
        return torch.atleast_2d(mask)
    lead = _lead(mask, leading)
    sizes = [leading[part] if math.prod(lead[part]) > 1 else (1,) * len(leading[part]) for part in _parts(at)]
    whole = mask.reshape(*lead, *mask.shape[-2:]).expand(*sizes[0], *sizes[1], *mask.shape[-2:])
    return whole.reshape(*map(math.prod, sizes), *mask.shape[-2:])


def _slow(plan, how) -> bool:
    """Whether the CPU's kernels, which keep less than torch's products, take longer than these."""
    mask = how.get("attn_mask")
    return plan.p > 0 or (mask is not None and mask.requires_grad)


def _alike(query, key, value, dtype) -> bool:
    """Whether torch multiplies the weights and values, and attention takes them."""
    if autocasting(query):
        return all(t.dtype in DTYPES.values() and t.dtype is not torch.float64 for t in (query, key, value))
    return query.dtype is key.dtype is value.dtype is dtype


def _masked(plan, shape, made):
    """Keyword arguments of attention for masks, or NotImplemented."""
    masks = [mask for mask, _ in plan.hidden]
    if not masks and not plan.biases:
        return {}
    mask = functools.reduce(torch.logical_or, masks) if masks else None
    bias = sum(plan.biases[1:], plan.biases[0]) if plan.biases else None
    read = [*masks, *(b for b in plan.biases if not (masks and b.requires_grad))]
    facts = made.facts(read, lambda: _facts(mask, bias, *shape[-2:]))
    if facts is None and mask is None and bias.requires_grad and has_values(bias):
        return {"attn_mask": bias}
    if facts is None or facts.blind:  # of a query that sees no key torch makes NaN, or a mean
        return NotImplemented
    if mask is None and facts.only:
        mask, bias = bias == -math.inf, None
    if bias is None:
        return {"is_causal": True} if facts.triangle else {"attn_mask": mask.logical_not()}
    if mask is not None:
        both = torch.broadcast_shapes(bias.shape, mask.shape)
        if math.prod(both) * 4 > math.prod(shape):
            return NotImplemented
        bias = bias.masked_fill(mask, -math.inf)
    return {"attn_mask": bias}


def _facts(mask, bias, queries: int, keys: int) -> Facts:
    hides = bias == -math.inf if mask is None else mask
    both = mask is not None and bias is not None and not bias.requires_grad
    whole = hides | (bias <= LOWEST) if both else hides
    whole = whole.expand(queries, keys) if whole.dim() < 2 else whole
    triangle = queries == keys and hides.shape[-2:] == (queries, keys) and hides.numel() == queries * keys
    triangle = triangle and torch.equal(
        hides.view(queries, keys), torch.ones(queries, keys, dtype=torch.bool, device=hides.device).triu(1)
    )
    only = bias is not None and not bias.requires_grad and not bias.masked_fill(hides, 0).any()
    return Facts(bool(whole.all(-1).any()), triangle, only)
