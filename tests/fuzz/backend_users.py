"""Steps of the backend fuzzer that use libraries built on collectives, and faulty calls."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def an_object(seed):
    """Random size and kind, determined by the seed."""
    draw = random.Random(seed)
    kind = draw.randrange(5)
    if kind == 0:
        return None
    if kind == 1:
        return draw.randrange(10**9)
    if kind == 2:
        return "x" * draw.choice([0, 3, 5000])
    if kind == 3:
        return {"list": [draw.random() for _ in range(draw.randrange(5))], "nested": (1, None)}
    return torch.arange(draw.randrange(50)).tolist()


class Users:
    def do_objects(self):
        """One of torch's functions for Python objects."""
        n, me, group, what = len(self.ranks), self.me, self.group, self.step["what"]
        objects = [an_object(hash((self.program["seed"], self.i, r))) for r in range(n)]
        label = f"{self.i} {what}"
        with self.attempt(label):
            if what == "all_gather_object":
                found = [None] * n
                self.api.all_gather_object(found, objects[me], group=group)
            elif what == "gather_object":
                found = [None] * n if self.at_root() else None
                self.api.gather_object(objects[me], found, dst=self.root(), group=group)
            elif what == "broadcast_object_list":
                found = list(objects) if self.at_root() else [None] * n
                self.api.broadcast_object_list(found, src=self.root(), group=group)
            elif what == "scatter_object_list":
                found = [None]
                self.api.scatter_object_list(found, objects if self.at_root() else None, src=self.root(), group=group)
            else:
                found = [None] * n
                if self.at_root():
                    for r in self.ranks:
                        if r != self.rank:
                            self.api.send_object_list(objects, dst=r, group=group)
                else:
                    self.api.recv_object_list(found, src=self.root(), group=group)
            self.show(label, found)

    def do_sparse(self):
        """all_reduce of sparse tensors with different numbers of values."""
        label, (rows, *rest) = f"{self.i} sparse", self.step["shape"]
        count = self.step["counts"][self.me]
        places = torch.randint(rows, (1, count), generator=torch.Generator().manual_seed(self.i + self.me))
        x = torch.sparse_coo_tensor(places, self.drawn(self.me, 0, (count, *rest)), (rows, *rest))
        with self.attempt(label):
            work = self.api.all_reduce(x, group=self.group, **self.later())
            if work is not None:
                work.wait()
            self.show(f"{label} coalesced", x.is_coalesced())
            x = x.coalesce()
            self.show(f"{label} indices", x.indices())
            self.show(f"{label} values", x.values())

    def do_ddp(self):
        """Two steps of torch's DDP, with unusual options."""
        step = self.step
        label = f"{self.i} ddp{' compressed' * (step['hook'] and not step['sparse'])}"
        torch.manual_seed(self.program["seed"] + self.i)
        parts = [
            nn.Embedding(7, 4, sparse=step["sparse"]),
            nn.Linear(4, 5),
            nn.BatchNorm1d(5) if step["norm"] else nn.ReLU(),
        ]
        model = nn.Sequential(*parts, nn.Linear(5, 2))
        with self.attempt(label):
            wrapped = DistributedDataParallel(model, process_group=self.group, **step["options"])
            if step["hook"] and not step["sparse"]:
                from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

                wrapped.register_comm_hook(self.group, default_hooks.fp16_compress_hook)
            for k in range(2):
                x = torch.tensor([(self.me + k + j) % 7 for j in range(3)])
                if step["no_sync"] and k == 0:
                    with wrapped.no_sync():
                        wrapped(x).square().sum().backward()
                else:
                    wrapped(x).square().sum().backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    self.show(f"{label} {name}", p.grad.to_dense() if p.grad.is_sparse else p.grad)
            for name, buffer in model.named_buffers():
                self.show(f"{label} {name}", buffer)

    def do_invalid(self):
        """A call that is refused immediately, on some ranks; later calls must be unaffected."""
        step, group, n = self.step, self.group, len(self.ranks)
        if self.me not in step["who"]:
            return
        x, other = torch.ones(4), self.ranks[(self.me + 1) % n]
        calls = {
            "to itself": lambda: self.api.send(x, self.rank, group=group),
            "no such root": lambda: self.api.broadcast(x, 77, group=group),
            "bits of floats": lambda: self.api.all_reduce(x, dist.ReduceOp.BAND, group=group),
            "too few outputs": lambda: self.api.all_gather([x.clone() for _ in range(n + 1)], x, group=group),
            "another dtype": lambda: self.api.all_gather([x.double() for _ in range(n)], x, group=group),
            "largest complex": lambda: self.api.all_reduce(x.to(torch.complex64), dist.ReduceOp.MAX, group=group),
            "splits": lambda: self.api.all_to_all_single(
                x.clone(), x, output_split_sizes=[9] * n, input_split_sizes=[9] * n, group=group
            ),
            "sparse in a batch": lambda: self.api.batch_isend_irecv(
                [dist.P2POp(dist.isend, x.to_sparse(), other, group), dist.P2POp(dist.irecv, x, other, group)]
            ),
            "list at another rank": lambda: self.api.scatter(
                x, [x] * n if self.rank != self.ranks[0] else None, self.ranks[0], group=group
            ),
        }
        if self.backend == "gloo" and step["what"] in COUNTED and len(step["who"]) < n:
            self.seen.append((f"error {self.i} invalid", "by definition"))
            return
        with self.attempt(f"{self.i} invalid", allowed=True):
            calls[step["what"]]()

    def do_mismatch(self):
        """Ranks make different calls: all raise. gloo would hang, or give arbitrary results."""
        label = f"{self.i} mismatch"
        self.broken = self.backend == "hfreduce"
        if not self.broken:
            self.seen.append((f"error {label}", "by definition"))
            return
        odd, what = self.me == self.step["odd"], self.step["what"]
        dtype = torch.float64 if odd and what == "dtype" else torch.float32
        x = torch.ones(5 if odd and what == "count" else 4, dtype=dtype)
        op = dist.ReduceOp.MAX if odd and what == "op" else dist.ReduceOp.SUM
        try:
            if odd and what == "kind":
                self.api.barrier(group=self.group)
            else:
                self.api.all_reduce(x, op, group=self.group)
        except dist.DistBackendError as error:
            self.seen.append((f"error {label}", str(error)))
        else:
            self.seen.append((f"error {label}", None))


# gloo numbers a collective before it refuses it: a rank that was refused alone stays out of step.
COUNTED = ("bits of floats", "too few outputs", "another dtype", "splits")
INVALID = (
    "to itself", "no such root", "bits of floats", "too few outputs", "another dtype", "largest complex", "splits",
    "sparse in a batch", "list at another rank",
)  # fmt: skip
