"""Types of public names: stubs of what tables make, and the type checker's view of all of it.

    python tests/test_types.py          writes the stubs, hfnn/ops/*.pyi
    python tests/test_types.py check    basedpyright finds the type of every public name, on Python 3.10 and 3.13

An editor reads no table. Where a module of hfnn.ops makes public names by one, a stub lists the module's public names.
"""

import ast
import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPLETE = (
    *("hfnn", "hfnn.functional", "hfnn.data", "hfnn.memory", "hfnn.optim", "hfreduce", "hfrecord"),
    *("haiscale", "haiscale.checkpoint", "haiscale.ddp", "haiscale.fsdp", "haiscale.launch", "haiscale.mesh"),
    "haiscale.pipeline",
)
VERSIONS = ("3.10", "3.13")


def public() -> dict[str, object]:
    """{where it is defined: a function or class that a module of COMPLETE lists}"""
    modules = [importlib.import_module(name) for name in COMPLETE]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    return {f"{v.__module__}.{v.__qualname__}": v for v in values if inspect.isfunction(v) or inspect.isclass(v)}


def stubs() -> dict[Path, str]:
    """{file: text} of the stubs of modules with public names that no def or class statement defines."""
    by_module = {}
    for where, value in public().items():
        module, _, name = where.rpartition(".")
        by_module.setdefault(module, {})[name] = value
    found = {}
    for module, values in sorted(item for item in by_module.items() if item[0].startswith("hfnn.ops.")):
        path = Path(importlib.import_module(module).__file__)
        defined = {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
        if not set(values) <= defined:
            found[path.with_suffix(".pyi")] = stub(values)
    return found


HEAD = """# Written by tests/test_types.py.

import typing
from typing import Any

import torch
from torch import nn

"""


def stub(values: dict) -> str:
    texts = [HEAD]
    for name, value in sorted(values.items()):
        summary = inspect.getdoc(value).partition("\n\n")[0].replace("\n", "\n    ")
        if not inspect.isclass(value):
            texts.append(f'def {name}{inspect.signature(value)}:\n    """{summary}"""\n\n')
            continue
        own = [f"    {key}: str\n" for key in ("prefer", "keep") if key in vars(value)]
        texts.append(f'class {name}(nn.{value.__base__.__name__}):\n    """{summary}"""\n\n{"".join(own)}')
        texts.append(f"    def forward{inspect.signature(value.forward)}: ...\n\n")
    return "".join(texts) + "def __getattr__(name: str) -> Any: ...\n"


def test_stubs_are_those_of_the_tables():
    kept = {path: path.read_text() for path in ROOT.glob("hfnn/**/*.pyi")}
    assert kept == stubs(), "python tests/test_types.py writes the stubs"


def test_the_package_lists_every_module_and_function():
    import hfnn

    made = {cls.__name__: cls for op in hfnn.ops.ALL for cls in op.modules.values()}
    assert {name: getattr(hfnn, name, None) for name in made} == made and set(made) <= set(hfnn.__all__)
    assert all(name in vars(hfnn) for name in hfnn.__all__)


EXAMPLES = """
hfnn.LayerNorm hfnn.LSTM hfnn.convert hfnn.revert hfnn.report
hfnn.functional.rms_norm hfnn.functional.group_norm hfnn.functional.batch_norm hfnn.functional.add_rms_norm
hfnn.functional.relu hfnn.functional.gelu hfnn.functional.silu hfnn.functional.softplus hfnn.functional.clamp
hfnn.functional.swiglu hfnn.functional.scaled_dot_product_attention hfnn.functional.rope hfnn.functional.softmax
hfnn.functional.masked_softmax hfnn.functional.causal_softmax hfnn.functional.cross_entropy hfnn.functional.mse_loss
hfnn.functional.binary_cross_entropy_with_logits hfnn.functional.linear_cross_entropy hfnn.functional.linear_log_probs
hfnn.functional.dropout hfnn.functional.dropout_add hfnn.functional.max_pool2d hfnn.functional.avg_pool2d
hfnn.functional.linear hfnn.functional.conv2d hfnn.functional.embedding
hfnn.optim.AdamW hfnn.optim.step_in_backward hfnn.data.pack hfnn.data.PackedCollator hfnn.data.PackedBatchSampler
hfnn.memory.saved_bytes haiscale.pipeline.predict haiscale.pipeline.partition
hfreduce.Group hfrecord.Schema hfrecord.Permutation hfrecord.ElasticSampler
"""  # at least one of each family


@pytest.mark.parametrize("name", EXAMPLES.split())
def test_examples_run(name):
    """The examples in the docstring of a public name."""
    module, _, attribute = name.rpartition(".")
    scope = {
        package: importlib.import_module(package) for package in ("torch", "hfnn", "haiscale", "hfreduce", "hfrecord")
    }
    value = getattr(importlib.import_module(module), attribute)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(value), scope, name, None, None)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted and not result.failed


GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_guide_for_authors_names_what_there_is():
    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \|", GUIDE, re.M)
    assert 0 < len(rows) <= 16
    pattern = r"\b{}\b(\(| =|:| \{{)"
    assert not [row for row in rows if not re.search(pattern.format(row[0]), (ROOT / row[1]).read_text())]


def test_the_lines_of_the_worked_row_are_those_of_the_files():
    found = ""
    diff = GUIDE.partition("```diff\n")[2].partition("```")[0].splitlines()
    for line in diff:
        if line.startswith("--- "):
            found = (ROOT / line[4:]).read_text().splitlines()
        else:
            assert line[1:] in found, line
    assert len(diff) > 10


def check(version: str) -> list[str]:
    """What the type checker says about public names and their members."""
    command = ["basedpyright", "--ignoreexternal", "--outputjson", "--pythonversion", version]
    command += ["--pythonpath", sys.executable, "--verifytypes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    names, said = set(public()), []
    for package in sorted({name.partition(".")[0] for name in COMPLETE}):
        done = subprocess.run([*command, package], cwd=ROOT, env=environment, capture_output=True, text=True)
        symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
        seen = {symbol["name"] for symbol in symbols}
        said += [f"{name}: not found" for name in names if name.startswith(f"{package}.") and name not in seen]
        for symbol in symbols:
            of_public = symbol["name"] in names or symbol["name"].rpartition(".")[0] in names
            if of_public and not symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]:
                said += [f"{symbol['name']}: {d['message']}" for d in symbol["diagnostics"]] or [symbol["name"]]
    return said


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] == ["check"]:
        found = [f"Python {version}: {line}" for version in VERSIONS for line in check(version)]
        sys.exit("\n".join(found) or None)
    for path, text in stubs().items():
        path.write_text(text)
