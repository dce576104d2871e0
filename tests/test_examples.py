"""examples/train_gpt.py: its output, bit-exact resumption, and its messages for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

import hfrecord

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--seq", "32", "--batch", "2", "--device", "cpu"]
PLAIN, OTHER, HFNN = "plain", "plain again", "hfnn"

# Warnings of transformers and matplotlib.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def script(examples):
    """The script as a module: transformers is imported once for all tests."""
    return ranks.loaded(examples / "train_gpt.py")


@pytest.fixture
def train(script, tmp_path, monkeypatch):
    """train(*arguments) runs the tiny model in an empty folder and returns the JSON that it wrote."""
    monkeypatch.chdir(tmp_path)

    def train(*arguments):
        script.main([*TINY, *map(str, arguments)])
        return json.loads(Path("out/train_gpt.json").read_text())

    return train


def test_runs_as_a_program(tmp_path):
    command = [sys.executable, SCRIPT, *TINY, "--steps", "4"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "ms per step" in done.stdout and "the band" in done.stdout
    assert (tmp_path / "out/train_gpt.png").read_bytes().startswith(b"\x89PNG")


def test_tune(train, tmp_path, monkeypatch, capsys):
    """The fastest mode measured trains, and learns what a plain model learns."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = train("--tune", "--steps", 4, "--no-band", "--dropout", 0)["runs"]
    assert "of stock" in capsys.readouterr().out
    assert runs[HFNN]["losses"] == pytest.approx(runs[PLAIN]["losses"], rel=1e-5)


@pytest.mark.parametrize(("arch", "at_most"), [("gpt2", 21), ("llama", 45)])
def test_result(train, arch, at_most):
    result = train("--arch", arch, "--steps", 4)
    assert set(result["runs"]) == {PLAIN, OTHER, HFNN}
    for run in result["runs"].values():
        assert len(run["losses"]) == len(run["ms"]) == 4
        assert all(4 < loss < 7 for loss in run["losses"])  # log(256) is 5.5
        assert run["tokens_per_s"] == pytest.approx(2 * 32 / run["median_ms"] * 1000)
        assert run["peak_bytes"] > run["activation_bytes"] > 0
        assert run["layer_u"] == pytest.approx(sum(run["layer_u_by_op"].values()))
    plain, hfnn = result["runs"][PLAIN], result["runs"][HFNN]
    assert hfnn["layer_u"] < at_most < plain["layer_u"]
    assert hfnn["activation_bytes"] < plain["activation_bytes"] and hfnn["peak_bytes"] < plain["peak_bytes"]
    assert plain["largest_gap"] == 0 < result["band"]["half_width"]
    assert result["settings"]["arch"] == arch


def test_without_dropout_only_rounding_differs(train):
    runs = train("--dropout", 0, "--steps", 4)["runs"]
    assert runs[HFNN]["largest_gap"] < 1e-4 and runs[OTHER]["largest_gap"] < 1e-4


def test_plain_only(train):
    result = train("--no-convert", "--steps", 2, "--dtype", "bfloat16")
    assert set(result["runs"]) == {PLAIN} and result["band"] is None


def test_resumes_bit_for_bit(train):
    train("--steps", 6, "--save", "straight.pt")
    train("--steps", 3, "--save", "half.pt")
    result = train("--resume", "half.pt", "--steps", 6, "--save", "resumed.pt")
    straight, resumed = (torch.load(name, weights_only=True)["runs"] for name in ("straight.pt", "resumed.pt"))
    assert set(straight) == {PLAIN, OTHER, HFNN}
    for name, run in straight.items():
        assert run["losses"] == resumed[name]["losses"] == result["runs"][name]["losses"]
        assert same(run["model"], resumed[name]["model"]) and same(run["random"], resumed[name]["random"])
        assert same(run["optimizer"], resumed[name]["optimizer"])
    assert not list(Path().glob("*.tmp"))


def same(a, b) -> bool:
    """Whether two nested structures of dicts, lists, tuples and tensors are bitwise equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_data(script, tmp_path):
    """Files of a folder are read in order of their names, without binary files. A step's batch depends on the step
    alone."""
    (tmp_path / "b.txt").write_text("b" * 40)
    (tmp_path / "a.txt").write_text("a" * 40)
    (tmp_path / "c.bin").write_bytes(bytes(40))
    args, _ = script.parse([*TINY, "--data", str(tmp_path), "--out", str(tmp_path)])
    assert bytes(args.text) == b"a" * 40 + b"b" * 40
    assert script.batch(args, 5).shape == (2, 32)
    assert torch.equal(script.batch(args, 5), script.batch(args, 5))


def test_records_go_on_in_the_middle_of_an_epoch(train, script, tmp_path):
    """13 records in batches of 2: the epoch ends within the seventh step."""
    with hfrecord.DatasetWriter(tmp_path / "set", {"input_ids": "uint8[?]"}) as writer:
        for number in range(13):
            writer.write({"input_ids": np.full(32 + number, 65 + number, np.uint8)})
    data = ["--data", "records:set"]
    train(*data, "--steps", 8, "--save", "straight.pt")
    train(*data, "--steps", 3, "--save", "half.pt")
    train("--resume", "half.pt", "--steps", 8, "--save", "resumed.pt")
    straight, resumed = (torch.load(name, weights_only=True)["runs"] for name in ("straight.pt", "resumed.pt"))
    assert all(same(run["model"], resumed[name]["model"]) for name, run in straight.items())
    args, _ = script.parse([*TINY, *data])
    seen = [int(row[0]) - 65 for step in range(7) for row in script.batch(args, step)]
    assert sorted(seen[:13]) == list(range(13))


BAD = {
    "--data records:missing": "--data records:missing: ",
    "--data records:folder": "no .hfr or .ffr file",
    "--dtype float8": "--dtype: invalid choice",
    "--arch bert": "--arch: invalid choice",
    "--steps -3": "--steps takes a whole number from 1, got -3",
    "--steps many": "--steps: invalid int value",
    "--batch 0": "--batch takes a whole number from 1, got 0",
    "--dropout 1": "--dropout takes a number from 0 up to 1, got 1.0",
    "--width 30 --heads 4": "--width 30 does not split",
    "--arch llama --width 6 --heads 2": "--width 6 does not split into even parts",
    "--device abacus": "--device abacus: ",
    "--data missing.txt": "--data missing.txt: No such file",
    "--data empty.txt": "--data empty.txt: 0 bytes of text there, takes more than --seq 32",
    "--data binary.bin": "--data binary.bin: 0 bytes of text there",
    "--data folder": "--data folder: 0 bytes of text there",
    "--out empty.txt/out": "--out empty.txt/out: Not a directory",
    "--save empty.txt/ckpt.pt": "--save empty.txt: ",
    "--resume missing.pt": "--resume missing.pt: No such file",
    "--resume binary.bin": "--resume binary.bin: not a checkpoint of this script",
    "--resume tensor.pt": "--resume tensor.pt: not a checkpoint of this script",
    "--frobnicate": "unrecognized arguments: --frobnicate",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gives_one_line(script, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "folder").mkdir()
    torch.save(torch.zeros(2), "tensor.pt")
    with pytest.raises(SystemExit) as stop:
        script.main([*TINY, *arguments.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and BAD[arguments] in error


def test_resuming_something_else_is_refused(train, capsys):
    train("--no-convert", "--steps", 2, "--save", "ckpt.pt")
    for arguments, why in (
        (["--steps", "2"], "--steps 2: ckpt.pt has 2 of them already"),
        (["--steps", "4", "--seed", "1"], "ckpt.pt was made with seed 0, asked for 1"),
        (["--steps", "4", "--arch", "llama"], "ckpt.pt was made with arch gpt2, asked for llama"),
    ):
        with pytest.raises(SystemExit) as stop:
            train("--resume", "ckpt.pt", *arguments)
        assert stop.value.code == 2 and why in capsys.readouterr().err
