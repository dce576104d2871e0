"""Which modules are gathered together: units.

A unit is a list of modules whose parameters are gathered before one of them runs and released after it. Parameters in
no unit belong to the root, which is the whole model: it is gathered first and kept until backward is over.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn


def find_units(model: nn.Module, wanted, ignored: set[nn.Module]) -> list[list[nn.Module]]:
    """The units of a model, without its root, in the order of the model.

    wanted: None for `by_structure`; a class or several of module classes; a list of modules, of their names, or of
    lists of these; or a policy as torch's FSDP takes, called with (module, recurse=, nonwrapped_numel=), or a function
    of a module alone. Raises ValueError for a name or module that is not in the model, and for one named twice.
    """
    if wanted is None:
        found = by_structure(model)
    elif isinstance(wanted, type) or _is_classes(wanted):
        classes = wanted if isinstance(wanted, type) else tuple(wanted)
        found = [m for m in model.modules() if isinstance(m, classes)]
    elif hasattr(wanted, "_run_policy"):  # torch's ModuleWrapPolicy, CustomPolicy
        targets = wanted._run_policy(model, ignored, {})
        found = [m for m in model.modules() if m in targets]
    elif callable(wanted):
        found = _by_policy(model, wanted)
    elif isinstance(wanted, Iterable) and not isinstance(wanted, str):
        found = [_named(model, one) for one in wanted]
    else:
        raise ValueError(f"units={wanted!r} is not accepted: give module classes, modules, names or a policy")
    groups = [list(one) if isinstance(one, list) else [one] for one in found]
    groups = [[m for m in group if m is not model and m not in ignored and has_parameters(m)] for group in groups]
    twice = [m for m, count in Counter(m for group in groups for m in group).items() if count > 1]
    if twice:
        names = ", ".join(name for name, m in model.named_modules() if m in twice)
        raise ValueError(f"units: {names} is in two units; give each module once")
    return [group for group in groups if group]


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def by_structure(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: consecutive modules of one class in an outermost module list.

    In addition, each embedding and each torch.nn.Linear outside of blocks that is as large as a block and does not
    share its weight, because it need not be gathered while the blocks run. (Not one that hfnn computes: its logits may
    be computed after its forward.)
    """
    blocks: list[nn.Module] = []
    _collect_blocks(model, blocks, leaves=False)
    if not blocks:
        _collect_blocks(model, blocks, leaves=True)
    inside = {m for block in blocks for m in block.modules()}
    least = min((_size(block) for block in blocks), default=0)
    uses = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    for m in model.modules():
        alone = isinstance(m, nn.Embedding) or getattr(m.forward, "__func__", None) is nn.Linear.forward
        if blocks and alone and m not in inside and _size(m) >= least and all(uses[p] == 1 for p in m.parameters()):
            blocks.append(m)
    order = {m: i for i, m in enumerate(model.modules())}
    return sorted(blocks, key=order.get)


def _collect_blocks(module: nn.Module, blocks: list, leaves: bool) -> None:
    for child in module.children():
        repeated = []
        if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            parts = [m for m in child.children() if has_parameters(m) and (leaves or next(m.children(), None))]
            count = Counter(map(type, parts))
            repeated = [m for m in parts if count[type(m)] > 1]
        blocks.extend(repeated)
        if not repeated:
            _collect_blocks(child, blocks, leaves)
    if leaves and isinstance(module, nn.Sequential) and not blocks:
        blocks.extend(m for m in module.children() if has_parameters(m))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_classes(wanted) -> bool:
    return (
        isinstance(wanted, tuple | set | frozenset | list) and bool(wanted) and all(isinstance(w, type) for w in wanted)
    )


def _named(model: nn.Module, one):
    """A module, or a list of modules, from its name or itself."""
    if isinstance(one, list | tuple):
        return [_named(model, part) for part in one]
    modules = dict(model.named_modules())
    if isinstance(one, str) and one in modules:
        return modules[one]
    if isinstance(one, nn.Module) and any(one is m for m in modules.values()):
        return one
    what = one if isinstance(one, str) else type(one).__name__
    raise ValueError(
        f"units: {what!r} is not a module of this {type(model).__name__}; names are those of named_modules()"
    )


def _by_policy(model: nn.Module, policy: Callable) -> list[nn.Module]:
    """Modules chosen by torch's policy protocol: children first, each call with the number of unwrapped elements."""
    found: list[nn.Module] = []
    try:
        policy(module=model, recurse=True, nonwrapped_numel=0)
    except TypeError:
        return [m for m in model.modules() if policy(m)]

    def visit(module: nn.Module) -> int:
        numel = _size(module)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(visit(child) for child in module.children())
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            found.append(module)
            return numel
        return wrapped

    visit(model)
    order = {m: i for i, m in enumerate(model.modules())}
    return sorted(found, key=order.get)
