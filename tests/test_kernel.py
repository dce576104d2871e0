"""Choosing a kernel, and explaining the choice."""

import contextlib
import logging
import subprocess
import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

import hfnn
from hfnn.core.context import context
from hfnn.core.kernel import FLOATS, Kernel, Op

BROKEN = Kernel("triton", "hfnn.kernels.no_such_op", "cpu")


def an_op(*kernels):
    return Op("an_op", torch.relu, torch.relu, kernels, sample=None)


def ran(y):
    """The name of the autograd node behind y."""
    return y.grad_fn.name()


def test_refusals_come_from_the_limits():
    kernel = Kernel("cpp", "math", "cpu", FLOATS, max_cols=8, out=False)
    assert kernel.refusals("cpu", torch.float32, 8, torch.float32) == []
    reasons = kernel.refusals("cuda", torch.float64, 9, torch.float32)
    assert reasons[0] == "runs on cpu, got cuda"
    assert reasons[1].endswith("torch.float16, got torch.float64")
    assert reasons[2] == "takes at most 8 columns, got 9"
    assert reasons[3] == "returns its input's dtype, asked for torch.float32 from torch.float64"


def test_what_is_not_built_says_so():
    assert "no hfnn.kernels.no_such_op here" in BROKEN.missing
    assert "has no no_such_thing" in Kernel("cpp", "hfnn._C:no_such_thing", "cpu").missing


def test_the_first_kernel_that_takes_the_call_is_chosen():
    narrow, wide = Kernel("cpp", "math", "cpu", max_cols=8), Kernel("triton", "math", "cpu")
    op, x = an_op(BROKEN, narrow, wide), torch.zeros(4, 8)
    assert op.select(x, row=(8,)) is narrow
    assert op.select(x, row=(9,)) is wide
    assert op.select(x.double(), row=(9,)) is None


def test_small_inputs_are_torchs():
    op = an_op(Kernel("cpp", "math", "cpu", min_elements=100))
    small, large = torch.zeros(99), torch.zeros(100)
    assert op.select(small) is None and op.select(large) is not None
    assert op.select(small, prefer="memory") is not None
    with hfnn.use("cpp"):
        assert op.select(small) is not None


def test_auto_takes_a_room_that_saves_much():
    """From two million elements on, saved bytes decide, unless speed is preferred."""
    op = an_op(Kernel("cpp", "math", "cpu", min_elements=1 << 60))
    x = torch.zeros(1 << 21)
    assert op.select(x) is not None and op.select(x[1:]) is None
    assert op.select(x, prefer="speed") is None


def test_use_nests_and_restores():
    x = torch.randn(4, 8, requires_grad=True)
    with hfnn.use("cpp"):
        assert ran(hfnn.functional.gelu(x)) == "_GELUBackward"
        with hfnn.use("torch"):
            assert ran(hfnn.functional.gelu(x)) == "GeluBackward0"
        assert ran(hfnn.functional.gelu(x)) == "_GELUBackward"
    assert ran(hfnn.functional.gelu(x)) == "GeluBackward0"
    with pytest.raises(ValueError, match="choose one of torch, cpp, triton, cuda"), hfnn.use("fast"):
        pass


def test_the_error_of_a_forced_kernel_has_every_reason():
    with hfnn.use("cuda"), pytest.raises(hfnn.NoKernel) as caught:
        hfnn.functional.layer_norm(torch.zeros(2, 8, dtype=torch.float64), (8,))
    text = str(caught.value)
    assert text.startswith("layer_norm: `cuda` was asked for; input (2, 8) torch.float64 on cpu\n")
    assert (
        "  cuda    runs on cuda, got cpu; takes torch.float32, torch.bfloat16, torch.float16, got torch.float64" in text
    )


def test_a_fallback_is_logged_once(caplog):
    op = Op("logged_once", torch.relu, torch.relu, (Kernel("cpp", "math", "cpu"),), sample=None)
    with caplog.at_level(logging.WARNING, "hfnn"):
        for _ in range(3):
            op.select(torch.zeros(8, dtype=torch.float64))
            op.select(torch.zeros(9, dtype=torch.float64))
    assert [r.message for r in caplog.records if "float64" in r.message] == [caplog.records[0].message]


def test_disabled_by_the_environment():
    code = "import torch, hfnn; print(hfnn.functional.gelu(torch.randn(512, 512, requires_grad=True)).grad_fn.name())"
    for value, node in (("1", "GeluBackward0"), ("0", "_GELUBackward")):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"HFNN_DISABLE": value, "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
        )
        assert out.stdout.strip() == node, out.stderr


# Inputs that go to torch's own op


class Subclass(torch.Tensor):
    pass


def test_subclasses_go_to_torch():
    x = torch.randn(512, 512).as_subclass(Subclass).requires_grad_()
    y = hfnn.functional.gelu(x, prefer="memory")
    assert type(y) is Subclass


def test_functorch_transforms_go_to_torch():
    x = torch.randn(4, 8, 16)
    want = torch.nn.functional.gelu(x)
    gelu = lambda x: hfnn.functional.gelu(x, prefer="memory")  # noqa: E731
    assert torch.equal(torch.vmap(gelu)(x), want)
    primal, tangent = torch.func.jvp(gelu, (x,), (torch.ones_like(x),))
    assert torch.equal(primal, want) and tangent.shape == x.shape
    assert torch.func.grad(lambda x: gelu(x).sum())(x).shape == x.shape


def test_what_a_functorch_transform_left_behind_goes_to_torch():
    """Such a tensor outlives its transform as a wrapper, which `Function` does not unwrap."""
    left = []
    torch.func.grad(lambda x: (left.append(x * 2), x.sum())[1])(torch.randn(300, 300))
    assert "left behind" in context(left[0])
    assert torch.equal(hfnn.functional.gelu(left[0], prefer="memory"), torch.nn.functional.gelu(left[0]))


def test_forward_mode_goes_to_torch():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.randn(4, 8), torch.ones(4, 8))
        y = hfnn.functional.layer_norm(dual, (8,), prefer="memory")
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None


def test_fake_tensors_keep_the_rooms_shapes_and_saved_tensors():
    with FakeTensorMode():
        x = torch.empty(64, 1024, device="cuda" if torch.cuda.is_available() else "cpu", requires_grad=True)
        weight = torch.empty(1024, device=x.device, requires_grad=True)
        y = hfnn.functional.layer_norm(x, (1024,), weight, prefer="memory")
        assert ran(y) == "_LayerNormBackward" and y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_torchs_errors_are_torchs():
    for args in (((7,),), ((8,), torch.zeros(7)), ((8,), torch.zeros(8), torch.zeros(9)), ((),)):
        errors = []
        for fn in (torch.nn.functional.layer_norm, lambda *a: hfnn.functional.layer_norm(*a, prefer="memory")):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                fn(torch.zeros(2, 8), *args)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


def test_launches_among_several_gpus_take_keywords(monkeypatch):
    """Optimizers' launches take keywords; with one GPU, a launch is the module's own function."""
    entered = []
    module = types.ModuleType("launches_of_a_test")
    module.update = lambda rows, queue, features=None: (entered[-1], queue, features)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    rows = torch.zeros(1)
    assert Kernel("triton", module.__name__, "cuda").update(rows, 7, features="all") == (rows.device, 7, "all")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_is_made_current():
    x = torch.randn(64, 1024, device="cuda:1", requires_grad=True)
    for kernel in ("cuda", "triton"):
        with hfnn.use(kernel):
            y = hfnn.functional.layer_norm(x, (1024,))
            y.sum().backward()
        assert y.device == x.device and torch.cuda.current_device() == 0
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (1024,)))
