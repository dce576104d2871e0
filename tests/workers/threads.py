"""`threads.py EXTENSION STEPS`: threads that share a converted model's graphs, on a given hfnn._autograd."""

import importlib.util
import sys
import threading

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

spec = importlib.util.spec_from_file_location("hfnn._autograd", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])

import hfnn  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)
LAYERS = (
    *(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1)),
    *(nn.Linear(32, 16), nn.RMSNorm(16), nn.SiLU(), nn.Linear(16, 16)),
    *(nn.GroupNorm(4, 16), nn.Softsign(), nn.Linear(16, 16)),  # described nodes: their formulas are in Python
)
model = hfnn.convert(nn.Sequential(*LAYERS), prefer="memory")
weights = list(model.parameters())
x = torch.randn(8, 16)
failed = []


def clones():
    return saved_tensors_hooks(torch.clone, lambda t: t)


def own():
    h = model[:-1](torch.randn(8, 16, requires_grad=True))
    h.register_hook(lambda dh: dh * 1)  # in Python, between nodes that rebuild
    model[-1](h).sum().backward()


def retained(y):
    return lambda: torch.autograd.grad(y, weights, retain_graph=True)


def batched():
    y = model(x)
    torch.autograd.grad(y, weights, torch.randn(3, *y.shape), is_grads_batched=True)


def hooked():
    with clones():
        y = model(x)
    y.sum().backward()


def checkpointed():
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).sum().backward()


def two_losses():
    h = model[:5](x)
    a, b = model[5](h), model[5](h)
    a.sum().backward()
    torch.autograd.grad(b.sum(), list(model[5].parameters()))


def run(step):
    try:
        for _ in range(int(sys.argv[2])):
            step()
    except Exception as error:
        failed.append(error)
        raise


y = model(x).sum()
with clones():
    z = model(x).sum()
steps = own, retained(y), retained(y), retained(z), retained(z), batched, hooked, checkpointed, two_losses
threads = [threading.Thread(target=run, args=(step,)) for step in steps]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("failed" if failed or not hfnn.recipe.counter.rebuilt else "ok")
