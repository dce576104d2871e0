"""Pipeline stages: contents, names, boundaries; including decoders of transformers."""

import copy
import time

import pytest
import torch
from torch import nn

from haiscale.pipeline import (
    SCHEDULES,
    Pop,
    SequentialModel,
    Stash,
    decoder,
    layer_costs,
    materialize,
    on_meta,
    partition,
    predict,
    stage_costs,
)
from haiscale.pipeline.stage import cut_of
from haiscale.pipeline.timeline import measure

transformers = pytest.importorskip("transformers")
SMALL = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
GATED = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = {**GATED, "num_key_value_heads": 2}
DECODERS = {
    "GPT2": {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 32},
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 4},
    "Qwen3": {**GROUPED, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "Gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 4},
    "GPTNeoX": GATED,
    "Phi": GATED,
    "OPT": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
}


def make(name, **more):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**DECODERS[name], "bos_token_id": 0, "eos_token_id": 0, **more})
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return getattr(transformers, kind)(config)


def chain(stages, *inputs):
    for stage in stages:
        output = stage(*inputs)
        inputs = output if isinstance(output, tuple) else (output,)
    return output


def names(module):
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", DECODERS)
def test_stages_of_a_decoder_compute_what_it_computes_and_keep_its_names(name):
    model = make(name).eval()
    tokens = torch.randint(3, 61, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    stages = partition(model, 3, balance=[2, 2, 2])
    with torch.no_grad():
        assert torch.equal(chain(stages, tokens), model(tokens).logits)
        assert torch.equal(chain(stages, tokens, mask), model(tokens, attention_mask=mask).logits)
    each = [names(stage) for stage in stages]
    assert set.union(*each) == names(model) and sum(map(len, each)) == len(names(model))
    assert all(len(part) > 5 for part in each)


def test_the_model_is_left_as_it_was():
    model = make("GPT2")
    before = {name: id(module) for name, module in model.named_modules()}
    config = model.config.to_dict()
    partition(model, 3, balance=[1, 4, 1])
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config and model.training


def test_a_decoder_that_does_more_than_its_parts_is_refused():
    class Scaled(transformers.LlamaModel):
        def forward(self, *args, inputs_embeds=None, input_ids=None, **kwargs):
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return super().forward(*args, inputs_embeds=3 * x, **kwargs)

    model = make("Llama")
    model.model.__class__ = Scaled
    with pytest.raises(ValueError, match="LlamaForCausalLM is not cut right by its structure"):
        partition(model, 2, balance=[3, 3])


def test_what_is_tied_is_known_by_its_first_name_and_by_all_who_have_it():
    stages = partition(make("GPT2"), 2, balance=[3, 3])
    first, last = map(cut_of, stages)
    assert first.names == {} and last.names == {"lm_head.weight": "transformer.wte.weight"}
    assert first.shared == last.shared == {"transformer.wte.weight": (0, 1)}


def test_the_stage_of_a_rank_and_all_stages():
    model = SequentialModel(*[nn.Linear(4, 4) for _ in range(8)])
    every = partition(model, 4, balance=[1, 3, 2, 2])
    assert [list(dict(stage.named_children())) for stage in every] == [["0"], ["1", "2", "3"], ["4", "5"], ["6", "7"]]
    assert names(partition(model, 1, 4, [1, 3, 2, 2])) == names(every[1])
    loop = partition(model, 1, 2, [2] * 4, 2)
    there_and_back = partition(model, 1, 2, [2] * 4, num_model_chunks=2, placement="v")
    assert [list(dict(s.named_children())) for s in loop] == [["2", "3"], ["6", "7"]]
    assert [list(dict(s.named_children())) for s in there_and_back] == [["2", "3"], ["4", "5"]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {"balance": [4, 4]}, r"balance=\[4, 4\] is not accepted for a model of 8 layers and 3 stages"),
        ((2,), {"balance": [8, 0]}, "at least 1 that add up to 8"),
        ((9,), {}, "8 layers cannot be cut into 9 stages"),
        ((2, 2), {"balance": [4, 4]}, "pp_rank=2 is not accepted: give an integer from 0 to 1"),
        ((0,), {}, "stages=0"),
        ((2,), {"placement": "v", "balance": [4, 4]}, "placement='v' with 1 chunks"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        partition(SequentialModel(*[nn.Linear(4, 4) for _ in range(8)]), *arguments, **options)


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match=r"a Linear cannot be cut: give a torch\.nn\.Sequential"):
        partition(nn.Linear(2, 2), 2)


def test_a_sequential_keeps_its_rule_for_tuples():
    class Pair(nn.Module):
        def forward(self, x):
            return x + 1, 2 * x

    class Sum(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    model, x = nn.Sequential(Pair(), Sum(), nn.Linear(3, 3)), torch.randn(2, 3)
    assert torch.equal(chain(partition(model, 2, balance=[1, 2]), x), model(x))


def test_skip_tensors_travel_from_stage_to_stage():
    class Add(nn.Module):
        def forward(self, x, kept):
            return x + 10 * kept

    model = SequentialModel(Stash("a"), nn.Tanh(), Stash("b"), nn.Tanh(), nn.Tanh(), Pop("a", Add()), Pop("b", Add()))
    x = torch.randn(3)
    for balance in ([1] * 7, [3, 2, 2], [2, 5]):
        assert torch.equal(chain(partition(model, len(balance), balance=balance), x), model(x))
    with pytest.raises(ValueError, match="nothing pops 'a'"):
        SequentialModel(Stash("a"), nn.Tanh())
    with pytest.raises(ValueError, match="layer 0 pops 'a', which no Stash before it keeps"):
        SequentialModel(Pop("a", Add()))
    with pytest.raises(ValueError, match="layer 1 stashes 'a' a second time"):
        SequentialModel(Stash("a"), Stash("a"))


# Measuring


class Takes(nn.Module):
    """Takes a given time on a test's clock."""

    def __init__(self, milliseconds, clock):
        super().__init__()
        self.seconds, self.clock, self.bias = milliseconds / 1e3, clock, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        self.clock.append(self.clock[-1] + self.seconds)
        return x + self.bias


@pytest.fixture
def clock(monkeypatch):
    """The clock of `measure`, independent of the machine's load."""
    times = [0.0]
    monkeypatch.setattr(measure, "_now", lambda device: times[-1])
    return times


def test_stages_are_balanced_by_measured_time(clock):
    model = SequentialModel(*[Takes(t, clock) for t in (20, 4, 4, 4, 4, 20)])
    stages = partition(model, 3, sample=(torch.randn(2, 3),))
    assert [len(stage) for stage in stages] == [1, 4, 1]


def test_the_loss_is_a_part_of_the_last_layer(clock):
    layers, loss = SequentialModel(*[Takes(2, clock) for _ in range(3)]), Takes(20, clock)
    costs = layer_costs(layers, (torch.randn(2, 3),), criterion=lambda y: loss(y).sum())
    assert [cost.forward for cost in costs] == pytest.approx([0.002, 0.002, 0.022])


def test_the_clock_is_a_real_one():
    class Sleeps(nn.Linear):
        def forward(self, x):
            time.sleep(0.02)
            return super().forward(x)

    (cost,) = layer_costs(SequentialModel(Sleeps(3, 3)), (torch.randn(2, 3),), repeats=1)
    assert cost.forward >= 0.02 and cost.backward > 0


def test_measuring_leaves_gradients_buffers_and_random_numbers_alone():
    model = SequentialModel(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3))
    model[2].weight.grad = torch.ones(3, 3)
    x = torch.randn(5, 3)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    costs = layer_costs(model, (x,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and model[0].weight.grad is None
    assert torch.equal(model[2].weight.grad, torch.ones(3, 3))
    assert [cost.parameters for cost in costs] == [24, 0, 48] and all(cost.time > 0 for cost in costs)
    assert costs[2].activation == 5 * 3 * 4
    assert all(min(cost.forward, cost.input, cost.backward) > 0 for cost in costs)


def test_among_partitions_as_fast_the_one_that_keeps_least():
    def layer(time, activation):
        return measure.LayerCost(time, 0, 0, 0, activation, 0)

    # The first stage keeps two microbatches: large layers go to the second if that costs almost no time.
    layers = [layer(1.0, 1), layer(1.0, 1), layer(0.04, 100), layer(1.0, 1), layer(1.0, 1)]
    assert measure.balance(layers, 2) == [2, 3]
    assert measure.balance([layer(1, 1)] * 7, 3) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert measure.balance([layer(9, 0)] + [layer(1, 0)] * 9, 2) == [1, 9]


def test_the_smallest_greatest_cost_is_found():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        numbers = torch.randint(1, 20, (7,), generator=generator).tolist()
        found = measure.balance_by_numbers(numbers, 3)
        every = [
            max(sum(numbers[:a]), sum(numbers[a:b]), sum(numbers[b:])) for a in range(1, 6) for b in range(a + 1, 7)
        ]
        a, b = found[0], found[0] + found[1]
        assert sum(found) == 7 and max(sum(numbers[:a]), sum(numbers[a:b]), sum(numbers[b:])) == min(every)


def test_measured_layers_predict_any_number_of_stages():
    model = make("Llama", num_hidden_layers=6)
    costs = layer_costs(model, (torch.arange(16).view(1, 16),), repeats=1)
    assert len(costs) == 8
    for counts in ([4, 4], [3, 3, 2], [2, 2, 2, 2]):
        stage = stage_costs(costs, counts)
        assert sum(stage.forward) == pytest.approx(1e3 * sum(cost.forward for cost in costs))
        timeline = predict(SCHEDULES["1f1b"](len(counts), 8), stage)
        assert timeline.makespan > 8 * max(map(sum, zip(stage.forward, stage.backward, strict=True)))
        assert timeline.peak[0] == pytest.approx(len(counts) * stage.activation[0])


# One stage alone


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_one_stage_is_made_without_the_others(name):
    whole = make(name).eval()
    stages = []
    for rank in range(2):
        with on_meta():
            model = make(name).eval()
        assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
        stages.append(materialize(partition(model, rank, 2)))
        assert any(p.is_meta for p in model.parameters())
    for stage in stages:
        assert not any(p.is_meta for p in stage.parameters())
        for parameter, p in stage.named_parameters():
            assert p.std() < 0.1 or torch.equal(p, torch.ones_like(p)), parameter
        stage.load_state_dict({name: value for name, value in whole.state_dict().items() if name in stage.state_dict()})
    tokens = torch.arange(8).view(2, 4)
    assert torch.equal(chain(stages, tokens), whole(tokens).logits)


def test_without_initial_values_a_stage_is_not_made():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with on_meta():
        stage = partition(nn.Sequential(nn.Linear(3, 3), Scale()), 1, 2)
    with pytest.raises(ValueError, match=r"1 \(a Scale\) has parameters on the meta device and no reset_parameters"):
        materialize(stage)


def test_a_part_is_told_where_nothing_can_be_found():
    assert decoder.find_blocks(nn.Linear(2, 2)) is None
