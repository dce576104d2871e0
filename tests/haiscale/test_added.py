"""Parameters that are added to a wrapped model, or replace others there, would not be averaged: an error names them."""

from pathlib import Path

import pytest
import ranks

WORKER = Path(__file__).parents[1] / "workers" / "added.py"
NAMES = {
    "inserted": "layers.0.weight (of a Linear); layers.0.bias",
    "appended": "layers.1.weight (of a Linear); layers.1.bias",
    "adapted": "head.1.weight (of a Linear).",
    "given": "head.scale (of a Linear).",
    "normed": "head.parametrizations.weight.original0",
    "replaced": "head.bias (of a Linear).",
    "larger": "head.weight (of a Linear).",
    "doubled": "head.weight (of a Linear).",
    "untied": "tied.weight (of a Linear).",
    "in_a_checkpoint": "head.scale (of a Linear).",
    "another": "head.weight (of a Linear); head.bias",
    "thawed": "teacher.weight (of a Linear).",
}


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_the_next_forward_names_them(found, wrapper):
    for rank, results in enumerate(found):
        said = dict(results[wrapper])
        assert said.pop("frozen") is None
        assert said.pop("trained") == ["layers.0.weight", "layers.0.bias", "head.bias"]
        if wrapper == "FSDP":  # takes over the value, as after load_state_dict(assign=True)
            assert "SGD was made of parameters that FSDP has sharded since" in said.pop("replaced")
            assert "head.weight was removed from the model after it was wrapped" in said.pop("normed")
            assert "head.weight was replaced in the model by one of (5, 4) float32" in said.pop("larger")
            assert "head.weight was replaced in the model by one of (4, 4) float64" in said.pop("doubled")
            assert "layers.0.weight is tied, and was replaced" in said.pop("untied")
        for change, text in said.items():
            assert text.startswith(f"rank {rank} (") and NAMES[change] in text, f"{change}: {text}"
            assert "Wrap after adding" in text, text


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks.run(WORKER, "changes", 2, tmp_path_factory.mktemp("added"))
