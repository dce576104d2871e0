"""Training on many devices: ranks are started, split into groups, wrapped, saved and resumed.

    haiscale.spawn(main, 4)                     # or: python -m haiscale.launch --nproc 4 train.py
    device = haiscale.init()                    # the process group, on hfreduce
    dp_group, pp_group = haiscale.make_subgroups(pp_size=2)
    haiscale.checkpoint.save("runs/a", model, optimizer, step=100, keep=3)

The wrappers are `haiscale.ddp.DDP`, `haiscale.fsdp.FSDP` and `haiscale.pipeline`. Names are imported at their first
use: the schedules of `haiscale.pipeline` and `haiscale.launch` work without torch.
"""

import importlib

_HOMES = {"init": "mesh", "make_subgroups": "mesh", "Subgroups": "mesh", "spawn": "launch"}
_MODULES = ("checkpoint", "checks", "ddp", "fsdp", "launch", "mesh", "pipeline", "survive")

__all__ = ["Subgroups", "checkpoint", "init", "make_subgroups", "spawn"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"haiscale.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"haiscale.{name}")
    raise AttributeError(f"module 'haiscale' has no attribute {name!r}")
