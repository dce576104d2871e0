"""haiscale.fsdp on two and four CPU ranks. tests/workers/fsdp.py describes the cases.

Losses, gradients and parameters are bitwise those of torch's fully_shard on the same backend: both average with the
same reductions in a fixed order. Features beyond fully_shard are compared with the unwrapped model.
"""

from pathlib import Path

import pytest
import ranks
import torch

WORKERS = Path(__file__).parents[1] / "workers"


def check(results, least):
    """Asserts that there is no error, with one line per rank and case, and at least `least` cases."""
    said = [(rank, name, text) for rank, found in enumerate(results) for name, text in found.items()]
    wrong = [f"rank {rank}, {name}: {text}" for rank, name, text in said if isinstance(text, str)]
    assert not wrong, "\n".join(wrong)
    assert all(len(found) >= least for found in results)


@pytest.mark.slow
def test_on_two_ranks(tmp_path):
    check(ranks.run(WORKERS / "fsdp.py", "cases", 2, tmp_path, timeout=300), 41)


@pytest.mark.rest
def test_on_four_ranks_and_predicted(tmp_path):
    results = ranks.run(WORKERS / "fsdp.py", "cases", 4, tmp_path, timeout=180)
    check(results, 6)
    check_prediction(results[0]["measured"], **results[0]["predicted"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "names",
    [
        "zero1 zero2 zero3 zero3_mixed low_reduction untied",
        "accumulate_mixed clipped unused frozen in_backward",
        "gpt2 gpt2_converted llama llama_converted norms_alone",
        "checkpoints offload states again",
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "hfreduce"])
def test_on_two_gpus(backend, names, tmp_path):
    """Also on NCCL, because the sum of two is the same in either order."""
    options = {"names": names.split(), "backend": backend, "gpus": True, "env": {"FSDP_DEVICE": "cuda"}}
    found = ranks.run(WORKERS / "fsdp.py", "cases", 2, tmp_path, timeout=280, **options)
    check(found, len(names.split()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_memory_of_a_step_on_gpus_is_predicted(tmp_path):
    """As the allocator counts it, with cuBLAS's workspace."""
    for measured, predicted in ranks.run(
        WORKERS / "fsdp.py", "peak_on_gpus", torch.cuda.device_count(), tmp_path, timeout=120, gpus=True
    ):
        assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_the_memory_of_a_converted_model_is_predicted(tmp_path):
    for measured, predicted in ranks.run(WORKERS / "fsdp.py", "peak_of_converted", 2, tmp_path, timeout=240):
        assert predicted == pytest.approx(measured, rel=0.03)


def check_prediction(measured, **predicted):
    """Compared with what one of four real ranks held, counted byte by byte."""
    guess, many, replicated = predicted["4"], predicted["64"], predicted["16 times 4"]
    for name in ("parameters", "gradients", "states", "communication"):
        assert guess[name] == measured[name] > 0, name
    assert guess["peak"] == pytest.approx(measured["peak"], rel=0.02)
    assert guess["rest"] == pytest.approx(measured["rest"], rel=0.05)
    assert many["parameters"] < guess["parameters"] / 7 and many["ranks"] == 64
    assert replicated["parameters"] == guess["parameters"]


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named(tmp_path):
    """In the all-gather that waits for it, or in backward. The next call repeats the error at once."""
    found = ranks.run(WORKERS / "fsdp_faults.py", "scenarios", 2, tmp_path, timeout=90)[0]
    assert len(found) == 4
    for scenario, (seconds, *errors) in found.items():
        assert len(errors) == 2 and all("rank 1" in error for error in errors), (scenario, errors)
        if scenario.startswith("SIGKILL"):
            assert float(seconds) < 1.9 and "has died" in errors[0], (scenario, seconds, errors[0])
        else:
            assert float(seconds) < 12 and "waiting for rank 1" in errors[0], (scenario, seconds, errors[0])
