"""The shards of parameters that are gathered together, and their positions.

A parameter of `rows` rows is sharded along its first dimension like DTensor's Shard(0): `chunk` = ceil(rows / ranks)
rows per rank, fewer or none on the last ranks. The local shards of a Flat are contiguous in one buffer:

    shard    [ a: chunk rows | b: chunk rows | c: chunk rows | ...]            what a rank keeps
    whole    [ a: chunk rows of rank 0, of rank 1, ... | b: ... | c: ... ]     what a gather makes

So each whole parameter is contiguous: a view. One buffer gathered as a whole would have all data of rank 0 first, and
each parameter would have to be assembled by a copy. Instead, a gather is one *coalesced* call with one all-gather per
parameter, from a view of the shard to a view of `whole`; a reduction is one coalesced call back. Neither copies
anything before or after, unless a dtype changes or the ranks do not divide the rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from haiscale import checks

# Alignment of parameters in elements: multiples of 16 bytes in a shard, of 128 bytes in whole 16-bit buffers.
SHARD_ALIGNMENT, WHOLE_ALIGNMENT = 16, 64


@dataclass(eq=False)
class Parameter:
    """One parameter of a model: its names, its position in the buffers, and its two tensors.

    sharded: the nn.Parameter that users and optimizers hold, a DTensor. whole: the nn.Parameter that modules have while
    they run; its memory is the buffer into which the unit was gathered.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    shape: torch.Size
    requires_grad: bool
    rows: int  # number of rows on this rank
    count: int  # elements of a shard, including padding
    start: int  # position in the shard
    whole_start: int  # position in a whole buffer
    sharded: nn.Parameter | None = None
    whole: nn.Parameter | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def local(self) -> Tensor:
        return self.sharded._local_tensor

    def __post_init__(self):
        plain = [(m, name) for m, name in self.places if type(m).__setattr__ is nn.Module.__setattr__]
        self._tables = [(module._parameters, name) for module, name in plain]
        self._others = [place for place in self.places if place not in plain]  # with own parameter lists, as nn.LSTM

    def put(self, tensor: nn.Parameter) -> None:
        """Sets `tensor` as the modules' parameter."""
        for table, name in self._tables:
            table[name] = tensor
        for module, name in self._others:
            setattr(module, name, tensor)


class Layout:
    """The positions of parameters of one dtype, on one of `size` ranks."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter, list]], rank: int, size: int):
        self.rank, self.size = rank, size
        self.parameters: list[Parameter] = []
        self.length = self.whole_length = 0  # elements
        for name, p, places in named:
            if p.dim() == 0:
                raise ValueError(
                    f"parameter {name} has no dimension to shard along: make it one of shape (1,), or leave it out by "
                    "ignored_states and reduce its gradient yourself"
                )
            chunk = -(-p.shape[0] // size)
            rows = min(max(p.shape[0] - rank * chunk, 0), chunk)
            count = chunk * (p.numel() // p.shape[0] if p.shape[0] else 0)
            entry = (name, places, p.shape, p.requires_grad, rows, count, self.length, self.whole_length)
            self.parameters.append(Parameter(*entry))
            self.length += _aligned(count, SHARD_ALIGNMENT)
            self.whole_length += _aligned(count * size, WHOLE_ALIGNMENT)

    def shards(self, buffer: Tensor) -> list[Tensor]:
        """The padded shard of each parameter in a buffer of `length` elements, flat."""
        return [buffer[p.start : p.start + p.count] for p in self.parameters]

    def wholes(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter, padded, in a buffer of `whole_length` elements, flat."""
        return [buffer[p.whole_start : p.whole_start + p.count * self.size] for p in self.parameters]


def _aligned(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class Flat(Layout):
    """Parameters of one dtype sharded over `mesh`, whose last dimension is for shards."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter, list]], mesh: DeviceMesh, device: torch.device, dtypes, host
    ):
        """dtypes: (param_dtype, reduce_dtype), or None. device: the device of modules; host: shards stay on the CPU."""
        super().__init__(named, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        given = [p for _, p, _ in named]
        self.dtype, self.device, self.host = given[0].dtype, device, host and device.type != "cpu"
        floating = self.dtype.is_floating_point
        self.compute_dtype = (dtypes[0] or self.dtype) if floating else self.dtype
        self.reduce_dtype = dtypes[1] or self.compute_dtype
        self.casts = self.compute_dtype is not self.dtype or self.host
        self.mesh = mesh
        self.shard = self.new()
        self.grad: Tensor | None = None  # gradient of the shard; the `.grad` of the sharded parameters are views of it
        self.granted: set[Parameter] = set()  # whose `.grad` is, or was, a view of this `grad`
        self.kept: Tensor | None = None  # accumulated whole gradients of the parameters `kept_of`
        self.kept_of: set[Parameter] = set()
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        for p, tensor, view in zip(self.parameters, given, self.shards(self.shard), strict=True):
            p.sharded = nn.Parameter(self._dtensor(p, view, mesh, placements), tensor.requires_grad)
            self.write(p, tensor.detach())
            whole = torch.empty(0, dtype=self.compute_dtype, device=device)
            p.whole = nn.Parameter(whole, tensor.requires_grad)
        self.inputs = self.shards(self.shard)  # of the gathers, if nothing is cast

    def new(self) -> Tensor:
        """Zeros in the layout and on the device of the shard."""
        where = torch.device("cpu") if self.host else self.device
        return torch.zeros(self.length, dtype=self.dtype, device=where, pin_memory=self.host)

    def trained(self) -> list[Parameter]:
        return [p for p in self.parameters if p.requires_grad]

    def _dtensor(self, p: Parameter, view: Tensor, mesh, placements) -> DTensor:
        local = view[: self._local_numel(p)].view(p.rows, *p.shape[1:])
        stride = torch.empty(p.shape, device="meta").stride()
        like = local.to("meta")  # from_local would copy a host tensor to the mesh's device
        spec = DTensor.from_local(like, mesh, placements, run_check=False, shape=p.shape, stride=stride)._spec
        return DTensor(local, spec, requires_grad=False)

    def _local_numel(self, p: Parameter) -> int:
        return p.rows * (p.numel // p.shape[0] if p.shape[0] else 0)

    @torch.no_grad()
    def write(self, p: Parameter, whole: Tensor) -> None:
        """Copies this rank's rows from a whole tensor."""
        self.copy_rows(p, whole, p.local)

    @torch.no_grad()
    def copy_rows(self, p: Parameter, whole: Tensor, into: Tensor) -> None:
        if p.rows:
            chunk = -(-p.shape[0] // self.size)
            into.copy_(whole[self.rank * chunk : self.rank * chunk + p.rows])

    @torch.no_grad()
    def adopt(self) -> None:
        """Takes over the values of parameters that replaced ours in modules, and whether they are trained."""
        for p in self.parameters:
            for module, name in p.places:
                if module._parameters.get(name) is not p.sharded:
                    self._take_over(p, [module._parameters.get(name) for module, name in p.places])
                    break

    def _take_over(self, p: Parameter, present: list[Tensor | None]) -> None:
        first, how = present[0], None
        if any(other is None for other in present):
            how = "was removed from the model"
        elif len({_memory(other) for other in present}) > 1:
            how = "is tied, and was replaced in the model by several, or in one of its places only,"
        elif (first.shape, first.dtype) != (p.shape, self.dtype):
            kinds = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (first, p.sharded)]
            how = f"was replaced in the model by one of {kinds[0]} instead of {kinds[1]}"
        if how is not None:
            raise ValueError(f"{checks.me()}: {p.name} {how} after it was wrapped. Wrap after changing it")
        p.sharded.copy_(first) if isinstance(first, DTensor) else self.write(p, first)
        p.sharded.requires_grad_(first.requires_grad)
        for other in present:
            other.given_to_fsdp = True
        p.put(p.sharded)

    def versions(self) -> int:
        """A counter that grows when a torch op writes to a shard."""
        return sum(p.sharded._version + p.local._version for p in self.parameters)

    def bind(self, buffer: Tensor) -> list[Tensor]:
        """Gives the whole parameters their memory, and returns the tensors that gathers write."""
        outputs = self.wholes(buffer)
        for p, view in zip(self.parameters, outputs, strict=True):
            p.whole.data = view[: p.numel].view(p.shape)
        return outputs

    def attach(self, done: list[Parameter], values: Tensor, divisor: int) -> None:
        """Adds averaged gradients, in the layout of the shard, to the `.grad` of the sharded parameters.

        values may be `self.grad` itself, written by the reduction: then nothing is copied. Autograd adds the gradients
        of sharded parameters that a loss uses directly, possibly while the reduction runs.
        """
        parts = [values[p.start : p.start + self._local_numel(p)] for p in done]
        if divisor != 1:
            torch._foreach_div_(parts, divisor)  # self.grad has gradients of other parameters too
        if values is not self.grad:
            into = self.make_grad()
            if self.writable(done) and len(done) == len(self.trained()):
                into.copy_(values, non_blocking=True)
                parts = [into[p.start : p.start + self._local_numel(p)] for p in done]
            else:
                parts = [self._part(p, part.to(into.device)) for p, part in zip(done, parts, strict=True)]
        for p, part in zip(done, parts, strict=True):
            present = None if p.sharded.grad is None else self._rows_of(p.sharded.grad, p)
            if present is None or values is self.grad:
                view = part.view(p.rows, *p.shape[1:])
                if present is not None:
                    view.add_(present)
                    p.sharded.grad = None
                p.sharded.grad = DTensor(view, p.sharded._spec, requires_grad=False)
                self.granted.add(p)
            else:
                present.add_(part.view(present.shape))

    def _part(self, p: Parameter, averaged: Tensor) -> Tensor:
        """A new gradient in its place in `self.grad`, unless a user may hold another there."""
        if p.sharded.grad is None and self.writable([p]):
            place = self.grad[p.start : p.start + self._local_numel(p)]
            return place.copy_(averaged)
        return averaged.to(self.dtype) if p.sharded.grad is None else averaged

    def _rows_of(self, gradient: DTensor, p: Parameter) -> Tensor:
        """This rank's rows; autograd's own gradients may have another placement."""
        if gradient.placements != p.sharded.placements:
            gradient = p.sharded.grad = gradient.redistribute(placements=p.sharded.placements)
        return gradient._local_tensor

    def make_grad(self) -> Tensor:
        if self.grad is None:
            self.grad, self.granted = self.new(), set()
        return self.grad

    def writable(self, done: list[Parameter]) -> bool:
        """Whether nobody reads these parameters' places in `self.grad`. On the host, gradients are not kept for a user
        who took them."""
        return self.first(done) and (self.host or self.grad is None or self.granted.isdisjoint(done))

    def let_go(self) -> None:
        """Frees the gradient's memory on the device if it is no longer any `.grad`; backward creates it anew."""
        if not self.host and self.first(self.parameters):
            self.grad = None

    def settle(self) -> None:
        """Waits until gradients being copied to the host have arrived."""
        if self.host:
            torch.cuda.current_stream(self.device).synchronize()

    def first(self, done: list[Parameter]) -> bool:
        """Whether none of the parameters has a gradient."""
        return all(p.sharded.grad is None for p in done)


def _memory(parameter: Tensor) -> int:
    """Where its values are: equal for tied ones, also if a state dict was assigned to them."""
    return getattr(parameter, "_local_tensor", parameter).data_ptr()
