"""The wrapper that `haiscale.auto` creates instead of torch's, with further attributes of torch's wrapper."""

import weakref

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from haiscale.ddp import wrapper

_BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class NotOnAllRanks(Exception):
    """Some rank cannot have the wrapper; all ranks know this."""


class DistributedDataParallel(wrapper.DDP):
    """haiscale.ddp.DDP for a script written for torch's wrapper; `isinstance` treats it as torch's.

    As in torch, gradients have their own memory unless gradient_as_bucket_view is set, and parameters unfrozen or
    added later are not averaged. agree() is called if this rank has no objection; NotOnAllRanks is raised unless it
    returns "". given: torch's arguments by name.
    """

    dim, broadcast_bucket_size, use_side_stream_for_tensor_copies = 0, 250 * 2**20, False
    gather, to_kwargs = wrapper._Torch.gather, wrapper._Torch.to_kwargs

    def __init__(self, agree, given):
        object.__setattr__(self, "_agree", agree)
        super().__init__(**{"gradient_as_bucket_view": False, **given})
        self.device_type, self.mixed_precision = self.device.type, given.get("mixed_precision")
        self.is_multi_device_module = len({p.device for p in self.module.parameters()}) > 1
        cap = given.get("bucket_cap_mb")
        self.bucket_bytes_cap = int((25 if cap is None else cap) * 2**20)

    def _connect(self, *how):
        if self.__dict__.pop("_agree")() != "":
            raise NotOnAllRanks
        super()._connect(*how)

    def _check(self):
        parameters = super()._check()
        if any(hasattr(p, "_in_backward_optimizers") for p in parameters):
            raise ValueError("optimizers step within its backward")
        return parameters

    def _set_up(self, parameters):
        super()._set_up(parameters)
        self.reducer.frozen, self._check_added = [], lambda: None
        # Used by torch.distributed.pipelining before the last microbatch's backward; forwards are in no_sync there.
        reducer = weakref.proxy(self.reducer)
        # Lightning and accelerate do the same for a backward that they begin themselves.
        self.reducer.prepare_for_backward = lambda outputs: reducer.arm(True)
        self.reducer._rebuild_buckets = lambda: False  # torch's may have to be called first,
        self.reducer._delay_all_reduce = lambda: None  # and this one after the first backward of a static graph

    @property
    def modules_buffers(self):
        return self._synced.all()

    def _set_static_graph(self):
        """The deprecated form of static_graph=True, before the first forward."""
        self.static_graph = self.reducer.static = self.reducer.lenient = True

    def _get_ddp_logging_data(self) -> dict:
        """Those of torch's facts that do not depend on how it averages."""
        return {
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "rank": self.process_group.rank(),
            "world_size": self.process_group.size(),
            "num_parameter_tensors": len(self.reducer.parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in self.reducer.parameters),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "is_multi_device_module": int(self.is_multi_device_module),
        }

    def _register_builtin_comm_hook(self, kind):
        self.register_comm_hook(None, _BUILTIN[kind])


nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
