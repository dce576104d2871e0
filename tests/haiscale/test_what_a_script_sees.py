"""What a script sees under python, torchrun and haiscale.launch, and the table of it in docs/launch.md.

python tests/haiscale/test_what_a_script_sees.py     writes the table
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from haiscale import launch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/launch.md"
# Where haiscale.launch is not as torchrun: unless it is told so by an option, and always.
BY_DEFAULT = {
    "cores": "its own (`--no-bind`: yours)",
    "`OMP_NUM_THREADS`": "the number of its cores (`--no-bind`: 1)",
    "standard output": "a pipe to the launcher (`--no-prefix`: yours)",
}
ALWAYS = {
    "killed with its parent": "True",
    "`TORCHELASTIC_USE_AGENT_STORE`": "False: rank 0 has the store",
    "`TORCHELASTIC_SIGNALS_TO_HANDLE`": "SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2",
}
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"]
WAYS = {
    "python": lambda: [],
    "torchrun": lambda: [*TORCHRUN, launch.environment(1)[0]["MASTER_PORT"]],
    "haiscale.launch": lambda: ["-m", "haiscale.launch", "--nproc", "2"],
    "without binding and prefix": lambda: ["-m", "haiscale.launch", "--nproc", "2", "--no-bind", "--no-prefix"],
}


def seen(way: str, folder: Path) -> list[tuple]:
    """(name, value, words in place of the value) of each thing."""
    (folder / "train.py").write_text((ROOT / "tests/workers/sees.py").read_text())
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    variables |= {"BEFORE": json.dumps(variables)}
    for _ in range(3):
        command = [sys.executable, *WAYS[way](), "train.py", "--lr", "1e-4", "rank ${local_rank}"]
        with open(folder / "out", "wb") as out:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
            how = {"cwd": folder, "env": variables, "stdout": out, "stderr": subprocess.PIPE, "timeout": 120}
            ended = subprocess.run(command, input=b"typed", **how)
        if b"EADDRINUSE" not in ended.stderr:  # the free port was taken meanwhile
            break
    assert (folder / "sees.json").exists(), ended.stderr.decode()
    found = [tuple(entry) for entry in json.loads((folder / "sees.json").read_text())]
    written = (folder / "out").read_bytes().removeprefix(b"[rank 0] ")
    return [*found, ("`sys.excepthook`", (folder / "hook").read_text()), ("bytes it prints", repr(written)[2:-1])]


def rows() -> list[tuple[str, str, str, str]]:
    """Name, and the cells for the three ways; one that is equal to its left neighbour is empty."""
    ways = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            ways.append(seen(way, Path(folder)))
    made, wrong = [], []
    for (name, python, *words), (_, torchrun, *_), (_, ours, *_), (_, plain, *_) in zip(*ways, strict=True):
        if name in ALWAYS:
            assert ALWAYS[name].startswith(ours) and ours == plain != torchrun, name
        elif plain != torchrun or (ours != torchrun and name not in BY_DEFAULT):
            wrong.append(f"{name}: {torchrun} under torchrun, {ours} and {plain} under haiscale.launch")
        different = BY_DEFAULT.get(name, ALWAYS.get(name, ""))
        cells = [*(words or [python]), "" if torchrun == python else torchrun, different]
        made.append((name, *(cell.strip("[]").replace("\\", "\\\\") for cell in cells)))
    assert not wrong, "\n".join(wrong)
    return made


def section() -> str:
    lines = ["a script sees | `python` | torchrun | haiscale.launch", "--- | --- | --- | ---", *map(" | ".join, rows())]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def page() -> tuple[str, str, str]:
    """What is before the table, the table, and what is after."""
    return re.fullmatch(r"(.*\n)(\| a script sees .*?\n)(\n.*)", PAGE.read_text(), re.S).groups()


def test_as_under_torchrun_and_as_the_page_says():
    _, table, _ = page()
    assert table == section(), f"python {Path(__file__).relative_to(ROOT)} writes the table"


if __name__ == "__main__":
    before, _, after = page()
    PAGE.write_text(before + section() + after)
