"""An option with a value that it does not have is a ValueError, wherever options are given."""

import inspect

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core.options import one_of
from hfnn.optim.state import OPTIONS


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def tuned(**options):
    batches = [torch.randn(2, 4)] * 2
    return hfnn.tune(model(), batches, **{"steps": 1, "loss": lambda m, x: m(x).sum(), "show": False, **options})


# A call with one option, and the parameters that are options.
CALLS = {
    "convert": (lambda **option: hfnn.convert(model(), **option), hfnn.convert, ("model", "options")),
    "convert again": (
        lambda **option: hfnn.convert(hfnn.convert(model()), **option),
        hfnn.convert,
        ("model", "options"),
    ),
    "tune": (tuned, hfnn.tune, ("model", "batches")),
    "memory.report": (
        lambda **option: hfnn.memory.report(hfnn.convert(model()), torch.randn(2, 4), **option),
        lambda prefer: None,
        (),
    ),
    "patch_torch": (hfnn.patch_torch, hfnn.patch_torch, ()),
    "use": (lambda name: hfnn.use(name).__enter__(), hfnn.use, ()),
    "MLP": (
        lambda **option: hfnn.MLP(4, 8, **option),
        lambda activation: None,
        (),
    ),
    "AdamW": (
        lambda **option: hfnn.convert(torch.optim.AdamW(model().parameters()), **option),
        lambda state_dtype, master, stochastic_rounding: None,
        (),
    ),
    "plot": (
        lambda by: hfnn.memory.report(model(), torch.randn(2, 4)).plot("picture.png", by),
        lambda by: None,
        (),
    ),
}
GIVEN = [
    (call, name)
    for call, (_, signature, inputs) in CALLS.items()
    for name in inspect.signature(signature).parameters
    if name not in inputs
]


@pytest.mark.parametrize("call, name", GIVEN, ids=lambda x: x)
def test_nonsense_is_refused(call, name):
    with pytest.raises(ValueError, match="nonsense" if name != "optimizer" else "Optimizer"):
        CALLS[call][0](**{name: "nonsense"})


@pytest.mark.parametrize(
    "options",
    [{"capture": "blocks"}, {"capture": 1}, {"capture": None}, {"exact": "no"}, {"prefer": None}, {"prefer": ["auto"]}],
    ids=str,
)
def test_convert_refuses(options):
    m = model()
    with pytest.raises(ValueError, match="choose one of"):
        hfnn.convert(m, **options)
    assert type(m[0]) is nn.Linear


def test_an_optimizer_has_no_options_of_a_model():
    optimizer = torch.optim.AdamW(model().parameters())
    for options in ({"capture": True}, {"prefer": "memory"}, {"only": "0"}, {"recompute": "gemm"}):
        with pytest.raises(ValueError, match="options of a model"):
            hfnn.convert(optimizer, **options)
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("options", [{"steps": 1.5}, {"budget": -1}, {"memory": "8 GiB"}, {"budget": True}], ids=str)
def test_tune_refuses(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        tuned(**options)


def test_tune_takes_one_name():
    assert [row.name for row in tuned(among="converted", cache=False).rows] == ["stock", "converted"]


def test_one_of():
    for value, allowed in (
        (True, (False, True)),
        ("a", ("a", None)),
        (None, ("a", None)),
        (torch.float32, (torch.float32,)),
    ):
        one_of("x", value, allowed)
    for value, allowed in ((1, (False, True)), (torch.ones(3), (False, True)), ("b", ("a", None)), (None, ("a",))):
        with pytest.raises(ValueError, match="x="):
            one_of("x", value, allowed)


def test_every_option_of_an_optimizer_is_checked():
    wrong = {
        "state_dtype": torch.float16,
        "master": True,
        "stochastic_rounding": 1,
        "max_grad_norm": 0.0,
        "ema_decay": 1.0,
    }
    assert set(wrong) == set(OPTIONS)
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            hfnn.convert(torch.optim.AdamW(model().parameters()), **{name: value})
