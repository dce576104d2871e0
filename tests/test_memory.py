"""Counts what autograd keeps, which module keeps it, and the peak of a step."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn


def test_unique_storages_by_op():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    # Both products keep x's one storage; the weight is a parameter; exp keeps its own output.
    saved = hfnn.memory.saved_bytes(lambda: ((x @ weight) + (x.view(4, 8) @ weight)).exp())
    assert saved.total == 2 * 4 * 8 * 4
    assert saved.by_op == {"Exp": 4 * 8 * 4, "Mm": 4 * 8 * 4}
    assert str(saved).splitlines()[0].split() == ["256", "bytes", "kept", "for", "backward"]


def test_views_pin_their_whole_storage():
    x = torch.randn(4, 8, requires_grad=True)
    assert hfnn.memory.saved_bytes(lambda: (x * 2)[:, :4].exp().log()).total == 4 * 4 * 4
    assert hfnn.memory.saved_bytes(lambda: [(x * 2).chunk(2, 1)[0].sin()]).total == 4 * 8 * 4


def test_nothing_without_grad():
    assert hfnn.memory.saved_bytes(lambda: torch.randn(3).exp()).total == 0


def test_custom_functions_are_seen():
    x = torch.randn(64, 32, requires_grad=True)
    saved = hfnn.memory.saved_bytes(lambda: {"y": hfnn.functional.layer_norm(x, (32,), prefer="memory")})
    assert saved.by_op == {"LayerNorm": 64 * 32 * 4 + 2 * 64 * 4}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_is_what_lives_at_once(device):
    x, size = torch.randn(1 << 16, device=device), 4 << 16

    def freed_in_between():
        y = x * 2  # with the next two, three are alive
        z = y + 1
        z = z.exp()
        del y
        z.add_(x)
        return z.view(2, -1).sum()  # plus a scalar, after two are freed

    assert hfnn.memory.peak_bytes(freed_in_between, device) == 3 * size
    assert hfnn.memory.peak_bytes(lambda: [x.view(2, -1), x.add_(1)], device) == 0, "nothing of one's own"
    assert hfnn.memory.peak_bytes(lambda: (x.exp(), {"y": x.sin()}), device) == 2 * size, "the result counts"


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_sees_graphs_and_backward(device):
    x, size = torch.randn(1 << 16, device=device, requires_grad=True), 4 << 16

    def step():
        y = x.exp().sin().sum()  # keeps exp's output, which both nodes saved
        return torch.autograd.grad(y, x)

    gc.collect()  # what other tests left in cycles would be freed in the middle
    before = torch.cuda.memory_allocated()
    peak = hfnn.memory.peak_bytes(step, device)
    assert 3 * size <= peak <= 4 * size + 4096
    while torch.cuda.memory_allocated() > before:  # a thread of the autograd engine holds the result a little longer
        time.sleep(1e-3)
    assert hfnn.memory.peak_bytes(step, device) == peak, "a second time the same"


def test_an_error_leaves_no_count_behind():
    with pytest.raises(ZeroDivisionError):
        hfnn.memory.peak_bytes(lambda: torch.ones(3) / (1 // 0))
    assert hfnn.memory.peak_bytes(lambda: torch.ones(4)) == 16


def test_what_was_counted_is_freed():
    """An op that saves its own result must not end up in a reference cycle."""
    alive = []

    def fn():
        y = torch.randn(8, requires_grad=True).exp()
        alive.append(weakref.ref(y.untyped_storage()))
        return y.sum()

    hfnn.memory.saved_bytes(fn)
    assert alive[0]() is None


def test_a_checkpoint_is_not_computed_again():
    x, calls = torch.randn(4, 8, requires_grad=True), []

    def block(x):
        calls.append(1)
        return x.exp().sin()

    saved = hfnn.memory.saved_bytes(lambda: checkpoint(block, x * 2, use_reentrant=False))
    assert saved.total == 4 * 8 * 4, "its input"
    assert len(calls) == 1


def test_casts_and_what_is_set_aside():
    class Ahead(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.grads = (torch.ones(100), None), x
            return x * 1

    x, linear = torch.randn(4, 8, requires_grad=True), torch.nn.Linear(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        saved = hfnn.memory.saved_bytes(lambda: linear(Ahead.apply(x)))
    assert saved.total == 4 * 8 * 4 + 4 * 8 * 2 + 8 * 16 * 2
    assert saved.casts == 8 * 16 * 2 and saved.aside == 400


# The report


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.act = torch.nn.GELU()
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x)))).sin()


ROWS, WIDTH = 64, 32
SIZE = 4 * ROWS * WIDTH


@pytest.fixture
def model():
    return torch.nn.Sequential(Block(WIDTH), Block(WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.5))


@pytest.fixture
def x():
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def kept(report):
    """{(module, op): (eager, converted)}"""
    return {(row.module, row.op): (row.eager, row.converted) for row in report.rows}


def test_report(model, x):
    report = hfnn.memory.report(model, x, prefer="memory")
    found, statistics = kept(report), 2 * 2 * ROWS * 4
    assert found["*.norm", "NativeLayerNorm"] == (2 * SIZE + statistics, 0)
    assert found["*.norm", "LayerNorm"][1] == 2 * SIZE + statistics
    assert found["*.up", "Addmm"] == (2 * SIZE, 0), "the output of the norm"
    assert found["*.act", "Gelu"] == (2 * 4 * SIZE, 0) and found["*.act", "GELU"] == (0, 2 * 4 * SIZE)
    assert found["*.down", "Addmm"] == (2 * 4 * SIZE, 0)
    assert found["*", "Sin"] == (2 * SIZE, 2 * SIZE), "a block's own"
    assert {row.module: row.modules for row in report.rows}["*.norm"] == 2
    assert report.rows[0].module == "*"
    assert report.eager - report.converted == 2 * 5 * SIZE + SIZE, "and the mask of a dropout, which is of x's dtype"
    assert report.by_module["*.down"] == (2 * 4 * SIZE, 0)
    assert sum(eager for eager, _ in report.by_op.values()) == report.eager


def test_the_report_counts_as_saved_bytes_does(model, x):
    model[2].eval()  # its running statistics are buffers, which the report omits
    report = hfnn.memory.report(model, x, prefer="memory")
    assert report.eager == hfnn.memory.saved_bytes(lambda: model(x)).total - 2 * 4 * WIDTH
    hfnn.convert(model, prefer="memory")
    assert report.converted == hfnn.memory.saved_bytes(lambda: model(x)).total  # the room keeps its own statistics


@pytest.mark.parametrize("converted", [False, True, "partly"])
def test_the_model_stays_as_it_was(model, x, converted):
    if converted:
        hfnn.convert(model, only="0" if converted == "partly" else None, prefer="memory")
        model[0].act.prefer = "speed"
    model(x).sum().backward()
    model[1].eval()
    call = torch.nn.Module.__call__

    def state():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        grads = [p.grad for p in model.parameters()]
        modules = [(type(m), m.training, m.__dict__.get("prefer"), len(m._forward_hooks)) for m in model.modules()]
        return {n: id(t) for n, t in tensors.items()}, [*map(id, grads)], modules, torch.get_rng_state().tolist()

    def values():
        return [t.clone() for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]

    before, numbers = state(), values()
    report = hfnn.memory.report(model, x)
    assert state() == before and all(map(torch.equal, values(), numbers))
    assert torch.nn.Module.__call__ is call
    if converted:
        assert report.converted < report.eager


def test_an_error_in_forward_leaves_nothing_behind(model, x):
    classes, call = [type(m) for m in model.modules()], torch.nn.Module.__call__
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        hfnn.memory.report(model, x[:, 1:])
    assert [type(m) for m in model.modules()] == classes and torch.nn.Module.__call__ is call
    assert torch.equal(torch.get_rng_state(), state)
    y = x.requires_grad_().exp()
    assert type(y.grad_fn._raw_saved_result.data) is torch.Tensor, "a hook is still there"


def test_casts_of_weights_have_a_name(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        found = kept(hfnn.memory.report(model, x, prefer="memory"))
    casts = 2 * 2 * WIDTH * 4 * WIDTH
    assert found["*.up", "casts of weights"] == (casts, 0) and found["*.down", "casts of weights"] == (casts, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(x, reentrant):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(WIDTH)

        def forward(self, x):
            return checkpoint(self.block, x * 1, use_reentrant=reentrant).sin()

    report = hfnn.memory.report(Checkpointed(), x.requires_grad_(), prefer="memory")
    generator = torch.get_rng_state().nbytes if reentrant else 0  # its state is kept on the node
    wanted = 2 * SIZE + generator
    assert (report.eager, report.converted) == (wanted, wanted), "the input of the block, and that of sin"
    assert set(report.by_module) == {"(model)"}


def test_what_only_python_holds_counts(x):
    class Hoarder(torch.nn.Linear):
        def forward(self, x):
            vars(self)["last"] = super().forward(x * 1).exp()
            return x * self.bias.sum()

    found = kept(hfnn.memory.report(Hoarder(WIDTH, WIDTH), x))
    assert found["(model)", "held from Python, as by a checkpoint"] == (2 * SIZE, 2 * SIZE)


def test_a_printed_report(model, x):
    report = hfnn.memory.report(model, x, prefer="memory")
    text = str(report)
    assert "*.norm  x2" in text and "NativeLayerNorm" in text and f"{report.eager / 1024:,.2f}" in text
    lines = [line for line in text.splitlines() if " all " in line]
    assert len(lines) == 2 and all(f"{report.converted / report.eager:.2f}" in line for line in lines)
    small = hfnn.memory.report(torch.nn.GELU(), torch.ones(3, requires_grad=True))
    assert "eager, bytes" in str(small) and small.eager == 12
    nothing = hfnn.memory.report(torch.nn.Identity(), torch.ones(3))
    assert nothing.eager == 0 and not nothing.rows and "all" in str(nothing)


def test_a_picture(model, x, tmp_path):
    pytest.importorskip("matplotlib")
    report = hfnn.memory.report(model, x)
    for by in ("module", "op"):
        path = tmp_path / f"{by}.png"
        report.plot(path, by=by)
        assert path.read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match='choose "module" or "op"'):
        report.plot(tmp_path / "x.png", by="layer")


def test_a_picture_has_a_layer_for_the_rest():
    sums = {f"m{i}": (i, 2 * i) for i in range(20)}
    layers = hfnn.memory.keepers._largest(sums)
    assert len(layers) == hfnn.memory.keepers.LAYERS and layers["9 others"] == (36, 72)
    assert sum(eager for eager, _ in layers.values()) == sum(range(20))


def test_bad_arguments(model, x):
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        hfnn.memory.report(lambda x: x, x)
    with pytest.raises(ValueError, match="prefer"):
        hfnn.memory.report(model, x, prefer="always")


def test_report_says_what_each_module_costs():
    """Bytes and time by `hfnn.report(model, input)`, also for a forward in plain Python. The model is unchanged."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(64), nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return (self.lin(self.norm(x)).exp().sigmoid() * 2).relu()  # three tensors of its own

    model = hfnn.convert(Own(), prefer="memory")
    x, state = torch.randn(32, 64, requires_grad=True), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = {row.name: row for row in hfnn.report(model, x).rows}
    assert sum(row.kept for row in rows.values()) == pytest.approx(1)
    assert sum(row.time for row in rows.values()) == pytest.approx(1)
    assert rows[""].kept > 0.7 and rows["norm"].kept > 0.2 and rows["lin"].kept < 0.01
    assert all(row.time > 0 for row in rows.values())
    assert "kept" in str(hfnn.report(model, x)) and "kept" not in str(hfnn.report(model)).split("norm")[0]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
