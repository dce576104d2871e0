"""examples/train_images.py: its output, the images it makes and reads, and its messages for bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

from hfrecord import __main__ as command

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

TINY = ["--layers", "1", "--width", "8", "--size", "16", "--batch", "4", "--device", "cpu"]
PLAIN, OTHER, HFNN = "plain", "plain again", "hfnn"

# Warnings of matplotlib.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def script(examples):
    return ranks.loaded(examples / "train_images.py")


@pytest.fixture
def train(script, tmp_path, monkeypatch):
    """train(*arguments) runs a tiny model in an empty folder and returns the JSON that it wrote."""
    monkeypatch.chdir(tmp_path)

    def train(*arguments):
        script.main([*TINY, *map(str, arguments)])
        assert Path("out/train_images.png").read_bytes().startswith(b"\x89PNG")
        return json.loads(Path("out/train_images.json").read_text())

    return train


@pytest.mark.parametrize(("arch", "at_most"), [("resnet", 0.85), ("vit", 0.75)])
def test_result(train, capsys, arch, at_most):
    result = train("--arch", arch, "--steps", 4)
    assert set(result["runs"]) == {PLAIN, OTHER, HFNN} and result["settings"]["arch"] == arch
    for run in result["runs"].values():
        assert len(run["losses"]) == len(run["ms"]) == 4
        assert all(1 < loss < 5 for loss in run["losses"])  # log(10) is 2.3
        assert run["images_per_s"] == pytest.approx(4 / run["median_ms"] * 1000)
        assert min(run["peak_bytes"], run["activation_bytes"]) > 0
    plain, hfnn = result["runs"][PLAIN], result["runs"][HFNN]
    assert hfnn["activation_bytes"] < at_most * plain["activation_bytes"]
    assert hfnn["peak_bytes"] < plain["peak_bytes"]
    assert plain["largest_gap"] == 0 < result["band"]["half_width"]
    said = capsys.readouterr().out
    assert "ms per step" in said and "the band" in said and "what hfnn keeps" in said


@pytest.mark.parametrize("arch", ["resnet", "vit"])
def test_without_dropout_only_rounding_differs(train, arch):
    """Only few steps, because Adam amplifies the rounding differences of each step."""
    runs = train("--arch", arch, "--dropout", 0, "--steps", 2)["runs"]
    assert runs[HFNN]["largest_gap"] < 1e-4 and runs[OTHER]["largest_gap"] < 1e-4


def test_plain_only(train):
    result = train("--no-convert", "--steps", 2, "--arch", "vit", "--dtype", "bfloat16")
    assert set(result["runs"]) == {PLAIN} and result["band"] is None


def test_a_step_has_its_own_images(script, tmp_path):
    """They depend on seed and step alone. The direction of its stripes tells an image's class."""
    args = script.parse([*TINY, "--batch", "64", "--out", str(tmp_path)])
    pixels, labels = script.batch(args, 3)
    assert pixels.shape == (64, 3, 16, 16) and set(labels.tolist()) == set(range(10))
    assert torch.equal(pixels, script.batch(args, 3)[0]) and not torch.equal(pixels, script.batch(args, 4)[0])
    spectrum = torch.fft.fft2(pixels).abs().sum(1)[:, :9]  # half of the rows: the other half mirrors it
    spectrum[:, 0, 0] = 0
    rows, columns = np.unravel_index(spectrum.flatten(1).argmax(1).numpy(), (9, 16))
    angle = np.arctan2(rows, (columns + 8) % 16 - 8)
    off = np.abs((angle - np.pi * labels.numpy() / 10 + np.pi / 2) % np.pi - np.pi / 2)
    assert np.median(off) < np.pi / 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes of five images, each of one color."""
    root = tmp_path_factory.mktemp("images")
    for label in range(3):
        (root / f"class {label}").mkdir()
        for number in range(5):
            color = (80 * label, 10 * number, 200)
            Image.new("RGB", (20, 12), color).save(root / f"class {label}" / f"{number}.png")
    return root


@pytest.mark.parametrize("kind", ["folder", "records"])
def test_data(train, script, folder, kind):
    data = f"folder:{folder}"
    if kind == "records":
        assert command.main(["convert", str(folder), "set", "--format", "images"]) in (0, None)
        data = "records:set"
    result = train("--data", data, "--steps", 2)
    assert set(result["runs"]) == {PLAIN, OTHER, HFNN}
    args = script.parse([*TINY, "--data", data])
    assert args.classes == 3
    pixels, labels = script.batch(args, 1)
    assert torch.equal(pixels, script.batch(args, 1)[0])
    colors = (pixels * 0.25 + 0.5) * 255
    assert (colors - colors[..., :1, :1]).abs().max() < 1e-3
    assert colors[:, 0, 0, 0].div(80).round().long().tolist() == labels.tolist()


BAD = {
    "--arch bert": "--arch: invalid choice",
    "--steps 0": "--steps takes a whole number from 1, got 0",
    "--heads 0": "--heads takes a whole number from 1, got 0",
    "--dropout 1": "--dropout takes a number from 0 up to 1, got 1.0",
    "--size 30": "--size takes a multiple of 4, got 30",
    "--arch vit --width 10": "--width 10 does not split into parts for --heads 4",
    "--device abacus": "--device abacus: ",
    "--data images": "--data images: takes folder:PATH or records:PATH",
    "--data folder:missing": "--data folder:missing: No such file",
    "--data folder:empty": "--data folder:empty: takes a folder with a folder of images for each class",
    "--data records:missing": "--data records:missing: ",
    "--data records:tokens": "takes records with image and label",
    "--out file/out": "--out file/out: Not a directory",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gives_one_line(script, tmp_path, monkeypatch, capsys, arguments):
    import hfrecord

    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").touch()
    with hfrecord.DatasetWriter("tokens", {"input_ids": "uint8[?]"}) as writer:
        writer.write({"input_ids": np.zeros(4, np.uint8)})
    with pytest.raises(SystemExit) as stop:
        script.main([*TINY, *arguments.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and BAD[arguments] in error
