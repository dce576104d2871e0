"""Measures the cost of a model's layers, and chooses the split.

Each layer runs forward and backward a few times on a sample, backward whole and in two parts (backward.py). `balance`
chooses the split with the fastest slowest stage. Among splits that are equally fast within the noise (SLACK), it takes
the one whose fullest stage keeps the least: activations of the microbatches in flight, weights, their gradients, and
two optimizer states.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haiscale import checks
from haiscale.pipeline import backward, messages
from haiscale.pipeline.timeline.simulate import Costs
from hfnn.memory import saved_bytes

SLACK = 0.05
STATES = 4  # weights, gradients, and two more of their size


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs for one microbatch.

    Attributes:
        forward: Seconds.
        input: Seconds of the part of the backward that computes gradients of inputs.
        weight: Seconds of the part that computes gradients of weights.
        backward: Seconds of a whole backward: less than both parts if the host is the bottleneck.
        activation: Bytes kept from forward to backward.
        parameters: Bytes.
    """

    forward: float
    input: float
    weight: float
    backward: float
    activation: int
    parameters: int

    @property
    def time(self) -> float:
        return self.forward + self.backward


def measure(
    layers: Sequence[nn.Module], sample: tuple, repeats: int = 3, criterion: Callable[..., Tensor] | None = None
) -> list[LayerCost]:
    """Cost of each layer: the first is called with `sample`, each other with the result of the previous one.

    The median of `repeats` runs after one warm-up run. criterion(output): the loss; its cost is part of the last layer.
    Gradients, buffers and torch's generators are restored.
    """
    costs = []
    for number, layer in enumerate(layers, 1):
        with _left_as_it_was(layer):
            cost, sample = _measure_one(layer, sample, repeats, criterion if number == len(layers) else None)
        costs.append(cost)
    return costs


def _measure_one(layer, inputs, repeats, criterion):
    def run(*leaves):
        return layer(*leaves) if criterion is None else criterion(layer(*leaves))

    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    runs = []
    for _ in range(repeats + 1):
        leaves = [_leaf(x) for x in inputs]
        start = _now(device)
        outputs = run(*leaves)
        forward = _now(device)
        begin, roots, gradients = _ends(outputs, device)
        weights = backward.split(roots, gradients, leaves)
        middle = _now(device)
        weights.run()
        end = _now(device)
        again, roots, gradients = _ends(run(*[_leaf(x) for x in inputs]), device)
        backward.whole(roots, gradients)
        runs.append((forward - start, middle - begin, end - middle, _now(device) - again))
    times = [statistics.median(times) for times in zip(*runs[1:], strict=True)]
    kept = saved_bytes(lambda: run(*[_leaf(x) for x in inputs])).total
    nbytes = sum(p.nbytes for p in layer.parameters())
    return LayerCost(*times, kept, nbytes), tuple(y.detach() if isinstance(y, Tensor) else y for y in _tuple(outputs))


def _ends(outputs, device):
    """(now, the roots of a backward, gradients for them)."""
    roots = backward.edges(_tuple(outputs))
    gradients = [None if root is None else torch.ones_like(y) for root, y in zip(roots, _tuple(outputs), strict=True)]
    return _now(device), roots, gradients


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _leaf(x):
    return x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


def _now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _left_as_it_was(layer: nn.Module) -> Iterator[None]:
    gradients = [(p, p.grad) for p in layer.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    devices = {p.device for p, _ in gradients if p.is_cuda}
    for p, _ in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def balance(layers: Sequence[LayerCost], stages: int) -> list[int]:
    """The number of layers of each stage, for 1F1B: stage s keeps `stages - s` microbatches."""
    times = _sums([layer.time for layer in layers])
    activations = _sums([layer.activation for layer in layers])
    parameters = _sums([STATES * layer.parameters for layer in layers])

    def memory(stage, start, stop):
        return (activations[stop] - activations[start]) * (stages - stage) + parameters[stop] - parameters[start]

    best, _ = _cut(len(layers), stages, lambda stage, start, stop: times[stop] - times[start])
    limit = best * (1 + SLACK)
    fits = lambda start, stop: times[stop] - times[start] <= limit  # noqa: E731
    _, counts = _cut(len(layers), stages, lambda s, a, b: memory(s, a, b) if fits(a, b) else float("inf"))
    return counts


def balance_by_numbers(numbers: Sequence[int], stages: int) -> list[int]:
    """As `balance`, with one number per layer."""
    sums = _sums(numbers)
    return _cut(len(numbers), stages, lambda stage, start, stop: sums[stop] - sums[start])[1]


def _sums(values):
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _cut(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[float, list[int]]:
    """(the smallest maximum cost of a stage, layers of each stage); among equal splits a more even one."""
    best = {(0, 0): (0.0, 0.0, [])}
    for stage in range(stages):
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = []
            for start in (start for start in range(stage, stop) if (stage, start) in best):
                worst, uneven, counts = best[stage, start]
                own = cost(stage, start, stop)
                options.append((max(worst, own), uneven + (stop - start) ** 2, [*counts, stop - start]))
            best[stage + 1, stop] = min(options)
    worst, _, counts = best[stages, layers]
    return worst, counts


def stage_costs(
    layers: Sequence[LayerCost], counts: Sequence[int], latency: float = 0.0, sending: float = 0.0
) -> Costs:
    """The costs for `predict`, in ms and MiB.

    Args:
        layers: Of `layer_costs`.
        counts: The number of layers of each chunk.
        latency: As in Costs, in ms; `message_times` measures it.
        sending: As in Costs, in ms.
    """
    ends = _sums(counts)
    chunks = [layers[start:stop] for start, stop in itertools.pairwise(ends)]
    return Costs(
        forward=[1e3 * sum(layer.forward for layer in chunk) for chunk in chunks],
        input=[1e3 * sum(layer.input for layer in chunk) for chunk in chunks],
        weight=[1e3 * sum(layer.weight for layer in chunk) for chunk in chunks],
        backward=[1e3 * sum(layer.backward for layer in chunk) for chunk in chunks],
        latency=latency,
        sending=sending,
        activation=[sum(layer.activation for layer in chunk) / 1024**2 for chunk in chunks],
    )


def message_times(x: Tensor, group: dist.ProcessGroup, repeats: int = 20) -> tuple[float, float]:
    """How long a message between two ranks takes, (sending, latency) as in Costs, in ms.

    Ranks 0 and 1, 2 and 3 and so on send each other such messages in turn, as stages do; the result is the median.
    Called by all ranks of the group, which get the same result.

    Args:
        x: Like the messages.
        group: The ranks.
        repeats: Messages in each direction.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.full((2,), torch.nan, dtype=torch.float64)
    peers = {dist.get_global_rank(group, rank ^ 1)} if rank ^ 1 < size else set()
    wires = messages.directed_groups(group, peers, peers, x.device)
    for peer in peers:
        mine[0], mine[1] = _sent_and_back(x, wires, peer, repeats)
    every = [torch.empty_like(mine, device=checks.host_device(group)) for _ in range(size)]
    dist.all_gather(every, mine.to(every[0].device), group=group)
    sending, both = torch.stack(every).nanmedian(dim=0).values.tolist()
    return sending, max(both - sending, 0.0)


def _sent_and_back(x, wires, peer, repeats):
    """(ms of a `send`, ms of half a round trip)."""
    me = dist.get_rank()
    sender = messages.Sender(peer, x.device, wires[me, peer])
    receiver = messages.Receiver(peer, x.device, wires[peer, me])
    x, sends, rounds = x.detach(), [], []
    for number in range(repeats, -1, -1):
        begin = _now(x.device)
        if me > peer:
            receiver.receive(last=not number)
        sending = _now(x.device)
        sender.send([x])
        sends.append(time.perf_counter() - sending)
        if me < peer:
            receiver.receive(last=not number)
        rounds.append(_now(x.device) - begin)
    sender.finish()
    return 1e3 * statistics.median(sends[1:]), 1e3 * statistics.median(rounds[1:]) / 2
