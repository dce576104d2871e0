"""torch's error for a tensor that was written to before backward, with the module that needs the tensor and what to do.

A node keeps its input itself where torch may keep a copy (a cast, a transposition). Then a write that torch would not
notice is an error. The module is found when the error is raised: the graph leads from the node to its parameters.
"""

import gc

import torch

from hfnn.core.native import extension as native

_TEXT = "modified by an inplace operation"
# Nodes between an op and its parameter.
_VIEWS = ("ToCopyBackward0", "ViewBackward0", "TBackward0", "AliasBackward0", "TransposeBackward0")


def written_to(x: torch.Tensor, version: int) -> RuntimeError:
    """torch's error for a saved tensor that was written to since it had this version."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{x.type()} {[*x.shape]}] is at version {x._version}; expected version {version} instead."
    )


def explained(node, text: str) -> str:
    """`text`, an error that the backward of a node raised; with an explanation if it is about a write."""
    if _TEXT not in text or "hfnn" in text:
        return text
    op = node.name().strip("_").removesuffix("Backward")
    names = _names(_parameters(node))
    where = " or ".join(f"'{name}' ({cls})" for name, cls in names[:3])
    where = f" of module {where}" if where else ""
    skip = f"skip={names[0][0]!r}" if names and names[0][0] else "skip=..."
    return (
        f"{text}\nhfnn's {op}{where} computes gradients from that tensor itself, where "
        "torch's may have kept a copy of it: write to a clone of the tensor, write after backward, or leave the module "
        f"to torch with hfnn.convert(model, {skip})."
    )


def _parameters(node) -> list[torch.Tensor]:
    found = []
    for before, _ in node.next_functions:
        if before is not None and before.name() in _VIEWS:
            before = before.next_functions[0][0]
        if hasattr(before, "variable"):
            found.append(before.variable)
    return [p for p in found if isinstance(p, torch.nn.Parameter)]


def _names(parameters) -> list[tuple[str, str]]:
    """(name in its model, class) of the modules that own all of these parameters."""
    if not parameters:
        return []
    modules = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module) and "_modules" in vars(x)]
    parents = {id(part): (outer, name) for outer in modules for name, part in outer._modules.items()}
    found = []
    for module in modules:
        own = {id(p) for p in module._parameters.values()}
        if own and all(id(p) in own for p in parameters):
            path, outer = [], module
            while id(outer) in parents and len(path) < 100:
                outer, name = parents[id(outer)]
                path.append(name)
            found.append((".".join(reversed(path)), type(module).__name__))
    return found


if native is not None:
    native.explain_writes(explained)
