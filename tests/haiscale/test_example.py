"""examples/train_gpt.py --dist: the losses of one process, in each layout and from each to the next."""

import json
import sys
from pathlib import Path

import pytest
import torch

import haiscale

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

TESTS = Path(__file__).parents[1]
TINY = ["--layers", "4", "--width", "32", "--heads", "2", "--seq", "32", "--batch", "4", "--device", "cpu"]
TINY += ["--dropout", "0", "--nproc", "2"]
PLAIN, HFNN = "plain", "hfnn"
# Each continues the previous one, up to this step.
CHAIN = {
    "ddp": (["--dist", "ddp"], 2),
    "1f1b": (["--dist", "pipeline", "--microbatches", "2"], 4),
    "fsdp": (["--dist", "fsdp"], 6),
    "zbv": (["--dist", "pipeline", "--schedule", "zbv"], 8),
}

# Warnings of transformers and matplotlib.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def script():
    """train_gpt.py as a module, as in tests/test_examples.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [p for p in sys.path if Path(p).resolve() != TESTS.parent])
        for folder in (TESTS / "workers", TESTS.parent / "examples"):
            patch.syspath_prepend(folder)
        import train_gpt

        yield train_gpt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def found(script, folder):
    """What each layout of the chain wrote, and one process."""
    import example_ranks
    from gpt import Run, batch

    trainings, before = [], None
    for name, (options, steps) in CHAIN.items():
        own = [*options, "--steps", str(steps), "--save", str(folder / name), "--out", str(folder)]
        args, _ = script.parse([*TINY, *own] if before is None else [*own, "--nproc", "2", "--resume", before])
        before = str(folder / name)
        script.write(
            f"{before}/settings.json", lambda file, a=args: file.write(json.dumps(script.description(a)).encode())
        )
        trainings.append((args, len(trainings) > 0, f"{before}.json"))
    haiscale.spawn(example_ranks.chain, 2, args=(trainings,))
    run, args = Run(PLAIN, trainings[0][0]), trainings[0][0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(8):
        run.step(batch(args, step))
    torch.set_num_threads(threads)
    return {"alone": run.losses} | {name: json.loads((folder / f"{name}.json").read_text()) for name in CHAIN}


@pytest.mark.parametrize("name", [PLAIN, HFNN])
@pytest.mark.parametrize("layout", CHAIN)
@pytest.mark.rest
def test_losses_are_those_of_one_process(found, layout, name):
    """Each continues from the checkpoint of another layout, so the losses cover all steps."""
    losses = found[layout][name]["losses"]
    assert len(losses) == CHAIN[layout][1] == len(found[layout][name]["ms"])
    assert losses == pytest.approx(found["alone"][: len(losses)], abs=2e-5)


BAD = {
    "--dist ddp --nproc 0": "--nproc takes a whole number from 1, got 0",
    "--dist ddp --nproc 3": "--batch 4 does not split into parts for 3 replicas",
    "--dist pipeline --nproc 4 --stages 3": "--nproc 4 does not split into pipelines of --stages 3",
    "--dist fsdp --compile": "--compile goes with --dist ddp, not with fsdp",
    "--dist pipeline --schedule 2f2b": "--schedule: invalid choice",
    "--dist fsdp --seed 1 --resume zbv": "was made with seed 0, asked for 1",
    "--dist ddp --resume alone.pt": "alone.pt is of a run without --dist",
    "--dist ddp --resume empty": "empty/settings.json: No such file",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gives_one_line(script, found, folder, monkeypatch, capsys, arguments):
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir(exist_ok=True)
    alone = json.loads((folder / "zbv" / "settings.json").read_text()) | {"runs": {}}
    torch.save(alone | {"settings": alone["settings"] | {"dist": None}}, folder / "alone.pt")
    tiny = [] if "--resume" in arguments else TINY
    with pytest.raises(SystemExit) as stop:
        script.parse([*tiny, *arguments.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and BAD[arguments] in error
