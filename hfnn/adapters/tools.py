"""torch's tools that identify modules by their exact class or its file, and how they treat modules made as hfnn's.

    torch.fx            does not trace into torch.nn's modules, nor into hfnn's
    torch.jit.script    compiles a module's source: hfnn's modules become torch's, in the model that it gets
    quantisation        swaps modules by their class: hfnn's modules become torch's, in the quantised model

A module that `hfnn.convert` converted has torch's class; only torch.jit.script reads its forward (hfnn/core/holder.py).
Scripted and quantised models are for inference, where hfnn's modules run torch's ops.
"""

import functools
import sys

import torch

from hfnn.convert import revert
from hfnn.core.kernel import log
from hfnn.patterns.subclass import ROOMS, restore

_QUANTIZE = "torch.ao.quantization.quantize"
_OWN = frozenset(ROOMS.values())
_said: set[str] = set()


def _say(tool: str) -> None:
    if tool not in _said:
        _said.add(tool)
        log.warning("%s takes torch's own modules: hfnn's are reverted (said once)", tool)


def _is_leaf(of_torch):
    """For fx: hfnn's module is a leaf, as torch's is."""

    @functools.wraps(of_torch)
    def is_leaf_module(self, m, module_qualified_name):
        return type(m) in _OWN or of_torch(self, m, module_qualified_name)

    return is_leaf_module


def _quantisable(of_torch):
    """For quantisation: its first step on a model, then run on torch's classes."""

    @functools.wraps(of_torch)
    def propagate_qconfig_(module, *args, **kwargs):
        if any(type(m) in _OWN for m in module.modules()):
            _say("torch.ao.quantization")
            revert(module)
        return of_torch(module, *args, **kwargs)

    return propagate_qconfig_


def _prepare_scriptable(self):
    """For torch.jit.script, which calls this on every module."""
    _say("torch.jit.script")
    restore(self)
    return self


def install() -> None:
    """Runs once, when hfnn is imported."""
    torch.fx.Tracer.is_leaf_module = _is_leaf(torch.fx.Tracer.is_leaf_module)
    quantize = sys.modules.get(_QUANTIZE)
    if quantize is not None:
        own = quantize.propagate_qconfig_
        for place in (quantize, torch.ao.quantization):
            place.propagate_qconfig_ = _quantisable(own)
    for cls in _OWN:
        cls.__prepare_scriptable__ = _prepare_scriptable
