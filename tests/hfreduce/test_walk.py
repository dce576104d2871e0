"""docs/hfreduce_walk.md against the sources: functions are in the stated files and call each other as stated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "csrc" / "hfreduce"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "hfreduce_walk.md").read_text().splitlines()
    if line.startswith("|") and "`" in line
]
WALK = [row[1:] for row in ROWS if row[0].isdecimal()]
OTHERS = [row for row in ROWS if not row[0].isdecimal()]


def definition(name: str, file: str) -> str:
    """The text of a function, from its parameters to its last brace; "" if the file does not define it."""
    source = (CORE / file).read_text()
    scope, short = name.split("::")
    outside = rf"^[\w:<>&*, ]+\b{scope}::{short}(\("  # of a class, in its file
    if f"class {scope} " in source:  # in the class
        outside = rf"^  [\w:<>&*, ]+\b{short}(\("
    if re.search(rf"^namespace [\w:]*\b{scope}\b", source, re.M):  # of a namespace
        outside = rf"^[\w:<>&*, ]+\b{short}(\("
    for found in re.finditer(outside + r"[^;{]*?\) (?:const )?{)", source, re.M):
        depth = 1
        for end in range(found.end(), len(source)):
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            if depth == 0:
                return source[found.start(1) : end]
    return ""


def unquoted(cell: str) -> str:
    (name,) = re.findall("`([^`]+)`", cell)
    return name


@pytest.mark.parametrize("row", WALK, ids=lambda row: row[0].strip("`"))
def test_functions_hand_on_to_one_another(row):
    function, file, _, to = row
    body = definition(unquoted(function), unquoted(file))
    assert body, f"{file} defines no {function}"
    assert unquoted(to) in body, f"{function} does not call {to}"


def test_from_torch_to_the_bytes_it_is_eight_functions_at_most():
    names = [unquoted(function).split("::")[1] for function, *_ in WALK]
    assert 0 < len(WALK) <= 8
    for (*_, to), following in zip(WALK, names[1:], strict=False):
        assert unquoted(to) == "body_(" or unquoted(to).endswith(f"{following}("), (to, following)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row[0].strip("`"))
def test_functions_are_where_they_are_said_to_be(row):
    function, file, _ = row
    assert definition(unquoted(function), unquoted(file)), f"{file} defines no {function}"


def test_what_is_not_there_is_not_found():
    assert not definition("Backend::allreduces", "torch/ops.cpp")
    assert not definition("Backend::allreduce", "communicator.cpp")
    assert not definition("Communicator::all_reduce", "communicator.h")  # only declared there
