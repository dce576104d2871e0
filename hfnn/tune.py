"""`tune`: which way of running a model trains it fastest, measured on batches of yours.

Candidates are the model as it is, converted, captured, compiled, compiled and converted, and each of them with the
weights of its convolutions in channels_last. Each runs in turn, in place. It is accepted if loss, gradients and buffers
agree with stock's after one batch and after two whose gradients add up, if its peak fits, and if it does not compile at
step after step.

How far a result may be from stock's is in hfnn/tuning/agreement.py. All candidates begin with the same states of the
generators. Dropout is off for the comparison, as masks of hfnn and Inductor are others than torch's for the same seed;
a model that draws random numbers all the same is compared in eval mode. For the times everything is as in training.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from hfnn.capture import captured
from hfnn.convert import convert
from hfnn.patterns.subclass import is_converted
from hfnn.tuning import ranks, rows
from hfnn.tuning.candidates import Candidate, among_names, candidates, convolved, watch
from hfnn.tuning.rows import Tuning
from hfnn.tuning.run import WARM, Run

_tuned: weakref.WeakKeyDictionary[nn.Module, tuple[Candidate, Tuning]] = weakref.WeakKeyDictionary()


def explain(model: nn.Module) -> str | None:
    """What was chosen for a model, for `hfnn.report`, or None."""
    if model not in _tuned:
        return None
    candidate, found = _tuned[model]
    gone = candidate.backend is not None and model._compiled_call_impl is None
    return found.line + "; no longer compiled, as too many calls compiled anew" * gone


def tune(
    model: nn.Module,
    batches: Iterable,
    *,
    steps: int,
    optimizer: Optimizer | None = None,
    loss: Callable[[nn.Module, object], torch.Tensor] | None = None,
    budget: float | None = None,
    memory: int | None = None,
    among: Iterable[str | Candidate] | None = None,
    backend: str | Callable = "inductor",
    cache: bool = True,
    show: bool = True,
) -> Tuning:
    """Run the model in each way that there is, print a table, and leave the model in the one that is fastest.

    batches: two or more of those that the model is to be trained on, on its device; no more than five are taken. loss:
    a function of model and batch, with autocast in it where you train so; without it the model is called with the
    batch (its items, if it is a dict, tuple or list) and returns the loss, or something with a `loss`. steps: how many
    calls of the model are to come: what takes long to compile must save that in them. optimizer: becomes hfnn's, as by
    `hfnn.convert`, where the choice is a converted model; its own step is not timed.

    budget: seconds for all candidates but stock (default: 300, or 2 % of what the steps to come take as stock, if that
    is less); what does not fit is not tried, and a candidate that has begun is interrupted, in the main thread. memory:
    bytes that a step may need at its peak above what is allocated before (default: what is free on the GPU, where
    states that an optimizer is yet to make count as free; on the CPU no limit). among: names of candidates, or
    `Candidate`s; stock is always one. backend: torch.compile's.

    Afterwards parameters, gradients, buffers, modes, and the generators of torch, numpy and Python are what they were,
    and the optimizer has made no step. With torch.distributed, call it on all ranks, before wrapping: a candidate must
    do on each of them, the slowest counts, and rank 0 decides. The choice is kept in $XDG_CACHE_HOME/hfnn/tune.json for
    models, batches, versions and GPUs alike (cache=False: neither read nor written); one of an earlier run is compared
    with stock again, but not timed. A compiled candidate ends with `torch._dynamo.reset()`: whatever else is compiled
    in the process compiles again when it is called.

    Raises ValueError for a model that is converted or compiled already (but by `tune`), sharded or wrapped, whose
    gradients have hooks, or whose loss is not one finite number; and what stock itself raises.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: takes how many steps are to come, one at least")
    if model in _tuned:
        _undo(model)
    _check(model)
    known = candidates(model, optimizer, backend)
    chosen = known if among is None else among_names(known, among)
    run = Run(model, loss or _loss, memory)
    with run.state:
        run.batches = list(itertools.islice(batches, WARM))
        if len(run.batches) < 2:
            raise ValueError(f"takes two batches or more, got {len(run.batches)}")
        key = rows.key(model, run.batches, steps, budget, run.memory, chosen, ranks.count())
        kept = ranks.first(rows.read().get(key) if cache else None)
        found = kept and run.again(kept, chosen, steps, budget)
        if not found:
            found = run.all(chosen, steps, budget)
            if cache and ranks.own() == 0:
                rows.write(key, found)
    choice = next(c for c in chosen if c.name == found.choice)
    choice.enter(model)
    if choice.backend is not None:
        watch(model)
    _tuned[model] = choice, found
    if optimizer is not None and choice.convert:
        convert(optimizer)
    if show and ranks.own() == 0:
        Console().print(found)
    return found


def _undo(model: nn.Module) -> None:
    candidate, _ = _tuned.pop(model)
    candidate.leave(model)
    for weight in convolved(model) if candidate.channels_last else ():
        weight.data = weight.data.contiguous()


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model that cannot be tuned."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"takes a torch.nn.Module, got {type(model).__name__}")
    if any(is_converted(m) or isinstance(m, captured.Captured) for m in model.modules()):
        raise ValueError("takes the model as torch has it: call hfnn.revert(model) first")
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel, torch._dynamo.eval_frame.OptimizedModule
    if isinstance(model, wrappers) or any(m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError("tune takes a model before it is wrapped or compiled: give the one inside")
    for name, p in model.named_parameters():
        if type(p) is not nn.Parameter:
            raise ValueError(f"{name} is a {type(p).__name__}: tune before sharding")
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"the gradient of {name} has hooks, which would see the gradients of measurements")


def _loss(model: nn.Module, batch) -> torch.Tensor:
    if isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(found, torch.Tensor):
        return found
    return found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)
