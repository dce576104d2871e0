"""The providers of an op: hfnn, torch, torch.compile, Liger, quack. All take the arguments of torch's op.

A provider that cannot run an op raises `Skip` with the reason, which is printed: no provider is left out silently.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import hfnn

AGAINST = ("torch", "compile", "compile-max", "liger", "quack")
OURS = ("auto", *(name for name in hfnn.kernel.NAMES if name != "torch"))


class Skip(Exception):
    """Why a provider does not take part."""


@dataclass(frozen=True)
class Provider:
    """`fn(*prepare(args), **kwargs)` is the op; `around` is entered for the forward, outside the timed part."""

    name: str
    fn: Callable
    label: str = ""  # distinguishes providers with the same name: hfnn's kernels
    around: Callable = contextlib.nullcontext
    prepare: Callable = tuple
    whole: bool = False  # forward also makes the gradient: only forward and backward together can be compared

    def __str__(self) -> str:
        return f"{self.name} {self.label}".strip()


def ours(op, kernel: str) -> Provider:
    """hfnn's function with one kind of kernel, or with its own choice ("auto")."""
    fn = getattr(hfnn.functional, op.name)
    if kernel == "auto":
        return Provider("hfnn", fn, "auto")
    return Provider("hfnn", fn, kernel, around=functools.partial(hfnn.use, kernel))


def rival(op, name: str, device: str) -> Provider:
    """One of AGAINST for `op`. Raises Skip."""
    if name == "torch":
        return Provider("torch", op.torch)
    if name.startswith("compile"):
        return Provider(name, _compiled(op, "max-autotune-no-cudagraphs" if name == "compile-max" else None))
    if device != "cuda":
        raise Skip("runs on CUDA only")
    make = {"liger": _liger, "quack": _quack}[name]().get(op.name)
    if make is None:
        raise Skip(f"has no {op.name}")
    return make


def _compiled(op, mode: str | None) -> Callable:
    torch._dynamo.reset()  # each case is compiled for its own shape, without counting as a recompilation
    torch._functorch.config.donated_buffer = False  # otherwise a retained graph cannot run backward twice
    return torch.compile(lambda *args, **kwargs: op.torch(*args, **kwargs), dynamic=False, mode=mode)


def _liger() -> dict[str, Provider]:
    """Liger Kernel's autograd functions, called as in its own functional interface."""
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise Skip(f"cannot be imported: {error}") from error

    def layer_norm(x, shape, weight, bias, eps=1e-5):
        return LigerLayerNormFunction.apply(x, weight, bias, eps)

    def rms_norm(x, shape, weight, eps):
        # in_place=False: by default Liger overwrites dy with dx, but a second backward of the graph reads dy.
        return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)

    def softmax(x, dim):
        return LigerSoftmaxFunction.apply(x)

    def cross_entropy(x, target):
        return LigerCrossEntropyFunction.apply(x, target, None)[0]

    def swiglu(gate, up):
        return LigerSiLUMulFunction.apply(gate, up)

    def geglu(gate, up, approximate="none"):
        return LigerGELUMulFunction.apply(gate, up)  # always the tanh form, the only one it has

    def own_inputs(args):
        # The backward overwrites gate and up with the gradients, so it gets copies: other providers use the same
        # tensors.
        return tuple(t.detach().clone().requires_grad_() for t in args)

    def own_logits(args):
        # The forward overwrites the logits with the gradient. It gets a copy, made before the clock starts; otherwise
        # other providers would get gradients as logits. From the second call on Liger itself does, which takes the same
        # time.
        x, *rest = args
        return x.detach().clone().requires_grad_(), *rest

    return {
        "layer_norm": Provider("liger", layer_norm),
        "rms_norm": Provider("liger", rms_norm),
        "softmax": Provider("liger", softmax),
        "cross_entropy": Provider("liger", cross_entropy, prepare=own_logits, whole=True),
        "swiglu": Provider("liger", swiglu, prepare=own_inputs),
        "geglu": Provider("liger", geglu, "tanh form", prepare=own_inputs),
    }


def _quack() -> dict[str, Provider]:
    """quack's kernels. Its LayerNorm has no autograd function, and only accepts float32 parameters."""
    try:
        import quack
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm
    # Its import compiles and inspects: an unknown driver or folder raises other errors than ImportError.
    except Exception as error:
        raise Skip(f"cannot be imported: {error}") from error

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, eps):
            y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return *layernorm_bwd(x, weight, dy, rstd, mean), None

    def layer_norm(x, shape, weight, bias, eps=1e-5):
        return LayerNorm.apply(x, weight, bias, eps)

    def rms_norm(x, shape, weight, eps):
        return rmsnorm(x, weight, eps=eps)

    def softmax(x, dim):
        return quack.softmax(x)

    def cross_entropy(x, target):
        return quack.cross_entropy(x, target)  # inplace_backward=False: the logits stay as they are

    def float32(args):
        x, *rest = args
        return x, *(torch.nn.Parameter(a.detach().float()) if isinstance(a, torch.Tensor) else a for a in rest)

    return {
        "layer_norm": Provider("quack", layer_norm, prepare=float32),
        "rms_norm": Provider("quack", rms_norm),
        "softmax": Provider("quack", softmax),
        "cross_entropy": Provider("quack", cross_entropy),
    }
