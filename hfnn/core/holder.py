"""A converted module keeps its class: its forward is an attribute of the instance, a bound method of a `Holder`.

Tools look modules up by their class, so the class stays. `attach` puts the methods of a holder into the module's dict;
`Holder.release` takes them out again, and makes the holder inert: whoever wrapped the forward since then calls the
class's own. A bound method, because Dynamo guards it by its code; it guards an object with `__call__` by identity, and
layers with equal code would be compiled one by one.

A tool may replace functions of torch for a while, to count calls (calflops, ptflops). While one that a module's own
forward refers to is replaced, this forward runs.
"""

import copy
import functools
import inspect
import logging
import sys
import types
import weakref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

# Methods in which a torch module computes: a convolution's forward calls another method.
COMPUTE = ("forward", "_conv_forward", "_output_padding")
# Attributes that `convert` sets on modules, if what computes them reads it.
SETTINGS = ("prefer", "recompute", "keep", "exact", "defer")


# Functions of torch as they are without tools, by their expression. In torch itself: the products, which are also
# methods of tensors, but tools replace both.
_OWN = {
    f"F.{name}": value
    for name, value in vars(F).items()
    if callable(value) and name[0].islower() and name not in vars(torch.overrides)
}
_OWN |= {f"torch.{name}": getattr(torch, name) for name in ("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum")}


def forward_of(cls: type) -> tuple:
    """The functions with which modules of a class compute."""
    return tuple(getattr(cls, name, None) for name in COMPUTE)


class Bound:
    """The owner of methods in a module's dict. It holds the module weakly: a strong reference would be a cycle.

    The methods follow the module: a deep copy, a pickle and a replica of nn.DataParallel get an owner of their own,
    made from `_how()`.
    """

    __slots__ = ("__weakref__", "hfnn_module", "on")
    NAMES = ("forward", "__prepare_scriptable__", "_replicate_for_data_parallel", "__getstate__")

    def __init__(self, module: nn.Module, on=True):
        self.hfnn_module, self.on = weakref.ref(module), on

    def names(self) -> list[str]:
        """The attributes of the module that are methods of this owner."""
        own = vars(self.hfnn_module()).items()  # not those under another name, where wrappers of the forward keep it
        return [name for name, value in own if getattr(value, "__self__", None) is self and value.__name__ == name]

    def put(self, names) -> None:
        vars(self.hfnn_module()).update({name: getattr(self, name) for name in names})

    def __prepare_scriptable__(self):
        """torch.jit.script reads the source of `forward`: it gets the class's own."""
        _say_scripted()
        module = self.hfnn_module()
        for owner in {id(value.__self__): value.__self__ for value in _methods(module)}.values():
            owner.release()
        return module

    def _replicate_for_data_parallel(self):
        """The replica is a copy of the module's dict, whose forward would compute with this module's parameters."""
        module = self.hfnn_module()
        replica = type(module)._replicate_for_data_parallel(module)
        type(self)(replica, *self._how()).put({*self.NAMES, *self.names()})
        return replica

    def __getstate__(self):
        """The module's. A deep copy and pickle bind the methods to the new module; copy.copy makes a module without
        them, because it would share them."""
        module = self.hfnn_module()
        own = getattr(type(module), "__getstate__", None)  # that of `object` exists from Python 3.11 on
        plain = own is None or own is getattr(object, "__getstate__", None)
        state = vars(module).copy() if plain else own(module)
        if sys._getframe(1).f_code is copy.copy.__code__ and isinstance(state, dict):
            gone = added(module)
            return {name: value for name, value in state.items() if name not in gone}
        return state

    def __deepcopy__(self, memo):
        """For the copy of the module, which is in `memo` before its attributes are copied."""
        module = self.hfnn_module()
        return type(self)(memo.get(id(module), module), *copy.deepcopy(self._how(), memo))

    def __reduce__(self):
        """Pickle writes a module before its attributes, so this refers to it."""
        return type(self), (self.hfnn_module(), *self._how())


class Holder(Bound):
    """What `convert` did to a module.

    target: a class whose functions run with the module as their first argument: `forward`, or that of
    `forward_for(class)`, and those that `methods(module)` names; like: the match of a proof, their second argument, or
    None for torch's own forwards; on: whether they are used; why: what has changed since, if a proof ended; cls: the
    module's class then; of_torch: the functions of torch that its own forward refers to, given for a copy, which has
    no parts yet; run: the function of its forward; values: what the proof read of the module.
    """

    __slots__ = ("cls", "like", "run", "target", "values", "why")

    def __init__(self, module, target: type, like=None, on=True, why=None, cls=None, of_torch=None):
        super().__init__(module, on)
        self.target, self.like, self.why, self.cls = target, like, why, cls or type(module)
        self.run = _runner(self.cls, target, like, module, of_torch)
        self.values = (_UNSEEN,) * (0 if like is None else self.run.reads.count)

    @property
    def forward(self):
        """The target's forward while the class's own is unchanged, with its signature."""
        return types.MethodType(self.run, self)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return types.MethodType(_passing(getattr(self.target, name)), self)

    def holds(self) -> bool:
        """Whether the target computes the forward. A proof whose values have changed ends here."""
        if not self.on or self.like is not None:
            return self.on and self.still(self.hfnn_module())
        return forward_of(type(self.hfnn_module())) == self.run.stock

    def still(self, module: nn.Module) -> bool:
        """Whether a proof holds although a value is another object than at the last call."""
        self.why = self.run.reads.changed(type(module), module)
        if self.why is None:
            self.values = self.run.reads.values(module)
            return True
        self.on = False
        name, text = self.cls.__name__, "%s runs its own forward again: %s after hfnn.convert"
        logging.getLogger("hfnn").warning(text, name, self.why)
        return False

    def release(self) -> None:
        """Takes methods and settings out of the module again."""
        for name in (*self.names(), *settings(self.target), "_hfnn_use"):
            vars(self.hfnn_module()).pop(name, None)
        self.on = False

    def _how(self) -> tuple:
        return self.target, self.like, self.holds(), self.why, self.cls, self.run.of_torch


_UNSEEN = object()


@functools.cache
def _say_scripted() -> None:
    logging.getLogger("hfnn").warning(
        "torch.jit.script takes torch's own modules: those that hfnn converted are reverted (said once)"
    )


_MODULE = """
    try:
        module = holder.hfnn_module()
    except AttributeError:  # m.forward.__func__ was called with a module
        module = None
    if module is None:
        return elsewhere(forward, holder, {passed})
    cls = type(module)
"""
_OF_TORCH = f"""\
def forward(holder, {{given}}):{_MODULE}\
    if holder.on and {{same}}:
        return fused(module, {{passed}})
    return cls.forward(module, {{passed}})
"""
# First the check for small calls, in which torch's own op would run anyway.
_PROVED = f"""\
def forward(holder, *args, **kwargs):{_MODULE}\
    if holder.on and {{large}}:
        {{values}}own = vars(module)
        if {{same}} or holder.still(module):
            return fused(module, like, *args, **kwargs)
    return cls.forward(module, *args, **kwargs)
"""

# By the ids of the functions of a class and of the target, which a runner holds. Only modules keep runners alive.
_runners: weakref.WeakValueDictionary[tuple, types.FunctionType] = weakref.WeakValueDictionary()


def _runner(cls: type, target: type, like, module: nn.Module, of_torch: tuple | None) -> types.FunctionType:
    """The function of `Holder.forward`: checks and op in one, because each call inside counts in a small module."""
    stock, reads = forward_of(cls), None if like is None else like.depends(cls)
    chosen = getattr(target, "forward_for", None)
    parts = () if chosen or of_torch is not None or not vars(module).get("_modules") else _compute(module)
    key = *map(id, stock + parts), of_torch, id(chosen or target.forward), like, *(() if reads is None else reads.key)
    found = _runners.get(key)
    if found is not None:
        return found
    fused = target.forward if chosen is None else chosen(cls)
    cells = {"fused": fused, "chosen": chosen, "like": like, "elsewhere": _elsewhere}
    if of_torch is None:
        of_class = () if reads is None or chosen else (value for *_, value in (*reads.methods, *reads.names))
        of_torch = tuple(sorted(_refers([*stock, *of_class, *parts])))
    cells |= {"F": F, "torch": torch, "routes": _routes}
    cells |= {name.replace(".", "_"): _OWN[name] for name in of_torch}
    own = [f"({name} is {(known := name.replace('.', '_'))} or routes({name}, {known}))" for name in of_torch]
    text = _of_torch(stock, cells, own) if reads is None else _of_proof(target, reads, cells, own)
    exec(_compiled(text), cells)
    found = _runners[key] = functools.wraps(stock[0])(cells["forward"])
    found.stock, found.reads, found.parts, found.of_torch = stock, reads, parts, of_torch
    return found


def _elsewhere(run: types.FunctionType, owner, *args, **kwargs):
    """A call of a forward whose module was freed, or of its function with a module, whose own holder then counts."""
    if isinstance(owner, Bound):
        raise ReferenceError("this forward's module was freed: keep the module, not only its forward")
    holder = holder_of(owner) if isinstance(owner, nn.Module) else None
    if holder is not None and holder.run.stock == run.stock:
        return holder.run(holder, *args, **kwargs)
    return run.stock[0](owner, *args, **kwargs)


_compiled = functools.lru_cache(maxsize=1024)(lambda text: compile(text, "<hfnn: forward>", "exec"))


def _compute(module: nn.Module) -> tuple:
    """The functions with which a module's parts compute."""
    classes = dict.fromkeys(map(type, module.modules()))
    return tuple(function for cls in classes for function in forward_of(cls) if function is not None)


def _refers(queue: list) -> set[str]:
    """The functions of torch, in `_OWN`, that functions refer to, also within those of torch.nn.functional."""
    found: set[str] = set()
    while queue:
        function = queue.pop()
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        new = set() if code is None else _names(code) - found
        found |= new
        queue += (_OWN[name] for name in new if getattr(_OWN[name], "__globals__", None) is vars(F))
    return found


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    found = {f"{of}.{name}" for name in code.co_names for of in ("F", "torch")} & _OWN.keys()
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*map(_names, inner)))


def _routes(function, of_torch) -> bool:
    """Whether a function of torch was replaced by hfnn itself (hfnn/patch.py)."""
    return getattr(function, "routes", None) is of_torch


def _of_torch(stock: tuple, cells: dict, checks: list[str]) -> str:
    for number, (name, function) in enumerate(zip(COMPUTE, stock, strict=True)):
        if function is not None:
            cells[f"_{number}"] = function
            checks.append(f"cls.{name} is _{number}")
    parameters = [*inspect.signature(stock[0]).parameters.values()][1:]
    if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        cells |= {f"_{p.name}": p.default for p in parameters if p.default is not p.empty}
        given = ", ".join(p.name if p.default is p.empty else f"{p.name}=_{p.name}" for p in parameters)
        passed = ", ".join(p.name for p in parameters)
    else:
        given = passed = "*args, **kwargs"
    return _OF_TORCH.format(given=given, passed=passed, same=" and ".join(checks))


def _of_proof(target: type, reads, cells: dict, own: list[str]) -> str:
    checks, of_checks = reads.checks()
    cells |= of_checks | {"compiling": is_dynamo_compiling}
    large = "not compiling()"
    if getattr(target, "_hfnn_one_input", False):  # the op's size limit applies to it
        cells["passes"] = cells["like"].op.passes
        large = f"len(args) == 1 and not kwargs and not passes(args[0], module.prefer) and {large}"
    elif hasattr(target, "_hfnn_small"):
        cells["small"], large = target._hfnn_small, f"{large} and not small(module, like, args, kwargs)"
    large = " and ".join((large, *own))
    values = "".join(f"v{number}, " for number in range(reads.count))
    values = f"{values}= holder.values; " if values else ""
    return _PROVED.format(passed="*args, **kwargs", large=large, values=values, same=" and ".join(checks))


@functools.lru_cache(maxsize=64)
def _passing(function):
    @functools.wraps(function)
    def method(holder, *args, **kwargs):
        return function(holder.hfnn_module(), *args, **kwargs)

    return method


def settings(target: type) -> list[str]:
    """The attributes that `convert` may set on modules that a class computes: those that it reads."""
    target = getattr(target, "_hfnn_room", target)
    return [name for name in SETTINGS if hasattr(target, name)]


def attach(module: nn.Module, target: type, like=None) -> Holder:
    """Convert a module: `target.forward` computes its forward, with the default settings."""
    before = holder_of(module)
    if before is not None:
        before.release()
    holder = Holder(module, target, like)
    more = getattr(target, "methods", None)
    holder.put((*Holder.NAMES, *(more(module) if more else ())))
    vars(module).update({name: getattr(target, name) for name in settings(target)})
    return holder


def _methods(module: nn.Module) -> list[types.MethodType]:
    """The methods in a module's dict that follow the module."""
    bound = [(name, value) for name, value in vars(module).items() if isinstance(value, types.MethodType)]
    return [value for name, value in bound if isinstance(value.__self__, Bound) and value.__name__ == name]


def added(module: nn.Module) -> set[str]:
    """The names that hfnn has put into a module's dict."""
    found = {value.__name__ for value in _methods(module)}
    found |= {name for name, value in vars(module).items() if isinstance(value, Bound)}
    holder = holder_of(module)
    return found if holder is None else found.union(settings(holder.target), {"_hfnn_use"})


def holder_of(module: nn.Module) -> Holder | None:
    """The module's holder, also if something has replaced the forward since, or a proof has ended."""
    own = vars(module)
    for name in ("forward", "__getstate__"):
        holder = getattr(own.get(name), "__self__", None)
        if type(holder) is Holder and holder.hfnn_module() is module and (holder.on or holder.why):
            return holder
    return None


def foreign_forward(module: nn.Module) -> bool:
    """Whether other code than hfnn has put a forward on the instance."""
    own = vars(module).get("forward")
    if own is None:
        return False
    owner = getattr(own, "__self__", None)
    return not (type(own) is types.MethodType and isinstance(owner, Bound) and owner.hfnn_module() is module)


def target_of(module: nn.Module) -> type:
    """The class that computes a module's forward: its own, or the target of its holder."""
    holder = holder_of(module)
    return type(module) if holder is None or not holder.holds() else holder.target


def like_of(module: nn.Module):
    """The match by which a module was converted, or None."""
    holder = holder_of(module)
    return getattr(type(module), "_hfnn_like", None) if holder is None else holder.like


def stock_of(module: nn.Module) -> type:
    """The class of a module without hfnn."""
    return getattr(type(module), "_hfnn_original", type(module))
