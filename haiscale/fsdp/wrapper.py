"""FSDP: parameters, gradients and optimizer states sharded over ranks."""

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from haiscale import checks
from haiscale import state as states
from haiscale.fsdp import clip, deferred, full, memory, methods, options, step, uneven
from haiscale.fsdp.engine import Engine, in_graph_task
from haiscale.fsdp.flat import Flat
from haiscale.fsdp.nested import cast
from haiscale.fsdp.reduce import Reductions, bytes_needed
from haiscale.fsdp.unit import Unit, is_fake
from haiscale.fsdp.units import find_units
from haiscale.mesh import hfreduce_takes_cuda, sibling
from hfnn.core import node as recipe


class FSDP(nn.Module):
    """Shards a model over the ranks of a group; otherwise it is used like the model.

        model = FSDP(model, zero=3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).loss.backward(); optimizer.step(); optimizer.zero_grad()

    Each rank keeps 1/ranks of what `zero` selects: 1 optimizer states, 2 also gradients, 3 (the default) also
    parameters (ZeRO, arXiv 1910.02054). Parameters are gathered unit by unit before they are used. Gradients are
    averaged over ranks as soon as a unit's backward has ended. `model.parameters()` are DTensors, sharded along
    dimension 0; create the optimizer from them, after wrapping.

    The arguments up to `device_mesh` are those of torch's FullyShardedDataParallel.

    Args:
        module: The model, the same on all ranks, on any device; on meta it is initialised unit by unit.
        process_group: The ranks; None: all.
        sharding_strategy: FULL_SHARD is zero=3, SHARD_GRAD_OP zero=2; HYBRID_SHARD shards inside a host and keeps a
            replica on each host.
        cpu_offload: Whether shards of parameters and gradients are in host memory.
        auto_wrap_policy: As units.
        backward_prefetch: Whether the next unit is gathered while one runs backward; None: it is not.
        mixed_precision: MixedPrecision, or a tuple (param_dtype, reduce_dtype, output_dtype).
        ignored_modules: Modules that are left alone, with their parameters.
        param_init_fn: Called with each module on meta, fills what the module itself has; None: its reset_parameters.
        device_id: The device of the shards; None: the current GPU if the model is on one, or on meta and the group
            takes CUDA tensors; otherwise the CPU.
        sync_module_states: Whether the first rank's parameters and buffers are sent to the others.
        forward_prefetch: Whether the next unit is gathered while one runs forward.
        limit_all_gathers: Accepted without effect: always on.
        use_orig_params: Accepted without effect: always on.
        ignored_states: Modules or parameters that are left alone.
        device_mesh: A mesh instead of a group; of two dimensions: replicas of shards.
        zero: 1, 2 or 3; None: 3.
        units: What is gathered together: module classes, modules or their names, or a policy as torch's FSDP takes;
            None: the blocks found in the model.
        buffers: How many sharded units may be whole at a time, and how many reductions may be in flight.
        reduce_unused: Whether parameters that this rank's loss does not depend on count as zero gradients, for models
            that train different parameters on different ranks. Otherwise they have no gradient on any rank.

    Raises:
        ValueError: An argument is not accepted, or the ranks' models differ.
    """

    module: nn.Module
    mesh: DeviceMesh

    def __init__(
        self, module: nn.Module, process_group: dist.ProcessGroup | None = None,
        sharding_strategy: options.ShardingStrategy | Any = None, cpu_offload: options.CPUOffload | Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: options.BackwardPrefetch | Any = options.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: options.MixedPrecision | tuple[torch.dtype | None, ...] | Any = None,
        ignored_modules: Iterable[nn.Module] | None = None, param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None, sync_module_states: bool = False, forward_prefetch: bool = True,
        limit_all_gathers: bool = True, use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None, device_mesh: DeviceMesh | None = None, *,
        zero: int | None = None, units: Any = None, buffers: int = 2, reduce_unused: bool = False,
    ):  # fmt: skip
        super().__init__()
        if not isinstance(buffers, int) or buffers < 1:
            raise ValueError(f"buffers={buffers!r} is not accepted: give an integer of at least 1")
        if auto_wrap_policy is not None and units is not None:
            raise ValueError("auto_wrap_policy and units say the same: give one of them")
        self.zero, hybrid = options.zero_stage(sharding_strategy, zero)
        self.precision = options.mixed_precision(mixed_precision)
        self.mesh = _mesh(process_group, device_mesh, hybrid, device_id, module)
        self.device = _device(device_id, self.mesh)
        self.offload = bool(getattr(cpu_offload, "offload_params", cpu_offload))
        for dim in range(self.mesh.ndim):
            checks.same_model(module, self.mesh.get_group(dim))
        ignored = _ignored(module, ignored_modules, ignored_states)
        checks.no_sparse_gradients(module, [p for p in module.parameters() if p not in ignored[1]])
        wanted = auto_wrap_policy if units is None else units
        groups = [[module], *find_units(module, wanted, ignored[0])]
        self.module = module
        self._names = [name for name, _ in module.named_parameters()]
        initialise = deferred.Initialiser(module, self.device, param_init_fn, sync_module_states, self.mesh)
        made = [self._unit(group, owned, initialise) for group, owned in _owners(module, groups, ignored[1])]
        initialise.buffers(self.precision.buffer_dtype)
        self._engine = self._make_engine(made, buffers)
        self._engine.forward_prefetch = bool(forward_prefetch)
        self._engine.backward_prefetch = backward_prefetch is not None
        self._engine.reduce_unused = bool(reduce_unused)
        self._check_added = checks.Added(module, self._adopt, [p.whole for unit in self.units for p in unit.parameters])
        if self.zero == 3:
            recipe.parameters_are_resharded()

    def _unit(self, modules: list[nn.Module], owned: list, initialise) -> Unit:
        """Creates one unit; its original whole parameters are released."""
        name = next(name for name, m in self.module.named_modules() if m is modules[0])
        name = f"{name} ({type(modules[0]).__name__})" if name else type(modules[0]).__name__
        flats, root = [], modules[0] is self.module
        for _, p, _ in owned:
            p.given_to_fsdp = True
        with torch.no_grad():
            whole = initialise.parameters(owned)
            for dtype in dict.fromkeys(p.dtype for _, p, _ in whole):
                rows = [row for row in whole if row[1].dtype is dtype]
                dtypes = self.precision.param_dtype, self.precision.reduce_dtype
                flats.append(Flat(rows, self.mesh, self.device, dtypes, self.offload))
        for flat in flats:
            for p in flat.parameters:
                p.put(p.sharded)
        return Unit(name, modules, flats, private=root or self.zero < 3)

    def _make_engine(self, units: list[Unit], buffers: int) -> Engine:
        group = self.mesh.get_group(self.mesh.ndim - 1)
        replicas = self.mesh.get_group(0) if self.mesh.ndim == 2 else None
        parts = {unit: {part for m in unit.modules for part in m.modules()} for unit in units}
        for unit in units:
            unit.around = {o for o in units if o is not unit and any(m in parts[o] for m in unit.modules)}

        def make(nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

        reductions = Reductions(_channel(group), replicas, buffers, make)
        needs = (bytes_needed(flat) for unit in units for flat in unit.flats)
        reductions.needs = [nbytes for nbytes in needs if nbytes]
        engine = Engine(units, group, reductions, buffers, make)
        engine.zero = self.zero
        if self.precision.cast_forward_inputs:
            engine.cast_inputs = self.precision.param_dtype
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if torch.is_grad_enabled():  # a reentrant checkpoint enables them in backward only
            self._check_added()
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            if not in_graph_task():  # a checkpoint that has all it needs stops by an exception
                self._engine.reset()
            raise
        dtype = self.precision.output_dtype
        return output if dtype is None else cast(output, dtype)

    def _adopt(self) -> None:
        for unit in () if in_graph_task() else self.units:
            for flat in unit.flats:
                flat.adopt()

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the module's; methods are called as described in `haiscale.fsdp.methods`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or (name.startswith("__") and name.endswith("__")):
                raise
        value = getattr(self.module, name)
        if inspect.ismethod(value) and value.__self__ is self.module:
            return methods.through(self._engine, value)
        return value

    def _apply(self, fn, recurse=True):
        """`.to()` and similar methods: buffers follow; shards keep their device and dtype."""
        for name, p in self.module.named_parameters():
            now = fn(p.detach())
            if (now.dtype, now.device) != (p.dtype, p.device):
                raise ValueError(
                    f"{name} would become {now.dtype} on {now.device}; it is a shard, {p.dtype} on {p.device}, and "
                    "others are sent it: cast or move the model before it is wrapped, or give FSDP mixed_precision or "
                    "device_id"
                )
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else fn(buffer)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "an FSDP cannot be copied, as its ranks share communication: copy the model before it is wrapped, or load "
            "full_state_dict() into another"
        )

    @property
    def units(self) -> list[Unit]:
        """The units; the first is the root."""
        return self._engine.units

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward accumulates whole gradients on each rank; the first backward outside averages all of them.

        Meanwhile a rank holds the gradients of all parameters, in the dtype of the reduction. Without no_sync each
        backward averages and adds to the sharded gradients: more communication, less memory.
        """
        before, self._engine.sync = self._engine.sync, False
        try:
            yield
        finally:
            self._engine.sync = before

    def constant_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, parameters do not change from one forward to the next, so those still gathered are used again.

        Outside, every forward gathers, because shards may have been written to through `.data`, numpy or a collective.
        With zero=1 or 2 a loop that only evaluates gathers once in it. Writes inside are seen at its end at the latest.
        """
        return self._engine.constant()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        Call it on every rank. Nothing waits for the GPU.

        Args:
            max_norm: A positive number.
            norm_type: 2, any other positive number, or inf.
        """
        return clip.clip_grad_norm_(self, max_norm, norm_type)

    def step_in_backward(self, optimizer: torch.optim.Optimizer) -> step.InBackward:
        """Steps each unit inside backward, as soon as its gradients are averaged, and frees them: see InBackward."""
        return step.InBackward(self, optimizer)

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loop in which ranks have different numbers of batches: see haiscale.fsdp.uneven.batches."""
        return uneven.batches(self._engine, self.mesh, batches)

    def summon_full_params(
        self, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False, with_grads: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which the module has whole parameters, as torch's; see haiscale.fsdp.full.summon."""
        return full.summon(self, writeback, rank0_only, offload_to_cpu, with_grads)

    def memory(self) -> memory.Memory:
        """The bytes that this rank holds for parameters, gradients and communication; print it."""
        return memory.of(self._engine)

    def named_shards(self) -> Iterator[tuple[str, Tensor | DTensor]]:
        """Parameters and persistent buffers (live) by their names in the plain model; tied ones once."""
        yield from states.named_shards(self.module)

    def shards_loaded(self) -> None:
        """Call after shards were written to: whole parameters are gathered anew."""
        for unit in self.units:
            unit.stamp = None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state dict: names without "module.", parameters as DTensors. `full_state_dict` has whole
        ones."""
        found = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        if prefix:  # inside another model, whose load_state_dict looks for versions under the names of modules here
            versions = found._metadata
            inside = [key for key in versions if key == prefix[:-1] or key.startswith(prefix)]
            versions.update({f"{prefix}module{key[len(prefix) - 1 :]}": versions[key] for key in inside})
        return found

    def full_state_dict(self, rank0_only: bool = True, cpu: bool = True) -> dict[str, Tensor]:
        """The state dict of the unwrapped model with whole tensors. All ranks call it.

        Args:
            rank0_only: Whether other ranks get {}.
            cpu: Whether each parameter is moved to the host before the next is gathered.
        """
        return full.state_dict(self, rank0_only, cpu)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict of either kind: each rank takes its rows of whole tensors."""
        return full.load_state_dict(self, state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest) -> None:
        """Called by the load_state_dict of a model around this one: names there are without "module."."""
        mine = self.module.state_dict(keep_vars=True)
        for name in [name for name in state_dict if name.startswith(prefix)]:
            inside = name[len(prefix) :]
            value = state_dict.pop(name)
            state_dict[f"{prefix}module.{inside}"] = full.rows_of(self, mine.get(inside), value)
        super()._load_from_state_dict(state_dict, prefix, *rest)


FullyShardedDataParallel = FSDP


def _mesh(group, mesh: DeviceMesh | None, hybrid: bool, device_id, module: nn.Module) -> DeviceMesh:
    """One dimension of shards, or (replicas, shards)."""
    if mesh is not None:
        checks.group_of(None)
        if mesh.ndim > 2:
            raise ValueError(
                f"device_mesh has dimensions {mesh.mesh_dim_names or mesh.shape}: give one, of shards, or two, of "
                "replicas and shards, as in mesh['dp', 'fsdp']"
            )
        if group is not None:
            raise ValueError("process_group and device_mesh say the same: give one of them")
        return mesh
    group = checks.group_of(group)
    kind = _kind(group, device_id, module)
    if not hybrid:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=("fsdp",))
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), dist.get_world_size()
    if group.size() != world or not local or world % local:
        raise ValueError(
            "HYBRID_SHARD without device_mesh shards over the ranks of a host, which LOCAL_WORLD_SIZE counts, and "
            "needs all ranks; give device_mesh, of two dimensions (replicas, shards)"
        )
    return init_device_mesh(kind, (world // local, local), mesh_dim_names=("dp", "fsdp"))


def _kind(group: dist.ProcessGroup, device_id, module: nn.Module) -> str:
    if device_id is not None:
        return "cuda" if isinstance(device_id, int) else torch.device(device_id).type
    kinds = {p.device.type for p in module.parameters()} - {"meta"}
    backend = dist.get_backend(group)
    reached = backend not in ("gloo", "hfreduce") or (backend == "hfreduce" and hfreduce_takes_cuda())
    meta_to_gpu = not kinds and torch.cuda.is_available() and reached
    return "cuda" if "cuda" in kinds or meta_to_gpu or backend == "nccl" else "cpu"


def _device(device_id, mesh: DeviceMesh) -> torch.device:
    if mesh.device_type != "cuda":
        return torch.device(mesh.device_type)
    index = device_id if isinstance(device_id, int) else None if device_id is None else torch.device(device_id).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _ignored(module: nn.Module, modules, states) -> tuple[set, set]:
    """(modules, parameters) that are left alone."""
    states = list(states or ())
    modules = [*(modules or ()), *(s for s in states if isinstance(s, nn.Module))]
    modules = {part for m in modules for part in m.modules()}
    return modules, {s for s in states if isinstance(s, Tensor)} | {p for m in modules for p in m._parameters.values()}


def _owners(module: nn.Module, groups: list[list[nn.Module]], ignored: set) -> list[tuple[list, list]]:
    """For each unit, its modules and its parameters, as (name, parameter, places).

    A module belongs to the innermost unit around it, a parameter to the unit of its module; to the root if there are
    several.
    """
    unit_of = {m: index for index, group in enumerate(groups) for m in group}
    owners: dict[nn.Module, set[int]] = {m: set() for m in module.modules()}

    def visit(m: nn.Module, around: int) -> None:
        index = unit_of.get(m, around)
        if index not in owners[m]:
            owners[m].add(index)
            for child in m.children():
                visit(child, index)

    visit(module, 0)
    found: dict[nn.Parameter, tuple[str, list]] = {}
    for prefix, m in module.named_modules():
        for name, p in m._parameters.items():
            if p is not None and p not in ignored:
                if isinstance(p, DTensor):
                    raise ValueError(
                        f"parameter {prefix}.{name} is a DTensor already: FSDP takes models that nobody has sharded"
                    )
                found.setdefault(p, (f"{prefix}.{name}" if prefix else name, []))[1].append((m, name))
    owned: list[list] = [[] for _ in groups]
    for p, (name, places) in found.items():
        indices = {index for m, _ in places for index in owners[m]}
        owned[indices.pop() if len(indices) == 1 else 0].append((name, p, places))
    return [pair for i, pair in enumerate(zip(groups, owned, strict=True)) if pair[1] or i == 0]


_channels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _channel(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the same ranks, in which reductions do not wait for gathers that were started before."""
    if group.size() == 1 or is_fake(group):
        return group
    if group not in _channels:
        _channels[group] = sibling(group)
    return _channels[group]
