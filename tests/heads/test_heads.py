"""Training programs whose model, head and loss are the user's own do on a converted model what they do on stock."""

import head_loops
import head_losses
import pytest
import torch
from head_program import PROGRAMS, Last, Tied, batches
from torch import nn

import hfnn
from hfnn.core.holder import target_of
from hfnn.deferred.head import CALLS, Head
from hfnn.deferred.logits import Deferred

assert head_loops and head_losses  # they register PROGRAMS


def results(make, run, **options):
    torch.manual_seed(0)
    model = make()
    if options:
        hfnn.convert(model, **options)
        assert target_of(model.lm_head) is Head
    torch.manual_seed(0)
    return run(model), model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a view on stock
@pytest.mark.parametrize("make", [Tied, Last])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_on_stock(make, name):
    wanted, _ = results(make, PROGRAMS[name])
    found, _ = results(make, PROGRAMS[name], prefer="memory")
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        tolerance = 2e-2 if name in SIXTEEN_BITS else 1e-4
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


SIXTEEN_BITS = "autocast", "autocast_loss_outside", "bfloat16"
UNREAD = (
    "classes_second_by_einops", "ddp", "ddp_loss_in_the_script",  "bfloat16", "float64",
    "loss_in_forward", "loss_in_the_script", "a_criterion", "shifted", "classes_second", "classes_second_by_permute",
    "each_loss", "log_softmax_and_nll", "log_softmax_method", "soft_cap", "temperature", "two_losses", "accumulation",
    "evaluation_in_between", "autocast", "autocast_loss_outside", "frozen_body", "frozen_head", "resized",
)  # fmt: skip


@pytest.mark.parametrize("make", [Tied, Last])
@pytest.mark.parametrize("name", UNREAD)
def test_losses_that_read_no_logits(make, name, monkeypatch):
    """From the third call on, no logits are made."""
    made, compute = [], Deferred._compute
    monkeypatch.setattr(Deferred, "_compute", lambda self: made.append(self) or compute(self))
    _, model = results(make, PROGRAMS[name], prefer="memory")
    assert not made
    if name != "resized":
        use = model.lm_head._hfnn_use
        assert use.unread >= CALLS and use.read == 0 and use.last.used, "the last logits were not deferred"


@pytest.mark.parametrize("make", [Tied, Last])
@pytest.mark.parametrize(
    "name", ["accuracy_each_step", "z_loss", "ranks_of_targets", "written_in_place", "distillation"]
)
def test_logits_that_are_read_are_torchs_from_the_third_call_on(make, name):
    _, model = results(make, PROGRAMS[name], prefer="memory")
    assert type(model(*next(batches()))[0]) is torch.Tensor
    assert "computed" in str(hfnn.report(model))


def test_a_layer_that_widens_inside_a_model_is_not_watched():
    model = hfnn.convert(Tied(), prefer="memory")
    assert target_of(model.mlp[0]) is not Head and target_of(model.mlp[2]) is not Head


@pytest.mark.parametrize("tied", [False, True])
def test_layers_as_large_as_an_embedding_are_not_watched(tied):
    """Keys and values of few heads in a model with few tokens, or projections and positions."""
    body = [nn.Linear(32, 32), nn.Linear(32, 32)]
    model = nn.Sequential(nn.Embedding(8, 32), nn.Embedding(32, 32), *body, nn.Linear(32, 8))
    if tied:
        model[-1].weight = model[0].weight
    hfnn.convert(model, prefer="memory")
    assert not any(target_of(m) is Head for m in body) and (target_of(model[-1]) is Head) == tied


def test_defer_false_computes_logits_in_forward():
    model = hfnn.convert(Tied(), prefer="memory", defer=False)
    assert type(model(*next(batches()))[0]) is torch.Tensor
