"""The memory of an optimizer, its parameters and gradients: `optimizer.memory()`."""

from torch import Tensor

from hfnn.core import parts
from hfnn.optim.table import local


class Memory(dict[str, int]):
    """Bytes by kind, in the order of the printed table; numel: the number of parameter elements.

    The kinds are "parameter", "gradient", the names of the states, "scales" of all low-bit states, "remainder", "ema"
    and "step", if they exist, and "total". Memory that two tensors share is counted for each.
    """

    numel = 0

    def __str__(self) -> str:
        lines = [f"{'kind':<16}{'bytes':>16}{'a parameter':>14}"]
        for kind, size in self.items():
            lines.append(f"{kind:<16}{size:>16,}{size / max(self.numel, 1):>14.3f}")
        return "\n".join(lines)


def memory(optimizer) -> Memory:
    """Count the bytes in this process; for a DTensor, those of its local part."""
    found = Memory(parameter=0, gradient=0)
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.numel += local(p).numel()
            found["parameter"] += parts.nbytes(local(p))
            found["gradient"] += 0 if p.grad is None else parts.nbytes(local(p.grad))
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    kind = "scales" if name.endswith("_scale") else name
                    found[kind] = found.get(kind, 0) + parts.nbytes(local(value))
    found["total"] = sum(found.values())
    return found
