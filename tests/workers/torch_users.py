"""torch's own users of process groups, each on gloo and twice on hfreduce: rank programs of test_torch_users.

On GPUs (test_gpu) the other backend is NCCL if each rank has its own GPU, otherwise gloo on the CPU.

A user is a function of (rank, size) that trains something small and returns tensors. It runs in its own group, so that
its failure does not affect others.
"""

import copy
import tempfile
import traceback
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import hfreduce

STEPS, WIDTH = 4, 48
DEVICE = torch.device("cpu")  # that users train on
warnings.filterwarnings("ignore")  # torch's own deprecations


def make_model(norm=False, depth=4):
    torch.manual_seed(5)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers).to(DEVICE)


def batch(rank, step):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def train(model, rank, steps=STEPS, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.state_dict().values() if p.is_floating_point()]


def ddp(rank, size, hook=None, norm=False, **options):
    model = DDP(make_model(norm), bucket_cap_mb=0.02, **options)
    if hook:
        model.register_comm_hook(None, hook)
    return train(model, rank)


class Branches(nn.Module):
    """Uses a different half of its parameters in every other step."""

    def __init__(self, alternating=True):
        super().__init__()
        self.halves, self.step, self.alternating = nn.ModuleList([make_model(), make_model()]), 0, alternating

    def forward(self, x):
        self.step += 1
        return self.halves[self.step % 2 if self.alternating else 0](x)


def ddp_unused(rank, size):
    return train(DDP(Branches(), find_unused_parameters=True), rank)


def ddp_static(rank, size):
    model = DDP(Branches(alternating=False), static_graph=True, gradient_as_bucket_view=True)
    return train(model, rank)


def ddp_no_sync(rank, size):
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        with model.no_sync():
            model(batch(rank, step)).square().sum().backward()
        model(batch(rank, step + 50)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def power_sgd(rank, size, bucket_cap_mb=25, steps=8):
    """Its hook starts operations in callbacks, and waits for them there."""
    model = DDP(make_model(), bucket_cap_mb=bucket_cap_mb)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, power_sgd_hook)
    return train(model, rank, steps)


def power_sgd_hook(state, bucket):
    """torch's hook frees a copy of the gradients while a callback's stream reads it, so on GPUs backward waits for it.

    Without the wait, 1 run in 5 has other bits where jobs share the GPUs, on NCCL as on hfreduce.
    """
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if DEVICE.type == "cuda":
        future.wait()
    return future


def ddp_join(rank, size):
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model]):
        for step in range(2 + rank):
            model(batch(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def zero1(rank, size):
    model = DDP(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    result = train(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    return result


def fsdp1(rank, size):
    model = FullyShardedDataParallel(make_model(), device_id=DEVICE)
    train(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def fsdp2(rank, size, mesh=None, steps=STEPS, factor=None, **precision):
    model = make_model()
    mesh = init_device_mesh(DEVICE.type, mesh or (size,), mesh_dim_names=("replicate", "shard")[2 - len(mesh or "1") :])
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**precision)}
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    if factor:
        for layer in model[::2]:
            layer.set_gradient_divide_factor(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        model(batch(rank, step)).float().square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


def fsdp2_factor(rank, size):
    """A divide factor is PREMUL_SUM: twice the ranks gives half the gradient. No other CPU backend supports it."""
    whole, half = fsdp2(rank, size, steps=1), fsdp2(rank, size, steps=1, factor=2.0 * size)
    for before, a, b in zip(make_model().parameters(), whole, half, strict=True):
        torch.testing.assert_close(a - before, 2 * (b - before), rtol=1e-3, atol=1e-6)
    return half


def checkpoint(rank, size):
    """DCP: what was saved from shards is restored."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    model = fully_shard(make_model(), mesh=init_device_mesh(DEVICE.type, (size,)))
    saved = [p.full_tensor().detach() for p in model.parameters()]
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    for p in model.parameters():
        p.data.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state)
    loaded = [p.full_tensor().detach() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    return loaded


def functionals(rank, size):
    x, group = batch(rank, 0), dist.group.WORLD
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, size - 1, group),
        *functional.all_reduce_coalesced([x, 2 * x], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x[:2]], group),
        *functional.reduce_scatter_tensor_coalesced([x, 3 * x], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(r) for r in results]


def dtensor(rank, size):
    mesh = init_device_mesh(DEVICE.type, (size,))
    x = distribute_tensor(batch(0, 0), mesh, [Shard(0)])
    y = distribute_tensor(batch(0, 1), mesh, [Replicate()])
    return [(x @ y.t()).full_tensor(), x.redistribute(mesh, [Shard(1)]).to_local(), x.sum().full_tensor()]


def objects(rank, size):
    everybody, mine, list_ = [None] * size, [None], [f"object {rank}"] * 3
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * (rank * 1000)})
    dist.scatter_object_list(mine, list(range(size)) if rank == 1 else None, src=1)
    dist.broadcast_object_list(list_, src=1)
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert [o["rank"] for o in everybody] == list(range(size)) and mine == [rank] and list_ == ["object 1"] * 3
    assert rank or gathered == list(range(size))
    return []


def groups(rank, size):
    x = batch(rank, 0)
    halves = [dist.new_group(list(range(i, size, 2))) for i in range(2)]
    dist.all_reduce(x, group=halves[rank % 2])
    mesh = init_device_mesh(DEVICE.type, (2, size // 2), mesh_dim_names=("a", "b"))
    for name in "ab":
        dist.all_reduce(x, group=mesh.get_group(name))
    dist.destroy_process_group(halves[rank % 2])
    dist.all_reduce(x)
    return [x]


LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
FOLDED = ("ZBVZeroBubble", "DualPipeV")  # the last stage is on the first rank


def pipeline(rank, size, name):
    stages_a_rank = 2 if name in LOOPED + FOLDED else 1
    total, chunks = stages_a_rank * size, 2 * size
    model = make_model(depth=total)
    places = [rank] if stages_a_rank == 1 else [rank, total - 1 - rank] if name in FOLDED else [rank, rank + size]
    parts = [copy.deepcopy(nn.Sequential(model[2 * i], model[2 * i + 1])) for i in places]
    stages = [PipelineStage(part, i, total, DEVICE) for part, i in zip(parts, places, strict=True)]
    schedule = schedules.get_schedule_class(name)
    schedule = schedule(stages if stages_a_rank > 1 else stages[0], chunks, loss_fn=nn.functional.mse_loss)
    x = torch.cat([batch(i, 0) for i in range(size)])
    for _ in range(2):
        losses = []
        target = {"target": torch.zeros_like(x), "losses": losses} if total - 1 in places else {}
        schedule.step(*([x] if rank == 0 else []), **target)
    return [p.grad for part in parts for p in part.parameters()]


SCHEDULES = ("GPipe", "1F1B", *LOOPED, *FOLDED)
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
USERS = {
    "ddp": partial(ddp, norm=True),
    "ddp_unused": ddp_unused,
    "ddp_static": ddp_static,
    "ddp_no_sync": ddp_no_sync,
    "ddp_fp16_hook": partial(ddp, hook=default_hooks.fp16_compress_hook),
    "ddp_bf16_hook": partial(ddp, hook=lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    "power_sgd": power_sgd,
    "power_sgd_buckets": partial(power_sgd, bucket_cap_mb=0.005, steps=20),
    "ddp_join": ddp_join,
    "zero1": zero1,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2_bf16": partial(fsdp2, **BF16),
    "fsdp2_factor": fsdp2_factor,
    "hsdp": lambda rank, size: fsdp2(rank, size, mesh=(2, size // 2)),
    "hsdp_mixed": lambda rank, size: fsdp2(
        rank, size, mesh=(2, size // 2), steps=12, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "checkpoint": checkpoint,
    "functionals": functionals,
    "dtensor": dtensor,
    "objects": objects,
    "groups": groups,
    **{f"pipeline_{name}": partial(pipeline, name=name) for name in SCHEDULES},
}
# gloo has no PREMUL_SUM, and runs the callbacks of several buckets concurrently, in an order that differs between
# ranks.
NOT_ON_GLOO = ["fsdp2_factor", "power_sgd_buckets"]
if torch.__version__ < "2.13":  # gloo loses its connections there
    NOT_ON_GLOO += ["pipeline_ZBVZeroBubble", "pipeline_DualPipeV"]
ROUNDED = ("ddp_fp16_hook", "ddp_bf16_hook", "fsdp2_bf16", "hsdp_mixed")  # gloo adds 16-bit floats in 16 bits


def alone(user, backend, rank, size, path, **options):
    """A user in its own group: its tensors, and the number of hfreduce operations that it started."""
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size, **options)
    before = hfreduce.operations()
    torch.manual_seed(0)
    try:
        result = [x.cpu() for x in USERS[user](rank, size)]
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result, hfreduce.operations() - before


def distance(a, b, limit):
    """The largest error, relative to the rounding allowed."""
    return max(
        (float((x - y).abs().max() / (limit * (1 + y.abs().max()))) for x, y in zip(a, b, strict=True)), default=0
    )


def use(device):
    global DEVICE
    DEVICE = torch.device(device)
    return DEVICE


def compare(rank, size, store, users=None, with_gloo=True):
    torch.set_num_threads(1)
    found = {}
    for user in users or USERS:
        backends = ["hfreduce"] * 2 + ["gloo"] * (with_gloo and user not in NOT_ON_GLOO)
        try:
            (ours, count), (again, _), *gloo = [
                alone(user, backend, rank, size, f"{store}.{user}.{i}") for i, backend in enumerate(backends)
            ]
            same = len(ours) == len(again) and all(map(torch.equal, ours, again))
            found[user] = {"operations": count, "same": same}
            if gloo:
                found[user]["distance"] = distance(ours, gloo[0][0], 2e-2 if user in ROUNDED else 1e-5)
        except Exception:  # of this user; the others have groups of their own
            found[user] = {"error": traceback.format_exc()[-3000:]}
    return found


def compare_on_gpus(rank, size, store, users=None, bound=False):
    """bound: to its device, so that torch splits the group for smaller ones. Not compared with NCCL: after other groups
    had been created and destroyed, splitting one of its own crashed (torch 2.11).

    In one process, all groups are bound or none, because DTensor's caches identify groups by name.
    """
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    gpu = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(gpu)
    torch.use_deterministic_algorithms(True, warn_only=True)
    options = {"device_id": gpu} if bound else {}
    found = {}
    for user in users or USERS:
        try:
            use(gpu)
            ours, count = alone(user, "hfreduce", rank, size, f"{store}.{user}.0", **options)
            again, _ = alone(user, "hfreduce", rank, size, f"{store}.{user}.1", **options)
            found[user] = {"operations": count, "same": len(ours) == len(again) and all(map(torch.equal, ours, again))}
            on_nccl = gpus >= size
            if not bound and (on_nccl or not user.startswith("power_sgd")) and user not in NOT_ON_GLOO:
                use(gpu if on_nccl else "cpu")  # torch's PowerSGD requests a GPU if there is one
                theirs, _ = alone(user, "nccl" if on_nccl else "gloo", rank, size, f"{store}.{user}.2")
                found[user]["distance"] = distance(ours, theirs, 2e-2 if user in ROUNDED else 2e-5)
        except Exception:
            found[user] = {"error": traceback.format_exc()[-3000:]}
    return found
