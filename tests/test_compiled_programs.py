"""A linear map and its cross-entropy in random programs: compiled by "hfnn_eager", against uncompiled torch."""

import contextlib
import random

import pytest
import torch
from torch.nn.functional import cross_entropy, embedding, linear

import hfnn.compiled.head
import hfnn.ops.head

FLAT = {
    "float": lambda logits: logits.float(),
    "contiguous": lambda logits: logits.contiguous(),
    "view": lambda logits: logits.view(-1, logits.shape[-1]),
    "flatten": lambda logits: logits.flatten(0, -2),
    "reshape": lambda logits: logits.reshape(-1, logits.shape[-1]),
}
RETURNED = {  # besides the loss
    "nothing": None,
    "logits": lambda logits: logits,
    "sum of logits": lambda logits: logits.sum(),
    "argmax": lambda logits: logits.argmax(-1),
}


class Program:
    """Random user code around a loss, drawn by a seed."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.seed = seed
        self.classes, self.width = draw.choice([7, 33, 64]), draw.choice([8, 16])
        self.rows, self.tokens = draw.choice([1, 2, 3]), draw.choice([1, 5, 8])
        self.between = [draw.choice(list(FLAT)) for _ in range(draw.choice([0, 1, 2]))]
        self.options = {
            "ignore_index": draw.choice([-100, 0, 3]),
            "reduction": draw.choice(["mean", "mean", "sum", "none"]),
            "label_smoothing": draw.choice([0.0, 0.0, 0.1]),
        }
        self.bias, self.wants_weight, self.wants_hidden = (draw.random() < p for p in (0.4, 0.8, 0.8))
        self.class_weight = draw.choice([None] * 6 + [torch.float32, torch.float64])
        self.autocast, self.all_ignored, self.wrong_label = (draw.random() < p for p in (0.3, 0.1, 0.08))
        self.returned = draw.choice(["nothing", "nothing", "logits", *RETURNED])
        self.reads_logits, self.written, self.twice, self.tied = (draw.random() < p for p in (0.5, 0.1, 0.15, 0.2))
        self.records = draw.random() < 0.92
        self.scale = draw.choice([1, 1, 3.0])
        self.dtype = draw.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])

    def __repr__(self):
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    def function(self, x, weight, bias, target, class_weight):
        hidden = x * 1.5
        if self.tied:
            hidden = hidden + embedding(target.clamp(0, self.classes - 1), weight)
        made = logits = linear(hidden, weight, bias)
        for name in self.between:
            logits = FLAT[name](logits)
        logits, target = logits.view(-1, self.classes), target.view(-1)
        if self.written:
            hidden.mul_(2)
        loss = cross_entropy(logits, target, class_weight, **self.options).sum()
        if self.twice:
            loss = loss + cross_entropy(logits, target, class_weight, **self.options).sum()
        more = RETURNED[self.returned]
        return (loss * self.scale,) if more is None else (loss * self.scale, more(made))

    def run(self, function):
        """Outputs and gradients, or the name of the error."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(self.dtype)

        x = normal(self.rows, self.tokens, self.width).requires_grad_(self.wants_hidden)
        weight = normal(self.classes, self.width).requires_grad_(self.wants_weight)
        bias = normal(self.classes).requires_grad_(self.wants_weight) if self.bias else None
        target = torch.randint(self.classes, (self.rows, self.tokens), generator=generator)
        target[torch.rand(target.shape, generator=generator) < 0.3] = self.options["ignore_index"]
        if self.all_ignored:
            target[:] = self.options["ignore_index"]
        if self.wrong_label:
            target[0, 0] = self.classes + 2
        class_weight = None
        if self.class_weight is not None:
            class_weight = torch.rand(self.classes, generator=generator).to(self.class_weight)
        try:
            with (
                contextlib.nullcontext() if self.records else torch.no_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=self.autocast),
            ):
                outputs = function(x, weight, bias, target, class_weight)
            total = outputs[0]
            if self.reads_logits and self.returned == "logits":
                total = total + outputs[1].float().square().mean()
            if total.requires_grad:
                total.backward()
        except Exception as error:
            return type(error).__name__
        gradients = [leaf.grad for leaf in (x, weight, bias) if leaf is not None]
        return [*(y.detach() + 0 for y in outputs), *gradients]


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_programs(first, monkeypatch):
    monkeypatch.setattr(hfnn.compiled.head, "WORTH_LOGITS", 0)
    monkeypatch.setattr(hfnn.ops.head, "WORTH_LOGITS", 0)
    replaced, original = [], hfnn.compiled.head._replace

    def replace(graph, loss):
        found = original(graph, loss)
        replaced.append(found is not None)
        return found

    monkeypatch.setattr(hfnn.compiled.head, "_replace", replace)
    for seed in range(first, first + 20):
        program = Program(seed)
        wanted = program.run(program.function)
        torch._dynamo.reset()
        found = program.run(torch.compile(program.function, backend="hfnn_eager"))
        if isinstance(wanted, str) or isinstance(found, str):  # a compiler has its own errors and refusals
            torch._dynamo.reset()
            wanted = program.run(torch.compile(program.function, backend="aot_eager"))
            assert isinstance(wanted, str) and wanted == found, f"{wanted}, not {found}: {program}"
            continue
        low = torch.bfloat16 in (program.dtype, torch.bfloat16 if program.autocast else None)
        assert len(wanted) == len(found)
        for a, b in zip(wanted, found, strict=True):
            assert (a is None) == (b is None), program
            if a is not None:
                assert a.dtype is b.dtype and a.shape == b.shape, program
                largest = a.double().abs().nan_to_num().max()
                torch.testing.assert_close(
                    b.double(), a.double(), rtol=0, atol=float((2**-5 if low else 1e-5) * largest) + 1e-12,
                    equal_nan=True, msg=lambda text, program=program: f"{program}: {text}",
                )  # fmt: skip
    assert replaced.count(True) >= 3
