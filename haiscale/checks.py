"""Checks before ranks train together, and the names of modules, parameters and ranks in messages."""

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registry

NAMES = 8  # parameters that a message lists


def group_of(process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The group that a wrapper's `process_group` means: None is the default group.

    Raises ValueError if torch.distributed is not initialised, if this rank is not in the group, and for other types.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed is not initialised: call haiscale.init() first, or start the program with "
            "haiscale.launch or torchrun and call it there"
        )
    if process_group is None:
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{me()} is not in the process group it was given: new_group returns no group to ranks that it leaves out; "
            "wrap the model on the group's ranks alone"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a torch.distributed.ProcessGroup or None for all ranks, "
            f"got {type(process_group).__name__}; of a DeviceMesh it is mesh.get_group()"
        )
    return process_group


def host_device(group: dist.ProcessGroup) -> torch.device:
    """The device of small tensors that ranks exchange to agree on something: the CPU, if the group supports it.

    So the agreement does not wait for pending GPU work. NCCL does not support CPU tensors: there it is the current GPU.
    """
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def me() -> str:
    """The name of this rank in messages: "rank 3 (host a)"."""
    return f"rank {dist.get_rank()} (host {socket.gethostname()})"


def explain(error: Exception, what: str) -> None:
    """Adds a line to the text of a backend's error, unless a rank has died: this rank, and what it was doing."""
    if " has died" not in str(error):
        error.args = (f"{error}\n{me()} {what}",)


def path(module: nn.Module, parameter: torch.Tensor) -> str:
    """The names of a parameter or buffer within `module`, and the classes that hold it.

    "h.3.mlp.c_fc.weight (of a Conv1D)"; for a tied one, "wte.weight = lm_head.weight (of an Embedding, a Linear)".
    """
    names, holders = [], []
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is parameter:
                names.append(f"{prefix}.{name}" if prefix else name)
                holders.append(type(part).__name__)
    if not names:
        return f"a parameter of shape {tuple(parameter.shape)} that is not in {type(module).__name__}"
    kinds = ", ".join(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}" for name in dict.fromkeys(holders))
    return f"{' = '.join(names)} (of {kinds})"


def same_model(module: nn.Module, group: dist.ProcessGroup | None = None, ignored: Collection[str] = ()) -> str:
    """Checks that all ranks of the group wrap the same model; returns a digest of it, equal on all of them.

    It compares the names, shapes, dtypes and `requires_grad` of parameters and the names, shapes and dtypes of buffers,
    in their order, except names in `ignored`; values are not compared. Every rank of the group must call this. Ranks
    exchange 32 bytes, and more only if these differ. Then all ranks raise the same ValueError, which names ranks,
    module and parameter.
    """
    group = group_of(group)
    mine = _rows(module, ignored)
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    size = group.size()
    if size == 1 or dist.get_backend(group) == "fake":  # it has no other ranks to compare with
        return digest
    device = host_device(group)
    sent = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(received, sent, group=group)
    digests = [bytes(tensor.tolist()) for tensor in received]
    if len(set(digests)) > 1:
        described = [None] * size
        dist.all_gather_object(described, (socket.gethostname(), type(module).__name__, mine), group=group)
        raise ValueError(_difference(digests, described, dist.get_process_group_ranks(group)))
    return digest


def no_sparse_gradients(module: nn.Module, parameters: Collection[torch.Tensor]) -> None:
    """Raises ValueError if an embedding among the averaged `parameters` uses sparse gradients."""
    trained = {id(p) for p in parameters if p.requires_grad}
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and id(part.weight) in trained:
            raise ValueError(
                f"{path(module, part.weight)} has sparse gradients, which are not averaged: set sparse=False, or "
                "freeze it"
            )


_registered = 0  # parameters and modules that any module of this process was given


def _count(*_):
    global _registered
    _registered += 1


registry.register_module_parameter_registration_hook(_count)
registry.register_module_module_registration_hook(_count)


class Added:
    """Raises ValueError, when called, for trained parameters that a wrapped module has been given since.

    The module is only looked at after some module was given something. prepare: called before that. also: other
    parameters that the module may have.
    """

    def __init__(
        self, module: nn.Module, prepare: Callable[[], None] = lambda: None, also: Collection[nn.Parameter] = ()
    ):
        self._module, self._prepare = module, prepare
        self._known = {id(p): p for p in (*module.parameters(), *also)}
        self._look()

    def __call__(self):
        if (_registered, sum(map(len, self._lists))) == self._seen and not any(p.requires_grad for p in self._frozen):
            return
        self._prepare()
        new = [p for p in self._module.parameters() if id(p) not in self._known and p.requires_grad]
        if new:
            names = "; ".join(path(self._module, p) for p in new[:NAMES])
            more = f"; and {len(new) - NAMES} more" if len(new) > NAMES else ""
            raise ValueError(
                f"{me()}: {len(new)} parameters were added to the model, or replaced others, after it was wrapped, so "
                f"they would not be averaged: {names}{more}. Wrap after adding or replacing them, and make the "
                "optimizer of the wrapped model's parameters"
            )
        self._look()

    def _look(self):
        """Remembers what the module is like. Lists are watched, because `insert` registers nothing."""
        modules = self._module.modules()
        self._lists = [part._modules for part in modules if isinstance(part, nn.ModuleList | nn.Sequential)]
        self._frozen = [p for p in self._module.parameters() if id(p) not in self._known]
        self._seen = _registered, sum(map(len, self._lists))


def _rows(module, ignored):
    """One line for each parameter and buffer; tied ones have one line per name."""
    rows = []
    for name, p in module.named_parameters(remove_duplicate=False):
        trained = "trained" if p.requires_grad else "frozen"
        rows.append((name, f"parameter {name}: {tuple(p.shape)} {_dtype(p)}, {trained}"))
    for name, b in module.named_buffers(remove_duplicate=False):
        rows.append((name, f"buffer {name}: {tuple(b.shape)} {_dtype(b)}"))
    return [row for name, row in rows if name not in ignored]


def _dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def _difference(digests, described, ranks):
    """Compares the most common model with the first that differs from it: the first line that differs."""
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    others = [i for i, digest in enumerate(digests) if digest != digests[usual]]
    odd = others[0]
    (host, kind, rows), (odd_host, odd_kind, odd_rows) = described[usual], described[odd]
    at = next((i for i, pair in enumerate(zip(rows, odd_rows, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(rows), len(odd_rows)) if at is None else at
    has, odd_has = ("nothing more" if at >= len(r) else r[at] for r in (rows, odd_rows))
    more = f" (as on {len(others) - 1} other ranks)" if len(others) > 1 else ""
    return (
        f"ranks wrap different models: rank {ranks[odd]} (host {odd_host}) has, in its {odd_kind}, {odd_has}{more}, "
        f"where rank {ranks[usual]} (host {host}) has, in its {kind}, {has}; build the model from the same "
        "configuration, and freeze the same parameters, on every rank before wrapping it"
    )
