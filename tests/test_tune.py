"""hfnn.tune: what it accepts and refuses, and that it leaves the model unchanged."""

import dataclasses
import random
import time

import numpy as np
import pytest
import ranks
import torch
from torch import nn

import hfnn
from hfnn.core.holder import target_of
from hfnn.tuning import rows
from hfnn.tuning.candidates import Candidate, candidates

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:The .grad attribute")]


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Net(nn.Module):
    """Several kinds of state: running statistics, dropout, an existing gradient."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.LayerNorm(8 * 36), nn.Linear(8 * 36, 32), nn.GELU(), nn.Dropout(dropout))
        self.last = nn.Linear(32, 10)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.last(self.head(self.body(images))), labels)


def built(dropout=0.1):
    torch.manual_seed(0)
    model = Net(dropout)
    model.body[0].eval()
    model.last.bias.grad = torch.ones(10)
    return model


def batches(sizes=(4,) * 8):
    """Like loaders, they draw from all generators."""
    generator = torch.Generator().manual_seed(1)
    for n in sizes:
        torch.rand(1), random.random(), np.random.rand()
        labels = torch.randint(10, (n,), generator=generator)
        yield {"images": torch.randn(n, 3, 8, 8, generator=generator), "labels": labels}


def image(model) -> dict:
    """Everything that tune must leave unchanged."""
    found = {
        f"{name} {what}": v for name, t in model.state_dict().items() for what, v in (("", t), ("at", t.data_ptr()))
    }
    found |= {f"{n} grad": p.grad for n, p in model.named_parameters()}
    found |= {f"{n} strides": p.stride() for n, p in model.named_parameters()}
    found |= {f"{n} mode": m.training for n, m in model.named_modules()}
    found |= {f"{n} class": type(m) for n, m in model.named_modules()}
    found |= {f"{n} holds": sorted(vars(m)) for n, m in model.named_modules()}
    found |= {f"{n} p": m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    found |= {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1].tolist()}
    return found


def differences(a, b) -> list[str]:
    def same(x, y):
        return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y

    return [key for key in {**a, **b} if not same(a.get(key), b.get(key))]


class Planted(Candidate):
    """A candidate that runs `call(model, plain, *args, **kwargs)`; `plain` is the model's own forward."""

    def enter(self, model):
        vars(model)["_compiled_call_impl"] = lambda *args, **kwargs: self.call(model, model._call_impl, *args, **kwargs)

    def leave(self, model):
        vars(model).pop("_compiled_call_impl", None)


class Faster(Planted):
    """Right, and faster than stock, which sleeps when told to."""

    def call(self, model, plain, *args, **kwargs):
        model.slow = False
        try:
            return plain(*args, **kwargs)
        finally:
            del model.slow


class Slow(Net):
    slow = True

    def forward(self, images, labels):
        if self.slow:
            torch.randn(600, 600) @ torch.randn(600, 600)
        return super().forward(images, labels)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.001


class WrongGradients(Planted):
    """Off by a part in a thousand."""

    def call(self, model, plain, *args, **kwargs):
        return _Doubled.apply(plain(*args, **kwargs))


class WrongLoss(Planted):
    def call(self, model, plain, *args, **kwargs):
        loss = plain(*args, **kwargs)
        return loss + 0.001 * loss.detach()


class Overwrites(Planted):
    """A second backward overwrites gradients instead of accumulating."""

    def call(self, model, plain, *args, **kwargs):
        for p in model.parameters():
            p.grad = None
        return plain(*args, **kwargs)


class Writes(Planted):
    """Writes to statistics, parameters and modes, and draws random numbers."""

    def call(self, model, plain, *args, **kwargs):
        loss = plain(*args, **kwargs)
        with torch.no_grad():
            model.body[1].running_mean.data.add_(0.5)
            model.last.weight.data.mul_(2)
        model.body[1].running_var = torch.ones(8)
        model.eval()
        torch.rand(1), random.random(), np.random.rand()
        return loss


class Frozen(Planted):
    def call(self, model, plain, *args, **kwargs):
        with torch.no_grad():
            loss = plain(*args, **kwargs)
        return loss + 0 * model.last.weight.sum()


class Hungry(Planted):
    def call(self, model, plain, *args, **kwargs):
        torch.empty(10 * (1 << 20), dtype=torch.uint8)
        return plain(*args, **kwargs)


class Raises(Planted):
    def call(self, model, plain, *args, **kwargs):
        raise RuntimeError("no such kernel\nand a trace")


class Hangs(Planted):
    def call(self, model, plain, *args, **kwargs):
        while True:
            time.sleep(0.01)


class Recompiles(Candidate):
    """Recompiles at each call."""

    def enter(self, model):
        def call(*args, **kwargs):
            torch._dynamo.reset()
            return torch.compile(model._call_impl, backend="eager")(*args, **kwargs)

        vars(model)["_compiled_call_impl"] = call


REFUSED = {
    WrongGradients: "gradient of body.0.weight after 1 batch is off by 0.001 of stock's",
    WrongLoss: "loss after 1 batch is off by 0.001",
    Overwrites: "after 2 batches is off by",
    Writes: "is off by",
    Frozen: "gradient of body.0.weight after 1 batch: there is none, unlike stock's",
    Hungry: "MiB, 4.0 MiB are allowed",
    Raises: "RuntimeError: no such kernel",
    Recompiles: "compiled anew in 5 of 5 steps",
}


@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_candidate_is_refused_and_nothing_stays(kind, dropout):
    model = built(dropout)
    before = image(model)
    found = hfnn.tune(model, batches(), steps=10**9, among=[kind("planted")], memory=4 << 20, budget=100, show=False)
    assert REFUSED[kind] in found.rows[1].why
    assert found.choice == "stock" and differences(before, image(model)) == []


def test_one_that_hangs_is_interrupted_and_what_comes_after_it_is_not_tried():
    model = built()
    before, begin = image(model), time.monotonic()
    planted = [Hangs("planted"), "converted"]
    found = hfnn.tune(model, batches(), steps=10**9, among=planted, budget=0.5, show=False)
    assert time.monotonic() - begin < ranks.soon(20)
    assert found.rows[1].why.startswith("not done in the ")
    assert found.rows[2].why == "not tried: the budget of 0.5 s is spent" and found.rows[2].ms is None
    assert found.choice == "stock" and differences(before, image(model)) == []
    assert hfnn.report(model).tuned.endswith("converted: not tried: the budget of 0.5 s is spent")


def test_the_best_is_taken_and_told_and_kept(tmp_path, capsys):
    model, counted = Slow(), []

    class Counted(Faster):
        def call(self, model, plain, *args, **kwargs):
            counted.append(1)
            return super().call(model, plain, *args, **kwargs)

    def take(model, budget=100):
        counted.clear()
        return hfnn.tune(model, batches(), steps=10**9, among=[Counted("faster")], budget=budget)

    plain = image(model)
    found = take(model)
    assert found.choice == "faster" and not found.kept and found.rows[1].ms < found.rows[0].ms
    assert "chosen" in capsys.readouterr().out
    assert hfnn.report(model).tuned == "tuned: faster, for 1,000,000,000 steps"
    assert "tuned: faster" in str(hfnn.report(model))
    measured, again = len(counted), take(model)
    assert again == dataclasses.replace(found, kept=True)
    assert len(counted) == 2 < measured  # two batches, to compare them
    assert "as an earlier run chose" in hfnn.report(model).tuned
    assert not take(model, budget=99).kept
    rows.cache_file().write_text("{")
    assert not take(model).kept
    hfnn.tune(model, batches(), steps=1, among=[], show=False)
    assert differences(plain, image(model)) == []


def test_an_earlier_choice_that_is_wrong_by_now_is_measured_anew(caplog):
    found = hfnn.tune(Slow(), batches(), steps=10**9, among=[Faster("planted")], budget=100, show=False)
    assert found.choice == "planted"
    found = hfnn.tune(Slow(), batches(), steps=10**9, among=[WrongLoss("planted")], budget=100, show=False)
    assert found.choice == "stock" and not found.kept and "the earlier choice, planted, is dropped" in caplog.text


def test_few_steps_do_not_pay_for_what_takes_long_to_set_up():
    class Late(Faster):
        def enter(self, model):
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                pass
            super().enter(model)

    for steps, choice in ((1, "stock"), (10**9, "late")):
        found = hfnn.tune(Slow(), batches(), steps=steps, among=[Late("late")], budget=100, show=False)
        assert found.rows[1].why == "" and found.choice == choice


def test_the_default_budget_is_a_share_of_the_steps_to_come():
    found = hfnn.tune(built(), batches(), steps=1, show=False)
    assert len(found.rows) == 4 and all(row.why.startswith(("not tried", "not done")) for row in found.rows[1:])
    assert found.rows[3].why.startswith("not tried: the budget of ")


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_candidates_of_a_model_with_convolutions(backend):
    """torch.compile's candidates without a compiler: all agree with stock, and the model is unchanged."""
    model = built(0.1 if backend == "aot_eager" else 0.0)
    before, optimizer = image(model), torch.optim.AdamW(model.parameters())
    sizes = (4, 4, 5, 6, 4)
    how = {"optimizer": optimizer, "budget": 300, "backend": backend, "show": False}
    found = hfnn.tune(model, batches(sizes), steps=1, **how)
    assert [row.name for row in found.rows] == [
        *("stock", "converted", "stock, channels_last", "converted, channels_last"),
        *("compiled", "compiled, converted", "compiled, channels_last", "compiled, converted, channels_last"),
    ]
    assert [row.why for row in found.rows] == [""] * 8
    assert all((row.peak is None) == ("compiled" in row.name) for row in found.rows)
    assert found.choice == "stock" and differences(before, image(model)) == []
    assert not optimizer.state and type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("name", ["converted", "converted, channels_last", "compiled, converted"])
def test_a_choice_is_applied_and_undone(name, monkeypatch):
    model = built()
    before, optimizer = image(model), torch.optim.AdamW(model.parameters())
    monkeypatch.setattr("hfnn.tuning.run.best", lambda rows, steps: name)
    how = {"optimizer": optimizer, "budget": 300, "backend": "eager", "show": False}
    found = hfnn.tune(model, batches(), steps=1, among=[name], **how)
    assert found.choice == name and (target_of(model.head[0]) is hfnn.LayerNorm)
    assert isinstance(optimizer, hfnn.optim.AdamW)
    last = model.body[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert last == ("channels_last" in name) and ("_compiled_call_impl" in vars(model)) == ("compiled" in name)
    assert [
        d for d in differences(before, image(model)) if d.split()[-1] not in ("class", "at", "holds", "strides")
    ] == []
    model(**next(batches())).backward()
    optimizer.step()
    monkeypatch.undo()
    hfnn.tune(model, batches(), steps=1, among=[], cache=False, show=False)
    assert type(model.head[0]) is nn.LayerNorm and model.body[0].weight.is_contiguous()
    assert "_compiled_call_impl" not in vars(model)


@pytest.mark.parametrize("calls, compiled", [(7, True), (8, False)])
def test_a_choice_that_compiles_anew_and_anew_is_given_up(calls, compiled, monkeypatch, caplog):
    model = built(0.0)
    monkeypatch.setattr("hfnn.tuning.run.best", lambda rows, steps: "compiled")
    hfnn.tune(model, batches(), steps=1, among=["compiled"], budget=300, backend="eager", show=False)
    expected = built(0.0)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # each size compiles
        for size in range(2, 2 + calls):
            batch = next(batches((size,)))
            assert torch.equal(model(**batch), expected(**batch))
    assert ("_compiled_call_impl" in vars(model)) is compiled
    assert ("Net is no longer compiled: 7 calls compiled anew" in caplog.text) is not compiled
    assert hfnn.report(model).tuned.endswith("no longer compiled, as too many calls compiled anew") is not compiled


@pytest.mark.slow
def test_inductor():
    """Compiled CPU code agrees with stock, and is timed."""
    found = hfnn.tune(built(0.0), batches(), steps=1, among=["compiled", "compiled, converted"], budget=500, show=False)
    assert [row.why for row in found.rows] == [""] * 3 and all(row.ms for row in found.rows)


def test_what_is_random_without_dropout_is_compared_in_eval_mode():
    class Noisy(Net):
        def forward(self, images, labels):
            return super().forward(images + torch.randn_like(images) * self.training, labels)

    class Draws(Planted):
        """Draws once more than stock."""

        def call(self, model, plain, *args, **kwargs):
            torch.rand(1)
            return plain(*args, **kwargs)

    model = Noisy()
    before = image(model)
    found = hfnn.tune(model, batches(), steps=1, among=[Draws("planted")], budget=100, show=False)
    assert found.rows[1].why == "" and differences(before, image(model)) == []


def test_refusals():
    take = {"steps": 1, "show": False}
    with pytest.raises(ValueError, match=r"hfnn\.revert"):
        hfnn.tune(hfnn.convert(built()), batches(), **take)
    compiled = built()
    compiled.compile(backend="eager")
    with pytest.raises(ValueError, match="before it is wrapped or compiled"):
        hfnn.tune(compiled, batches(), **take)
    with pytest.raises(ValueError, match="before it is wrapped or compiled"):
        hfnn.tune(torch.compile(built(), backend="eager"), batches(), **take)
    hooked = built()
    hooked.last.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"gradient of last\.weight has hooks"):
        hfnn.tune(hooked, batches(), **take)
    with pytest.raises(ValueError, match="two batches or more, got 1"):
        hfnn.tune(built(), batches((4,)), **take)
    with pytest.raises(ValueError, match="steps=0"):
        hfnn.tune(built(), batches(), steps=0)
    with pytest.raises(ValueError, match=r"among='fast': choose of 'stock', 'converted'"):
        hfnn.tune(built(), batches(), among=["fast"], **take)
    with pytest.raises(ValueError, match=r"a loss of one number, got \(4, 10\)"):
        hfnn.tune(built(), batches(), loss=lambda m, b: m.last(torch.ones(4, 32)), **take)
    with pytest.raises(ValueError, match="is nan as stock"):
        hfnn.tune(built(), batches(), loss=lambda m, b: m(**b) * float("nan"), **take)


def test_what_stock_raises_is_raised_and_the_model_is_what_it_was():
    model = built()
    before = image(model)
    with pytest.raises(KeyError, match="images"):
        hfnn.tune(model, batches(), steps=1, loss=lambda m, b: (m(**b), b.pop("images"), m(b["images"])))
    assert differences(before, image(model)) == []


def test_layouts_wait_for_an_optimizer_without_states():
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    assert len(candidates(model, optimizer)) == 8 and len(candidates(model)) == 4
    optimizer.step()
    assert len(candidates(model, optimizer)) == 4
