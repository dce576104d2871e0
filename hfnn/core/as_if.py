"""A step without values, as if on a GPU: what would be chosen and kept there, on a machine that has none."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from hfnn.core import context, native
from hfnn.core.context import PLAIN

_LEAST = 8, 0  # the oldest GPUs for which kernels are built

# The functions that autocast runs in float32 on CUDA (torch.amp's documentation).
_IN_FLOAT32 = {
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist",
    "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv",
    "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod",
    "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus",
    "sum", "tan", "triplet_margin_loss",
}  # fmt: skip


class _OnGPU(TorchFunctionMode):
    """torch's own ops on FakeTensors of the CPU keep what they keep on a GPU."""

    hfnn_runs = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        own, wide = _OWN.get(func), getattr(func, "__name__", "") in _IN_FLOAT32
        if own or wide:
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if type(first) in PLAIN and first.is_cpu and context.on_gpu(first):
                found = own(*args, **kwargs) if own else NotImplemented
                if found is not NotImplemented:
                    return found
                if wide and torch.is_autocast_enabled("cpu"):
                    args, kwargs = [_wide(x) for x in args], {name: _wide(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _in_checkpoints():
    """Backward computes checkpoints again without modes of torch functions, where forward had this one."""
    own = checkpoint._checkpoint_without_reentrant_generator

    def again(function, *args, **kwargs):
        @functools.wraps(function)
        def run(*given, **named):
            here = any(type(mode) is _OnGPU for mode in _get_current_function_mode_stack())
            with contextlib.nullcontext() if here else _OnGPU():
                return function(*given, **named)

        return own(run, *args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = again
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = own


def _dropout(input, p=0.5, training=True, inplace=False):
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """With dropout, the CPU keeps probabilities; a GPU does only where the mask needs a gradient."""
    if not dropout_p or attn_mask is None or not attn_mask.requires_grad:
        how = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **how)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    with torch.autocast("cpu", enabled=False):
        q, k, v = (_wide(x.to(autocast)) for x in (query, key, value))
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        root = (scale or q.shape[-1] ** -0.5) ** 0.5
        scores = (q * root) @ (k.transpose(-2, -1) * root) + attn_mask
        kept = torch.native_dropout(torch.softmax(scores, -1), dropout_p, True)[0]
        return (kept @ v).to(autocast)


class _Softmax(torch.autograd.Function):
    """softmax or log_softmax, in float32, of 16-bit numbers. A GPU makes no copy of these in float32.

    There are no values, so one result stands for both. Under create_graph it depends on what torch's depends on.
    """

    @staticmethod
    def forward(ctx, x):
        y = torch.empty(x.shape, device=x.device)
        ctx.save_for_backward(y)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return (grad * y).to(ctx.dtype) if torch.is_grad_enabled() else torch.empty_like(y, dtype=ctx.dtype)


def _softmax(input, dim=None, _stacklevel=3, dtype=None):
    if dtype is None and torch.is_autocast_enabled("cpu"):
        dtype = torch.float32
    return _Softmax.apply(input) if dtype is torch.float32 and _is_half(input) else NotImplemented


def _softmax_of_torch(input, dim=None, dtype=None):
    return _softmax(input, dim, dtype=dtype)


def _cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
                   label_smoothing=0.0):  # fmt: skip
    if label_smoothing or target.is_floating_point() or not (torch.is_autocast_enabled("cpu") and _is_half(input)):
        return NotImplemented
    return F.nll_loss(_Softmax.apply(input), target, weight, size_average, ignore_index, reduce, reduction)


_OWN = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((F.softmax, F.log_softmax), _softmax),
    **dict.fromkeys((torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax), _softmax_of_torch),
}


def _is_half(x) -> bool:
    """Whether x is a tensor of 16-bit floating-point numbers."""
    return type(x) in PLAIN and x.is_floating_point() and x.itemsize == 2


def _wide(x):
    return x.float() if _is_half(x) else x


@contextlib.contextmanager
def as_if(device: str = "cuda", capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Steps without values choose, and keep for backward, what they would on a GPU; torch may be built without CUDA.

    For FakeTensors on the CPU, and for real tensors in their mode: run forward and backward inside, with the tensors'
    own device ("cpu") in the code. hfnn's choices of kernels, their limits of size, the layouts and dtypes of their
    results, and what dropout, attention and autocast of torch keep, are those of a GPU. All kernels of hfnn count as
    built. Autocast is that of the CPU with the dtypes of a GPU: `torch.autocast("cpu", torch.bfloat16)`.

    Real tensors outside of such a mode have kernels of their own device only, so nothing changes for them, nor on
    "meta", where torch's own ops run. What cuDNN keeps for batch norm and recurrent layers is not included, and torch's
    functions called by torch's own functions in Python (`multi_head_attention_forward`) are as on the CPU. Applies to
    the whole process, like `hfnn.use`.

    Args:
        device: "cuda".
        capability: The compute capability of the GPU. From 8.0 on, no choice of hfnn depends on it.

    Raises:
        ValueError: Another device, or a GPU for which hfnn has no kernels.

    >>> from torch._subclasses import FakeTensorMode
    >>> with hfnn.as_if("cuda"), FakeTensorMode():
    ...     y = hfnn.Dropout(0.5)(torch.empty(8, 8, requires_grad=True))  # torch keeps a boolean mask on a GPU
    >>> y.grad_fn.name()
    'NativeDropoutBackward0'
    """
    if torch.device(device).type != "cuda":
        raise ValueError(f"as_if({device!r}): choices can be those of 'cuda' only")
    if tuple(capability) < _LEAST:
        raise ValueError(f"as_if(capability={capability}): hfnn has kernels for GPUs of capability {_LEAST} and newer")
    before = context.assumed()
    _assume(True)
    try:
        with _OnGPU(), _in_checkpoints():
            yield
    finally:
        _assume(before)


def _assume(on: bool) -> None:
    context._assumed = on
    if native.extension is not None:
        native.extension.as_if(on)
