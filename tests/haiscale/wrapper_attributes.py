"""Prints what the installed lightning, accelerate and transformers read on torch's DDP, its reducer and FSDP beyond
what every module has, and where first: the contents of wrapper_attributes.txt.

An attribute counts if its name is one of torch's object, and it is read on anything but `self` or a class; so some rows
are other objects'. "only torch's": haiscale's FSDP lacks it, and code that reads it asks for torch's class first.
"""

import ast
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from haiscale.fsdp import FSDP

PACKAGES = ("lightning", "accelerate", "transformers")
KINDS = {"DDP": "DistributedDataParallel", "Reducer": "reducer", "FSDP": "FullyShardedDataParallel"}


def read(package: str, word: str) -> dict[str, str]:
    """The attributes that files with `word` read, and the first place of each."""
    found, root = {}, Path(importlib.util.find_spec(package).origin).parent
    for path in sorted(path for path in root.rglob("*.py") if path.parts[-3] != "models"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if word in text else ():
            name = None
            if isinstance(node, ast.Attribute):
                name = node.attr if getattr(node.value, "id", "") not in ("self", "FSDP", KINDS["FSDP"]) else None
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr"):
                name = getattr(node.args[1], "value", None)
            found.setdefault(name, str(path.relative_to(root.parent)))
    return found


def theirs() -> dict[str, set[str]]:
    """The attributes of torch's own objects."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        wrapper = set(dir(nn.parallel.DistributedDataParallel(nn.Linear(1, 1))))
        dist.destroy_process_group()
    plain = set(dir(nn.Module()))
    reducer = set(dir(dist.Reducer)) - set(dir(object))
    return {"DDP": wrapper - plain, "Reducer": reducer, "FSDP": set(dir(FullyShardedDataParallel)) - plain}


def rows() -> list[str]:
    """The lines of the list."""
    lines = []
    for kind, own in theirs().items():
        places = {}
        for package in PACKAGES:
            if importlib.util.find_spec(package):
                for name, place in read(package, KINDS[kind]).items():
                    places.setdefault(name, place)
        for name in sorted(own & places.keys()):
            lacks = kind == "FSDP" and name != "module" and not hasattr(FSDP, name)
            lines.append(f"{kind} {name}: {places[name]}" + ", only torch's" * lacks)
    return lines


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    print(*rows(), sep="\n")
