"""`hfnn.convert(model, capture=True)`, with CUDA graphs or played ones. tests/fuzz/capture.py tests random programs."""

import copy
import inspect
import pickle
import sys
import threading
from pathlib import Path

import pytest
import torch
from played_graphs import DEVICE, played
from torch import nn

import hfnn
from hfnn.capture import captured

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "bench")]
import test_families as families
import zoo

pytestmark = pytest.mark.filterwarnings("ignore:.* [aA]ttention defaults to a non-deterministic algorithm")

# Stock torch cannot record these forwards either: they copy numbers from the host, or their experts read token counts
# on the host.
NOT_STOCK = ("gpt2", "bloom", "mixtral") if DEVICE == "cuda" else ()


@pytest.fixture
def graphs():
    with played():
        yield


@pytest.fixture
def no_atomics():
    """No attention of torch whose backward adds by atomics, and differs from run to run on a GPU: masks and biases, as
    in bert and swin, go to "efficient"."""
    switches = torch.backends.cuda
    before = switches.mem_efficient_sdp_enabled(), switches.cudnn_sdp_enabled()
    switches.enable_mem_efficient_sdp(False), switches.enable_cudnn_sdp(False)
    yield
    switches.enable_mem_efficient_sdp(before[0]), switches.enable_cudnn_sdp(before[1])


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4)).to(DEVICE)


def steps(model, count, optimizer=None):
    optimizer, losses = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for i in range(count):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8).to(next(model.parameters()).device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_losses_and_state_are_those_of_the_model(graphs):
    plain = hfnn.convert(small())
    ours = hfnn.convert(small(), capture=True)
    assert torch.equal(steps(plain, 20), steps(ours, 20))
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert vars(ours)["_hfnn_capture"].counts == {"before recording": 3, "replayed": 17}
    assert "captured: 1 kinds of calls, 17 replays" in " ".join(str(hfnn.report(ours)).split())


def test_under_a_default_device(graphs):
    """Which set_default_device sets: graphs are recorded, for each device anew."""
    plain, ours = hfnn.convert(small()), hfnn.convert(small(), capture=True)
    with torch.device(DEVICE):
        assert torch.equal(steps(plain, 8), steps(ours, 8))
    assert vars(ours)["_hfnn_capture"].counts == {"before recording": 3, "replayed": 5}
    with torch.device("meta"):
        model = vars(ours)["_hfnn_capture"]
        ours(torch.ones(6, 8, device=DEVICE))
    assert model.counts == {"before recording": 4, "replayed": 5}


def test_on_the_cpu_it_does_nothing_and_says_so(caplog):
    model = hfnn.convert(small().cpu(), capture=True)
    assert "the CPU has no graphs" in caplog.text
    assert torch.equal(steps(hfnn.convert(small().cpu()), 6), steps(model, 6))
    assert vars(model)["_hfnn_capture"].counts == {"it has no parameters on a GPU": 6}


def test_revert_and_converting_again_end_it(graphs):
    plain = small()
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    hfnn.revert(model)
    assert type(model) is nn.Sequential and vars(model).keys() == vars(plain).keys()
    hfnn.convert(model, capture=True)
    assert captured.of(model)
    hfnn.convert(model)
    assert captured.of(model) is None


def test_copies_are_captured_on_their_own(graphs):
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and vars(other)["_hfnn_capture"] is not vars(model)["_hfnn_capture"]
        assert torch.equal(steps(copy.deepcopy(hfnn.convert(copy.deepcopy(other))), 8), steps(other, 8))
        assert vars(other)["_hfnn_capture"].counts["replayed"] == 5
    counts = dict(vars(model)["_hfnn_capture"].counts)
    steps(copy.copy(model), 2)
    assert vars(model)["_hfnn_capture"].counts == counts


def test_the_signature_is_the_models_own(graphs):
    model = hfnn.convert(small(), capture=True)
    assert inspect.signature(model.forward) == inspect.signature(nn.Sequential().forward)
    assert isinstance(model, nn.Sequential) and type(model).__name__ == "Sequential"


def test_shapes_beyond_the_bound_run_as_they_are(graphs):
    model = hfnn.convert(small(), capture=True)
    knows = vars(model)["_hfnn_capture"]
    for _ in range(5):
        for rows in range(2, captured.SHAPES + 4):
            model(torch.randn(rows, 8, device=DEVICE)).sum().backward()
    assert sum(bool(kind.pairs) for kind in knows._kinds.values()) == captured.SHAPES
    assert knows.counts[f"there are {captured.SHAPES} kinds of calls already"] == 10
    for _ in range(captured.IDLE * captured.SHAPES + 5):  # unused kinds make room
        model(torch.randn(30, 8, device=DEVICE)).sum().backward()
    assert any(kind.pairs and kind.last == knows._calls for kind in knows._kinds.values())


def test_gradients_are_not_copied_while_nobody_holds_them(graphs):
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    ((pair,),) = (kind.pairs for kind in vars(model)["_hfnn_capture"]._kinds.values())
    addresses = {g.data_ptr() for g in pair._grads}
    assert {p.grad.data_ptr() for p in model.parameters()} == addresses
    model(torch.randn(6, 8, device=DEVICE)).sum().backward()  # accumulates: existing gradients are moved
    assert not {p.grad.data_ptr() for p in model.parameters()} & addresses


def test_while_another_tensor_shares_a_gradient_nothing_is_replayed(graphs):
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    alias, before = model[0].weight.grad.view(-1), model[0].weight.grad.clone()
    model(torch.randn(6, 8, device=DEVICE)).sum().backward()
    assert torch.equal(alias, model[0].weight.grad.view(-1)) and not torch.equal(alias, before.view(-1))
    why = "gradients of an earlier call are held by something else than .grad"
    assert vars(model)["_hfnn_capture"].counts[why] == 1


def test_a_loss_that_is_alive_does_not_keep_a_model_from_being_recorded(graphs):
    """The loss keeps gradient-accumulation nodes alive, which belong to another stream than the recording's."""
    model = hfnn.convert(small(), capture=True)
    for _ in range(6):
        loss = model(torch.randn(6, 8, device=DEVICE)).sum()
        loss.backward()
    assert vars(model)["_hfnn_capture"].counts["replayed"] == 3


def test_parameters_that_something_else_holds_are_told(graphs):
    linear = nn.Linear(8, 8).to(DEVICE)
    hidden = iter([lambda weight=linear.weight: weight] * 20)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x) @ next(hidden)()

    model = hfnn.convert(Net(), capture=True)
    for _ in range(6):
        model(torch.randn(6, 8, device=DEVICE)).sum().backward()
    counts = vars(model)["_hfnn_capture"].counts
    assert counts["it reads parameters by other ways than its modules' attributes"] == 3, counts


def test_waiting_for_the_gpu_ends_the_recording_and_nothing_else(graphs):
    """A model that waits runs uncaptured; generators, streams and other models' graphs are as before."""

    class Waits(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    other, model = hfnn.convert(small(), capture=True), hfnn.convert(Waits(8, 8).to(DEVICE), capture=True)
    plain, seen = copy.deepcopy(hfnn.revert(copy.deepcopy(model))), []
    for _ in range(6):
        x = torch.randn(6, 8, device=DEVICE)
        seen.append(torch.equal(model(x), plain(x)))
        steps(other, 1)
        torch.nn.functional.dropout(x, 0.5)
    assert all(seen) and vars(other)["_hfnn_capture"].counts["replayed"] == 3
    assert torch.cuda.current_stream() == torch.cuda.default_stream() if DEVICE == "cuda" else True
    counts = vars(model)["_hfnn_capture"].counts
    assert counts["replayed"] == (0 if DEVICE == "cuda" else 3), counts


def test_what_cannot_be_recorded_runs_and_is_told(graphs, caplog):
    class Waits(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled() and not self.weight.grad_fn and recording:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return super().forward(x)

    recording = []
    model = hfnn.convert(nn.Sequential(Waits(8, 8)).to(DEVICE), capture=True)
    for call in range(6):
        recording[:] = [True] if call == 3 else []
        with pytest.raises(RuntimeError) if call == 3 else torch.enable_grad():
            model(torch.randn(2, 8, device=DEVICE)).sum().backward()
    why = "it could not be recorded: operation not permitted when stream is capturing"
    assert vars(model)["_hfnn_capture"].counts[why] == 3 and caplog.text.count("is not captured") == 1


def test_a_call_of_another_thread_waits_for_the_recording(graphs):
    """During recording other parameters take the place of the model's; a concurrent call would leave no gradient."""
    main, found, waits = threading.get_ident(), [], threading.Event()

    class Lock:
        """A lock that reports when another thread waits for it."""

        def __init__(self):
            lock = threading.Lock()
            self.acquire, self.release = lock.acquire, lock.release

        def __enter__(self):
            waits.set()
            return self.acquire()

        def __exit__(self, *exception):
            self.release()

    class Slow(nn.Linear):
        def forward(self, x):
            if threading.get_ident() == main and capture._recorder == main and other.ident is None:
                other.start()
                assert waits.wait(60)
            return super().forward(x)

    model = hfnn.convert(nn.Sequential(Slow(8, 8)).to(DEVICE), capture=True)
    parameters, x = [*model.parameters()], torch.randn(2, 8, device=DEVICE)
    capture = vars(model)["_hfnn_capture"]
    capture._lock = Lock()

    def beside():
        found.extend(torch.autograd.grad(model(x).sum(), parameters))

    other = threading.Thread(target=beside)
    for _ in range(captured.WARM + 2):
        loss = model(x).sum()
        if other.ident is not None:  # the stand-in for graphs calls the model in each replay
            other.join()
        loss.backward()
    assert len(found) == 2 and torch.equal(found[1], torch.full_like(found[1], 2.0))
    assert capture.counts["replayed"] == 2


def test_what_looks_at_a_captured_model_leaves_it_captured(graphs):
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    x = torch.randn(6, 8, device=DEVICE)
    rows = [row for row in hfnn.memory.report(model, x).rows if row.op == "graphs"]
    assert [row.converted for row in rows] == [captured.pool_bytes(model)] and rows[0].converted > 0
    hfnn.report(model, x)
    steps(model, 5)
    counts = vars(model)["_hfnn_capture"].counts
    assert counts == {"before recording": 3, "replayed": 2 + 5}, counts


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_models_of_transformers(graphs, family, autocast):
    """Losses, gradients and logits that are read later, over more calls than recording needs."""
    results, batch = [], {k: v.to(DEVICE) if k != "return_loss" else v for k, v in families.inputs(family).items()}
    for capture in (False, True):
        # On a GPU, hfnn's dropout draws other numbers in a graph.
        model = families.build(family).to(DEVICE).train(DEVICE == "cpu")
        model, seen = hfnn.convert(model, prefer="memory", capture=capture), []
        for call in range(7):
            torch.manual_seed(call)
            with torch.autocast(DEVICE, torch.bfloat16, autocast):
                out = model(**batch)
            model.zero_grad()
            out.loss.backward()
            seen += [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            if getattr(out, "logits", None) is not None:
                seen.append(out.logits.detach() + 0)
        results.append(seen)
    counts = vars(model)["_hfnn_capture"].counts
    assert counts["replayed"] == 4 or (family in NOT_STOCK and not counts["replayed"]), counts
    differ = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    assert not differ, [(i, results[0][i].shape, (results[0][i] - results[1][i]).abs().max()) for i in differ[:4]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*[dD]eterministic")
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "vit", "swin", "unet"])
def test_fifty_steps(graphs, no_atomics, name):
    """One, two or four calls per step, two shapes in turn: losses, gradients and state are those without capture."""
    of, results = zoo.MODELS[name], []
    pytest.importorskip({"vit": "timm", "swin": "timm", "unet": "diffusers"}.get(name, "transformers"))
    for capture in (False, True):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = hfnn.convert(of.build(None, True).eval(), prefer="memory", capture=capture)
            batches = [of.batch(model, of.tiny[0] + more, of.tiny[1]) for more in (0, 1)]
        optimizer, seen, calls = torch.optim.AdamW(model.parameters(), 1e-3), [], 0
        for step in range(50):
            for _ in range((1, 2, 4)[step % 3]):
                loss = of.loss(model, **batches[step % 2])
                loss.backward()
                seen.append(loss.detach())
                calls += 1
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        results.append(seen + [t.clone() for t in model.state_dict().values()])
    counts = vars(model)["_hfnn_capture"].counts
    assert counts == {"before recording": 6, "replayed": calls - 6}, counts
    differ = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    assert not differ, [(i, results[0][i].shape, (results[0][i] - results[1][i]).abs().max()) for i in differ[:6]]


def _padding(kind, rows, tokens):
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    if kind == "end":
        mask[0, -3:] = 0
    elif kind == "begin":
        mask[1, :2] = 0
    elif kind == "holes":
        mask[0, 2] = 0
    return mask.to(DEVICE)


def _few(labels, kind):
    """Labels, with the share that counts given by `kind`."""
    kept = {"all": 1.0, "few": 0.02, "half": 0.5, "none": 0.0}[kind]
    return labels.where(torch.rand(labels.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE) < kept, -100)


def test_what_a_forward_asks_of_its_tensors_is_compared_at_each_replay(graphs):
    """Padding: none, at one end, anywhere. Each kind is recorded with the kernels that it uses outside of a graph."""
    from transformers import BertConfig, BertForMaskedLM

    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kinds = ["full"] * 5 + ["end"] * 5 + ["begin", "holes"] * 4 + ["full", "end", "holes"] * 4
    results = []
    for capture in (False, True):
        torch.manual_seed(0)
        model = BertForMaskedLM(BertConfig(**families.ENCODER, attn_implementation="sdpa")).to(DEVICE).eval()
        model, seen = hfnn.convert(model, prefer="memory", capture=capture), []
        for kind in kinds:
            model.zero_grad()
            out = model(ids, attention_mask=_padding(kind, 2, 12), labels=ids)
            out.loss.backward()
            seen += [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        results.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    knows = vars(model)["_hfnn_capture"]
    ((*pairs,),) = (kind.pairs for kind in knows._kinds.values())
    assert len(pairs) == 3 and knows.counts["what it asks of its tensors is none of what was recorded"] == 2
    assert knows.counts["replayed"] == len(kinds) - 3 - 2


def test_tokens_that_count_are_worked_on_alone_in_a_graph(graphs):
    from transformers import BertConfig, BertForMaskedLM

    ids = torch.randint(3, 64, (16, 64), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for capture in (False, True):
        torch.manual_seed(0)
        config = BertConfig(**families.ENCODER | {"vocab_size": 4096, "max_position_embeddings": 64})
        model, seen = hfnn.convert(BertForMaskedLM(config).to(DEVICE).eval(), prefer="memory", capture=capture), []
        for kind in ["few"] * 6 + ["half", "all", "none"] * 4 + ["few", "half"]:
            model.zero_grad()
            loss = model(ids, labels=_few(ids, kind)).loss
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        results.append(seen)
    for a, b in zip(*results, strict=True):  # summed over other lengths
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
    ((*pairs,),) = (kind.pairs for kind in vars(model)["_hfnn_capture"]._kinds.values())
    assert len(pairs) == captured.VARIANTS
