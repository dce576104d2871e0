"""torch's tools work on a converted model as on the original: fx, jit.script, quantisation, export, "meta"."""

import warnings

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode

import hfnn
from hfnn.patterns.subclass import is_converted

MODULES = {
    "softmax": lambda: nn.Softmax(-1),
    "glu": nn.GLU,
    "gelu": nn.GELU,
    "dropout": nn.Dropout,
    "layer_norm": lambda: nn.LayerNorm(8),
    "linear": lambda: nn.Linear(8, 8),
    "rrelu": nn.RReLU,
    "avg_pool": lambda: nn.AvgPool1d(2),
    "adaptive_avg_pool": lambda: nn.AdaptiveAvgPool1d(2),
    "max_pool": lambda: nn.MaxPool1d(2),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


def pair(name):
    torch.manual_seed(0)
    plain = nn.Sequential(MODULES[name]()).eval()
    converted = hfnn.convert(nn.Sequential(MODULES[name]()).eval(), prefer="memory")
    converted.load_state_dict(plain.state_dict())
    return plain, converted


@pytest.mark.parametrize("name", MODULES)
def test_fx(name):
    """The same graph, which still calls hfnn's modules."""
    (plain, converted), x = pair(name), torch.randn(2, 4, 8)
    graphs = [torch.fx.symbolic_trace(model) for model in (plain, converted)]
    nodes = [[(node.op, node.target) for node in graph.graph.nodes] for graph in graphs]
    assert nodes[0] == nodes[1] and any(map(is_converted, graphs[1].modules()))
    torch.testing.assert_close(graphs[1](x), plain(x))


class Pool(nn.AvgPool2d):
    """fx traces into a user's class, as without hfnn."""


@pytest.mark.parametrize("prefer", ["auto", "memory"])
@pytest.mark.parametrize("make", [lambda: Pool(2), lambda: nn.Embedding(9, 4), lambda: nn.Softmax(-1), nn.GLU, nn.Tanh])
def test_fx_of_a_proxy(make, prefer):
    model = hfnn.convert(nn.Sequential(make()), prefer=prefer)
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda module, name: False
    wanted = tracer.trace(nn.Sequential(make()))
    assert [node.op for node in tracer.trace(model).nodes] == [node.op for node in wanted.nodes]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("encoder", "rrelu")])
def test_script(name):
    (plain, converted), x = pair(name), torch.randn(2, 4, 8)
    torch.testing.assert_close(torch.jit.script(converted)(x), plain(x))
    torch.testing.assert_close(converted(x), plain(x))
    assert not any(map(is_converted, converted.modules())) and "prefer" not in vars(converted[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantise():
    """Every linear map is quantised, in a copy; the model itself stays converted."""
    model = hfnn.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval())
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert [type(m).__module__.startswith("torch.ao.nn.quantized") for m in quantised] == [True, False, True]
    assert all(map(is_converted, model))
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    prepared = torch.ao.quantization.prepare(model)
    prepared(torch.randn(4, 8))
    assert type(torch.ao.quantization.convert(prepared)[0]) is torch.ao.nn.quantized.Linear


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, mask):
    ids = torch.arange(16).view(2, 8)
    how = {"use_cache": False} | ({"attention_mask": torch.ones_like(ids)} if mask else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(hfnn.convert(llama()), (ids,), how, strict=strict).module()
    torch.testing.assert_close(exported(ids, **how).logits, llama()(ids, **how).logits)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("labels, attention", [(False, "sdpa"), (True, "sdpa"), (True, "eager")])
def test_language_model_on_meta(labels, attention, autocast):
    ids, shapes = torch.zeros(2, 8, dtype=torch.int64, device="meta"), []
    for model in (llama(), hfnn.convert(llama(), prefer="memory")):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model.to("meta")(ids, labels=ids if labels else None)
        out.logits.sum().backward()
        shapes.append((out.logits.shape, out.logits.device, None if out.loss is None else out.loss.device))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_meta(name, autocast):
    x, found = torch.empty(2, 4, 8, device="meta", requires_grad=True), []
    for model in pair(name):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model.to("meta")(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        found.append((y.shape, y.dtype, y.stride(), dx.shape, dx.device.type))
    assert found[0] == found[1]


PLACES = {"meta": lambda: torch.device("meta"), "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True)}
GIVEN = {
    "mask": lambda ids: {"attention_mask": torch.ones_like(ids)},
    "padding": lambda ids: {"attention_mask": torch.ones_like(ids).bool()},
    "positions": lambda ids: {"position_ids": torch.arange(8).remainder(4).expand(2, 8), "use_cache": False},
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_without_numbers(attention, place, given):
    """Tensors without values are not read: transformers' mask, or its error."""
    found = []
    for model in (llama(), hfnn.convert(llama(), prefer="memory")):
        model.set_attn_implementation(attention)
        model = model.to("meta") if place == "meta" else model
        with PLACES[place]():
            ids = torch.zeros(2, 8, dtype=torch.int64)
            try:
                found.append(model(ids, **GIVEN[given](ids)).logits.shape)
            except RuntimeError as error:
                found.append(str(error))
    assert found[0] == found[1]
