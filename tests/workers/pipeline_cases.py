"""Cases of tests/workers/pipeline.py: functions of a Place that return None, or a description of the error."""

import contextlib
import copy
import gc
import itertools
import math
import types
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from pipeline_models import (
    DEVICE,
    ROUNDING,
    WIDTH,
    Place,
    batch,
    compare,
    decoder,
    differs,
    layers,
    next_token,
    sequential,
    tokens,
)
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import haiscale
from haiscale import mesh
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP
from haiscale.pipeline import PipeDream, Pop, SequentialModel, Stash, engine, messages, partition, predict


def layered(schedule, chunks, **options):
    def case(place):
        model = layers(16)
        steps = [((x,), y) for x, y in (batch(1), batch(2))]
        return compare(place, place.pipeline(model, schedule, chunks, **options), model, chunks, steps, mse_loss)

    return case


def decoded(kind, converted, schedule, chunks, rows=4):
    def case(place):
        model = decoder(kind, converted)
        steps = [((tokens(seed, rows),), tokens(seed, rows)) for seed in (1, 2)]
        close = ["transformer.wte.weight"]  # tied: its parts are summed in another order
        return compare(place, place.pipeline(model, schedule, chunks), model, chunks, steps, next_token, close)

    return case


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return function(*args, **(kwargs or {}))


def products(converted, kind):
    """A step with split backwards computes as many products as one without a pipeline."""

    def case(place):
        model, found = decoder(kind, converted), torch.zeros((), dtype=torch.int64)
        pp = place.pipeline(model, "ZeroBubble-H1", 2)
        with Counted() as counted:
            pp.forward_backward(tokens(), criterion=next_token, labels=tokens())
        found += counted.count
        dist.all_reduce(found, group=place.group)
        with Counted() as counted:
            sequential(model, 2, [((tokens(),), tokens())], next_token)
        if found != counted.count or not found:
            return f"{int(found)} products instead of {counted.count}"

    return case


class Between(nn.Module):
    """Several inputs and outputs: some without gradients, one unused, None, and another dtype."""

    def __init__(self, first=False, last=False):
        super().__init__()
        self.linear, self.first, self.last = nn.Linear(WIDTH, WIDTH), first, last

    def forward(self, x, scale=None, nothing=None, aside=None):
        if self.first:
            scale, aside = (x > 0), x.double().sum(1)
        y = torch.where(scale, self.linear(x), -x)
        return y if self.last else (y, scale, None, aside.detach() if self.linear.in_features % 2 else aside)


def several_inputs(place):
    torch.manual_seed(3)
    model = SequentialModel(*[Between(i == 0, i == 7) for i in range(8)]).to(DEVICE)
    pp = place.pipeline(model, "PipeDream", 4)
    return compare(place, pp, model, 4, [((batch(1)[0],), batch(1)[1])] * 2, mse_loss)


class Added(nn.Linear):
    def forward(self, x, kept):
        return super().forward(x) + kept


def skips(schedule):
    def case(place):
        torch.manual_seed(4)
        linear = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
        model = SequentialModel(
            *(linear(), Stash("a"), linear(), Stash("b"), nn.Tanh(), linear()),
            *(Pop("b", Added(WIDTH, WIDTH)), linear(), Pop("a", Added(WIDTH, WIDTH)), linear()),
        )
        return compare(
            place, place.pipeline(model, schedule, 3), model, 3, [((batch(1)[0],), batch(1)[1])] * 2, mse_loss
        )

    return case


def other_shapes(place):
    """Changing batch sizes and sequence lengths: nothing is agreed on in advance, and gradients accumulate.

    More kinds of messages than are cached, and the first ones again.
    """
    model = decoder("llama")
    steps = [
        ((tokens(1, rows, length),), tokens(1, rows, length))
        for rows, length in ((4, 8), (6, 12), (3, 5), (5, 7), (6, 12), (4, 8))
    ]
    return compare(place, place.pipeline(model, "PipeDream", 3), model, 3, steps, next_token)


def masks(place):
    """A mask is sent with the hidden states; each stage processes it like the model."""
    model, x = decoder("gpt2"), tokens(1)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    pp = place.pipeline(model, "Interleaved1F1B", 2)
    found = pp(*((x, mask) if pp.is_first else ()))
    if pp.is_last:
        wrong = differs(found, model(x, attention_mask=mask).logits)
        return wrong and f"other logits, {wrong}"


def inference(place):
    model = layers()
    pp = place.pipeline(model, "ZeroBubble-V" if place.size < 3 else "PipeDream", 3)
    x, y = batch(1)
    for _ in range(2):
        found = pp(x)
        if pp.is_last and (found.requires_grad or differs(found, model(x))):
            return "other outputs, or a graph"
        pp.forward_backward(x, criterion=mse_loss, labels=y)
    if not pp.is_last and found is not None:
        return "outputs on a rank without the last chunk"


def dropout(checkpoint):
    """Recomputation draws the same random numbers, and later draws are the same, too."""

    def case(place):
        torch.manual_seed(5)
        model = SequentialModel(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))]).to(DEVICE)
        grads = []
        for mode in ("never", checkpoint):
            pp = place.pipeline(model, "ZeroBubble-H1", 3, checkpoint=mode)
            torch.manual_seed(6 + place.rank)
            pp.forward_backward(batch(1)[0], criterion=mse_loss, labels=batch(1)[1])
            pp.forward_backward(batch(2)[0], criterion=mse_loss, labels=batch(2)[1])
            grads.append([p.grad for p in pp.parameters()])
        if any(map(differs, *grads)):
            return "other gradients than without checkpoints"

    return case


def autocast(checkpoint, schedule="PipeDream"):
    """A weight's cast left by a checkpointed forward has no graph, so it must not be reused."""

    def case(place):
        model, x = layers(), batch(1)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            pp = place.pipeline(model, schedule, 2, checkpoint=checkpoint)
            criterion = lambda y, label: mse_loss(y.float(), label)  # noqa: E731
            rounding = 1e3 * ROUNDING  # bfloat16
            return compare(place, pp, model, 2, [((x[0],), x[1])], criterion, rounding=rounding)

    return case


def pictures(place):
    pp = place.pipeline(layers(), "ZeroBubble-H1", 4)
    for _ in range(2):
        pp.forward_backward(batch()[0], criterion=mse_loss, labels=batch()[1])
    timeline, costs = pp.timeline(), pp.costs()
    for order, spans in zip(pp.schedule.orders, timeline.spans, strict=True):
        if [span.action for span in spans] != list(order):
            return "other actions than the schedule's"
        if any(a.end > b.start or b.end < b.start for a, b in itertools.pairwise(spans)):
            return "spans that overlap"
    ends = {span.action: span.end for spans in timeline.spans for span in spans}
    starts = {span.action: span.start for spans in timeline.spans for span in spans}
    early = 0 if DEVICE.type == "cpu" else 1  # ms by which GPU clocks, aligned with the hosts', may differ
    if any(starts[a] < ends[a._replace(chunk=a.chunk - 1)] - early for a in starts if a.kind == "F" and a.chunk):
        return "a forward that begins before what it needs has ended"
    if not all(peak > 0 for peak in timeline.peak) or not predict(pp.schedule, costs).makespan > 0:
        return f"no memory or no time: {timeline.peak}, {costs}"
    if not math.isclose(predict(pp.schedule, costs).peak[0], timeline.peak[0], rel_tol=0.005):  # told in 3 digits
        return "another peak than the prediction's"
    if "measured" not in pp.report(80) or "predicted" not in pp.report(80):
        return "no report"


def frozen(place):
    """Frozen layers, including whole stages."""
    model = layers(16)
    for name, p in model.named_parameters():
        p.requires_grad_(int(name.split(".")[0]) >= 14)
    _, expected, _ = sequential(copy.deepcopy(model), 4, [((batch(1)[0],), batch(1)[1])], mse_loss)
    for schedule in ("PipeDream", "ZeroBubble-H1"):
        pp = place.pipeline(model, schedule, 4)
        pp.forward_backward(batch(1)[0], criterion=mse_loss, labels=batch(1)[1])
        for name, p in pp.named_shards():
            wrong = differs(p.grad, expected[name])
            if wrong:
                return f"another gradient of {name}, {wrong}"


def errors(place):
    """Mistakes are reported on the rank that makes them, before anything is sent; differences between ranks on all."""
    found = []

    def note(make):
        try:
            make()
        except ValueError as error:
            found.append(str(error))

    stage = partition(layers(), place.rank, place.size, [4] * 2 if place.size == 2 else None)
    note(lambda: PipeDream(stage, 2 + place.rank, process_group=place.group))
    note(lambda: PipeDream([stage, stage], 2, process_group=place.group))
    note(lambda: PipeDream(partition(layers(), 1 - place.rank, place.size, [4, 4]), 2, process_group=place.group))
    note(lambda: PipeDream(stage, 2, process_group=place.group, checkpoint="sometimes"))
    note(lambda: PipeDream(stage, 0, process_group=place.group))
    expected = ["2 and 3 microbatches", "2 modules", "of 2 where 1F1B has chunk", "except_last", "microbatches=0"]
    if len(found) != len(expected) or not all(text in error for text, error in zip(expected, found, strict=True)):
        return f"found {found}"


def too_few_rows(place):
    """The rank that reads the batch raises; it raises the same again, as does one whose own step has failed."""
    pp = place.pipeline(layers(), "PipeDream", 4)
    if place.rank:
        return None
    found = []
    for _ in range(2):
        try:
            pp.forward_backward(batch(1, rows=3)[0], criterion=mse_loss, labels=())
        except ValueError as error:
            found.append(error)
    if (
        len(found) != 2
        or found[0] is not found[1]
        or "3 rows" not in str(found[0])
        or "4 microbatches" not in str(found[0])
    ):
        return f"found {found}"


def replicas(schedule, wrapper):
    """DDP or FSDP inside, over the ranks with the same stage: gradients of all batches, averaged once."""

    def case(place):
        sizes = {"dp_size": 2} if wrapper is DDP else {"fsdp_size": 2}
        groups = haiscale.make_subgroups(pp_size=2, **sizes)
        inner, pp_group = groups.dp_group if wrapper is DDP else groups.fsdp_group, groups.pp_group
        mine, replica = Place(pp_group, dist.get_rank(pp_group), 2), dist.get_rank(inner)
        for tied in (False, True):
            model = decoder("gpt2") if tied else layers(16)
            criterion = next_token if tied else mse_loss
            seeds = [[10 * r + s for s in range(3)] for r in range(2)]
            data = [[(tokens(s), tokens(s)) if tied else batch(s) for s in row] for row in seeds]
            try:
                pp = mine.pipeline(model, schedule, 4, wrap=lambda stage: wrapper(stage, process_group=inner))
            except ValueError as error:  # two chunks of one rank, sharded separately
                told = "wte.weight is tied between chunks (0, 3)" if mine.rank == 0 else "cannot make its part"
                if tied and wrapper is FSDP and schedule == "ZeroBubble-V" and told in str(error):
                    continue
                raise
            for step, (x, y) in enumerate(data[replica]):
                with pp.no_sync() if step == 1 else contextlib.nullcontext():
                    pp.forward_backward(x, criterion=criterion, labels=y)
            every = [sequential(copy.deepcopy(model), 4, [((x,), y) for x, y in row], criterion)[1] for row in data]
            for name, p in pp.named_shards():
                if isinstance(p, nn.Parameter):
                    found = p.grad.full_tensor() if wrapper is FSDP else p.grad
                    wrong = differs(found, sum(gradients[name] for gradients in every) / 2, 1e-4)
                    if wrong:
                        return f"another gradient of {name}, {wrong}"
            expected = [sum(gradients[name] for gradients in every) / 2 for name in every[0]]
            wrong = differs(
                pp.clip_grad_norm_(1.0), torch.stack([g.square().sum() for g in expected]).sum().sqrt(), 1e-4
            )
            if wrong:
                return f"another norm, {wrong}"

    return case


def clipping(place):
    """Gradients of all stages are clipped by the whole model's norm, in which a tied parameter counts once."""
    model = decoder("gpt2")
    sequential(model, 2, [((tokens(),), tokens())], next_token)
    pp = place.pipeline(decoder("gpt2"), "PipeDream", 2)
    pp.forward_backward(tokens(), criterion=next_token, labels=tokens())
    for kind in (2.0, float("inf")):
        norms = [pp.clip_grad_norm_(0.01, kind), nn.utils.clip_grad_norm_(model.parameters(), 0.01, kind)]
        if differs(*norms, 1e-5):
            return f"norms {norms}"
        expected = {name: p.grad for name, p in model.named_parameters()}
        for name, p in pp.named_shards():
            if isinstance(p, nn.Parameter) and differs(p.grad, expected[name], 1e-4):
                return f"another gradient of {name}, {differs(p.grad, expected[name], 1e-4)}"


def tied_copies(schedule):
    """Copies of a tied embedding stay bitwise equal over optimizer steps, and equal the whole model's."""

    def case(place):
        model = decoder("gpt2")
        pp = place.pipeline(model, schedule, 2)
        whole = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pp, whole)]
        for seed in range(3):
            pp.forward_backward(tokens(seed), criterion=next_token, labels=tokens(seed))
            sequential(whole, 2, [((tokens(seed),), tokens(seed))], next_token)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=seed == 0)
        weight = dict(pp.named_shards()).get("transformer.wte.weight", torch.zeros(61, 32)).detach()
        every = [torch.empty_like(weight) for _ in range(place.size)]
        dist.all_gather(every, weight, group=place.group)
        copies = [w for w in every if w.any()]
        home = 1 if schedule == "ZeroBubble-V" else 2
        if len(copies) != home or not all(torch.equal(w, copies[0]) for w in copies):
            return f"{len(copies)} copies, not the same"
        if not torch.allclose(copies[0], whole.transformer.wte.weight, atol=1e-6):
            return "another weight than the whole model's"

    return case


def directions(backend):
    """Each direction has a group on NCCL if `backend` is NCCL, or if ranks have GPUs of their own. Here, with other
    groups in place of NCCL's. They do not keep the pipeline's group alive."""

    def case(place):
        made, stand_ins = [], []

        class Group:
            def __init__(self, group):
                self.group = group

            def _get_backend(self, device):
                return types.SimpleNamespace(name=lambda: backend)

        def sibling(stand_in, backend, ranks):
            made.append(backend)
            return mesh.sibling(stand_in.group, ranks=ranks)

        def each_way(group, *rest):
            stand_in = Group(group)
            stand_ins.append(weakref.ref(stand_in))
            wires = messages.directed_groups(stand_in, *rest)
            return {pair: tuple(group if each is stand_in else each for each in both) for pair, both in wires.items()}

        with (
            mock.patch.object(messages, "sibling", sibling),
            mock.patch.object(messages, "own_gpus", lambda group, device: True),
            mock.patch.object(engine, "directed_groups", each_way),
        ):
            wrong = layered("ZeroBubble-V", 5)(place)
        expected = {"nccl"} if backend == "hfreduce" else {"gloo", "nccl"}
        gc.collect()
        kept = [ref for ref in stand_ins if ref() is not None]
        return wrong or (None if expected == set(made) and stand_ins and not kept else f"made: {made}, kept: {kept}")

    return case
