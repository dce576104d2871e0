"""The steps of the backend fuzzer's programs, as run by one rank: collectives here, others in sibling modules.

A step is a dict: "do" is its kind, "group" one of the program's groups; the rest is for its function. With "gloo"
False, the definition is computed in gloo's place.
"""

import contextlib
import copy
import random
import traceback
import types

import backend_data as data
import backend_faults
import backend_messages
import backend_users
import torch
import torch.distributed as dist

FUNCTIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
    "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced", "barrier", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
)  # fmt: skip


def functions():
    """torch.distributed's functions, in a namespace where a fault can replace them."""
    api = types.SimpleNamespace(**{name: getattr(dist, name) for name in FUNCTIONS})
    api.all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    api.reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    api.monitored_barrier = lambda group: group.monitored_barrier()
    api.wait = lambda work: work.wait()
    return api


class Raised(str):
    """The text of an exception."""


class Steps(backend_messages.Messages, backend_users.Users):
    def __init__(self, here, program, backend, fault):
        self.here, self.rank, self.program, self.backend = here, here.rank, program, backend
        self.seen, self.broken, self.pending, self.api = [], False, {}, functions()
        if fault and backend == "hfreduce":
            backend_faults.FAULTS[fault](self.api)

    def run(self):
        for i, step in enumerate(self.program["steps"]):
            ranks = self.program["groups"][step["group"]]
            if self.rank in ranks and not self.broken:
                self.i, self.step, self.ranks, self.me = i, step, ranks, ranks.index(self.rank)
                self.group = self.here.group(self.backend, ranks)
                getattr(self, f"do_{step['do']}", self.collective)()
        self.wait_for(list(self.pending), 0)
        self.broken |= any(step["do"] == "unanswered" for step in self.program["steps"])

    def end(self):
        """Leaves nothing of this program for the next one."""
        dist.distributed_c10d._world.pg_coalesce_state.clear()

    @contextlib.contextmanager
    def attempt(self, label, allowed=False):
        """Logs whether the block raises. After an exception that is not `allowed` the program ends here."""
        try:
            yield
        except Exception as error:
            self.seen.append((f"error {label}", Raised("".join(traceback.format_exception(error)[-6:]))))
            self.broken = self.broken or not allowed
        else:
            self.seen.append((f"error {label}", None))

    def show(self, label, value):
        self.seen.append((f"value {label}", copy.deepcopy(value)))

    def drawn(self, rank, slot=0, shape=None, dtype=None):
        """The data of a rank of the group in this step; any rank can compute it."""
        seed = hash((self.program["seed"], self.i, rank, slot))
        shape = self.step["shape"] if shape is None else shape
        return data.values(seed, shape, dtype or self.step["dtype"], self.step.get("exact", True))

    def laid(self, x):
        lazy = self.step.get("layout") in ("negated", "conjugated")  # gloo does not write to these
        return data.laid_out(
            x.clone(), "plain" if lazy and self.backend == "gloo" else self.step.get("layout", "plain")
        )

    def op(self):
        name = self.step["op"]
        if name == "PREMUL":
            return dist._make_nccl_premul_sum(self.factor(self.me))
        return getattr(dist.ReduceOp, name)

    @staticmethod
    def factor(rank):
        return 0.5 * (rank + 1)

    def reduced(self, inputs):
        return data.reduced(inputs, self.step["op"], [self.factor(r) for r in range(len(inputs))])

    # Collectives: each starts one, and returns its work and outputs; `define_...` gives the expected outputs.

    def collective(self):
        label, name = f"{self.i} {self.step['do']}", self.step["do"]
        if self.backend == "gloo" and not self.step["gloo"]:
            work, outputs = None, getattr(self, f"define_{name}")(range(len(self.ranks)))
            self.seen.append((f"error {label}", None))
        else:
            work = outputs = None
            with self.attempt(label):
                work, outputs = getattr(self, f"begin_{name}")(len(self.ranks), {"group": self.group, **self.later()})
            if outputs is None:
                return
        if self.step.get("async"):
            self.pending[self.i] = work, label, outputs
        else:
            for k, x in enumerate(outputs):
                self.show(f"{label} {k}", x)

    def later(self):
        return {"async_op": True} if self.step.get("async") else {}

    def wait_for(self, steps, seed):
        for i in random.Random(seed + self.rank).sample(steps, len(steps)):
            work, label, outputs = self.pending.pop(i)
            with self.attempt(f"{label} wait"):
                if work is not None:  # None: already done, or torch's coalescing manager had nothing to do
                    self.api.wait(work)
                for k, x in enumerate(outputs):
                    self.show(f"{label} {k}", x)

    def do_wait(self):
        self.wait_for([i for i in self.pending if i in self.step["steps"]], self.step["seed"])

    def do_barrier(self):
        with self.attempt(f"{self.i} barrier"):
            if self.step["monitored"]:
                self.api.monitored_barrier(self.group)
            else:
                work = self.api.barrier(group=self.group, **self.later())
                if work is not None:
                    work.wait()

    def root(self):
        return self.ranks[self.step["root"]]

    def at_root(self):
        return self.me == self.step["root"]

    def begin_all_reduce(self, n, rest):
        x = self.laid(self.drawn(self.me))
        return self.api.all_reduce(x, self.op(), **rest), [x]

    def define_all_reduce(self, all_ranks):
        return [self.reduced([self.drawn(r) for r in all_ranks])]

    def begin_reduce(self, n, rest):
        x = self.laid(self.drawn(self.me))
        return self.api.reduce(x, self.root(), self.op(), **rest), [x] if self.at_root() else []

    def define_reduce(self, all_ranks):
        return self.define_all_reduce(all_ranks) if self.at_root() else []

    def begin_broadcast(self, n, rest):
        x = self.laid(self.drawn(self.me))
        return self.api.broadcast(x, self.root(), **rest), [x]

    def define_broadcast(self, all_ranks):
        return [self.drawn(self.step["root"])]

    def sized(self, rank, slot=0):
        """A tensor of this rank's own size, where sizes differ."""
        first, *others = self.step["shape"]
        return self.drawn(rank, slot, (first + (rank + slot) * self.step["uneven"], *others))

    def begin_all_gather(self, n, rest):
        outputs = [self.laid(torch.zeros_like(self.sized(r))) for r in range(n)]
        return self.api.all_gather(outputs, self.laid(self.sized(self.me)), **rest), outputs

    def define_all_gather(self, all_ranks):
        return [self.sized(r) for r in all_ranks]

    def begin_all_gather_single(self, n, rest):
        x = self.drawn(self.me)
        output = self.laid(torch.zeros_like(torch.cat([x] * n)))
        return self.api.all_gather_single(output, self.laid(x), **rest), [output]

    def define_all_gather_single(self, all_ranks):
        return [torch.cat([self.drawn(r) for r in all_ranks])]

    def begin_reduce_scatter(self, n, rest):
        inputs = [self.laid(self.sized_for(self.me, r)) for r in range(n)]
        output = self.laid(torch.zeros_like(inputs[self.me]))
        return self.api.reduce_scatter(output, inputs, self.op(), **rest), [output]

    def sized_for(self, sender, receiver):
        first, *others = self.step["shape"]
        return self.drawn(sender, receiver, (first + receiver * self.step["uneven"], *others))

    def define_reduce_scatter(self, all_ranks):
        return [self.reduced([self.sized_for(r, self.me) for r in all_ranks])]

    def begin_reduce_scatter_single(self, n, rest):
        x = torch.cat([self.drawn(self.me, r) for r in range(n)])
        output = self.laid(torch.zeros_like(self.drawn(self.me)))
        return self.api.reduce_scatter_single(output, self.laid(x), self.op(), **rest), [output]

    def define_reduce_scatter_single(self, all_ranks):
        return [self.reduced([self.drawn(r, self.me) for r in all_ranks])]

    def begin_gather(self, n, rest):
        outputs = [self.laid(torch.zeros_like(self.drawn(r))) for r in range(n)] if self.at_root() else []
        x = self.laid(self.drawn(self.me))
        return self.api.gather(x, outputs or None, self.root(), **rest), outputs

    def define_gather(self, all_ranks):
        return [self.drawn(r) for r in all_ranks] if self.at_root() else []

    def begin_scatter(self, n, rest):
        inputs = [self.laid(self.drawn(self.me, r)) for r in range(n)] if self.at_root() else None
        output = self.laid(torch.zeros_like(self.drawn(self.me)))
        return self.api.scatter(output, inputs, self.root(), **rest), [output]

    def define_scatter(self, all_ranks):
        return [self.drawn(self.step["root"], self.me)]

    def block(self, sender, receiver):
        """What one rank sends another, with any number of rows."""
        rows = self.step["splits"][sender][receiver]
        return self.drawn(sender, receiver, (rows, *self.step["shape"][1:]))

    def begin_all_to_all(self, n, rest):
        inputs = [self.laid(self.block(self.me, r)) for r in range(n)]
        outputs = [self.laid(torch.zeros_like(self.block(r, self.me))) for r in range(n)]
        return self.api.all_to_all(outputs, inputs, **rest), outputs

    def define_all_to_all(self, all_ranks):
        return [self.block(r, self.me) for r in all_ranks]

    def begin_all_to_all_single(self, n, rest):
        x = torch.cat([self.block(self.me, r) for r in range(n)])
        output = self.laid(torch.zeros_like(torch.cat([self.block(r, self.me) for r in range(n)])))
        splits = self.step["splits"]
        if any(splits[r] != splits[0] or len(set(splits[r])) > 1 for r in range(n)):
            rest |= {"output_split_sizes": [splits[r][self.me] for r in range(n)], "input_split_sizes": splits[self.me]}
        return self.api.all_to_all_single(output, self.laid(x), **rest), [output]

    def define_all_to_all_single(self, all_ranks):
        return [torch.cat([self.block(r, self.me) for r in all_ranks])]

    # Several tensors at once: by torch's functions of lists, or by its coalescing manager.

    def each(self, rank, of=lambda x: x):
        return [of(self.drawn(rank, slot, shape)) for slot, shape in enumerate(self.step["shapes"])]

    def begin_all_reduce_coalesced(self, n, rest):
        xs = self.each(self.me)
        return self.api.all_reduce_coalesced(xs, self.op(), **rest), xs

    def define_all_reduce_coalesced(self, all_ranks):
        return [self.reduced(list(of)) for of in zip(*(self.each(r) for r in all_ranks), strict=True)]

    def begin_all_gather_coalesced(self, n, rest):
        outputs = [self.each(self.me, torch.zeros_like) for _ in range(n)]
        work = self.api.all_gather_coalesced(outputs, self.each(self.me), **rest)
        return work, [x for of in outputs for x in of]

    def define_all_gather_coalesced(self, all_ranks):
        return [x for r in all_ranks for x in self.each(r)]

    def begin_managed(self, n, rest):
        which, later = self.step["what"], bool(self.step.get("async"))
        inputs = self.each(self.me, (lambda x: torch.cat([x] * n)) if which == "reduce_scatter_single" else torch.clone)
        if which == "all_reduce":
            outputs = inputs
        else:
            outputs = self.each(
                self.me, (lambda x: torch.cat([x] * n)) if which == "all_gather_single" else torch.clone
            )
        with dist.distributed_c10d._coalescing_manager(self.group, async_ops=later) as manager:
            for x, output in zip(inputs, outputs, strict=True):
                if which == "all_reduce":
                    dist.all_reduce(x, self.op(), group=self.group)
                elif which == "all_gather_single":
                    self.single("all_gather")(output, x, group=self.group)
                else:
                    self.single("reduce_scatter")(output, x, self.op(), group=self.group)
        return manager, outputs

    @staticmethod
    def single(name):
        return getattr(dist, f"{name}_single", None) or getattr(
            dist, {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
        )

    def define_managed(self, all_ranks):
        each = list(zip(*(self.each(r) for r in all_ranks), strict=True))
        if self.step["what"] == "all_gather_single":
            return [torch.cat(of) for of in each]
        return [self.reduced(list(of)) for of in each]
