"""A config of transformers that names another attention: the same attributes, one answer that differs.

Models and their modules hold one config, models may share it, and in it is the name by which attention is looked up. A
view is an object of a class derived from the config's, with the very same `__dict__`: what is written to one is read
from the other. Only `_attn_implementation` is "hfnn" where the config says "sdpa" or "eager".
"""

import functools
import sys
import types
import weakref

from hfnn.core.context import compiling

NAME = "hfnn"
_REPLACED = ("sdpa", "eager")
INTERNAL = "_attn_implementation_internal"  # where a config keeps the name


def modeling():
    """transformers.modeling_utils where it was imported, else None."""
    return sys.modules.get("transformers.modeling_utils")


def is_config(thing) -> bool:
    configuration = sys.modules.get("transformers.configuration_utils")
    return configuration is not None and isinstance(thing, configuration.PreTrainedConfig)


def is_view(config) -> bool:
    return "_hfnn_config" in vars(type(config))


def plain(config):
    """The config behind a view, or the config itself."""
    return config._hfnn_of if is_view(config) else config


def implementation(config) -> str | None:
    """What a config says itself."""
    return plain(config)._attn_implementation


def base(config) -> str:
    """What stands behind "hfnn": "eager", or else "sdpa", also where "hfnn" was asked for by name.

    Read from where a view and its config keep it, which Dynamo can follow.
    """
    return "eager" if getattr(config, INTERNAL, None) == "eager" else "sdpa"


def by_name(config) -> bool:
    """Whether "hfnn" is what the config itself says."""
    return getattr(config, INTERNAL, None) == NAME


def attributes(config) -> dict:
    """Of a config, without its own look-up of names, which takes longer than a small op."""
    return object.__getattribute__(config, "__dict__")


_views: dict[int, weakref.ref] = {}


def view(config):
    """The view of a config: one for all who share it."""
    if is_view(config):
        return config
    key = id(config)
    found = _views.get(key, lambda: None)()
    # A view keeps its config alive, so as long as there is one the number is that config's.
    if found is None:
        cls = _derived(type(config))
        found = object.__new__(cls)
        found.__dict__ = config.__dict__
        cls._hfnn_config.__set__(found, config)
        _views[key] = weakref.ref(found, lambda ref: _views.pop(key) if _views.get(key) is ref else None)
    return found


@functools.cache
def _derived(cls: type) -> type:
    """The class of views; it keeps the name, by which transformers' tables go."""

    own = cls._attn_implementation

    def _attn_implementation(self, own=own.fget):
        state = self.__dict__ if compiling() else attributes(self)
        name = own(self) if compiling() or INTERNAL not in state else state[INTERNAL]
        # Whoever has the config return attention weights wants his own implementation.
        return NAME if name in _REPLACED and not state.get("_output_attentions") else name

    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": ("_hfnn_config",),
        "__init__": cls.__init__,
        "__eq__": lambda self, other: plain(self) == plain(other),
        "__reduce__": lambda self: (view, (plain(self),)),
        "_hfnn_of": property(lambda self: getattr(self, "_hfnn_config", None) or self),
        "_attn_implementation": property(_attn_implementation, own.fset),
    }
    return type(cls)(cls.__name__, (cls,), names)


def original(cls: type) -> type:
    """The class of a module without hfnn."""
    return getattr(cls, "_hfnn_original", cls)


def constants(code: types.CodeType) -> frozenset:
    """The strings in a code object, those in tuples and in nested code included."""
    found = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= constants(constant)
        elif isinstance(constant, tuple | frozenset):
            found.update(c for c in constant if isinstance(c, str))
        elif isinstance(constant, str):
            found.add(constant)
    return frozenset(found)
