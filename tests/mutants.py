"""Plants faults in Python files one by one and runs the tests that cover them. Which ones does `make test` find?

    python tests/mutants.py --count 150 --seed 1             # in a clone: files are changed in place, and restored
    python tests/mutants.py --count 20 haiscale/ddp hfnn/ops/smooth.py

A fault is a changed operator, an off-by-one number, a removed check, a removed wait or another dtype. First the tests
of `make test` that cover it run. If they find nothing, the others run. Prints one line per fault, and the counts. After
DeMillo, Lipton and Sayward, "Hints on test data selection", 1978.
"""

import argparse
import ast
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# By path prefix; the first match counts.
TESTS = {
    "hfnn/ops/attention": ["tests/ops/test_attention*.py"],
    "hfnn/ops": ["tests/ops/test_{stem}*.py", "tests/ops/test_contract*.py", "tests/ops/test_strides.py"],
    "hfnn/compiled": ["tests/test_compiled_*.py"],
    "hfnn/capture": ["tests/test_capture.py", "tests/fuzz/test_capture.py"],
    "hfnn/tun": ["tests/test_tune*.py"],
    "hfnn/deferred": ["tests/test_deferred.py", "tests/test_language_models.py"],
    "hfnn/adapters": ["tests/test_transformers*.py", "tests/test_language_models.py", "tests/test_trainer.py"],
    "hfnn/memory": ["tests/test_memory.py"],
    "hfnn/optim": ["tests/optim/test_*.py"],
    "hfnn/core": ["tests/test_recipe*.py", "tests/test_kernel.py", "tests/ops/test_contract*.py"],
    "hfnn": ["tests/test_convert.py", "tests/test_lookalike*.py", "tests/test_verify.py", "tests/test_in*.py",
             "tests/test_*_sites.py", "tests/test_feedforward.py", "tests/test_*norm*.py", "tests/test_experts.py",
             "tests/fuzz/test_convert.py"],
    "haiscale/ddp": ["tests/haiscale/test_ddp.py", "tests/haiscale/test_arrivals.py", "tests/fuzz/test_wrappers.py"],
    "haiscale/fsdp": ["tests/haiscale/test_fsdp*.py", "tests/fuzz/test_wrappers.py"],
    "haiscale/pipeline": ["tests/haiscale/test_p*.py", "tests/haiscale/test_s*.py", "tests/haiscale/test_backward.py"],
    "haiscale/checkpoint": ["tests/haiscale/test_checkpoint.py"],
    "haiscale/state": ["tests/haiscale/test_checkpoint.py", "tests/haiscale/test_fsdp.py"],
    "haiscale": ["tests/haiscale/test_auto.py", "tests/haiscale/test_launch.py", "tests/haiscale/test_mesh.py"],
    "hfreduce": ["tests/hfreduce/test_*.py"],
    "haiprof": ["tests/haiprof/test_*.py"],
    "hfrecord": ["tests/hfrecord/test_*.py", "tests/fuzz/test_records.py"],
}  # fmt: skip
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
}  # fmt: skip
WAITS = ("wait", "synchronize", "barrier", "join", "copy_", "clear", "zero_", "acquire", "wait_stream")
DTYPES = {"float32": "bfloat16", "float64": "float32", "int64": "int32", "uint8": "int32"}


def faults(tree: ast.AST) -> list:
    """(line, description, function that plants it) for each possible fault."""
    found = []

    def add(node, text, *change):
        found.append((node.lineno, text, lambda: setattr(*change)))

    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp | ast.BinOp) and (turned := TURNED.get(type(node.op))):
            add(node, f"{turned.__name__} for {type(node.op).__name__}", node, "op", turned())
        if isinstance(node, ast.Compare) and (turned := TURNED.get(type(node.ops[0]))):
            add(node, f"{turned.__name__} for {type(node.ops[0]).__name__}", node, "ops", [turned(), *node.ops[1:]])
        if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            other = not node.value if type(node.value) is bool else node.value + 1
            add(node, f"{other} for {node.value}", node, "value", other)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add(node, "no not", node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
            add(node, "no check", node, "test", ast.Constant(False))
        if isinstance(node, ast.Attribute) and node.attr in DTYPES and isinstance(node.ctx, ast.Load):
            add(node, f"{DTYPES[node.attr]} for {node.attr}", node, "attr", DTYPES[node.attr])
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if getattr(called, "attr", None) in WAITS:
            add(node, f"no {called.attr}", node, "value", ast.Constant(None))
    return found


def tests_of(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    patterns = next(tests for begin, tests in TESTS.items() if name.startswith(begin))
    return sorted({str(p) for pattern in patterns for p in ROOT.glob(pattern.format(stem=path.stem))})


def found_by(tests: list[str], marks: str, seconds: float) -> str:
    """How the tests end: "failed", "hung" after `seconds`, or "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", marks, *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "hung"
    return "failed" if done.returncode in (1, 2) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["hfnn", "haiscale", "hfreduce", "haiprof", "hfrecord"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=600, help="until tests count as hung, and the fault as found")
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    chosen = random.Random(options.seed)
    given = [ROOT / path for path in options.paths]
    files = [p for path in given for p in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    counts = {"make test": 0, "all tests": 0, "none": 0}
    for _ in range(options.count):
        path = chosen.choice(files)
        text = path.read_text()
        tree = ast.parse(text)
        places = faults(tree)
        if not places or not (tests := tests_of(path)):
            continue
        line, what, plant = chosen.choice(places)
        plant()
        try:
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            by = "make test" if (how := found_by(tests, "not slow and not rest", options.seconds)) else "none"
            if by == "none" and (how := found_by(tests, "slow or rest", options.seconds)):
                by = "all tests"
        finally:
            path.write_text(text)
        counts[by] += 1
        print(f"{path.relative_to(ROOT)}:{line}: {what}: {by}{' (hung)' * (how == 'hung')}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
