"""What a proof depends on, compared at each call by identity: functions of the class, names outside of it, values of
the module.

`Held.checks` are expressions for the forward of a converted module (hfnn/core/holder.py). If one is false, `changed`
compares by value, and says what has changed.
"""

from torch import nn

from hfnn.core.holder import COMPUTE
from hfnn.patterns.names import outside
from hfnn.patterns.probe import ABSENT, CONTAINERS, Reads, _at, frozen, of_class

_CELLS = {"ABSENT": ABSENT, "of_class": of_class, "frozen": frozen, "at": _at, "state": object.__getattribute__}


class Held:
    """count: the values of the module that are compared; key: identifies the values of its class."""

    def __init__(self, cls: type, reads: Reads):
        self.cls, self.reads = cls, reads
        computes = [name for name in COMPUTE if hasattr(cls, name) and name not in reads.methods]
        self.methods = [(name, of_class(cls, name)) for name in (*computes, *reads.methods)]
        self.names = outside(cls, reads.methods) if reads.names else []
        self.paths = dict.fromkeys((*((name,) for name, _ in reads.attributes), *(path for path, _ in reads.paths)))
        self.count = len(self.paths)
        self.key = *(id(value) for _, value in self.methods), *(id(value) for _, _, value in self.names)

    def checks(self) -> tuple[list[str], dict]:
        """(expressions that are all true while nothing has changed, the names in them besides those of a forward).

        The forward has `cls`, `module`, its dict `own`, and the known values `v0`, `v1`, ...
        """
        found, cells = [], dict(_CELLS, registered=_registered)
        for number, (name, value) in enumerate(self.methods):
            cells[f"m{number}"] = value
            get = "getattr(cls, {!r}, ABSENT)" if getattr(self.cls, name, ABSENT) is value else "of_class(cls, {!r})"
            found.append(f"{get.format(name)} is m{number}")
        for number, (where, name, value) in enumerate(self.names):
            cells |= {f"w{number}": where.get, f"n{number}": value}
            found.append(f"w{number}({name!r}, ABSENT) is n{number}")
        numbers = {path: number for number, path in enumerate(self.paths)}
        for path, number in numbers.items():
            parent = numbers.get(path[:-1])
            if len(path) == 1:
                get = f"own.get({path[0]!r}, ABSENT)"
            elif parent is not None and parent < number:
                get = f"state(v{parent}, '__dict__').get({path[-1]!r}, ABSENT)"
            elif len(path) == 2:  # of a part
                get = f"(own['_modules'].get({path[0]!r}) or module).__dict__.get({path[1]!r}, ABSENT)"
            else:
                get = f"at(module, {path!r})"
            found.append(f"{get} is v{number}")
        for path, value in self.reads.paths:  # whose contents may change
            if isinstance(value, tuple) and value[0] in CONTAINERS:
                cells[f"c{numbers[path]}"] = value
                found.append(f"frozen(v{numbers[path]}) == c{numbers[path]}")
        found += [f"not registered(module, {name!r})" for name in self._missing()]
        return found, cells

    def values(self, module: nn.Module) -> tuple:
        """The present values of a module, in the order of the checks."""
        return tuple(_at(module, path) for path in self.paths)

    def changed(self, cls: type, module: nn.Module) -> str | None:
        """What differs from the proof, in words, or None."""
        for name, value in self.methods:
            if getattr(cls, name, ABSENT) is not value and of_class(cls, name) is not value:
                return f"{name} of its class was replaced"
        for where, name, value in self.names:
            if where.get(name, ABSENT) is not value:
                return f"{name}, which its class reads, was assigned"
        for name, value in self.reads.attributes:
            now = vars(module).get(name, ABSENT)
            if frozen(now) != value:
                return f"its attribute {name} was {'deleted' if now is ABSENT else 'set'}"
        for name in self._missing():
            if _registered(module, name):
                return f"{name} was registered"
        path = self.reads.moved(module)
        return path and f"its {'.'.join(path)} was set"

    def _missing(self) -> list[str]:
        """Attributes that neither the module nor its class had."""
        return [
            name for name, value in self.reads.attributes if value == frozen(ABSENT) and not hasattr(self.cls, name)
        ]


def _registered(module: nn.Module, name: str) -> bool:
    return any(part.get(name) is not None for part in (module._parameters, module._buffers, module._modules))
