"""What hfnn.LSTM, GRU and RNN leave to torch, with its results and its errors."""

import copy
import itertools
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hfnn
from hfnn.core import kernel
from hfnn.core.holder import target_of
from hfnn.ops import rnn

from .test_rnn import B, H, I, T, build, call, every_kind, inputs, ran, swapped

# torch warns about its own layers.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.mark.parametrize(
    "own, dtype", [(torch.float32, torch.bfloat16), *itertools.permutations([torch.bfloat16, torch.float16])]
)
@pytest.mark.parametrize("how", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize("claimed", [False, True])
def test_what_onednn_has_not_is_torchs(how, own, dtype, claimed, monkeypatch):
    """Without AVX-512 torch's one-layer LSTM raises under autocast; with two, in the other 16-bit dtype, it runs. On
    some processors oneDNN's flags claim a dtype of which it has no LSTM."""
    if claimed:
        for name in ("bf16", "fp16"):
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: True)
        rnn._onednn_has.cache_clear()
    module, found = nn.LSTM(I, H, **how).to(own), []
    for m in (module, swapped(module)):
        x = torch.randn(T, B, I, dtype=own, requires_grad=True)
        try:
            with torch.autocast("cpu", dtype):
                y = call(m, x)[0]
            y.sum().backward()
            found.append(y.dtype)
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_what_is_torchs(caplog, monkeypatch):
    """Each with its reason, logged once."""
    monkeypatch.setattr(kernel, "_logged", set())
    module = build("lstm")
    ours = swapped(module)
    (x,) = inputs(module)
    packed = pack_padded_sequence(x, [11, 7, 2])
    frozen = swapped(module)
    frozen.weight_hh_l0.requires_grad_(False)
    quiet = hfnn.convert(copy.deepcopy(module))
    assert target_of(quiet) is hfnn.LSTM and quiet.prefer == "auto"
    with caplog.at_level(logging.WARNING, "hfnn"):
        for m, given in ((quiet, x), (frozen, x), (ours, packed), (frozen, x)):
            for mine, stock in zip(m(given)[1], module(given)[1], strict=True):
                assert torch.equal(mine, stock) and not ran([mine])
        with hfnn.use("torch"):
            assert not ran(call(ours, x))
        with torch.no_grad():
            assert torch.equal(call(ours, x)[0], call(module, x)[0])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "weights that all want gradients" in said[0] and "no packed sequences" in said[1]


@every_kind
@pytest.mark.parametrize("batch", [1, 3])
def test_features_in_columns_are_torchs(kind, batch):
    """torch's gradient of such an input is in columns, too."""
    module, found = build(kind, batch_first=True), []
    for m in (module, swapped(module)):
        x = torch.randn(I, T, batch).permute(2, 1, 0).requires_grad_()
        y = call(m, x)[0]
        found.append((y.stride(), *(g.stride() for g in torch.autograd.grad(y.square().sum(), [x, *m.parameters()]))))
    assert found[0] == found[1]


@every_kind
@pytest.mark.parametrize(
    "wrong",
    [
        lambda m, x: (x[None, ..., None], None),
        lambda m, x: (x[..., :-1], None),
        lambda m, x: (x.long(), None),
        lambda m, x: (x.double(), None),
        lambda m, x: (x[:0], None),
        lambda m, x: (x, "states"),
        lambda m, x: (x, torch.zeros(2, 7, 7)),
        lambda m, x: (x, (torch.zeros(1, B), torch.zeros(1, B))),
        lambda m, x: (x, (torch.zeros(1, B, H).double(), torch.zeros(1, B, H))),
        lambda m, x: (None, None),
    ],
)
def test_errors_are_torchs(kind, wrong):
    module = build(kind)
    said = []
    for m in (module, swapped(module)):
        with pytest.raises(Exception) as error:
            m(*wrong(m, inputs(module)[0]))
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]
