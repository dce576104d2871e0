"""hfnn.data: packing, the collator's batches, each rank's share, and packed sequences in a model."""

import importlib.util
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hfnn
from hfnn.data import PackedBatchSampler, PackedCollator, pack

needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def fewest_bins(lengths, capacity):
    """By exhaustive search: each length goes to each open bin, and to a new one."""
    best = len(lengths)

    def place(rest, rooms):
        nonlocal best
        if len(rooms) >= best and rest:
            return
        if not rest:
            best = min(best, len(rooms))
            return
        for at in range(len(rooms)):
            if rooms[at] >= rest[0] and rooms[at] not in rooms[:at]:
                place(rest[1:], [room - rest[0] * (i == at) for i, room in enumerate(rooms)])
        place(rest[1:], [*rooms, capacity - rest[0]])

    place(sorted(lengths, reverse=True), [])
    return best


def best_fit_slowly(lengths, capacity):
    """The bins' sizes, scanning all bins each time."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


# ---- pack


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=80))))
def test_pack(drawn):
    capacity, lengths = drawn
    bins = pack(lengths, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in found) for found in bins]
    assert all(bins) and all(size <= capacity for size in sizes)
    assert sorted(capacity - size for size in sizes) == best_fit_slowly(lengths, capacity)
    assert pack(lengths, capacity) == bins
    backwards = pack(lengths[::-1], capacity)
    assert sorted(sum(lengths[::-1][i] for i in found) for found in backwards) == sorted(sizes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_pack_is_near_the_best(lengths):
    for capacity in (30, 37, 50):
        assert 9 * len(pack(lengths, capacity)) <= 11 * fewest_bins(lengths, capacity) + 6


def test_pack_of_many():
    lengths = torch.randint(1, 8193, (200_000,)).tolist()
    bins = pack(lengths, 8192)
    assert sum(len(found) for found in bins) == len(lengths)
    assert sum(lengths) / (len(bins) * 8192) > 0.98


def test_pack_refusals():
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens, a batch takes 0 to 8: cut or leave out"):
        pack([3, 9], 8)
    with pytest.raises(ValueError, match="sequence 0 has -1 tokens"):
        pack([-1], 8)
    with pytest.raises(ValueError, match="capacity=0"):
        pack([], 0)
    assert pack([], 8) == []


# ---- PackedCollator


def test_collator():
    features = [{"input_ids": s, "labels": torch.tensor(s) * 2, "weight": [0.5] * len(s)} for s in SEQUENCES]
    batch = PackedCollator(max_tokens=11)(features)
    flat = list(itertools.chain(*SEQUENCES))
    assert batch["input_ids"].tolist() == [flat] and batch["input_ids"].dtype is torch.int64
    assert batch["labels"].tolist() == [[-100, 12, 14, -100, -100, 20, 22, 24, 26, -100, 30]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]]
    assert batch["weight"].tolist() == [[0.5] * 11]
    for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
        assert batch[name].tolist() == [0, 3, 4, 9, 11] and batch[name].dtype is torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 5
    assert features[0]["labels"].tolist() == [10, 12, 14], "the dataset's own labels were written to"
    assert "attention_mask" not in batch


def test_collator_options():
    features = [{"input_ids": torch.tensor(s), "attention_mask": [1] * len(s)} for s in (*SEQUENCES, [])]
    bare = PackedCollator(return_position_ids=False, return_cu_seqlens=False, label_ignore=-1)(features)
    assert set(bare) == {"input_ids", "labels"}
    assert bare["labels"].tolist() == [[-1, 6, 7, -1, -1, 10, 11, 12, 13, -1, 15]]

    padded = PackedCollator(pad_to_multiple_of=8, pad_token=3)(features)
    assert padded["input_ids"].shape == (1, 16) and padded["input_ids"][0, 11:].tolist() == [3] * 5
    assert padded["labels"][0, 11:].tolist() == [-100] * 5 and padded["position_ids"][0, 11:].tolist() == [*range(5)]
    assert padded["cu_seqlens"].tolist() == [0, 3, 4, 9, 11, 16]
    assert torch.equal(PackedCollator(pad_to_multiple_of=11)(features)["cu_seqlens"], padded["cu_seqlens"][:-1])


def test_collator_refusals():
    collate = PackedCollator()
    for features, match in (
        ([{"labels": [1]}], "'labels': give input_ids"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"labels has shape \(1,\), input_ids \(2,\)"),
        ([{"input_ids": [[1, 2]]}], r"shape \(1, 2\)"),
        ([{"input_ids": [1, 2], "attention_mask": [0, 1]}], "without padding"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "the same keys"),
        ([{"input_ids": []}], "without a token"),
        ([], "0 features without a token"),
    ):
        with pytest.raises(ValueError, match=match):
            collate(features)
    with pytest.raises(ValueError, match="11 tokens, and max_tokens=10"):
        PackedCollator(10)([{"input_ids": s} for s in SEQUENCES])
    with pytest.raises(ValueError, match="pad_to_multiple_of=0"):
        PackedCollator(pad_to_multiple_of=0)


@needs_transformers
@pytest.mark.parametrize("labels", [False, True])
def test_collator_is_transformers(labels):
    from transformers import DataCollatorWithFlattening

    features = [{"input_ids": s} | ({"labels": s[::-1]} if labels else {}) for s in SEQUENCES]
    want = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    got = PackedCollator()(features)
    assert set(got) == {*want, "cu_seqlens"}
    for key, value in want.items():
        assert got[key] == value if isinstance(value, int) else torch.equal(got[key], value), key
        assert type(got[key]) is type(value) and getattr(got[key], "dtype", None) is getattr(value, "dtype", None)


# ---- PackedBatchSampler


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 5), st.booleans(), st.booleans())
def test_sampler(lengths, world, shuffle, drop_last):
    samplers = [
        PackedBatchSampler(lengths, 20, shuffle, 3, rank=rank, world_size=world, drop_last=drop_last)
        for rank in range(world)
    ]
    bins = len(pack(lengths, 20))
    for epoch in range(2):
        given = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert len(batches) == len(sampler) == (bins // world if drop_last else -(-bins // world))
            assert all(sum(lengths[i] for i in batch) <= 20 for batch in batches)
            assert batches == list(sampler), "an epoch is not the same twice"
            given += batches
        seen = list(itertools.chain(*given))
        if drop_last or bins % world == 0:
            assert len(set(seen)) == len(seen)
        if not drop_last or bins % world == 0:
            assert set(seen) == set(range(len(lengths)))
        again = len(given) - len({tuple(batch) for batch in given})
        assert again == (0 if drop_last else max(0, len(given) - bins))


def test_epochs_differ():
    lengths = torch.randint(1, 50, (300,)).tolist()
    sampler = PackedBatchSampler(lengths, 100, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second and sorted(map(sorted, first)) != sorted(map(sorted, second))
    assert first == list(PackedBatchSampler(lengths, 100, seed=1)) != list(PackedBatchSampler(lengths, 100, seed=2))
    still = PackedBatchSampler(lengths, 100, shuffle=False)
    before = list(still)
    still.set_epoch(1)
    assert list(still) == before == pack(lengths, 100)


def test_sampler_refusals():
    with pytest.raises(ValueError, match="rank=2 of world_size=2"):
        PackedBatchSampler([1], 8, rank=2, world_size=2)
    with pytest.raises(ValueError, match="sequence 0 has 9 tokens"):
        PackedBatchSampler([9], 8)


def test_in_a_data_loader():
    dataset = [{"input_ids": torch.full((n,), n)} for n in torch.randint(1, 30, (50,)).tolist()]
    sampler = PackedBatchSampler([len(d["input_ids"]) for d in dataset], 64)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator(64))
    tokens = torch.cat([batch["input_ids"][0] for batch in loader])
    assert torch.equal(tokens.sort()[0], torch.cat([d["input_ids"] for d in dataset]).sort()[0])


# ---- in a model


@pytest.fixture(params=[False, True], ids=["plain", "converted"])
def llama(request):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    config.use_cache = False  # as transformers.Trainer does; with a cache transformers does not detect sequences
    assert config._attn_implementation == "sdpa"
    return hfnn.convert(model, prefer="memory") if request.param else model


@pytest.mark.filterwarnings("default")  # transformers' own warnings
def test_packed_sequences_are_on_their_own(llama):
    """Logits and losses of a packed batch equal those of its sequences, one by one."""
    sequences = [torch.randint(97, (n,)) for n in (7, 1, 12, 5)]
    batch = PackedCollator()([{"input_ids": s} for s in sequences])
    alone = [llama(input_ids=s[None]).logits[0] for s in sequences]
    logits = llama(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
    torch.testing.assert_close(logits, torch.cat(list(alone)))
    predicted, following = torch.cat([a[:-1] for a in alone]), torch.cat([s[1:] for s in sequences])
    torch.testing.assert_close(llama(**batch).loss, torch.nn.functional.cross_entropy(predicted, following))

    together = llama(input_ids=batch["input_ids"], position_ids=torch.arange(25)[None]).logits[0]
    assert not torch.allclose(together[7:], logits[7:], atol=1e-3), "what is compared cannot tell sequences apart"


@pytest.mark.filterwarnings("default")
def test_no_gradient_crosses_over(llama):
    """The loss of one sequence gives the others' embeddings gradients of exactly zero."""
    lengths = (6, 9, 4)
    batch = PackedCollator()([{"input_ids": torch.randint(97, (n,))} for n in lengths])
    starts = batch["cu_seqlens"].tolist()
    for mine, (begin, end) in enumerate(itertools.pairwise(starts)):
        embeddings = llama.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        labels = torch.full_like(batch["labels"], -100)
        labels[:, begin:end] = batch["labels"][:, begin:end]
        llama(inputs_embeds=embeddings, position_ids=batch["position_ids"], labels=labels).loss.backward()
        grads = [embeddings.grad[0, a:b] for a, b in itertools.pairwise(starts)]
        assert all(not grad.any() for other, grad in enumerate(grads) if other != mine)
        assert grads[mine][:-1].abs().sum(-1).all()
