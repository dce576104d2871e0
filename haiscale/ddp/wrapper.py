"""The wrapper: torch's constructor and methods around `Reducer`, `Buffers` and the other parts of a step."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

from haiscale import checks
from haiscale import state as states
from haiscale.ddp import arguments, buckets, join, sizes
from haiscale.ddp.buffers import Buffers, broadcast
from haiscale.ddp.hooks import GradBucket
from haiscale.ddp.overlap import Overlap
from haiscale.ddp.precision import Dtypes, Narrow, feedback
from haiscale.ddp.reducer import Reducer
from haiscale.mesh import assisted, backend_of

_Torch = nn.parallel.DistributedDataParallel
_DELAYED = "averages begin in the order in which gradients get ready"


class DDP(nn.Module, Joinable):
    """Data parallelism: each rank has the whole model and its own inputs; gradients are averaged within backward.

    A replacement for torch.nn.parallel.DistributedDataParallel, with its arguments up to forward_sync_buffers.
    Gradients are views of the buffers in which they are averaged.

    Args:
        module: The model, the same on all ranks, on its device.
        device_ids: The GPU of the model, to which forward also moves its inputs; None: inputs stay where they are.
        output_device: As in torch.
        broadcast_buffers: Whether the first rank's buffers are sent to the others, now and before each forward.
        init_sync: Whether models are compared, and the first rank's parameters sent to the others, now.
        process_group: The ranks; None: all.
        bucket_cap_mb: MiB of gradients that are averaged together; None: the best size is measured in the first steps.
        find_unused_parameters: Whether a backward may leave parameters without gradients.
        gradient_as_bucket_view: False: gradients are copied from and to buckets.
        static_graph: Whether all steps use the same parameters.
        mixed_precision: The dtype of parameters in forward and backward, or torch's _MixedPrecision.
        device_mesh: A DeviceMesh of one dimension instead of process_group.
        forward_sync_buffers: The same before each forward only; None: as broadcast_buffers.
        wire_dtype: In which gradients are averaged, as torch.bfloat16, or only sent: torch.float8_e4m3fn.
        cpu_assisted: Whether copy engines and host cores average gradients on GPUs, by hfreduce on any backend.
        error_feedback: For float8, by default True: rounding errors of gradients are added to the next ones.

    The other arguments of torch have no effect here. Those that would change results or order are refused.

    Raises:
        ValueError: On all ranks, if ranks wrap different models; if the model cannot be wrapped or an argument is
            refused; in forward, if the previous backward left a parameter without gradient, unless
            find_unused_parameters. Errors of the backend are raised unchanged, and again at each later forward.
    """

    process_group: dist.ProcessGroup
    reducer: Reducer
    output_device: int | torch.device | None

    def __init__(
        self, module: nn.Module, device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None, dim: int = 0, broadcast_buffers: bool = True,
        init_sync: bool = True, process_group: dist.ProcessGroup | None = None, bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False, check_reduction: bool = False, gradient_as_bucket_view: bool = True,
        static_graph: bool = False, delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None, mixed_precision: Any = None, device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False, bucket_cap_mb_list: object = None, batched_grad_copy: bool = True,
        forward_sync_buffers: bool | None = None, *, wire_dtype: torch.dtype | None = None, cpu_assisted: bool = False,
        error_feedback: bool | None = None,
    ):  # fmt: skip
        super().__init__()
        Joinable.__init__(self)
        arguments.refuse(
            dim=(dim != 0, "batches are not split within a process: each rank has one device"),
            delay_all_reduce_named_params=(delay_all_reduce_named_params is not None, _DELAYED),
            param_to_hook_all_reduce=(param_to_hook_all_reduce is not None, _DELAYED),
            skip_all_reduce_unused_params=(skip_all_reduce_unused_params, "static_graph=True skips what no rank uses"),
            bucket_cap_mb_list=(bucket_cap_mb_list is not None, "bucket_cap_mb is the size of all buckets"),
        )
        self.process_group, self.cpu_assisted = arguments.group(process_group, device_mesh), cpu_assisted
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        broadcast_buffers = broadcast_buffers is not False  # in torch 2.13, None means True
        self.broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.bucket_cap_mb = gradient_as_bucket_view, bucket_cap_mb
        self.dtypes = Dtypes.of(mixed_precision)
        self.wire_dtype = self.dtypes.reduce if wire_dtype is None else wire_dtype
        self.error_feedback = feedback(self.wire_dtype, error_feedback)
        if cpu_assisted and self.wire_dtype == buckets.CODES:
            raise ValueError(f"cpu_assisted=True takes no multiprocessor, and {buckets.CODES} needs them: choose one")
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        parameters = self._check()
        self.device = parameters[0].device
        self.device_ids, self.output_device = arguments.devices(parameters, device_ids, output_device)
        self._connect(parameters, init_sync, broadcast_buffers)

    def _connect(self, parameters, init_sync, broadcast_buffers):
        """The first messages to the other ranks; everything before is local."""
        if init_sync:
            self._digest = checks.same_model(self.module, self.process_group, self.parameters_to_ignore)
            broadcast(self._states(buffers=broadcast_buffers), self.process_group)
        else:
            self._digest = "unchecked"
        self._set_up(parameters)

    def _set_up(self, parameters):
        """The attributes that are not copied or pickled with the model."""
        narrow = self.dtypes.param and Narrow(self.module, list(self._named_parameters().values()), self.dtypes)
        backend = "the CPU-assisted reduce" if self.cpu_assisted else backend_of(self.process_group)
        backend += " in float8" if self.wire_dtype == buckets.CODES else ""
        key = f"{self._digest[:16]}, {self.process_group.size()} ranks of {backend}"
        cap = None if self.bucket_cap_mb is None else max(1, int(self.bucket_cap_mb * 2**20))
        total = buckets.nbytes(parameters, self.wire_dtype)
        self._narrow, self._overlap, self._divide_by_initial = narrow, None, True
        self._check_added = checks.Added(self.module)
        self._synced = Buffers(self.module, self.parameters_to_ignore, self.process_group)
        self.reducer = Reducer(
            self.module, parameters, assisted(self.process_group) if self.cpu_assisted else self.process_group,
            sizes.Sizes(f"{key}, {sizes.machine(self.device)}", total, cap, self.device),
            wire_dtype=self.wire_dtype, feedback=self.error_feedback,
            attach=self.gradient_as_bucket_view and buckets.keep_dtypes(parameters, self.wire_dtype),
            lenient=self.find_unused_parameters, static=self.static_graph, restore=narrow and narrow.restore,
        )  # fmt: skip

    def _named_parameters(self) -> dict[str, Tensor]:
        """The parameters that are not ignored; tied ones once."""
        return {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}

    def _states(self, buffers: bool = True) -> list[Tensor]:
        """Everything that is the same on all ranks."""
        named = self.module.named_buffers() if buffers else ()
        return [*self._named_parameters().values(), *(b for name, b in named if name not in self.parameters_to_ignore)]

    def _check(self) -> list[Tensor]:
        """The parameters to train. Raises ValueError if the model cannot be wrapped."""
        named = self._named_parameters()
        for p in named.values():
            kind = "was not initialised" if isinstance(p, UninitializedParameter) else None
            kind = "is on the meta device" if kind is None and p.is_meta else kind
            kind = "is a DTensor" if kind is None and hasattr(p, "_local_tensor") else kind
            if kind is not None:
                raise ValueError(
                    f"{checks.path(self.module, p)} {kind}: DDP takes whole parameters with values; run a forward of "
                    "lazy modules first, give meta parameters memory with to_empty() and values, and for DTensors use "
                    "haiscale.fsdp"
                )
        checks.no_sparse_gradients(self.module, named.values())
        parameters = [p for p in named.values() if p.requires_grad]
        if not parameters:
            raise ValueError(
                f"no parameter of {type(self.module).__name__} requires a gradient, so there is nothing to average: "
                "use it without DDP, or set requires_grad_(True) first"
            )
        return parameters

    # Forward

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, with inputs moved to `device_ids` if given."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        with _active(self):
            output = self.module(*inputs, **kwargs)
        return self._after_forward(output)

    def _before_forward(self, inputs, kwargs):
        if torch._C._current_graph_task_id() == -1:
            self.reducer.arrivals.begun = False  # the last backward may have ended in an exception
        if self.reducer.arrivals.begun:
            pass  # a checkpoint reruns the model within the backward whose gradients are being counted
        elif torch.is_grad_enabled():
            if self._overlap is not None:
                self._overlap.check_stepped()
            self._check_added()
            self.reducer.prepare(self.require_backward_grad_sync)
        elif self.reducer.fault is not None:
            raise self.reducer.fault
        Join.notify_join_context(self)
        self._synchronise_buffers()
        if self._join_config.enable:
            live = join.Live(self.process_group, self.require_backward_grad_sync, live=True)
            group = self.process_group
            self.reducer.authority = lambda: join.common_rank(group, True)
            self.reducer.contributors = None if self._divide_by_initial else lambda: live.read()[1]
        if self.device_ids:
            device = torch.device(self.device.type, self.device_ids[0])
            inputs, kwargs = tree_map(
                lambda x: x.to(device, non_blocking=True) if torch.is_tensor(x) else x, (inputs, kwargs)
            )
        if self._narrow:
            self._narrow.place()
            inputs, kwargs = self._narrow.cast((inputs, kwargs))
        return inputs, kwargs

    def _synchronise_buffers(self, live=True):
        if self.require_forward_param_sync and self.broadcast_buffers:
            source = join.common_rank(self.process_group, live) if self._join_config.enable else 0
            self._synced.synchronise(source)

    def _after_forward(self, output):
        if self._overlap is not None:
            self._overlap.flush()  # of layers that this forward did not use
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        outputs = [t for t in _tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for tensor in outputs:
            # Unread logits of hfnn must not be computed for this: the first gradient is early enough.
            if type(tensor) is Tensor and tensor.grad_fn is not None:
                tensor.register_hook(self.reducer.begins[self.require_backward_grad_sync])
        if self._narrow and not outputs:
            self._narrow.restore()  # no backward will
        return output

    # Without averages

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards inside do not average: gradients accumulate. The first backward after it averages the
        sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Sets whether backwards average, from the next one on, whichever forward it belongs to. Pipelines need
        this."""
        self.require_backward_grad_sync = requires_gradient_sync
        self.reducer.arm(requires_gradient_sync)

    def overlap_forward(self, optimizer: torch.optim.Optimizer) -> Overlap:
        """From the next backward on, averages end in the following forward, where each layer waits only for its own.

        The optimizer is stepped there too, bucket by bucket, with the learning rate at the time of `optimizer.step()`,
        which must be called as usual. Results equal those of ordinary steps. Between backward and the next forward
        there are no gradients to read, so clipping and GradScaler are not possible, and parameters have their values
        from before the step. `state_dict()` and `named_shards()` finish the step first.

        Args:
            optimizer: One of hfnn.optim, over this model's parameters.

        Returns:
            A handle: `flush()` finishes the step, `remove()` undoes everything.

        Raises:
            ValueError: For other optimizers, and with find_unused_parameters, static_graph or mixed_precision.
        """
        if self.find_unused_parameters or self.static_graph or self._narrow:
            raise ValueError(
                "overlap_forward goes together with neither find_unused_parameters, static_graph nor mixed_precision"
            )
        self._overlap = Overlap(self.module, self.reducer, optimizer)
        return self._overlap

    # Uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context in which ranks may have different numbers of inputs, as in torch."""
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch.distributed.algorithms.Join, with divide_by_initial_world_size."""
        if self._overlap is not None:
            raise ValueError(
                "join: averages end in the next forward, which a rank without inputs has not: overlap_forward"
            )
        return join.Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """For torch.distributed.algorithms.Join."""
        return checks.host_device(self.process_group)

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For torch.distributed.algorithms.Join."""
        return self.process_group

    # Hooks

    def register_comm_hook(self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]) -> None:
        """`hook(state, bucket)` is called instead of averaging. Call this once, before training.

        Args:
            state: Anything, for the hook.
            hook: Returns a future of the bucket's result. Those of torch.distributed.algorithms.ddp_comm_hooks work.

        Raises:
            ValueError: There is a hook already, or it cannot be called.
        """
        if not callable(hook):
            raise ValueError(f"hook must be callable with a state and a bucket, got {type(hook).__name__}")
        if self.reducer.hook is not None:
            raise ValueError("a model takes one communication hook, and has one already")
        self.reducer.sizes.fix("a default: a hook may keep something for each bucket")
        self.reducer.use_hook(hook, state)

    # Checkpoints

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers (live) by their names in the plain model; tied ones once, by the first."""
        self._end_step()
        yield from states.named_shards(self.module)

    def shards_loaded(self) -> None:
        """Call after values were written to `named_shards`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in nn.Module: names begin with "module.", as in torch's wrapper."""
        self._end_step()
        return super().state_dict(*args, **kwargs)

    def _end_step(self):
        if self._overlap is not None:
            self._overlap.flush()
        if self._narrow:
            self._narrow.restore()

    def explain(self) -> str:
        """A text: what is averaged, how, and why."""
        backend, size = backend_of(self.reducer.group), self.process_group.size()
        parameters = self.reducer.parameters
        total = buckets.nbytes(parameters, self.wire_dtype) / 2**20
        dtypes = {str(buckets.dtype_of(p, self.wire_dtype)).removeprefix("torch.") for p in parameters}
        kind = ", ".join(sorted(dtypes))
        if self.wire_dtype == buckets.CODES:
            between = " between hosts" if self.reducer.wire and self.reducer.wire.hosts else ""
            kind += f" from float8_e4m3fn on the wire{between}{' with error feedback' * self.error_feedback}"
        views = "views of buckets" if self.reducer.attach else "copied from and to buckets"
        sent = "broadcast before a forward" if self.broadcast_buffers else "left alone"
        return "\n".join([
            f"DDP of {type(self.module).__name__}, {size} ranks of {backend}",
            f"  gradients: {len(parameters)}, {total:.3g} MiB, averaged in {kind}; {views}",
            *self.reducer.explain(),
            f"  buffers: {len(self._synced.all())}, {sent}",
        ])  # fmt: skip

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise ValueError("a model can be copied or pickled on the default process group only")
        if self._overlap is not None:
            raise ValueError("a model can be copied or pickled without overlap_forward only: remove() it first")
        self._end_step()
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "_synced", "_narrow", "_overlap", "_join_config", "_check_added"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        Joinable.__init__(self)
        self.process_group = checks.group_of(None)
        self._set_up(self._check())


DistributedDataParallel = DDP


def _tensors(output):
    """All tensors in the result of a forward: in lists, dicts, dataclasses and outputs of transformers (also dicts)."""
    if torch.is_tensor(output):
        return [output]
    if isinstance(output, dict):
        return [t for value in output.values() for t in _tensors(value)]
    if isinstance(output, list | tuple | set):
        return [t for value in output for t in _tensors(value)]
    if dataclasses.is_dataclass(output):
        return [t for field in dataclasses.fields(output) for t in _tensors(getattr(output, field.name))]
    return []


@contextlib.contextmanager
def _active(ddp):
    """With this, torch.compile splits the model's graph at buckets, so averages start within backward."""
    size = max(ddp.reducer.sizes.now, dist._DEFAULT_FIRST_BUCKET_BYTES)  # torch accepts no smaller ones
    before, _Torch._active_ddp_module = _Torch._active_ddp_module, _Buckets(size)
    try:
        yield
    finally:
        _Torch._active_ddp_module = before


@dataclasses.dataclass
class _Buckets:
    bucket_bytes_cap: int
