"""Communication between ranks."""

import torch.distributed as dist

from hfnn.tuning.rows import TuneRow


def count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own() -> int:
    return dist.get_rank() if count() > 1 else 0


def first(value):
    """The value of rank 0."""
    if count() > 1:
        found = [value]
        dist.broadcast_object_list(found, src=0)
        return found[0]
    return value


def of_all(value) -> list:
    """The values of all ranks."""
    if count() == 1:
        return [value]
    found = [None] * count()
    dist.all_gather_object(found, value)
    return found


def together(row: TuneRow) -> TuneRow:
    """Combines the rows of all ranks: the slowest rank's numbers, and the first reason."""
    rows = of_all(row)
    most = {of: [x for r in rows if (x := getattr(r, of)) is not None] for of in ("ms", "setup", "peak")}
    whys = [r.why + f" (rank {rank})" * (len(rows) > 1) for rank, r in enumerate(rows) if r.why]
    return TuneRow(row.name, **{of: max(found, default=None) for of, found in most.items()}, why=(*whys, "")[0])
