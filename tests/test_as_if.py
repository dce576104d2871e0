"""`hfnn.as_if`: a step without values chooses, and keeps, what it would on a GPU."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hfnn
from haiscale.fsdp.predict import predict
from hfnn import memory
from hfnn.core import context, native
from hfnn.ops import layer_norm

from .test_fakes import MODELS, built, faked

F, ONE = hfnn.functional, torch.ones(1, 1)
built_in_cpp = pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")


def fake(*shape, dtype=torch.float32, **options):
    return torch.empty(*shape, dtype=dtype, **options).requires_grad_()


def test_kernels_are_those_of_a_gpu():
    """By the tables alone, also where nothing is built for CUDA; real tensors choose what exists."""
    op, x = layer_norm.OP, torch.ones(4, 8)
    of_gpu = [k.name for k in op.kernels if k.device == "cuda"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        like_x = torch.empty(4, 8)
        here = op.select(like_x, prefer="memory").name
        with hfnn.as_if():
            assert op.select(like_x, prefer="memory").name == op.select(x, prefer="memory").name == of_gpu[0]
            assert op.find(like_x).name == of_gpu[0] and context.place(like_x) == "cuda"
        assert op.select(like_x, prefer="memory").name == here and context.place(like_x) == "cpu"
    with hfnn.as_if():
        real = op.select(x, prefer="memory")
        assert (real is None or real.device == "cpu") and context.place(x) == "cpu"
        assert torch.equal(F.dropout(x, 0.0, prefer="memory"), x)


@built_in_cpp
@pytest.mark.parametrize("name", ["layer_norm", "gelu", "dropout", "swiglu", "sigmoid", "softmax"])
def test_sizes_from_which_a_kernel_runs_are_a_gpus(name):
    """With a node in C++ and in Python, for fakes and for real tensors in their mode."""
    op = next(op for op in hfnn.ops.CONTRACT if op.name == name)
    on_cpu, on_gpu = op.floors["speed"]
    assert on_cpu != on_gpu
    with FakeTensorMode(allow_non_fake_inputs=True):
        for size, real, on in itertools.product((on_cpu, on_gpu), (True, False), (True, False)):
            arguments = {"layer_norm": ((64,),), "softmax": (-1,), "dropout": (0.5,)}.get(name, ())
            x = nn.Parameter(ONE.expand(size // 64, 64)) if real else fake(size // 64, 64)
            with hfnn.as_if() if on else contextlib.nullcontext():
                node = getattr(F, name)(x, *arguments, prefer="speed").grad_fn
            ours = native.extension.module(node) is not None or not node.name().endswith("Backward0")
            assert ours == (size >= (on_gpu if on else on_cpu)), (node.name(), size, real, on)


@built_in_cpp
def test_dtypes_and_layouts_are_a_gpus():
    with FakeTensorMode(), hfnn.as_if(), torch.autocast("cpu", torch.bfloat16):
        x = fake(4, 8, dtype=torch.bfloat16)
        for norm in (hfnn.LayerNorm(8), nn.LayerNorm(8), hfnn.convert(nn.Sequential(nn.LayerNorm(8)), prefer="memory")):
            assert norm(x).dtype is torch.float32  # the CPU's autocast leaves it in bfloat16
        assert nn.functional.softmax(x, -1).dtype is torch.float32
        assert F.dropout(x, 0.5, prefer="memory").dtype is nn.functional.gelu(x).dtype is torch.bfloat16
        image = fake(2, 8, 3, 3).to(memory_format=torch.channels_last)
        assert F.group_norm(image, 4, prefer="memory").is_contiguous()  # channels last on the CPU
    with FakeTensorMode():
        image = fake(2, 8, 3, 3).to(memory_format=torch.channels_last)
        assert not F.group_norm(image, 4, prefer="memory").is_contiguous()


def test_torchs_own_ops_keep_what_they_keep_on_a_gpu():
    with FakeTensorMode(), hfnn.as_if():
        x = fake(8, 8)
        assert nn.functional.dropout(x, 0.5).grad_fn.name() == "NativeDropoutBackward0"
        assert nn.functional.dropout(x, 0.5, False) is x
        q = fake(1, 2, 64, 16)
        for attend in (F.scaled_dot_product_attention, nn.functional.scaled_dot_product_attention):
            kept = memory.saved_bytes(lambda attend=attend: attend(q, q, q, dropout_p=0.1, is_causal=True))
            assert kept.total <= 3 * q.nbytes, kept  # no probabilities
    real = torch.ones(1000)
    with hfnn.as_if():
        torch.manual_seed(0)
        found = nn.functional.dropout(real, 0.5)
    torch.manual_seed(0)
    assert torch.equal(found, nn.functional.dropout(real, 0.5))


def test_checkpoints_are_computed_again_as_on_a_gpu():
    drop = nn.Dropout(0.5)

    def block(x):
        return nn.functional.layer_norm(drop(x), (8,)) * 2

    for reentrant in (False, True):
        with FakeTensorMode(), hfnn.as_if(), torch.autocast("cpu", torch.bfloat16):
            x = fake(8, 8, dtype=torch.bfloat16)
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert x.grad.shape == x.shape
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator.__module__ == checkpoint.__module__


def test_small_attention_of_a_model_is_hfnns():
    """On a CPU the model's own eager attention is faster."""
    pytest.importorskip("transformers")

    def kept(on):
        with FakeTensorMode() as mode, hfnn.as_if() if on else contextlib.nullcontext():
            model = hfnn.convert(faked(built("eager"), mode).train())
            return memory.saved_bytes(lambda: model(**MODELS["eager"][-1]()).loss).by_op

    here, there = kept(False), kept(True)
    assert "Bmm" in here and "Attention" not in here and "Bmm" not in there and "Attention" in there


def test_predictions_for_gpus_are_of_hfnns_nodes():
    def peak(convert):
        def build():
            return convert(
                nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
            )

        return predict(build, lambda model: model(torch.empty(512, 64)).sum(), 2).rest

    assert peak(lambda model: hfnn.convert(model, prefer="memory")) < 0.75 * peak(lambda model: model)
    assert not hfnn.recipe.parameters_are_resharded(False)  # as before


def test_errors_and_nesting():
    with pytest.raises(ValueError, match="'cuda' only"), hfnn.as_if("mps"):
        pass
    with pytest.raises(ValueError, match="capability"), hfnn.as_if(capability=(7, 5)):
        pass
    with hfnn.as_if():
        with hfnn.as_if("cuda:0", capability=(8, 0)):
            assert context.assumed()
        assert context.assumed()
    assert not context.assumed()


def _trained_mask(x):
    mask = torch.empty(1, 1, 64, 64, device=x.device).requires_grad_()
    return nn.functional.scaled_dot_product_attention(x, x, x, mask, dropout_p=0.5)


ELEMENTS = 2 * 4 * 64 * 64  # of the input, and of attention's scores
BEYOND = {  # a function of a (2, 4, 64, 64) in bfloat16: (bytes kept, most in forward and backward) by element of it
    "softmax": (lambda x: torch.softmax(x, -1, dtype=torch.float32), 4, 4 + 4 + 2),
    "log_softmax": (lambda x: nn.functional.log_softmax(x, 1, dtype=torch.float32), 4, 4 + 4 + 2),
    "cross_entropy": (
        lambda x: nn.functional.cross_entropy(x.flatten(0, 2), torch.zeros(512, device=x.device).long()),
        *(4, 4 + 4 + 2),
    ),
    "attention": (_trained_mask, 4 + 4 + 4 + 1 + 4 + 4, None),  # queries, keys, values; probabilities twice, a mask
}


@pytest.mark.parametrize("name", BEYOND)
def test_16_bit_numbers_that_a_gpu_computes_in_float32(name):
    run, kept, most = BEYOND[name]

    def step(x):
        y = run(x)
        y.backward(torch.empty_like(y))

    def both(on):
        with torch.autocast(on, torch.bfloat16):
            x = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, device=on, requires_grad=True)
            return memory.saved_bytes(lambda: run(x)).total, memory.peak_bytes(lambda: step(x), on)

    with FakeTensorMode(), hfnn.as_if():
        found = both("cpu")
    assert found[0] == pytest.approx(kept * ELEMENTS, rel=0.05)
    assert most is None or found[1] == pytest.approx(most * ELEMENTS, rel=0.05)
    if torch.cuda.is_available():
        assert found == pytest.approx(both("cuda"), rel=0.05)


def test_softmax_of_16_bit_numbers_has_second_derivatives():
    with FakeTensorMode(), hfnn.as_if(), torch.autocast("cpu", torch.bfloat16):
        x = fake(8, 8, dtype=torch.bfloat16)
        (first,) = torch.autograd.grad(nn.functional.cross_entropy(x, torch.zeros(8).long()), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), x)
        assert first.dtype is second.dtype is x.dtype and second.shape == x.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to compare with")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "vit", "whisper"])
def test_bytes_are_those_of_a_step_on_a_gpu(name, autocast):
    def step(on_gpu):
        device, model = "cuda" if on_gpu else "cpu", built(name)
        with FakeTensorMode() if not on_gpu else contextlib.nullcontext() as mode:
            model = (model.cuda() if on_gpu else faked(model, mode)).train()
            model = hfnn.convert(model, prefer="memory")
            with hfnn.as_if(), torch.device(device), torch.autocast(device, torch.bfloat16, enabled=autocast):
                return memory.saved_bytes(lambda: model(**MODELS[name][-1]()).loss).total

    assert step(False) == step(True)
