"""Rooms in C++: hfnn._autograd, an extension for one version of torch.

`extension` is the module, or None if it is missing; `why` then has the reason. A room first makes its call there. The
call returns the result; None, if torch's own op must run (the input is below the size limit); or NotImplemented, if it
must run for another reason, which `Op.left` explains: a tracer, a transform, a subclass of Tensor, or no extension.
Where the package has none for this torch, or one that is older than its sources, it is built (build.py).
"""

import functools
import importlib
import importlib.util
import logging
import os

import torch

OFF = "switched off: HFNN_AUTOGRAD=0"


def _load():
    if os.environ.get("HFNN_AUTOGRAD", "1") == "0":
        return None, OFF
    try:
        if importlib.import_module("hfnn._build").torch_version == torch.__version__:
            file = importlib.util.find_spec("hfnn._autograd").origin
            apart = os.path.dirname(file) != os.path.dirname(os.path.dirname(__file__))  # an editable install
            if not (apart and importlib.import_module("hfnn.core.build").outdated(file)):
                return importlib.import_module("hfnn._autograd"), None
    except (ImportError, AttributeError):  # there is none, or the file is from an earlier build
        pass
    try:
        return importlib.import_module("hfnn.core.build").load(), None
    except Exception as error:  # whatever the state of this machine, hfnn can be imported
        return None, str(error) or type(error).__name__


@functools.cache
def warn() -> None:
    """Says once that there is no extension, and how to build it."""
    if extension is None and why != OFF:
        logging.getLogger("hfnn").warning(
            "hfnn._autograd is missing, and converted models gain less: %s. To build it: python -m hfnn.info --build",
            why,
        )


extension, why = _load()


def call(kind: str, *table):
    """The call of a room of this kind ("norm", "smooth", ...) with its table."""
    return _missing if extension is None else getattr(extension, kind)(*table)


def _missing(*_):
    return NotImplemented
