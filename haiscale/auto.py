"""Switches over a script that does not use haiscale: HAISCALE_AUTO in the environment, or `import haiscale.auto`.

    HAISCALE_AUTO=1 torchrun --nproc-per-node 2 train.py

Process groups requested on gloo or nccl run on hfreduce, if haiscale.init would create them there. torch's
DistributedDataParallel creates haiscale's wrapper. HAISCALE_AUTO=convert also converts wrapped models with
hfnn.convert, and HAISCALE_AUTO=capture does so with capture=True. HAISCALE_AUTO=0 switches nothing, whatever is
imported. Rank 0 reports in one line what was switched, what was not, and why. See docs/switch.md.

Two functions of torch are replaced: the one that creates every process group in torch.distributed, and `__new__` of
DistributedDataParallel. So it does not matter which names a script has imported before.

The ranks decide together through the group's store: each writes what it supports, the first one decides, and all
follow. If anything goes wrong, the script is left alone.
"""

import contextlib
import functools
import inspect
import json
import logging
import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

_log = logging.getLogger("haiscale.auto")
_MODES = ("1", "convert", "capture")
_Torch = nn.parallel.DistributedDataParallel
_make = c10d._new_process_group_helper
_said: set[str] = set()
_LATE = "not all ranks came in time, or not all have HAISCALE_AUTO in their environment"
_mode = ""  # one of _MODES once started


class _State:
    worlds = 0  # number of default groups so far: a store may outlive them
    decisions: Counter = Counter()  # since the last default group, by subject
    gave_up = ""  # why this process creates no more groups on hfreduce: a failed attempt may take long
    left = False  # the same on all ranks: nothing is switched, because the default group could not be


_state = _State()


def begin() -> None:
    """Replaces torch's functions, once, according to HAISCALE_AUTO; the default is "1"."""
    global _mode
    asked = os.environ.get("HAISCALE_AUTO") or "1"
    if asked == "0" or _mode:
        return
    if asked not in _MODES:
        _log.warning("HAISCALE_AUTO=%s is none of 0, %s: nothing is switched", asked, ", ".join(_MODES))
        return
    _mode = asked
    c10d._new_process_group_helper = _new_group
    _Torch.__new__ = _new_ddp


# Deciding together


def _agree(about: str, store, rank: int, size: int, timeout: timedelta, vote, decide):
    """The result of `decide` for the votes of all `size` ranks, in their order; computed by the first, equal on all.

    None if votes or the decision did not arrive within half of `timeout`; the other half is left for what torch does
    then. None is also the same on all ranks, because the first rank to write an end writes it for all. Votes and
    decisions are JSON values.
    """
    _state.decisions[about] += 1
    store = dist.PrefixStore(f"haiscale.auto {_state.worlds} {about} {_state.decisions[about]}", store)
    store.set(str(rank), json.dumps(vote))
    decided = None
    try:
        if rank == 0:
            votes = [str(each) for each in range(size)]
            store.wait(votes, timeout / 2)
            decided = decide([json.loads(store.get(each)) for each in votes])
        else:
            store.wait(["decided"], timeout / 2)
    except Exception:  # stop waiting
        _log.debug("no decision about %s", about, exc_info=True)
    return json.loads(store.compare_set("decided", "", json.dumps(decided)))


def _first(reasons: list[str]) -> str:
    """The combined reasons of all ranks, "" if there are none."""
    return next((f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason), "")


def _say(rank: int, text: str) -> None:
    if rank == 0 and text not in _said:
        _said.add(text)
        _log.warning("haiscale.auto: %s", text)


# Process groups


@functools.wraps(_make)
def _new_group(*args, **kwargs):
    try:
        given = inspect.signature(_make).bind(*args, **kwargs)
        given.apply_defaults()
        concerned = _concerns(given.arguments)
    except Exception:  # torch raises for wrong arguments
        concerned = False
    made = _switch(given) if concerned else None
    return _make(*args, **kwargs) if made is None else made


def _switch(given):
    """The result of torch's function for a switched group; None, on all its ranks, if it stays as requested."""
    asked, size, others = (given.arguments[name] for name in ("backend", "group_size", "global_ranks_in_group"))
    about = [given.arguments[name] for name in ("group_name", "store", "group_rank", "group_size", "timeout")]
    if not others:
        _state.worlds += 1
        _state.decisions.clear()
        _state.gave_up, _state.left = "", False
    found = _agree(*about, _possible(), functools.partial(_decide, str(asked)))
    found = found or {"backend": None, "why": _LATE, "impossible": True}
    made, failed = None, ""
    if found["backend"]:
        given.arguments["backend"] = c10d.Backend(found["backend"])
        # A separate prefix: if this fails, torch uses the store itself.
        given.arguments["store"] = dist.PrefixStore("haiscale.auto", given.arguments["store"])
        try:
            made = _make(*given.args, **given.kwargs)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        failed = _agree(*about, failed, _first)
        if failed == "":
            c10d._world.pg_map[made[0]] = asked, made[1]  # returned to the script, which may depend on it
        else:
            found = {"backend": None, "why": failed or _LATE, "impossible": True}
            if made is not None:
                _forget(made[0])
                made = None
    if found["impossible"]:
        _state.gave_up, _state.left = found["why"], not others
    if not others:
        _say(given.arguments["group_rank"], _line(str(asked), size, **found))
    elif made is None:
        _say(dist.get_rank(), f"a group of {size} ranks stays on {asked}: {found['why']}")
    return made


def _concerns(given) -> bool:
    """Whether a requested group can be switched, by its arguments, which are equal on all its ranks."""
    members = given["global_ranks_in_group"]
    if given["group_rank"] in (None, -1) or given["pg_tag"]:
        return False
    if members and (_state.left or dist.get_rank() not in members):
        return False
    if given["backend_options"] is not None:
        return False  # they belong to the requested backend
    if given["group_name"] in c10d._world.pg_names.values():
        return False  # which is an error
    asked = str(given["backend"])
    if asked not in ("gloo", "nccl", "undefined") and ":" not in asked:
        return False
    return not {"gloo", "nccl"}.isdisjoint(_devices(asked).values())


def _devices(asked: str) -> dict[str, str]:
    """The requested backend by device."""
    return dict(c10d.BackendConfig(c10d.Backend(asked)).get_device_backend_map())


def _possible() -> dict:
    """This rank's vote: the reason if it has no hfreduce; whether hfreduce takes all its CUDA tensors; its host; and
    which backend is faster between hosts, by its plan."""
    from haiscale import mesh

    why = _state.gave_up
    try:
        from hfreduce import backend

        backend.native()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    takes = mesh.hfreduce_takes_cuda() or torch.cuda.device_count() == 0
    return {"why": why, "cuda": takes, "host": mesh._host(), "measured": mesh.measured()}


def _decide(asked: str, votes: list[dict]) -> dict:
    """backend: the backend to request from torch, if any; why: what stays as requested; impossible: everything
    stays."""
    from haiscale.mesh import why_nccl

    hosts = len({vote["host"] for vote in votes})
    why = _first([vote["why"] for vote in votes])
    if why:
        return {"backend": None, "why": why, "impossible": True, "hosts": hosts}
    why = why_nccl(hosts == 1, all(vote["cuda"] for vote in votes), votes[0]["measured"])
    to = {"gloo": "hfreduce", "nccl": "nccl" if why else "hfreduce"}
    before = _devices(asked).items()
    after = {device: to.get(name, name) if device in ("cpu", "cuda") else name for device, name in before}
    names = set(after.values())
    backend = "hfreduce" if names == {"hfreduce"} else ",".join(":".join(pair) for pair in after.items())
    return {
        "backend": backend if "hfreduce" in names else None,
        "why": why if "nccl" in names else "",
        "impossible": False,
        "hosts": hosts,
    }


def _forget(group) -> None:
    """Destroys a group that was created on this rank but not on all, so that its name can be reused."""
    world = c10d._world
    with contextlib.suppress(Exception):
        group.shutdown()
    for known in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        known.pop(group, None)
    for tagged in world.tags_to_pg.values():
        tagged[:] = [each for each in tagged if each is not group]
    c10d._unregister_process_group(group.group_name)


def _line(asked, size, backend, why, impossible, hosts=0) -> str:
    """A description of the result for the default group, and so for all groups."""
    asked = "torch's default" if asked == "undefined" else asked
    ranks = f"{size} ranks" + (f" on {hosts} host{'s' * (hosts > 1)}" if hosts else "")
    if impossible:
        return f"nothing is switched, {ranks} stay on {asked}: {why}"
    switched = f"{ranks} run on {backend} instead of {asked}" if backend else f"{ranks} stay on {asked}"
    if why:
        switched += f" ({why})"
    models = {
        "1": "models are not converted (HAISCALE_AUTO=convert does)",
        "convert": "what it wraps is converted by hfnn",
        "capture": "what it wraps is converted by hfnn, with capture=True",
    }
    return f"{switched}; DistributedDataParallel is haiscale's where it takes the model; {models[_mode]}"


# Models


@functools.wraps(_Torch.__init__)
def _new_ddp(cls, *args, **kwargs):
    """haiscale's wrapper, or else an object of `cls`, which Python then initialises as usual."""
    try:
        given = inspect.signature(_Torch.__init__).bind(None, *args, **kwargs).arguments
        del given["self"]
    except TypeError:  # a copy is being made, or the arguments are wrong, for which torch raises
        return object.__new__(cls)
    module = given.get("module")
    if _state.left or not isinstance(module, nn.Module) or not dist.is_initialized():
        return object.__new__(cls)
    if type(module) is nn.ParameterList:
        return object.__new__(cls)  # a list has no forward: torch's `replicate` calls the wrapped modules
    if _mode in ("convert", "capture"):
        _convert(module)
    return (_wrapped(given) if cls is _Torch else None) or object.__new__(cls)


def _convert(module: nn.Module) -> None:
    try:
        import hfnn

        hfnn.convert(module, capture=_mode == "capture")
    except Exception as error:
        _say(dist.get_rank(), f"{type(module).__name__} is not converted: {type(error).__name__}: {error}")


def _wrapped(given) -> nn.Module | None:
    """haiscale's wrapper with torch's arguments; None, on all ranks, if some rank cannot have it."""
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if group is None and mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    group = group or dist.group.WORLD
    if group not in c10d._world.pg_map:
        return None
    from haiscale.mesh import timeout_of

    store, timeout = c10d._world.pg_map[group][1], timeout_of(group) or c10d.default_pg_timeout
    about, votes, model = f"{group.group_name} DistributedDataParallel", [], None

    def agree(why):
        """Why some rank cannot have it, "" if all can; None if not all ranks arrived in time."""
        votes.append(_agree(about, store, group.rank(), group.size(), timeout, why, _first))
        return votes[-1]

    objection = ""
    try:
        from haiscale.ddp import as_torch

        model = as_torch.DistributedDataParallel(lambda: agree(""), given)
    except Exception as error:
        objection = str(error)
    if not votes or votes[-1] == "":  # an objection of this rank before any message, or the result of the messages
        agree(objection)
    if votes[-1] != "":
        name = type(given["module"]).__name__
        _say(dist.get_rank(), f"DistributedDataParallel of {name} is torch's: {votes[-1] or _LATE}")
        if model is not None:
            model.reducer.stop()
        return None
    return model


begin()
