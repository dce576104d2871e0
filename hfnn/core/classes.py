"""Facts about classes, kept while the classes exist.

Many classes are made at run time: a parametrised module has its own class, which holds its parts.
"""

import functools
import weakref
from collections.abc import Callable


class ByClass:
    """A dict whose keys are tuples that begin with a class; an entry goes with its class. Values must not hold the
    class."""

    def __init__(self):
        self._known: weakref.WeakKeyDictionary[type, dict] = weakref.WeakKeyDictionary()

    def __contains__(self, key: tuple) -> bool:
        return key[1:] in self._known.get(key[0], ())

    def __getitem__(self, key: tuple):
        return self._known[key[0]][key[1:]]

    def __setitem__(self, key: tuple, value) -> None:
        self._known.setdefault(key[0], {})[key[1:]] = value


def cache_by_class(function: Callable) -> Callable:
    """`functools.cache` for a function whose first argument is a class. It does not keep the class alive."""
    known = ByClass()

    @functools.wraps(function)
    def cached(*key):
        if key not in known:
            known[key] = function(*key)
        return known[key]

    return cached
