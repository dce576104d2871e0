"""The pages of docs/tutorials and the front page: each Python block runs, in the order of its page, on the CPU."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import haiprof.__main__
import hfnn.__main__
import hfrecord.__main__

ROOT = Path(__file__).parents[1]
PARSERS = {"hfnn": hfnn.__main__.parser, "hfrecord": hfrecord.__main__.parser, "haiprof": haiprof.__main__.parser}
PAGES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
PROFILE = ROOT / "docs/tutorials/profile.md"  # its block is a script, run by its commands
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem == "ranks"), id=p.stem) for p in PAGES if p != PROFILE],
)
def test_python_blocks_run(page, tmp_path, monkeypatch, one_thread):
    found, names = blocks(page, "python"), {"__name__": page.stem}
    assert found
    for library in ("transformers", "diffusers"):
        if f"import {library}\n" in "".join(found):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    if "haiscale.init()" in "".join(found):
        if torch.cuda.device_count() == 1:
            pytest.skip("two ranks on a machine with GPUs need two")
        Path("train.py").write_text("".join(found))
        subprocess.run([sys.executable, "-m", "haiscale.launch", "--nproc", "2", "train.py"], check=True, timeout=120)
        return
    for block in found:
        exec(compile(block, str(page), "exec"), names)


def test_commands_of_pages_parse():
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    assert lines
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        assert PARSERS[name]().parse_args(arguments)


@pytest.mark.slow
def test_the_commands_of_the_page_on_profiles(tmp_path):
    """They run, and the verdict is the page's."""
    (tmp_path / "train.py").write_text("".join(blocks(PROFILE, "python")))
    lines = [line for block in blocks(PROFILE, "bash") for line in block.splitlines() if "attach" not in line]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # finds the page's "python"
    said = []
    for line in lines:
        command = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    (shown,) = re.findall(
        r"^```\n(data-bound: The run waits for data):.*?(num_workers=0).*?```$", PROFILE.read_text(), re.M | re.S
    )
    assert [words in said[0] for words in shown] == [True, True] and len(said) == 3
    assert (tmp_path / "before/report.html").exists()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="pip install hfnn[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").exists()
    shutil.rmtree(tmp_path / "site")
