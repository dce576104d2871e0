"""Tensors of any shape from rank to rank: each message describes its own content.

A message is a list of tensors (or None). It begins with a header of HEADER int64, on the host: the number of tensors,
and for each the dtype, whether it requires a gradient, the number of dimensions, and the shape. So a receiver needs no
prior knowledge. On the CPU the tensors follow in the same message if they fit into the size of the previous message,
which sender and receiver both know. Otherwise, and on other devices, each tensor follows in its own message.

Sends do not wait: sent tensors are kept until they have left. For each sending rank, one receive is always posted in
advance, so that messages arrive while this rank computes. There are no tags: messages of one rank are received in the
order in which they were sent.
"""

import contextlib
import weakref
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from haiscale.mesh import own_gpus, sibling

HEADER = 128
ALIGNMENT = 64  # of the tensors inside a message, in bytes
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
NONE = -1
KNOWN = 4  # number of message kinds between two ranks whose headers are cached: activations, gradients
# For each group {(from, to): wires}. Pipelines of one group run one after another, so they can share them.
_WIRES = weakref.WeakKeyDictionary()


def describe(tensors: list[Tensor | None]) -> list[int]:
    """The header. Raises ValueError for values that cannot be sent."""
    header = [len(tensors)]
    for number, x in enumerate(tensors):
        if x is None:
            header.append(NONE)
        elif isinstance(x, Tensor) and x.dtype in DTYPES and x.layout == torch.strided:
            header += [DTYPES.index(x.dtype), x.requires_grad, x.dim(), *x.shape]
        else:
            what = f"a {x.layout} tensor of {x.dtype}" if isinstance(x, Tensor) else f"of {type(x).__name__}"
            raise ValueError(f"number {number} of what a stage gives is {what}: give dense tensors, or None")
    if len(header) > HEADER:
        raise ValueError(f"{len(tensors)} tensors are too many for one stage to give: their shapes fill its header")
    return header + [0] * (HEADER - len(header))


def understand(header: list[int]) -> list[tuple[torch.dtype, bool, tuple[int, ...]] | None]:
    """(dtype, whether a gradient is wanted, shape) of each tensor, from its header."""
    found, at = [], 1
    for _ in range(header[0]):
        if header[at] == NONE:
            found.append(None)
            at += 1
        else:
            code, gradient, dims = header[at : at + 3]
            found.append((DTYPES[code], bool(gradient), tuple(header[at + 3 : at + 3 + dims])))
            at += 3 + dims
    return found


def _places(sizes):
    """(offsets of tensors with these sizes in bytes, total bytes)."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


class Sender:
    """Messages to one rank (its number in the default group). wires: the groups for host and device tensors."""

    def __init__(self, peer: int, device: torch.device, wires):
        self.peer, self.device, self.wires = peer, device, wires
        self.room = 0  # bytes that the next message has for tensors
        self._leaving: deque = deque()
        self._known: dict = {}  # by content: the header's bytes, and the positions of the tensors

    def send(self, tensors: list[Tensor | None]) -> None:
        kinds = tuple(
            (x.dtype, x.layout, x.requires_grad, x.shape) if isinstance(x, Tensor) else type(x) for x in tensors
        )
        if kinds not in self._known:
            header = torch.tensor(describe(tensors), device="cpu").view(torch.uint8)
            self._known = dict(list(self._known.items())[1 - KNOWN :])
            self._known[kinds] = header, *_places([x.nbytes for x in tensors if x is not None])
        header, offsets, size = self._known[kinds]
        tensors = [x.detach().contiguous() for x in tensors if x is not None]
        message = torch.empty(HEADER * 8 + self.room, dtype=torch.uint8, device="cpu")
        message[: HEADER * 8].copy_(header)
        if size <= self.room:
            body = message[HEADER * 8 :]
            for x, offset in zip(tensors, offsets, strict=True):
                body[offset : offset + x.nbytes].copy_(x.view(-1).view(torch.uint8))
            tensors = []
        self.room = size if self.device.type == "cpu" else 0
        host, wire = self.wires
        self._leaving.append((dist.isend(message, self.peer, host), message))
        for x in tensors:
            if x.numel():
                self._leaving.append((dist.isend(x, self.peer, wire), x))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()[0].wait()

    def finish(self) -> None:
        """Returns when everything sent has left; on CUDA the current stream waits, not the host."""
        while self._leaving:
            self._leaving.popleft()[0].wait()


class Receiver:
    """Messages from one rank, in its order; `wires` as in Sender."""

    def __init__(self, peer: int, device: torch.device, wires):
        self.peer, self.device, self.wires = peer, device, wires
        self.room, self._posted = 0, None
        self._known: list = []  # headers, and their content
        # On its own stream, a receive does not wait for concurrent computation.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def post(self) -> None:
        """Start to receive the next message."""
        message = torch.empty(HEADER * 8 + self.room, dtype=torch.uint8, device="cpu")
        self._posted = dist.irecv(message, self.peer, self.wires[0]), message

    def receive(self, last: bool) -> list[Tensor | None]:
        """The next message; the receive of the one after it is posted, unless this is the last. Its tensors are
        leaves."""
        if self._posted is None:
            self.post()
        work, message = self._posted
        work.wait()
        self._posted = None
        header, body = message[: HEADER * 8], message[HEADER * 8 :]
        layout, sizes, offsets, size = self._understood(header)
        fits = size <= self.room
        self.room = size if self.device.type == "cpu" else 0
        if fits:
            flat = (body[offset : offset + n] for offset, n in zip(offsets, sizes, strict=True))
        else:
            flat = iter(self._bodies(sizes, layout))
        if not last:
            self.post()
        tensors = []
        for entry in layout:
            x = None
            if entry is not None:
                x = next(flat).view(entry[0]).view(entry[2]).requires_grad_(entry[1])
            tensors.append(x)
        return tensors

    def _understood(self, header):
        """(result of `understand`, bytes of each tensor, their positions in the message, total bytes)."""
        for known, said in self._known:
            if torch.equal(header, known):
                return said
        layout = understand(header.view(torch.int64).tolist())
        sizes = [dtype.itemsize * _numel(shape) for dtype, _, shape in filter(None, layout)]
        said = layout, sizes, *_places(sizes)
        self._known = [(header.clone(), said), *self._known[: KNOWN - 1]]
        return said

    def _bodies(self, sizes, layout):
        """The tensors that arrive as separate messages, as bytes."""
        current = torch.cuda.current_stream(self.device) if self._stream else None
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            kinds = [(dtype, _numel(shape)) for dtype, _, shape in filter(None, layout)]
            bodies = [torch.empty(n, dtype=dtype, device=self.device) for dtype, n in kinds]
            works = [dist.irecv(x, self.peer, self.wires[1]) for x in bodies if x.numel()]
        for work in works:
            work.wait()
        for x in bodies if current else ():
            x.record_stream(current)
        return [x.view(torch.uint8) for x in bodies]


def _numel(shape):
    n = 1
    for size in shape:
        n *= size
    return n


def directed_groups(group: dist.ProcessGroup, senders: set[int], receivers: set[int], device: torch.device) -> dict:
    """{(from, to): (group for headers, group for tensors)} of the ranks that this one receives from and sends to.

    CUDA tensors travel on NCCL if each rank has a GPU of its own. hfreduce passes them through the host: there the
    receiver's host waits until the sender's GPU has computed them, which takes the overlap of hosts and GPUs away. NCCL
    serialises the messages of a pair in both directions, and would deadlock if two ranks send to each other. So each
    direction has a group of NCCL, created once for each `group`. Headers travel on `group`, or on gloo if `group` is
    NCCL's. Called by all ranks of `group` together.
    """
    me = dist.get_rank()
    pairs = {(peer, me) for peer in senders} | {(me, peer) for peer in receivers}
    backend = group._get_backend(device).name() if hasattr(group, "_get_backend") else dist.get_backend(group)
    of_nccl = "nccl" in backend.lower()
    if not of_nccl and not own_gpus(group, device):
        return dict.fromkeys(pairs, (group, group))
    wires = _WIRES.setdefault(group, {})  # without `group` itself, which they would keep alive
    for pair in sorted(pairs - wires.keys()):
        ranks = sorted(pair)
        wires[pair] = sibling(group, "gloo", ranks=ranks) if of_nccl else None, sibling(group, "nccl", ranks=ranks)
    return {pair: (group if headers is None else headers, tensors) for pair, (headers, tensors) in wires.items()}
