"""Every architecture of transformers' auto classes, tiny: is the converted model right, and how much does it save?

python bench/architectures.py                       # all of them, some minutes; writes docs/models.md
python bench/architectures.py --models '^(bert|llama)$' --out /dev/stdout
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import floor
import models_page
import test_families as families
import tiny
import torch
import transformers.modeling_utils  # all models import it; not more, so `convert` cannot rely on others' imports
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.utils import ModelOutput

import hfnn
from hfnn.memory.peak import tensors
from hfnn.memory.saved import nodes
from hfnn.testing import error

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SECONDS = 60
LARGEST = 40_000_000  # parameters
DRAWS = 3
# If a model type has several classes, the one whose table comes first is built.
FIRST = (
    "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "MULTIMODAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "CTC", "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
)  # fmt: skip


def architectures(models: str = "") -> dict[str, tuple[str, str]]:
    """model type -> (the auto class's table, the class): each class once, if possible under the type in its name.
    models: a regular expression.
    """
    names = [re.fullmatch("MODEL_FOR_(.*)_MAPPING_NAMES", name) for name in dir(modeling_auto)]
    tables = {match[1]: getattr(modeling_auto, match[0]) for match in names if match}
    first, kinds = {}, collections.defaultdict(list)
    for auto in (*FIRST, *(table for table in tables if table not in FIRST)):
        for kind, classes in tables[auto].items():
            first.setdefault(kind, (auto, classes if isinstance(classes, str) else classes[0]))
    for kind, (_, name) in sorted(first.items()):
        named = name.startswith(CONFIG_MAPPING_NAMES[kind].removesuffix("Config"))
        kinds[name].insert(0 if named else len(kinds[name]), kind)
    chosen = {}
    for several in kinds.values():
        if any(re.search(models, kind) for kind in several):
            kind = next((kind for kind in several if CONFIG_MAPPING[kind].model_type == kind), several[0])
            chosen |= {kind: first[kind]} if re.search(models, kind) else {}
    return dict(sorted(chosen.items()))


@dataclass
class Result:
    """The result for one architecture; `stage` is where `error` occurred.

    modules: of kinds for which hfnn has ops; stock, ours, floor: bytes kept for backward; wrong: tensors that break the
    accuracy rule; not_reverted: what revert did not restore; gaps: classes that keep more than the floor, as (share of
    the savable bytes, class, what it keeps).
    """

    kind: str
    auto: str
    name: str
    stage: str = "build"
    inputs: dict[str, list[int]] = field(default_factory=dict)
    modules: int = 0
    converted: int = 0
    stock: int = 0
    ours: int = 0
    floor: int = 0
    wrong: list[str] | None = None
    reference: str = "float64"
    not_reverted: list[str] | None = None
    gaps: list[tuple[float, str, str]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def share(self) -> float | None:
        """The saved share of the savable bytes; None if there is hardly anything to save."""
        room = self.stock - self.floor
        return (self.stock - self.ours) / room if self.ours and room > 0.02 * self.stock else None


class Signed(torch.autograd.Function):
    """A sum with random signs, which keeps nothing."""

    @staticmethod
    def forward(ctx, y):
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return (y * Signed.signs(ctx)).sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Signed.signs(ctx)

    @staticmethod
    def signs(ctx):
        return torch.randint(2, ctx.shape, generator=torch.Generator().manual_seed(7)).mul(2).sub(1).to(ctx.dtype)


@dataclass
class Loss(ModelOutput):
    loss: torch.Tensor | None = None


class Task(nn.Module):
    """A model that returns only a loss: its own, or a sum of all outputs with random signs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        result = self.model(**batch)
        loss = getattr(result, "loss", None)
        if loss is None or not loss.requires_grad:
            if isinstance(result, dict):
                result = {name: y for name, y in result.items() if name != "past_key_values"}
            outputs = [y for y in tensors(result) if y.requires_grad]
            loss = sum(Signed.apply(y.real if y.is_complex() else y).float() for y in outputs)
        return Loss(torch.as_tensor(loss).sum())


class NotBuilt(Exception):
    """The model is too large, or no batch suits it."""


def build(kind: str, name: str) -> tuple[Task, dict]:
    """The model in training mode, without dropout, and the first batch that it accepts."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = without_dropout(cls(tiny.config_of(cls, CONFIG_MAPPING[kind])).float()).train()
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > LARGEST:
        raise NotBuilt(f"{parameters:,} parameters")
    task, refusals = Task(model), {}
    for batch in tiny.batches(model):
        try:
            torch.manual_seed(1)
            loss = task(**batch).loss
            loss.backward()
            model.zero_grad()
        except Exception as refusal:  # trying is the only way to find the batch that a model accepts
            refusals.setdefault(str(refusal), short(refusal))
            continue
        if loss.isfinite() and abs(loss) < 1e6:
            return task, batch
        refusals.setdefault("loss", f"its loss is {loss:g}")
    raise NotBuilt(min(refusals.values(), key=lambda why: why.startswith("TypeError")))


def without_dropout(model):
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (".drop" in f".{name}" or "_drop" in name):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def examine(result: Result) -> None:
    """Fills the result in, step by step."""
    task, batch = build(result.kind, result.name)
    result.inputs = {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    state = {name: value.clone() for name, value in task.state_dict().items()}

    def stage(name):
        result.stage = name
        task.load_state_dict(state)  # of a batch norm, say
        torch.manual_seed(1)

    stage("stock")
    before, first = look(task), families.run(task, batch)
    stage("stock again")
    once, second = look(task), families.run(task, batch)
    own = {*changes(once, look(task)), *families.unequal(first, second)}  # values that differ after each forward
    stage("stock's bytes")
    result.stock = kept(task, batch)
    stage("floor")
    least = floor.floor(task, lambda: task(**batch).loss)
    result.floor = least.total
    stage("convert")
    kinds = {name: families.kind_of(module) for name, module in task.model.named_modules()}
    hfnn.convert(task.model, prefer="memory")
    swapped = {row.name for row in hfnn.report(task.model).swapped}
    result.modules = sum(kind is not None for kind in kinds.values())
    result.converted = sum(kind is not None and name in swapped for name, kind in kinds.items())
    stage("converted")
    result.ours = kept(task, batch)
    stage("gaps")
    result.gaps = gaps(task, batch, least, result.stock)
    stage("verify")
    result.wrong, result.reference = differences(task, batch, first)
    stage("converted, backward")
    families.run(task, batch)
    stage("revert")
    hfnn.revert(task.model)
    again = families.run(task, batch)
    found = [*changes(before, look(task)), *families.unequal(first, again)]
    result.not_reverted = [what for what in found if what not in own]
    result.stage = "done"


def kept(task, batch) -> int:
    """Bytes kept for backward, without parameter gradients that a loss makes in forward."""
    saved = hfnn.memory.saved_bytes(lambda: task(**batch).loss)
    if not saved.aside:
        return saved.total
    shapes, aside = {tuple(p.shape) for p in task.parameters()}, 0
    for _, node in nodes(task(**batch)):
        held = [t for t in tensors(getattr(node, "__dict__", None)) if tuple(t.shape) not in shapes]
        aside += sum(t.untyped_storage().nbytes() for t in held)
    return saved.total + min(aside, saved.aside)


def gaps(task, batch, least, stock) -> list[tuple[float, str, str]]:
    """The modules that keep more than the floor, the largest first."""
    fold = lambda name: re.sub(r"\b\d+\b", "*", name) or "(model)"  # noqa: E731
    classes = {fold(name): type(module).__name__ for name, module in task.named_modules()}
    whys = {fold(f"model.{row.name}"): row.why for row in hfnn.report(task.model).left}
    ours = collections.Counter()
    for row in hfnn.memory.report(task, **batch).rows:
        if "LinearCrossEntropy, set aside" not in row.op:
            ours[row.module] += row.converted
    floors, makers = collections.Counter(), collections.defaultdict(collections.Counter)
    for name, size in least.by_module.items():
        outer = fold(name)
        while outer and not ours[outer]:  # a block may have taken over from its parts
            outer = outer.rpartition(".")[0]
        floors[outer or fold(name)] += size
    for (name, made, _), size in least.savable.items():
        makers[fold(name)][made] += size
    gap, made, why = collections.Counter(), collections.defaultdict(collections.Counter), {}
    for name, size in ours.items():
        cls = classes.get(name, name)
        gap[cls] += (size - floors[name]) / max(stock - least.total, 1)
        made[cls] += makers[name]
        why.setdefault(cls, whys.get(name, ""))
    ops = {cls: ", ".join(op for op, size in made[cls].most_common(3) if size) for cls in gap}
    whats = {cls: "; ".join(filter(None, (ops[cls], why[cls]))) for cls in gap}
    return [(size, cls, whats[cls]) for cls, size in gap.most_common() if size > 0.02]


def differences(task, batch, stock) -> tuple[list[str], str]:
    """(loss and gradients that break the accuracy rule in each of several draws of the inputs, the reference)."""
    wrong = None
    for draw in range(DRAWS):
        try:
            found = hfnn.verify(task, **tiny.redrawn(batch, draw))
        except Exception as error:  # models that accept no other input
            if wrong is None:
                return roughly(families.run(task, batch), stock), f"stock's float32, for {short(error)}"
            break
        if found.reference != "float64":
            return roughly(families.run(task, batch), stock), found.reference
        texts = {row.name: row.why or f"{row.converted.l2:.1e}, torch's {row.original.l2:.1e}" for row in found.rows}
        bad = {row.name: texts[row.name] for row in found.rows if not row.ok}
        wrong = bad if wrong is None else {name: why for name, why in wrong.items() if name in bad}
        if not wrong:
            break
    return [f"{name}: {why}" for name, why in wrong.items()], "float64"


def roughly(ours, stock) -> list[str]:
    """The tensors that differ by more than rounding; a gradient that is zero in theory is compared with the largest."""
    largest = max(value.double().norm().item() for value in stock.values())
    wrong = sorted(ours.keys() ^ stock.keys())
    for name in ours.keys() & stock.keys():
        off = error(ours[name], stock[name].double()).l2
        if off > 1e-4 and off * stock[name].double().norm() > 1e-6 * largest:
            wrong.append(f"{name}: {off:.1e}")
    return wrong


def look(model) -> dict:
    """Classes and attributes, which revert must restore."""
    copied = lambda value: dict(value) if isinstance(value, dict) else value  # noqa: E731
    return {n: (type(m), {k: copied(v) for k, v in vars(m).items()}) for n, m in model.named_modules()}


def changes(before, after) -> list[str]:
    found = []
    for name, (cls, held) in before.items():
        now, holds = after[name]
        found += [f"{name} is {now.__name__}, was {cls.__name__}"] if cls is not now else []
        found += [f"{name}.{key}" for key in held.keys() | holds.keys() if not same(held.get(key), holds.get(key))]
    return found


def same(a, b) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def short(error) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def one(kind: str, auto: str, name: str) -> Result:
    """The result of one architecture, in this process."""
    result, start = Result(kind, auto, name), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            examine(result)
        except NotBuilt as error:
            result.error = str(error)
        except Exception as error:
            result.error = short(error)
            where = traceback.extract_tb(error.__traceback__)[-1]
            result.error += f" ({Path(where.filename).name}:{where.lineno})"
    result.seconds = time.perf_counter() - start
    return result


def _child(kind, auto, name, path):
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        result = one(kind, auto, name)
    path.write_text(json.dumps(dataclasses.asdict(result)))


def run(chosen, jobs: int) -> list[Result]:
    """Each in its own process, for at most `SECONDS`."""
    context, waiting, running, results = multiprocessing.get_context("fork"), list(chosen.items()), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                kind, (auto, name) = waiting.pop(0)
                path = Path(folder, kind)
                process = context.Process(target=_child, args=(kind, auto, name, path))
                process.start()
                running[kind] = process, time.monotonic() + SECONDS, path
            time.sleep(0.02)
            for kind, (process, until, path) in list(running.items()):
                late = time.monotonic() > until
                if process.is_alive() and not late:
                    continue
                process.kill()
                process.join()
                del running[kind]
                why = f"took more than {SECONDS} s" if late else f"its process ended with {process.exitcode}"
                done = path.exists() and path.read_text()
                results[kind] = Result(**json.loads(done)) if done else Result(kind, *chosen[kind], error=why)
                print(f"{len(results)}/{len(chosen)} {models_page.line(results[kind])}", file=sys.stderr, flush=True)
    return [results[kind] for kind in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="a regular expression for model types")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    versions = {"version": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    args.out.write_text(models_page.page(run(architectures(args.models), args.jobs), versions))


if __name__ == "__main__":
    main()
