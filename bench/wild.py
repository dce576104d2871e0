"""Programs that people published, beside stock: bytes kept for backward, errors, processor time.

    bench/wild.py FOLDER                               # all; rows in bench/results/<device>-wild.csv, and a table
    bench/wild.py FOLDER --programs nanoGPT Swin --out kept.json     # with the lines of source that keep the most
    bench/wild.py FOLDER --seen --pairs 0              # only those that authors of patterns may read; not timed

FOLDER has a clone of each repository, FOLDER/<owner>/<name>, at the commit that the manifest (wild.json) names; this
project has none of their code. An entry of the manifest:

    name, field, repository, commit; unseen: whoever writes patterns does not look at it
    root, file: the folder for sys.path, relative to the repository, and the module's file, relative to root
    make: the model, an expression in the module's names and `p`, the rate of dropout
    inputs: name -> expression; loss: an expression in `model` and the inputs

Each program has its own process. In five steps without dropout, losses and gradients are compared with those of float64
at the same weights; an error is the largest of a parameter's gradient, relative to it. With dropout, `saved_bytes` is
what a forward keeps, and steps take turns: `ratio` is the median of converted over stock, of pairs of steps, and `low`
and `high` bound it with 95 % confidence.
"""

import argparse
import contextlib
import gc
import importlib
import io
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cli
import report
import timing
import torch
from host import ask, bounds
from torch import nn
from torch.nn import functional as F

import hfnn
from hfnn.core import parts
from hfnn.memory.saved import Record, counted, leaves, nodes, unpack
from hfnn.testing import GRADIENTS

MANIFEST = Path(__file__).with_suffix(".json")
SIDES = ("torch", "hfnn-memory", "hfnn-auto")
STEPS, RATE = 5, 0.1  # steps that are compared; dropout of those that are counted
WATCHED = 4  # calls until a head's use is known
SMALL = 1e-3  # of the largest gradient: a bias in front of a batch norm has a gradient of roundings alone


class Training:
    """A program's model, stock ("torch") or converted, and its batch. exact: in float64."""

    def __init__(self, program: SimpleNamespace, folder: Path, side: str, rate: float, exact: bool = False):
        root = folder / program.repository / program.root
        # Without this folder: a program may have modules of the same names.
        sys.path[:] = [str(root), *(path for path in sys.path if path not in (str(root), str(MANIFEST.parent)))]
        module = importlib.import_module(program.file.removesuffix(".py").replace("/", "."))
        names = {"torch": torch, "nn": nn, "F": F, "SimpleNamespace": SimpleNamespace, **vars(module), "p": rate}
        torch.manual_seed(0)
        self.model = eval(program.make, names).train()
        for weight in self.model.parameters():  # a branch whose last weights are zero would get no gradients
            if not weight.any():
                nn.init.normal_(weight, std=0.02)
        for part in self.model.modules() if not rate else ():  # also those whose rate cannot be chosen
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        self.batch = {name: eval(value, names) for name, value in program.inputs.items()}
        if exact:
            self.model._apply(double)
            self.batch = {name: double(value) for name, value in self.batch.items()}
        if side != "torch":
            hfnn.convert(self.model, prefer=side.removeprefix("hfnn-"))
        self.code, self.names = compile(program.loss, f"{root}/(the loss)", "eval"), names | self.batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def loss(self) -> torch.Tensor:
        return eval(self.code, self.names | {"model": self.model})

    def step(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(the loss, the gradient of each parameter that has one)"""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        named = self.model.named_parameters()
        gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}
        self.optimizer.step()
        return loss.detach(), gradients

    def seconds(self) -> float:
        """The processor's time of a forward and backward."""
        begin = time.process_time()
        self.model.zero_grad()
        self.loss().backward()
        return time.process_time() - begin

    def lines(self, root: Path) -> list[tuple[int, str, str, list]]:
        """(bytes, line of the program, op, a shape), those that keep the most first."""
        record, found = Record(), {}

        def pack(tensor):
            kept = record.pack(tensor)
            kept.line = line_of(root)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = self.loss()
        graph = list(nodes(loss))
        seen = {key for weight in leaves(node for _, node in graph) for key in parts.storages(weight)}
        for kept, op, size in counted(record, graph, seen):
            key = kept.line, op, list(kept.tensor.shape)
            found[str(key)] = (found.get(str(key), (0,))[0] + size, *key)
        return sorted(found.values(), key=lambda line: -line[0])


def double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def line_of(root: Path) -> str:
    """The innermost line of the program's own code that is running."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(str(root)):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).relative_to(root)}:{frame.f_lineno}"


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """What a program writes for float32 is float64."""
    names = {"float32": torch.float64, "float": torch.float64}
    with mock.patch.multiple(torch, **names), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def exactly(program: SimpleNamespace, folder: Path) -> tuple[list, list]:
    """(the weights before each step, the results of the steps), without dropout, in float64."""
    with wide():
        training, weights, found = Training(program, folder, "torch", 0.0, exact=True), [], []
        torch.set_default_dtype(torch.float64)
        for _ in range(STEPS):
            weights.append([weight.detach().clone() for weight in training.model.parameters()])
            found.append(training.step())
    torch.set_default_dtype(torch.float32)
    return weights, found


def steps(program: SimpleNamespace, folder: Path, side: str, weights: list) -> list:
    """The results of steps without dropout, each from these weights: errors of earlier steps do not add up."""
    training, found = Training(program, folder, side, 0.0), []
    for before in weights:
        with torch.no_grad():
            for weight, value in zip(training.model.parameters(), before, strict=True):
                weight.copy_(value)
        found.append(training.step())
    return found


def errors(found: list, reference: list) -> dict:
    """The largest errors of a loss and of a gradient, relative, and the parameter of the latter."""
    of_losses, worst = 0.0, (0.0, "")
    for (loss, gradients), (exact, wanted) in zip(found, reference, strict=True):
        of_losses = max(of_losses, abs(loss.item() / exact.item() - 1))
        if gradients.keys() != wanted.keys() or not loss.isfinite():
            return {"loss_error": math.inf, "rel_error": math.inf, "parameter": "its loss, or which have gradients"}
        largest = max(gradient.norm().item() for gradient in wanted.values())
        for name, gradient in wanted.items():
            size = max(gradient.norm().item(), SMALL * largest)
            error = (gradients[name].double() - gradient).norm().item() / size
            worst = max(worst, (error if math.isfinite(error) else math.inf, name))
    return {"loss_error": of_losses, "rel_error": worst[0], "parameter": worst[1]}


def ratios(stock: Training, ours: Training, pairs: int) -> dict:
    """The processor's time of a step, converted over stock, in turns."""
    found = []
    gc.collect()
    for pair in range(pairs):
        order = (stock, ours) if pair % 2 else (ours, stock)
        seconds = {side: side.seconds() for side in order}
        found.append(seconds[ours] / seconds[stock])
    low, high = bounds(found) if found else ("", "")
    return {"ratio": statistics.median(found) if found else "", "low": low, "high": high}


def measure(name: str, options) -> dict:
    """{side: its figures}"""
    program, folder = programs(options)[name], options.folder
    torch.set_num_threads(1)
    sys.stdout = io.StringIO()  # of this process
    weights, reference = exactly(program, folder)
    found = {side: errors(steps(program, folder, side, weights), reference) for side in SIDES}
    del weights, reference
    sides = {side: Training(program, folder, side, RATE) for side in SIDES}
    for side, training in sides.items():
        for _ in range(WATCHED):
            training.seconds()
        found[side]["saved_bytes"] = hfnn.memory.saved_bytes(training.loss).total
        found[side]["kept"] = found[side]["saved_bytes"] / found["torch"]["saved_bytes"]
        found[side]["lines"] = training.lines(folder / program.repository)[: options.lines]
        found[side] |= ratios(sides["torch"], training, options.pairs if side != "torch" else 0)
    return found


def rows_of(program: SimpleNamespace, found: dict, options) -> list[dict]:
    rows, columns = [], ("saved_bytes", "rel_error", "loss_error", "kept", "ratio", "low", "high")
    for side, figures in found.items():
        more = {column: figures[column] for column in columns}
        more |= {"pairs": options.pairs, "unseen": int(program.unseen), "program": program.commit[:12]}
        none = timing.Timing(None, None, None)
        rows.append(report.row(program.name, (program.field,), "float32", side, "step", none, None, more))
    return rows


def table(rows: list[dict], title: str) -> None:
    columns = ("kept, MB", *SIDES[1:], "error", *SIDES[1:], *(f"{side}, time" for side in SIDES[1:]))
    shown = report.grid(title, ("program", "field"), columns)
    for stock, *ours in zip(*(rows[n::3] for n in range(3)), strict=True):
        name = stock["op"] + " (unseen)" * int(stock["unseen"])
        cells = f"{int(stock['saved_bytes']) / 1e6:.1f}", *(f"{float(one['kept']):.2f}" for one in ours)
        cells += *(f"{float(one['rel_error']):.1e}" for one in (stock, *ours)), *(str(one["ratio"]) for one in ours)
        shown.add_row(name, stock["case"], *cells)
    report.put(shown)


def wrong(found: dict) -> list[str]:
    """The sides whose error is infinite, or more than `GRADIENTS` times stock's, with the parameter."""
    stock = found["torch"]["rel_error"]
    most = GRADIENTS * max(stock, torch.finfo(torch.float32).eps)
    wrongs = [(side, of) for side, of in found.items() if not of["rel_error"] <= most < math.inf]
    return [f"{side}, {of['parameter']}: {of['rel_error']:.1e}, stock {stock:.1e}" for side, of in wrongs]


def programs(options) -> dict[str, SimpleNamespace]:
    lines = json.loads(options.manifest.read_text())
    found = [SimpleNamespace(**{"root": "", "unseen": False, **line}) for line in lines]
    return {program.name: program for program in found if not (options.seen and program.unseen)}


def parse(argv) -> argparse.Namespace:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="with a clone of each repository")
    add("--programs", nargs="*", help="names; without it, all")
    add("--seen", action="store_true", help="leave out the unseen ones")
    add("--pairs", type=int, default=10, help="of timed steps; 0: no times")
    add("--lines", type=int, default=5, help="of a program in --out")
    add("--manifest", type=Path, default=MANIFEST)
    add("--out", type=Path, help="a JSON file with all figures and the lines that keep the most")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    path, everything, failed, known = report.path(options.results, options.device, "-wild"), {}, 0, programs(options)
    with report.shown(table, f"{path.stem}: bytes kept, of stock's; errors of gradients; time, of stock's") as rows:
        for name in options.programs or known:
            found = ask(measure, name, options)
            if found is not None:
                everything[name] = found
                rows += report.append(path, rows_of(known[name], found, options))
                print(name, *(f"{found[side]['kept']:.3f}" for side in SIDES[1:]), flush=True)
            for fault in ["failed"] if found is None else wrong(found):
                failed += 1
                print(f"RED: {name}: {fault}", flush=True)
    for which, side in itertools.product(("seen", "unseen"), SIDES[1:]):
        kept = [of[side]["kept"] for name, of in everything.items() if known[name].unseen == (which == "unseen")]
        if kept:
            print(
                f"{which}, {len(kept)} programs, {side}: {statistics.median(kept):.3f} of stock's bytes in the median"
            )
    if options.out:
        options.out.write_text(json.dumps(everything, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    cli.run(main)
