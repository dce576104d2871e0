"""Rooms in C++: hfnn._autograd, an extension for one version of torch.

`extension` is the module, or None if it is missing; `why` then has the reason. A room first makes its call there. The
call returns the result; None, if torch's own op must run (the input is below the size limit); or NotImplemented, if the
room in Python must run: for a tracer, a transform, a subclass of Tensor, or without the extension.
"""

import importlib
import os

import torch


def _load():
    if os.environ.get("HFNN_AUTOGRAD", "1") == "0":
        return None, "switched off: HFNN_AUTOGRAD=0"
    try:
        build = importlib.import_module("hfnn._build")
    except ImportError:
        return None, "not built"
    built = getattr(build, "autograd", "not built")  # the file may be from an earlier build
    if not built.startswith("for torch"):
        return None, built
    if build.torch_version != torch.__version__:
        return None, f"built for torch {build.torch_version}, this is torch {torch.__version__}: rooms run in Python"
    try:
        return importlib.import_module("hfnn._autograd"), None
    except ImportError as error:
        return None, str(error)


extension, why = _load()


def call(kind: str, *table):
    """The call of a room of this kind ("norm", "smooth", ...) with its table."""
    return _python if extension is None else getattr(extension, kind)(*table)


def _python(*_):
    return NotImplemented
