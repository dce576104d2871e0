"""What the layers of a model cost, measured, and where to cut it by that.

Each layer runs forward and backward a few times on a sample, and its backward in two parts (backward.py). `balance`
takes the cuts whose slowest stage is fastest; among those that are as fast but for the noise of measuring (SLACK), the
one whose fullest stage keeps least: activations of the microbatches under way, weights, their gradients, and two
states of an optimizer.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from haiscale.pipeline import backward
from haiscale.pipeline.simulate import Costs
from hfnn.memory import saved_bytes

SLACK = 0.05
STATES = 4  # weights, gradients, and two more of their size


@dataclass(frozen=True)
class LayerCost:
    """Of one layer and microbatch: seconds of a forward and of both parts of a backward, bytes kept and of weights."""

    forward: float
    input: float
    weight: float
    activation: int
    parameters: int

    @property
    def time(self) -> float:
        return self.forward + self.input + self.weight


def measure(layers: Sequence[nn.Module], sample: tuple, repeats: int = 3) -> list[LayerCost]:
    """Cost of each layer, where the first is called with `sample` and each other with what the one before returns.

    The fastest of `repeats` runs, after one that does not count. Gradients, buffers and torch's generators are left as
    they were.
    """
    costs = []
    for layer in layers:
        with _left_as_it_was(layer):
            cost, sample = _measure_one(layer, sample, repeats)
        costs.append(cost)
    return costs


def _measure_one(layer, inputs, repeats):
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    runs = []
    for _ in range(repeats + 1):
        leaves = [_leaf(x) for x in inputs]
        start = _now(device)
        outputs = layer(*leaves)
        forward = _now(device)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        roots = backward.edges(outputs)
        gradients = [None if root is None else torch.ones_like(y) for root, y in zip(roots, outputs, strict=True)]
        begin = _now(device)
        weights = backward.split(roots, gradients, leaves)
        middle = _now(device)
        weights.run()
        runs.append((forward - start, middle - begin, _now(device) - middle))
    times = [min(times) for times in zip(*runs[1:], strict=True)]
    kept = saved_bytes(lambda: layer(*[_leaf(x) for x in inputs])).total
    nbytes = sum(p.nbytes for p in layer.parameters())
    return LayerCost(*times, kept, nbytes), tuple(y.detach() if isinstance(y, Tensor) else y for y in outputs)


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
    """As `balance`, by one number of each layer."""
    sums = _sums(numbers)
    return _cut(len(numbers), stages, lambda stage, start, stop: sums[stop] - sums[start])[1]


def _sums(values):
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _cut(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[float, list[int]]:
    """(the smallest greatest cost of a stage, layers of each stage): of equal ones a more even one."""
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


def stage_costs(layers: Sequence[LayerCost], counts: Sequence[int], latency: float = 0.0) -> Costs:
    """What `predict` takes, for chunks of these numbers of layers: ms, and MiB that a microbatch keeps."""
    ends = _sums(counts)
    chunks = [layers[start:stop] for start, stop in itertools.pairwise(ends)]
    return Costs(
        forward=[1e3 * sum(layer.forward for layer in chunk) for chunk in chunks],
        input=[1e3 * sum(layer.input for layer in chunk) for chunk in chunks],
        weight=[1e3 * sum(layer.weight for layer in chunk) for chunk in chunks],
        latency=latency,
        activation=[sum(layer.activation for layer in chunk) / 1024**2 for chunk in chunks],
    )
