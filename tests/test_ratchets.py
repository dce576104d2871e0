"""Debts of the source that may only shrink, measured against tests/ratchets.json.

    python tests/test_ratchets.py     prints what changed, and lowers the file's figures; it never raises one

A new file above 400 lines, an import between folders that did not import each other, or one more coined word is an
error. If a change needs it all the same, edit tests/ratchets.json by hand, in the commit that says why.
"""

import ast
import collections
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "tests/ratchets.json"
PACKAGES = ("hfnn", "hfreduce", "haiscale", "haiprof", "hfrecord")
PUBLIC = (
    *("hfnn", "hfnn.data", "hfnn.functional", "hfnn.memory", "hfnn.optim", "hfreduce", "hfrecord"),
    *("haiscale", "haiscale.checkpoint", "haiscale.ddp", "haiscale.fsdp", "haiscale.launch", "haiscale.mesh"),
    *("haiscale.pipeline", "haiscale.survive"),
)
# Beginnings of words that this project uses in a sense of its own. A field's standard term is better.
COINED = ("lapse", "lenient", "likes", "notes", "owed", "owes", "room", "settle", "shadow", "told", "worth")
MOST_LINES = 400
RUN = 6  # lines that stand twice are a repetition from this number on


def sources(*suffixes: str) -> list[Path]:
    folders = [*PACKAGES, "kernels", "csrc"]
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return [path for path in files if path.suffix in suffixes]


def read(path: Path) -> list[str]:
    return path.read_text().splitlines()


def lines(path: Path) -> int:
    """Lines of a file without docstrings, of which there should be enough."""
    if path.suffix != ".py":
        return len(read(path))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented) and node.body]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    return len(read(path)) - sum(text.end_lineno - text.lineno + 1 for text in texts)


def long_files() -> dict[str, int]:
    """{file: lines} of the files above 400 lines."""
    files = sources(".py", ".cpp", ".cu", ".h", ".cuh") + sorted((ROOT / "tests").rglob("*.py"))
    counts = {str(path.relative_to(ROOT)): len(read(path)) for path in files}
    return {name: number for name, number in counts.items() if number > MOST_LINES}


def place(name: str) -> str:
    """Of a module: its package; in hfnn and haiscale the module or folder below it."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] in ("hfnn", "haiscale") else 1])


def imported(path: Path) -> set[str]:
    """The places that a Python file imports from this project, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # relative imports stay in their folder
            folder = ROOT / node.module.replace(".", "/")
            for alias in node.names:
                submodule = (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").exists()
                found.add(f"{node.module}.{alias.name}" if submodule else node.module)
    return {place(name) for name in found if name.partition(".")[0] in PACKAGES}


def arrows() -> dict[str, list[str]]:
    """{place: the places that it imports}; of C++, {folder: the folders whose headers it includes}."""
    found = collections.defaultdict(set)
    for path in sources(".py"):
        name = path.relative_to(ROOT).with_suffix("").parts
        source = "hfnn.kernels" if name[0] == "kernels" else place(".".join(name).removesuffix(".__init__"))
        found[source] |= imported(path) - {source}
    for path in sources(".cpp", ".cu", ".h", ".cuh"):
        folder = path.parent
        for header in re.findall(r'^#include "(.*)"', path.read_text(), re.M):
            targets = [base / header for base in (folder, ROOT / "csrc", ROOT / "csrc/hfreduce")]
            target = next((t.resolve().parent for t in targets if t.exists()), folder)
            if target != folder:
                found[str(folder.relative_to(ROOT))].add(str(target.relative_to(ROOT)))
    return {name: sorted(targets) for name, targets in sorted(found.items()) if targets}


def words() -> dict[str, int]:
    """{beginning: coined words with it} in code and documents; a part of an identifier counts as a word."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counts = collections.Counter()
    for path in sources(".py", ".cpp", ".cu", ".h", ".cuh") + pages:
        counts.update(word.lower() for word in re.findall(r"[A-Z]?[a-z]+", path.read_text()))
    return {start: sum(n for word, n in counts.items() if word.startswith(start)) for start in COINED}


def undocumented() -> dict[str, int]:
    """{module: names in its __all__ without a docstring, or with an argument or a result without a type}."""
    counts = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        named = [getattr(module, key) for key in module.__all__]
        counts[name] = sum(callable(value) and not complete(value) for value in named)
    return counts


def complete(value) -> bool:
    function = value.__init__ if inspect.isclass(value) else value
    if not inspect.getdoc(value):
        return False
    inherited = getattr(function, "__module__", "").partition(".")[0] not in PACKAGES
    if inspect.isclass(value) and inherited:  # torch and Python have the types of theirs
        return True
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C++
        return False
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    typed = all(p.annotation is not p.empty for p in parameters)
    return typed and (inspect.isclass(value) or signature.return_annotation is not signature.empty)


def repeated_lines() -> int:
    """Lines of product and tests in runs of six or more that stand elsewhere, too.

    Without blanks, comments, and parameters with a line of their own, in signatures and docstrings: functions with
    torch's arguments share those.
    """
    left_out = re.compile(r"#|//|import |from |\w+: [\w.|, \[\]]+( = [\w.\"-]+)?,$|\w+: [A-Z\"].*\.$")
    runs = collections.defaultdict(list)
    for path in sources(".py", ".cpp", ".cu", ".h", ".cuh") + sorted((ROOT / "tests").rglob("*.py")):
        text = [(number, line.strip()) for number, line in enumerate(read(path))]
        text = [(n, line) for n, line in text if re.search(r"\w", line) and not left_out.match(line)]
        for start in range(len(text) - RUN + 1):
            run = text[start : start + RUN]
            runs[tuple(line for _, line in run)].append([(path, n) for n, _ in run])
    again = (copies for copies in runs.values() if len(copies) > 1)
    return len({line for copies in again for run in copies for line in run})


def op_and_pattern_lines() -> int:
    """Lines of hfnn/ops, patterns, adapters and convert together."""
    folders = tuple(str(ROOT / "hfnn" / name) for name in ("ops/", "patterns/", "adapters/", "convert"))
    return sum(lines(path) for path in sources(".py") if str(path).startswith(folders))


MEASURES = {
    measure.__name__: measure
    for measure in (long_files, arrows, words, undocumented, repeated_lines, op_and_pattern_lines)
}


def grown(now, before) -> list[str]:
    """What is in `now` beyond `before`: numbers, lists of names, or dicts of these."""
    if isinstance(now, dict):
        each = ((key, grown(value, before.get(key, type(value)()))) for key, value in now.items())
        return [f"{key}: {text}" for key, texts in each for text in texts]
    if isinstance(now, list):
        return sorted(set(now) - set(before))
    return [f"{now}, was {before}"] if now > before else []


def lowered(now, before):
    """`before` without what `now` no longer has."""
    if isinstance(now, dict):
        return {key: lowered(value, before[key]) for key, value in now.items() if key in before}
    return [name for name in before if name in now] if isinstance(now, list) else min(now, before)


@pytest.mark.parametrize("name", MEASURES)
def test_may_only_shrink(name):
    more = grown(MEASURES[name](), json.loads(BASELINE.read_text())[name])
    assert not more, f"{name}: more than tests/ratchets.json allows: " + "; ".join(more)


def test_a_rise_is_found():
    before = {"a": 3, "b": ["x", "y"], "c": {"d": 1}}
    assert grown({"a": 3, "b": ["y"], "c": {"d": 0}}, before) == []
    assert grown({"a": 4, "b": ["z"], "c": {"e": 1}}, before) == ["a: 4, was 3", "b: z", "c: e: 1, was 0"]
    assert lowered({"a": 2, "b": ["y", "z"], "c": {}}, before) == {"a": 2, "b": ["y"], "c": {}}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    stored = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    measured = {name: measure() for name, measure in MEASURES.items()}
    for name, value in measured.items():
        print(f"{name}:", "; ".join(grown(value, stored.get(name, value))) or "no more than before")
    new = {name: lowered(value, stored.get(name, value)) for name, value in measured.items()}
    BASELINE.write_text(json.dumps(new, indent=1) + "\n")
