"""One step in plain torch, for any dtype, device and format: the definition in `csrc/optim.h`, one parameter at a time.

It runs if no kernel does and torch's own class does not support the formats. Unlike a kernel, it waits for the device.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hfnn.optim import formats
from hfnn.optim.table import Entry, flat, like

MAXIMIZE, DECOUPLED, AMSGRAD, NESTEROV = 1, 2, 4, 8  # of the sixth number of a group


def square_sum(grads: list[Tensor], grad_scale: float) -> Tensor:
    """The sum of the squares of all elements, float64, of gradients not yet divided by grad_scale."""
    total = sum((g.double() / grad_scale).square().sum() for g in grads)
    return torch.as_tensor(total, dtype=torch.float64)


def step(
    entry: Entry, grad: Tensor, update: Callable, numbers: list[float], signed: list[bool], factor: float,
    stochastic: bool, ema_decay: float | None,
) -> None:  # fmt: skip
    """One step of one parameter; `factor` multiplies its gradient: sign, scale and clipping."""
    whole = like(entry.param, entry.param)  # a copy if there are gaps
    x = flat(whole)
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    p = x.to(work, copy=True) if entry.remainder is None else formats.join(x, flat(entry.remainder))
    g = flat(grad).to(work) * factor
    states = [_read(entry, i, x.numel(), sign).to(work, copy=True) for i, sign in enumerate(signed)]
    if entry.step is not None:
        entry.step.add_(1)
    update(p, g, states, numbers, None if entry.step is None else entry.step.item(), entry.first)
    for i, (state, sign) in enumerate(zip(states, signed, strict=True)):
        _write(entry, i, state, sign)
    if entry.remainder is not None:
        parameter, remainder = formats.split(p)
        x.copy_(parameter)
        flat(entry.remainder).copy_(remainder)
    else:
        x.copy_(_stochastic(p, x.dtype) if stochastic and x.element_size() == 2 else p)
    if whole is not entry.param:
        entry.param.copy_(whole)
    if entry.ema is not None:
        kept = p if entry.remainder is not None else x
        ema = flat(entry.ema)
        ema.add_((kept.float() - ema) * (1 - ema_decay))


def _read(entry: Entry, i: int, numel: int, signed: bool) -> Tensor:
    if entry.format in formats.LOW:
        return formats.decode(entry.states[i], entry.scales[i], numel, entry.format, signed)
    return flat(entry.states[i])


def _write(entry: Entry, i: int, state: Tensor, signed: bool) -> None:
    if entry.format in formats.LOW:
        codes, scale = formats.encode(state, entry.format, signed)
        entry.states[i].copy_(codes)
        entry.scales[i].copy_(scale)
    else:
        flat(entry.states[i]).copy_(state)


def _stochastic(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 x, rounded to one of its two 16-bit neighbours such that the expected value is x."""
    bits = 16 if dtype is torch.bfloat16 else 13
    noise = torch.randint(0, 1 << bits, x.shape, dtype=torch.int32, device=x.device)
    cut = ((x.view(torch.int32) + noise) >> bits << bits).view(torch.float32)
    # float16 has fewer exponents: values outside its normal range are rounded to nearest.
    normal = x.isfinite() & (x.abs() >= torch.finfo(dtype).tiny) & (x.abs() <= torch.finfo(dtype).max)
    return torch.where(normal, cut, x)


def decayed(p: Tensor, g: Tensor, numbers: list[float]) -> Tensor:
    """The gradient with weight decay; decoupled decay is done to p in place. Without decay, infinite p stay."""
    lr, _, _, _, decay, options = numbers[:6]
    if options & DECOUPLED:
        p.mul_(1 - lr * decay)
    return g if options & DECOUPLED or not decay else g + p * decay


def adam(p, g, states, numbers, step, first) -> None:
    """Adam and AdamW: Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101."""
    lr, beta1, beta2, eps, _, options = numbers[:6]
    m, v, *largest = states
    g = decayed(p, g, numbers)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if options & AMSGRAD:
        v = torch.maximum(largest[0], v, out=largest[0])
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))


def sgd(p, g, states, numbers, step, first) -> None:
    """SGD with momentum as in torch: Sutskever et al., ICML 2013, with the learning rate outside of the buffer."""
    lr, momentum, dampening, _, _, options = numbers[:6]
    g = decayed(p, g, numbers)
    if states:
        (b,) = states
        b.copy_(g) if first else b.mul_(momentum).add_(g, alpha=1 - dampening)
        g = g + b * momentum if options & NESTEROV else b
    p.sub_(g * lr)


def lion(p, g, states, numbers, step, first) -> None:
    """Lion: Chen et al., arXiv:2302.06675."""
    lr, beta1, beta2, _, decay, _ = numbers[:6]
    (m,) = states
    p.mul_(1 - lr * decay)
    p.sub_((m * beta1 + g * (1 - beta1)).sign() * lr)
    m.lerp_(g, 1 - beta2)
