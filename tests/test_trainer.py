"""transformers.Trainer, unmodified, on a converted model: it trains, evaluates and scores as with the plain one.

A converted run of 200 steps is judged as in examples/train_gpt.py: its losses lie in a band around a plain run's. The
band is as wide as the differences between correct runs. These differ in their seeds (order of the data and dropout
masks) or, for a narrower band, only in their dropout masks.
"""

import statistics
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from played_graphs import played

import hfnn
from hfnn.deferred.logits import Deferred

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("default")  # warnings of transformers and accelerate

SEQ, STEPS, SEEDS = 64, 200, (0, 1, 2)
LAST = 10  # losses of single batches scatter, so the first and the last loss are means of this many steps
SHAPE = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": SEQ, "attn_pdrop": 0.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The model is tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows():
    """Bytes of the standard library's sources, in rows of SEQ."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths)[: 2200 * SEQ], np.uint8)
    tokens = torch.from_numpy(text[: len(text) // SEQ * SEQ].copy()).long().view(-1, SEQ)
    return [{"input_ids": row, "labels": row} for row in tokens]


def build(dropout: float, converted: bool):
    """The same random weights each time."""
    torch.manual_seed(0)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **drop))
    return hfnn.convert(model, prefer="memory") if converted else model


def trainer(model, rows, tmp_path, seed=0, steps=STEPS, **how):
    arguments = {
        "output_dir": str(tmp_path),
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "warmup_steps": 10,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": seed,
    }
    settings = {key: how.pop(key) for key in list(how) if hasattr(transformers.TrainingArguments, key)}
    args = transformers.TrainingArguments(**arguments | settings)
    return transformers.Trainer(model=model, args=args, train_dataset=rows, **how)


def losses(run) -> list[float]:
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def gaps(a, b) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


@pytest.fixture
def calls(monkeypatch):
    """One entry per call of linear_cross_entropy."""
    seen, function = [], hfnn.functional.linear_cross_entropy

    def counted(*args, **kwargs):
        seen.append(1)
        return function(*args, **kwargs)

    monkeypatch.setattr(hfnn.functional, "linear_cross_entropy", counted)
    return seen


@pytest.mark.rest
def test_losses_lie_in_the_band_of_seeds(rows, tmp_path, calls):
    plain = [losses(trainer(build(0.1, converted=False), rows, tmp_path, seed)) for seed in SEEDS]
    masks = losses(trainer(build(0.1, converted=False), rows, tmp_path, seed=3, data_seed=SEEDS[0]))
    assert not calls
    found = losses(trainer(build(0.1, converted=True), rows, tmp_path, seed=SEEDS[0]))
    assert len(found) == len(calls) == STEPS
    gap, between = gaps(plain[0], found), [gaps(plain[0], other) for other in plain[1:]]
    assert max(gap) <= max(map(max, between)), "outside the band of seeds"
    assert statistics.fmean(gap) <= min(map(statistics.fmean, between))
    # Correct runs on the same batches are closer. hfnn's masks are not torch's, so the band is not of width 0.
    assert statistics.fmean(gap) <= max(gaps(plain[0], masks)), "outside the band of dropout masks"
    for run in (*plain, found):
        assert statistics.fmean(run[-LAST:]) < statistics.fmean(run[:LAST]) - 1  # it learns


def test_without_dropout_only_rounding_differs(rows, tmp_path, calls):
    plain, found = (losses(trainer(build(0.0, converted), rows, tmp_path, steps=60)) for converted in (False, True))
    assert max(gaps(plain, found)) <= 1e-4 and len(calls) == 60


def test_accumulation_and_label_smoothing(rows, tmp_path):
    """num_items_in_batch counts all accumulated batches. With smoothing, Trainer computes the loss itself."""
    for how in ({"gradient_accumulation_steps": 3}, {"label_smoothing_factor": 0.1}, {"bf16": True}):
        runs = [losses(trainer(build(0.0, converted), rows, tmp_path, steps=6, **how)) for converted in (False, True)]
        assert max(gaps(*runs)) <= (2e-2 if "bf16" in how else 1e-4), (how, runs)


def test_evaluation(rows, tmp_path):
    """Metrics get the plain model's logits; where nothing asks for logits, none are computed."""

    def metrics(prediction):
        logits, labels = prediction
        assert isinstance(logits, np.ndarray) and logits.shape == (*labels.shape, 256)
        return {"accuracy": (logits[:, :-1].argmax(-1) == labels[:, 1:]).mean(), "mean": logits.mean()}

    scores, computed = [], []
    for converted in (False, True):
        how = {"eval_dataset": rows[:40], "eval_strategy": "steps", "eval_steps": 5, "compute_metrics": metrics}
        run = trainer(build(0.0, converted), rows, tmp_path, steps=5, **how)
        run.train()
        (score,) = [entry for entry in run.state.log_history if "eval_accuracy" in entry]
        scores.append([score[key] for key in ("eval_loss", "eval_accuracy", "eval_mean")])
        assert run.predict(rows[:3]).predictions.shape == (3, SEQ, 256)
        run.compute_metrics = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Deferred, "computed", lambda self: computed.append(self))
            scores[-1].append(run.evaluate()["eval_loss"])
    assert scores[1] == pytest.approx(scores[0], rel=1e-4) and not computed


def test_signature_columns(rows, tmp_path):
    """Trainer keeps the columns that forward names, and checks whether forward takes num_items_in_batch."""
    runs = [trainer(build(0.0, converted), rows, tmp_path) for converted in (False, True)]
    for run in runs:
        run._set_signature_columns_if_needed()
    assert runs[0]._signature_columns == runs[1]._signature_columns
    assert runs[0].model_accepts_loss_kwargs == runs[1].model_accepts_loss_kwargs
    assert runs[0].label_names == runs[1].label_names and runs[0].can_return_loss == runs[1].can_return_loss


# A captured model


def _sentences(count: int, seed: int):
    """Rows of different lengths, each with a class."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(5, 64, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": sum(row) % 2} for row in ids]


def _padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {
        key: torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows])
        for key in ("input_ids", "attention_mask")
    }
    return {**filled, "labels": torch.tensor([row["labels"] for row in rows])}


def _classifier(capture: bool):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, vocab_size=64, max_position_embeddings=16)
    return hfnn.convert(transformers.BertForSequenceClassification(config), prefer="memory", capture=capture)


def _story(tmp_path, capture: bool):
    """A run's log, with evaluation, saving, resumption, gradient clipping and accumulation; and its replay counts."""
    how = {
        "steps": 24,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "save_strategy": "steps",
        "save_steps": 8,
        "gradient_accumulation_steps": 2,
        "eval_dataset": _sentences(16, 2),
        "data_collator": _padded,
    }
    run = trainer(_classifier(capture), _sentences(96, 1), tmp_path, **how)
    run.train()
    again = trainer(_classifier(capture), _sentences(96, 1), tmp_path, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    keys = ("loss", "eval_loss", "grad_norm")
    said = [[(e["step"], k, e[k]) for e in r.state.log_history for k in keys if k in e] for r in (run, again)]
    replays = [vars(r.model)["_hfnn_capture"].counts["replayed"] for r in (run, again)] if capture else None
    return said, replays, run


def test_a_captured_model_logs_what_it_logs_otherwise(tmp_path):
    """Played graphs on the CPU: results are bitwise equal."""
    with played():
        plain, _, _ = _story(tmp_path / "plain", False)
        ours, replays, run = _story(tmp_path / "captured", True)
    assert ours == plain
    assert min(replays) > 0, vars(run.model)["_hfnn_capture"].report()


@pytest.mark.parametrize("choice", ["stock", "converted"])
def test_tune_callback(rows, tmp_path, monkeypatch, choice):
    """The tuned model trains as it would have without: on the same rows, from the same weights."""
    from hfnn.adapters.trainer import TuneCallback

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hfnn.tuning.run.best", lambda rows, steps: choice)
    plain = losses(trainer(build(0.0, False), rows, tmp_path, steps=5))
    model = build(0.0, False)
    callback = TuneCallback(among=["converted"], budget=100)
    tuned = losses(trainer(model, rows, tmp_path, steps=5, callbacks=[callback]))
    assert hfnn.report(model).tuned == f"tuned: {choice}, for 5 steps"
    assert tuned == (plain if choice == "stock" else pytest.approx(plain, rel=1e-4))


def test_tune_callback_leaves_what_it_cannot_tune(rows, tmp_path, caplog):
    from hfnn.adapters.trainer import TuneCallback

    model = build(0.0, True)
    assert losses(trainer(model, rows, tmp_path, steps=2, callbacks=[TuneCallback()]))
    assert hfnn.report(model).tuned is None and "the model is not tuned: takes the model as torch has it" in caplog.text
