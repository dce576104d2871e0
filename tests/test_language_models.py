"""transformers' language models with labels: the same loss and gradients without logits, which are computed if read."""

import copy
import inspect
import io
import pickle
import threading
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hfnn
from hfnn.deferred.logits import Deferred
from hfnn.testing import GRADIENTS, error

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings

VOCABULARY, BATCH, SEQ = 257, 16, 40
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = SIZES | TOKENS | {"max_position_embeddings": 64}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
BART = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in LAYERS.items()}
BART |= {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64}

# model -> (config, arguments)
MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2 | {"bos_token_id": 1, "eos_token_id": 2}),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "Gemma2ForCausalLM": ("Gemma2Config", DECODER | {"final_logit_softcapping": 0.5}),
    "CohereForCausalLM": ("CohereConfig", DECODER | {"logit_scale": 3.0}),
    "GraniteForCausalLM": ("GraniteConfig", DECODER | {"logits_scaling": 0.5}),
    "BertForMaskedLM": ("BertConfig", ENCODER),
    "RobertaForMaskedLM": ("RobertaConfig", ENCODER),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"decoder_start_token_id": 0}),
    "BartForConditionalGeneration": ("BartConfig", BART),
}
CAUSAL = "LlamaForCausalLM"


def build(name):
    config, arguments = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**arguments)).eval()


def pair(name=CAUSAL, **how):
    """(the model, its converted copy)"""
    plain = build(name)
    if hasattr(plain, "final_logits_bias"):
        plain.final_logits_bias.copy_(torch.linspace(-1, 1, VOCABULARY))
    return plain, hfnn.convert(copy.deepcopy(plain), **{"prefer": "memory", **how})


def batch(seq=SEQ):
    ids = torch.randint(3, VOCABULARY, (BATCH, seq), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :7] = -100
    return {"input_ids": ids, "labels": labels}


def untouched(out) -> bool:
    return type(out.logits) is Deferred and out.logits._value is None


def gradients(loss, model):
    """By name; a tied parameter once."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, grads, strict=True) if g is not None}


def flat(grads):
    return torch.cat([g.double().view(-1) for g in grads.values()])


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor with memory that any op returns."""

    def __init__(self):
        super().__init__()
        self.numel, self.hfnn_runs = 0, True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.numel = max(self.numel, t.numel())
        return result


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_logits(name):
    (plain, model), inputs = pair(name), batch()
    wanted, found = plain(**inputs), model(**inputs)
    torch.testing.assert_close(found.loss, wanted.loss)
    ours, theirs = gradients(found.loss, model), gradients(wanted.loss, plain)
    assert untouched(found) and list(found.keys()) == list(wanted.keys())
    assert ours.keys() == theirs.keys()
    for parameter, g in theirs.items():
        torch.testing.assert_close(ours[parameter], g, rtol=1e-4, atol=1e-6)
    for what in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(found.logits, what) == getattr(wanted.logits, what)
    assert untouched(found)
    torch.testing.assert_close(found.logits + 0, wanted.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision(name, how):
    """Dtypes are the same, and errors against float64 are about as large as torch's."""
    (plain, model), inputs = pair(name), batch()
    exact = copy.deepcopy(plain).double()
    results = []
    for m in (plain, model):
        m = m.bfloat16() if how == "bfloat16" else m
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            results.append(m(**inputs))
    wanted, found = results
    assert untouched(found) and found.loss.dtype is wanted.loss.dtype and found.logits.dtype is wanted.logits.dtype
    reference = exact(**inputs)
    allowed = max(abs(wanted.loss.item() - reference.loss.item()), 2e-3 * reference.loss.item())
    assert abs(found.loss.item() - reference.loss.item()) <= 2 * allowed
    ours, theirs = gradients(found.loss, model), gradients(wanted.loss, plain)
    assert all(ours[n].dtype is theirs[n].dtype for n in theirs)
    truth = flat(gradients(reference.loss, exact))
    ours, theirs = error(flat(ours), truth), error(flat(theirs), truth)
    assert ours.within(theirs, torch.bfloat16, GRADIENTS), (ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_no_logits_are_made(name):
    (plain, model), inputs = pair(name), batch()
    sizes = []
    for m in (plain, model):
        with Largest() as largest:
            m(**inputs).loss.backward()
        sizes.append(largest.numel)
    assert sizes[1] <= BATCH * SEQ * VOCABULARY / 2 and sizes[0] >= BATCH * SEQ * VOCABULARY


def test_no_logits_are_made_without_grad():
    model, inputs = pair()[1], batch()
    with Largest() as largest, torch.no_grad():
        model(**inputs)
    assert largest.numel <= BATCH * SEQ * VOCABULARY / 2


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_nothing_but_ignored_labels(name):
    """A mean over no labels is NaN, as in torch."""
    (plain, model), inputs = pair(name), batch()
    inputs["decoder_input_ids" if name.startswith("T5") else "input_ids"] = inputs["input_ids"]
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    assert plain(**inputs).loss.isnan() and model(**inputs).loss.isnan()


@pytest.mark.parametrize(
    "how",
    [{"num_items_in_batch": n} for n in (100, torch.tensor(100), torch.tensor([100]))]
    + [{"shift_labels": batch()["labels"].roll(-1, 1)}, {"logits_to_keep": slice(None)}],
)
def test_arguments_of_the_loss(how):
    plain, model = pair()
    wanted, found = plain(**batch(), **how).loss, model(**batch(), **how)
    assert untouched(found) and found.loss.shape == wanted.shape
    torch.testing.assert_close(found.loss, wanted)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "BartForConditionalGeneration"])
@pytest.mark.parametrize("what", ["both", "logits"])
def test_gradients_through_logits(name, what):
    (plain, model), inputs = pair(name), batch()
    grads = []
    for m in (plain, model):
        out = m(**inputs)
        loss = out.logits.float().softmax(-1).square().sum(-1).mean()
        grads.append(gradients(loss + out.loss if what == "both" else loss, m))
    for parameter in grads[0]:
        torch.testing.assert_close(grads[1][parameter], grads[0][parameter], rtol=1e-4, atol=1e-6)


def test_weights_have_changed():
    """Logits that were not read before an optimizer's step are those before it. If anything else writes, an error."""
    model, inputs = pair()[1], batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    read, unread = model(**inputs), model(**inputs)
    before = read.logits.detach().clone()
    unread.loss.backward()
    optimizer.step()
    assert "not computed" in repr(unread.logits)
    for output in (read, unread):
        assert torch.equal(output.logits.detach() + 0, before)
    unread = model(**inputs)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"the weights have changed since"):
        unread.logits.argmax(-1)
    with pytest.raises(RuntimeError, match=r"Read output\.logits between forward and the change"):
        pickle.dumps(unread)
    assert "not computed" in repr(unread.logits) and unread.loss.item() > 0


def test_output_object():
    (plain, model), inputs = pair(), batch()
    with torch.no_grad():
        wanted, out = plain(**inputs).logits, model(**inputs)
        assert out.to_tuple()[1] is out[1] is out["logits"] is out.logits and untouched(out)
        loss, logits, *_ = model(**inputs, return_dict=False)
        assert loss.equal(out.loss) and type(logits) is Deferred
        file = io.BytesIO()
        torch.save(dict(out), file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        for copied in (pickle.loads(pickle.dumps(model(**inputs))), copy.deepcopy(model(**inputs))):
            assert type(copied) is type(out) and type(copied.logits) is torch.Tensor
            torch.testing.assert_close(copied.logits, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(saved["logits"], wanted, rtol=1e-4, atol=1e-5)
        out.logits = out.logits * 2
        torch.testing.assert_close(out[1] + 0, 2 * wanted, rtol=1e-4, atol=1e-5)


def test_without_labels():
    """Nothing is deferred that cannot have a loss; generate draws the same tokens."""
    (plain, model), inputs = pair(), batch()
    assert type(torch.no_grad()(model)(inputs["input_ids"]).logits) is torch.Tensor
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = [m.generate(inputs["input_ids"][:2, :4], **arguments) for m in (plain, model)]
    assert torch.equal(*tokens)


def test_labels_by_position():
    (plain, model), inputs = pair(), batch()
    place = list(inspect.signature(plain.forward).parameters).index("labels")
    found = model(inputs["input_ids"], *[None] * (place - 1), inputs["labels"])
    assert untouched(found)
    torch.testing.assert_close(found.loss, plain(**inputs).loss)


def test_class():
    """What other code reads of the class is unchanged, and revert undoes the conversion."""
    plain, model = pair()
    cls = type(plain)
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__ and isinstance(model.lm_head, nn.Linear)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(cls.forward)
    assert model.config is not None and list(model.state_dict()) == list(plain.state_dict())
    rows = {row.name: row for row in hfnn.report(model).rows}
    assert rows[""].to == "hfnn linear_cross_entropy" and "when labels are given" in rows[""].why
    assert rows["lm_head"].to == "hfnn.Linear" and rows["lm_head"].original == "torch.Linear"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and untouched(other(**batch()))
    assert type(hfnn.convert(model)) is type(model)
    assert type(hfnn.revert(model)) is cls and type(model.lm_head) is nn.Linear
    assert type(model(**batch()).logits) is torch.Tensor


def test_save_and_load(tmp_path):
    plain, model = pair()
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert type(loaded) is type(plain) and loaded.config.architectures == ["LlamaForCausalLM"]
    torch.testing.assert_close(loaded(**batch()).loss, model(**batch()).loss)
    assert untouched(hfnn.convert(loaded, prefer="memory")(**batch()))


def test_gradient_checkpointing():
    (plain, model), inputs = pair(), batch()
    wanted = gradients(plain(**inputs).loss, plain)
    # The older name warns where the newer one exists.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    found = gradients(model(**inputs).loss, model)
    for parameter in wanted:
        torch.testing.assert_close(found[parameter], wanted[parameter], rtol=1e-4, atol=1e-6)


def test_head_of_patched_torch():
    """The head is hfnn's already."""
    plain = build(CAUSAL)
    hfnn.convert(plain.lm_head)
    assert hfnn.is_converted(plain.lm_head) and untouched(hfnn.convert(plain, prefer="memory")(**batch()))
    assert type(hfnn.revert(plain).lm_head) is nn.Linear


class OtherLinear(nn.Linear):
    pass


class TestComputedAtOnce:
    """Cases that need the logits, or whose product is not a plain one."""

    def logits(self, model):
        out = model(**batch())
        torch.testing.assert_close(out.loss, build(CAUSAL)(**batch()).loss)
        return out.logits

    def test_hook_on_the_head(self):
        model, seen = pair()[1], []
        handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(type(out)))
        assert type(self.logits(model)) is torch.Tensor and seen == [torch.Tensor]
        handle.remove()
        assert type(self.logits(model)) is Deferred
        model.lm_head.register_full_backward_hook(lambda *_: seen.append("backward"))
        self.logits(model).sum().backward()
        assert seen[-1] == "backward"

    def test_forward_on_the_head(self):
        model = pair()[1]
        forward = model.lm_head.forward
        model.lm_head.forward = lambda x: forward(x)
        assert type(self.logits(model)) is torch.Tensor

    def test_another_head(self):
        model = build(CAUSAL)
        model.lm_head.__class__ = OtherLinear
        hfnn.convert(model, prefer="memory")
        assert type(self.logits(model)) is torch.Tensor
        assert not [row for row in hfnn.report(model).swapped if row.name == ""]

    def test_new_head(self):
        model = pair()[1]
        new = nn.Linear(32, VOCABULARY, bias=False)
        new.weight.data.copy_(model.lm_head.weight.data)
        model.set_output_embeddings(new)
        assert type(self.logits(model)) is torch.Tensor
        (row,) = [row for row in hfnn.report(model).rows if row.name == ""]
        assert row.why == "never: its output embedding is not converted"
        assert type(self.logits(hfnn.convert(model, prefer="memory"))) is Deferred

    def test_head_skipped(self):
        assert type(self.logits(pair(skip="lm_head")[1])) is torch.Tensor

    def test_replica_of_data_parallel(self):
        model = pair()[1]
        model._is_replica = model.lm_head._is_replica = True
        assert type(self.logits(model)) is torch.Tensor

    def test_torch_was_asked_for(self):
        with hfnn.use("torch"):
            assert type(self.logits(pair()[1])) is torch.Tensor

    def test_few(self):
        """Fewer than linear_cross_entropy is worthwhile for: torch would make and keep them anyway."""
        model = pair(prefer="auto")[1]
        assert type(self.logits(model)) is torch.Tensor
        rows = hfnn.ops.head.WORTH_LOGITS // VOCABULARY // SEQ
        ids = torch.randint(3, VOCABULARY, (rows, SEQ))
        assert type(model(input_ids=ids, labels=ids).logits) is torch.Tensor
        ids = torch.randint(3, VOCABULARY, (rows + 1, SEQ))
        assert type(model(input_ids=ids, labels=ids).logits) is Deferred

    def test_compiled(self):
        model = pair()[1]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert type(self.logits(compiled)) is torch.Tensor


def test_threads():
    """One thread's labels do not defer another thread's logits."""
    model, inputs, found = pair()[1], batch(), []

    def without_labels():
        found.append(type(torch.no_grad()(model)(inputs["input_ids"]).logits))

    hook = model.model.register_forward_hook(lambda *_: start())

    def start():
        hook.remove()
        thread = threading.Thread(target=without_labels)
        thread.start()
        thread.join()

    assert untouched(model(**inputs)) and found == [torch.Tensor]


def test_accelerate():
    """Under mixed precision accelerate wraps forward and casts outputs to float32."""
    operations = pytest.importorskip("accelerate.utils.operations")
    (plain, model), inputs = pair(), batch()
    results = []
    for m in (plain, model):
        forward = torch.autocast("cpu", torch.bfloat16)(m.forward)
        results.append(operations.convert_outputs_to_fp32(forward)(**inputs))
    assert untouched(results[1]) and results[1].logits.dtype is torch.float32
    torch.testing.assert_close(results[1].loss, results[0].loss, rtol=1e-2, atol=0)
    torch.testing.assert_close(results[1].logits + 0, results[0].logits, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.slow
def test_parallelised(way, tmp_path):
    ranks.run(Path(__file__).parent / "workers" / "language_model.py", "main", 2, tmp_path, timeout=120, way=way)
