"""A transformers config that names another attention: the same attributes except one.

Models and their modules hold one config, and several models may share it. It contains the name by which attention is
looked up. A view is an object of a class derived from the config's class, with the same `__dict__` object: a write to
one is visible in the other. Only `_attn_implementation` differs: it is "hfnn" if the config says "sdpa" or "eager".
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
    """transformers.modeling_utils if it was imported, else None."""
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
    """The implementation that the config itself names."""
    return plain(config)._attn_implementation


def base(config) -> str:
    """The implementation that "hfnn" replaces: "eager", or else "sdpa", also if "hfnn" was requested by name.

    Read from the attribute in which a view and its config keep it, which Dynamo can trace.
    """
    return "eager" if getattr(config, INTERNAL, None) == "eager" else "sdpa"


def by_name(config) -> bool:
    """Whether the config itself names "hfnn"."""
    return getattr(config, INTERNAL, None) == NAME


def attributes(config) -> dict:
    """Of a config, without its own attribute look-up, which takes longer than a small op."""
    return object.__getattribute__(config, "__dict__")


_views: dict[int, weakref.ref] = {}


def view(config):
    """The view of a config: one view for everything that shares the config."""
    if is_view(config):
        return config
    key = id(config)
    found = _views.get(key, lambda: None)()
    # A view keeps its config alive, so while a view exists the id belongs to that config.
    if found is None:
        cls = _derived(type(config))
        found = object.__new__(cls)
        found.__dict__ = config.__dict__
        cls._hfnn_config.__set__(found, config)
        _views[key] = weakref.ref(found, lambda ref: _views.pop(key) if _views.get(key) is ref else None)
    return found


@functools.cache
def _derived(cls: type) -> type:
    """The class of views. It keeps the name of the config's class, which is the key of transformers' tables."""

    own = cls._attn_implementation

    def _attn_implementation(self, own=own.fget):
        state = self.__dict__ if compiling() else attributes(self)
        name = own(self) if compiling() or INTERNAL not in state else state[INTERNAL]
        # If the config returns attention weights, the user wants the chosen implementation.
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


def constants(code: types.CodeType) -> frozenset:
    """The strings in a code object, including those in tuples and in nested code."""
    found = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= constants(constant)
        elif isinstance(constant, tuple | frozenset):
            found.update(c for c in constant if isinstance(c, str))
        elif isinstance(constant, str):
            found.add(constant)
    return frozenset(found)
