"""The pages of docs/tutorials and the front page: each Python block runs, in the order of its page, on the CPU."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hfnn.__main__
import hfrecord.__main__

ROOT = Path(__file__).parents[1]
PARSERS = {"hfnn": hfnn.__main__.parser, "hfrecord": hfrecord.__main__.parser}
PAGES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
pytestmark = pytest.mark.filterwarnings("default")  # whatever transformers warns of is its own


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch, one_thread):
    found, names = blocks(page, "python"), {"__name__": page.stem}
    assert found
    for library in ("transformers", "diffusers"):
        if f"import {library}\n" in "".join(found):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    if "haiscale.init()" in "".join(found):
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
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="pip install hfnn[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").exists()
    shutil.rmtree(tmp_path / "site")
