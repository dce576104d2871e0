"""`tune`: measures on your batches which way of running a model trains it fastest.

Candidates are the model as it is, converted, captured, compiled, compiled and converted, and each of them with the
weights of its convolutions in channels_last. Each runs in turn, in place. It is accepted if loss, gradients and buffers
agree with stock's after one batch and after two accumulated batches, if its peak memory fits, and if it does not
recompile at every step.

hfnn/tuning/agreement.py defines how far a result may be from stock's. All candidates begin with the same generator
states. Dropout is off for the comparison, because masks of hfnn and Inductor differ from torch's for the same seed. A
model that still draws random numbers is compared in eval mode. For the timing everything is as in training.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from hfnn.capture import captured
from hfnn.convert import convert
from hfnn.core.options import one_of
from hfnn.patterns.subclass import is_converted
from hfnn.tuning import ranks, rows
from hfnn.tuning.candidates import Candidate, among_names, candidates, convolved, watch
from hfnn.tuning.rows import Tuning
from hfnn.tuning.run import WARM, Run

_tuned: weakref.WeakKeyDictionary[nn.Module, tuple[Candidate, Tuning]] = weakref.WeakKeyDictionary()


def explain(model: nn.Module) -> str | None:
    """The choice for a model, for `hfnn.report`, or None."""
    if model not in _tuned:
        return None
    candidate, found = _tuned[model]
    gone = candidate.backend is not None and model._compiled_call_impl is None
    return found.line + "; no longer compiled, as too many calls compiled anew" * gone


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int,
    optimizer: Optimizer | None = None,
    loss: Callable[[nn.Module, object], torch.Tensor] | None = None,
    budget: float | None = None,
    memory: int | None = None,
    among: Iterable[str | Candidate] | None = None,
    backend: str | Callable[..., Any] = "inductor",
    cache: bool = True,
    show: bool = True,
) -> Tuning:
    """Run the model in each available way, print a table, and leave the model in the fastest one.

    Afterwards parameters, gradients, buffers, modes, and the generators of torch, numpy and Python are unchanged, and
    the optimizer has made no step. With torch.distributed, call it on all ranks, before wrapping: a candidate must work
    on each rank, the slowest rank counts, and rank 0 decides. A choice of an earlier run is compared with stock again,
    but not timed. A compiled candidate ends with `torch._dynamo.reset()`: everything else compiled in the process is
    recompiled when it is called.

    Args:
        model: A module that is not converted, compiled (except by `tune`), sharded or wrapped.
        batches: Two or more training batches, on the model's device; at most five are used.
        steps: The number of calls of the model still to come; compile time must be saved within them.
        optimizer: Becomes hfnn's, as by `hfnn.convert`, if the choice is a converted model; its own step is not timed.
        loss: A function of model and batch, including autocast if you train with it. None: the model is called with the
            batch (its items, if it is a dict, tuple or list) and must return the loss, or an object with a `loss`.
        budget: Seconds for all candidates except stock; None: 300, or 2 % of stock's time for the remaining steps, if
            that is less. Candidates that do not fit are not tried, and a running candidate is interrupted, in the main
            thread only.
        memory: The peak bytes that a step may need above what is allocated before; None: the free memory of the GPU,
            where optimizer states that do not exist yet count as free; no limit on the CPU.
        among: Names of candidates, or `Candidate`s; stock is always included. None: all.
        backend: As in torch.compile.
        cache: Whether the choice is read from and kept in $XDG_CACHE_HOME/hfnn/tune.json, for equal models, batches,
            versions and GPUs.
        show: Whether the table is printed.

    Raises:
        ValueError: The model is of another kind, its gradients have hooks, or its loss is not one finite number. Errors
            of stock itself are raised unchanged.
    """
    _check_options(steps, optimizer, loss, budget, memory, backend)
    one_of("cache", cache, (False, True))
    one_of("show", show, (False, True))
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


def _check_options(steps, optimizer, loss, budget, memory, backend) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: takes how many steps are to come, one at least")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer: takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if loss is not None and not callable(loss):
        raise ValueError(f"loss={loss!r}: takes a function of model and batch")
    for name, value in (("budget", budget), ("memory", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise ValueError(f"{name}={value!r}: takes a number from 0 on, or None")
    if not callable(backend) and backend not in (known := torch.compiler.list_backends(None)):
        raise ValueError(f"backend={backend!r}: choose one of {', '.join(map(repr, known))}, or give a function")


def _undo(model: nn.Module) -> None:
    candidate, _ = _tuned.pop(model)
    candidate.leave(model)
    for weight in convolved(model) if candidate.channels_last else ():
        weight.data = weight.data.contiguous()


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model that cannot be tuned."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"takes a torch.nn.Module, got {type(model).__name__}")
    if any(is_converted(m) or captured.of(m) for m in model.modules()):
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
