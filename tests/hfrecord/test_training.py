"""Models train from records with torch's DataLoader, transformers' Trainer, and haiscale's ranks."""

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

import hfrecord

WORKER = Path(__file__).parents[1] / "workers" / "records_ranks.py"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_model_by_torchs_dataloader(tmp_path, one_thread, workers):
    pytest.importorskip("PIL")
    rng = np.random.default_rng(0)
    with hfrecord.DatasetWriter(tmp_path / "set", {"image": "image", "label": "int64"}, part_bytes=8000) as writer:
        for number in range(64):
            pixels = rng.integers(0, 100, (8, 8, 3), np.uint8)
            pixels[:, :, number % 2] += 100
            writer.write({"image": pixels, "label": number % 2})

    dataset = hfrecord.Dataset(tmp_path / "set", _tensors, fields=("image", "label"))
    sampler = hfrecord.ElasticSampler(dataset, 8, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    for _ in range(4):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert len(losses) == 32 and np.mean(losses[-8:]) < 0.5 * np.mean(losses[:4]) and sampler.epoch == 4


def _tensors(sample):
    image, label = sample
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255, label


def test_an_error_of_a_worker_names_the_record(tmp_path):
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for number in range(8):
            writer.write(bytes([number]) * 50)
    data = bytearray(path.read_bytes())
    data[data.index(bytes([5]) * 50)] ^= 1
    path.write_bytes(data)
    loader = torch.utils.data.DataLoader(hfrecord.Dataset(path), 8, num_workers=1, collate_fn=list)
    with pytest.raises(hfrecord.RecordError, match="record 5, byte"):
        next(iter(loader))


@pytest.mark.filterwarnings("default")  # warnings of transformers and accelerate
def test_a_gpt_by_transformers_trainer(tmp_path, one_thread):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    text = np.frombuffer((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[: 32 * 400], np.uint8)
    with hfrecord.FileWriter(tmp_path / "a.hfr", {"input_ids": "int64[32]", "labels": "int64[32]"}) as writer:
        for row in text.reshape(-1, 32):
            writer.write({"input_ids": row, "labels": row})
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=hfrecord.Dataset(tmp_path / "a.hfr"))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 60 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 1


@pytest.mark.rest
def test_two_ranks_of_haiscale_and_then_one(tmp_path):
    path, n = str(tmp_path / "a.hfr"), 90
    with hfrecord.FileWriter(path, {"x": "float32[12]", "label": "int64"}) as writer:
        for number in range(n):
            writer.write({"x": np.eye(12)[number % 12], "label": number})
    two = ranks.run(WORKER, "train", 2, tmp_path / "two", path=path, steps=5)
    assert two[0]["losses"] and two[0]["state"] == two[1]["state"]
    (one,) = ranks.run(WORKER, "train", 1, tmp_path / "one", path=path, state=two[0]["state"])
    turns = itertools.chain(*zip(two[0]["labels"], two[1]["labels"], strict=True))
    order = hfrecord.ElasticSampler(range(n), seed=1).indices(0, np.arange(n)).tolist()
    assert [*turns, *one["labels"]] == order[: 40 + 48]
