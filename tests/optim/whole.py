"""Helpers shared by tests of all optimizers."""

import torch

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def difference(a, b):
    """The largest difference between two lists of tensors, relative to the second one's largest number."""
    pairs = [(x.detach().double().cpu(), y.detach().double().cpu()) for x, y in zip(a, b, strict=True) if y.numel()]
    return max(((x - y).abs().max() / y.abs().max().clamp_min(1e-30)).item() for x, y in pairs)


def on_threads(count, run):
    """The result of `run()` with this number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def clipped(params, plain, optimizer, found):
    """Gives params the gradients of `plain`, scaled, and the optimizer what a GradScaler found; clips those of `plain`
    to a norm of 2. Returns that norm, and copies of params."""
    for p, q in zip(params, plain, strict=True):
        p.grad = q.grad * 1024
    norm = torch.nn.utils.clip_grad_norm_(plain, 2.0)
    device = params[0].device
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0, device=device), torch.tensor(found, device=device)
    return norm, [p.detach().clone() for p in params]


def halved(masters):
    """bfloat16 parameters; the masters are set to the same values."""
    halves = [torch.nn.Parameter(p.detach().bfloat16()) for p in masters]
    for p, q in zip(masters, halves, strict=True):
        p.data.copy_(q.data)
    return halves


def assert_masters(full, masters, ours, halves):
    """The halves with their remainders equal the masters, bit for bit, and so do the states."""
    for p, q in zip(masters, halves, strict=True):
        low = ours.state[q]["remainder"].int()
        assert torch.equal((q.detach().view(torch.int16).int() << 16) + low, p.detach().view(torch.int32))
        assert all(torch.equal(full.state[p][n], ours.state[q][n]) for n in full.state[p])
