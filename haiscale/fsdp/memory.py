"""The memory of an FSDP model, in bytes."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank.

    parameters, gradients: the shards. slots: the memory of gathered units; `slot_count` slots are shared in turns.
    reductions: buffers of gradients that are cast or padded before they are sent. whole_gradients: gradients kept by
    microbatches under no_sync, or by zero=1. Not included: gradients as autograd creates them, at most those of
    `buffers` + 1 units; optimizer states; activations.
    """

    parameters: int
    gradients: int
    slots: int
    slot_count: int
    reductions: int
    whole_gradients: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "slot_count")

    def __str__(self) -> str:
        rows = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self) if f.name != "slot_count"]
        rows.append(("together", self.total))
        return "\n".join(f"{name:16} {number / 2**20:10.2f} MiB" for name, number in rows)


def of(engine) -> Memory:
    flats = [flat for unit in engine.units for flat in unit.flats]
    slots = {id(u.slot): u.slot for u in engine.units if u.slot is not None} | {id(s): s for s in engine.slots}
    return Memory(
        parameters=sum(flat.shard.nbytes for flat in flats),
        gradients=sum(flat.grad.nbytes for flat in flats if flat.grad is not None),
        slots=sum(slot.buffer.nbytes for slot in slots.values()),
        slot_count=len(engine.slots),
        reductions=sum(buffer.nbytes for buffer in engine.reductions.buffers),
        whole_gradients=sum(flat.kept.nbytes for flat in flats if flat.kept is not None),
    )
