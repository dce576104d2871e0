"""Under torch.compile hfnn's plain ops give way to Inductor, without a graph break."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import native
from hfnn.ops import OPS

CASES = {
    "layer_norm": lambda x: hfnn.functional.layer_norm(x, (64,), prefer="memory"),
    "rms_norm": lambda x: hfnn.functional.rms_norm(x, (64,), prefer="memory"),
    "gelu": lambda x: hfnn.functional.gelu(x, approximate="tanh", prefer="memory"),
    "dropout": lambda x: hfnn.functional.dropout(x, 0.0, prefer="memory"),
    "linear": lambda x: hfnn.functional.linear(x, torch.eye(64)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(name, dynamic):
    torch._dynamo.reset()
    x = torch.randn(64, 64, requires_grad=True)
    compiled = torch.compile(CASES[name], fullgraph=True, dynamic=dynamic, backend="aot_eager")
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, CASES[name](x))


def test_the_first_call_of_an_op_may_be_compiled():
    torch._dynamo.reset()
    x = torch.randn(8, 64)
    for op in OPS.values():
        unused = dataclasses.replace(op)
        compiled = torch.compile(lambda x, op=unused: (x + 1, op.select(x)), fullgraph=True, backend="eager")
        assert compiled(x)[1] is None, op.name


def test_a_module_compiles_and_runs_eagerly_alike():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(hfnn.LayerNorm(64), hfnn.Linear(64, 256), hfnn.GELU(), hfnn.Linear(256, 64))
    x = torch.randn(8, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    for module in model:
        module.prefer = "memory"
    torch.testing.assert_close(compiled(x), model(x))


def test_make_fx_records_torchs_ops():
    """Its FakeTensors stand for values: a room that skipped the kernel would record nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(64, 64)
    graph = make_fx(CASES["layer_norm"], tracing_mode="fake")(x)
    torch.testing.assert_close(graph(x), CASES["layer_norm"](x))
    exported = torch.export.export(torch.nn.Sequential(hfnn.LayerNorm(64), hfnn.Linear(64, 8)), (x,), strict=False)
    assert "layer_norm" in str(exported.graph)


def test_fx_traces_a_model():
    model = torch.nn.Sequential(hfnn.LayerNorm(64), hfnn.GELU(), hfnn.Linear(64, 8))
    x = torch.randn(4, 64)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_autograd(inside):
    """Backward is compiled, with forward inside its region or before it; each step has a new graph."""
    if native.extension is None and not inside:
        pytest.skip("nodes in Python cannot be compiled: their rooms refuse it, where forward can tell")
    torch.manual_seed(0)
    stock = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 16))
    models = stock, hfnn.convert(copy.deepcopy(stock), prefer="memory")
    for _ in range(2):
        x, losses = torch.randn(4, 16), []
        for model in models:
            loss = None if inside else model(x).square().sum()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss = model(x).square().sum() if inside else loss
                loss.backward()
            losses.append(loss)
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("mode, options", [(None, None), ("reduce-overhead", None), (None, {"epilogue_fusion": False})])
def test_modes_and_options_reach_inductor(mode, options, monkeypatch):
    from torch._inductor import compile_fx, list_mode_options

    from hfnn.compiled import backend

    given = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, config_patches: given.append(config_patches))
    x = torch.randn(2, 3)
    backend.hfnn(torch.fx.symbolic_trace(torch.nn.Linear(3, 3)), [x], mode=mode, options=options)
    (patches,) = given
    assert patches.pop("custom_partitioner_fn") is not None
    assert patches == (list_mode_options(mode) if mode else {}) | (options or {})


@pytest.mark.parametrize("wrong", [{"mode": "bogus"}, {"options": {"bogus": 1}}, {"options": {"max_autotune": "yes"}}])
def test_wrong_modes_and_options_are_told_of_as_by_inductor(wrong):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(RuntimeError) as theirs:
        torch.compile(model, **wrong)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as ours:
        torch.compile(model, backend="hfnn", **wrong)(x)
    assert f"RuntimeError: {theirs.value}" in str(ours.value)


def test_a_captured_model_compiles_with_fullgraph():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    captured, x = hfnn.convert(copy.deepcopy(model), capture=True), torch.randn(2, 4)
    compiled = torch.compile(captured, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(captured(x), model(x))
    assert sum(vars(captured)["_hfnn_capture"].counts.values()) == 1, "the compiled call is not counted"
