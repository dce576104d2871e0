"""The operators of a few steps: their time, calls and shapes, the modules that called them, and the FLOPs of a step."""

import gzip
import json
from collections import Counter

import torch
from torch.utils import flop_counter

from haiprof.places import Places

TOP = 200  # number of written rows
MODULE = "haiprof module: "  # begins the name of a record
NODE = "autograd::engine::evaluate_function: "  # begins that of a node of autograd
# FLOPs per second of matrix products in bfloat16 (V100: float16), dense, of the vendor's data sheets; by a part of the
# name, the first one that fits.
PEAKS = {
    "B200": 2250e12, "GH200": 989.4e12, "H200 NVL": 835e12, "H200": 989.4e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989.4e12, "H800": 989.4e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12,
    "V100": 125e12,
}  # fmt: skip


def peak(name: str) -> float | None:
    """None if it is not known."""
    return next((value for part, value in PEAKS.items() if part in name.replace("-", " ").replace("_", " ")), None)


class Flops:
    """Counts the FLOPs of one step of the thread that begins it, as FlopCounterMode does, but without its module hooks,
    which would change the step."""

    def __init__(self):
        self._counter = flop_counter.FlopCounterMode(display=False)
        self._mode = flop_counter._FlopCounterMode(self._counter)
        self._mode.__enter__()

    def end(self) -> int:
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if not stack or stack[-1] is not self._mode:
            raise RuntimeError("another dispatch mode began in the step whose FLOPs were counted, and has not ended")
        self._mode.__exit__(None, None, None)
        return self._counter.get_total_flops()


class Modules:
    """While it is installed, calls of modules are records of torch.profiler, with their names in these models."""

    def __init__(self, models):
        self._places, self._names = Places(), {}
        whole = sorted(models, key=lambda model: -sum(1 for _ in model.modules()))  # before parts of them
        for model in whole:
            for name, module in model.named_modules():
                self._names.setdefault(id(module), ".".join(filter(None, (type(model).__name__, name))))

    def install(self):
        self._places.replace(torch.nn.Module, "__call__", self._named)

    def remove(self):
        self._places.restore()

    def _named(self, call):
        names = self._names

        def __call__(self, *args, **kwargs):
            name = names.get(id(self))
            if name is None:
                return call(self, *args, **kwargs)
            with torch.profiler.record_function(MODULE + name):
                return call(self, *args, **kwargs)

        return __call__


def rows(profiler) -> tuple[list, float, float]:
    """([name, calls, own seconds on the host, own seconds on GPUs, shapes, module], most time first; the sums of both
    times over all operators). Nodes of autograd and what they call belong to the module of their forward."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    modules, forwards = {}, {}
    for event in events:  # parents come before their children
        parent = event.cpu_parent
        if event.name.startswith(MODULE):
            modules[event.id] = event.name[len(MODULE) :], False
        else:
            name, backward = modules.get(parent.id, ("", False)) if parent is not None else ("", False)
            modules[event.id] = (event.sequence_nr, True) if event.name.startswith(NODE) else (name, backward)
            if not modules[event.id][1] and name and event.sequence_nr >= 0:
                forwards[event.sequence_nr] = name
    calls, host, gpu = Counter(), Counter(), Counter()
    for event in events:
        # With stacks, which are recorded if hfnn is loaded, calls of Python are events as well.
        if event.name.startswith((MODULE, "ProfilerStep")) or getattr(event, "is_python_function", False):
            continue
        module, backward = modules[event.id]
        module = forwards.get(module, "") if backward else module
        key = event.name, _shapes(event.input_shapes), module
        calls[key] += 1
        host[key] += event.self_cpu_time_total / 1e6
        gpu[key] += getattr(event, "self_device_time_total", 0) / 1e6
    total, on_gpu = sum(host.values()), sum(gpu.values())
    order = sorted(calls, key=lambda key: -(gpu[key] if on_gpu else host[key]))[:TOP]
    return [[key[0], calls[key], host[key], gpu[key], key[1], key[2]] for key in order], total, on_gpu


def _shapes(shapes) -> str:
    found = ["x".join(map(str, shape)) for shape in shapes or () if shape and not isinstance(shape[0], list)]
    return ", ".join(found)


def read(path) -> list[dict]:
    """The events of an exported trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def launches(events, steps) -> dict:
    """Per step: kernels, their seconds, and those of copies from pageable memory to a GPU; {} without a GPU."""
    kernels = [event.get("dur", 0) / 1e6 for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    pageable = sum(event.get("dur", 0) for event in copies if "Pageable -> Device" in event["name"]) / 1e6
    if not kernels:
        return {}
    return {"kernels": len(kernels) / steps, "seconds": sum(kernels) / steps, "pageable": pageable / steps}
