"""The pages of docs/tutorials and the front page: each Python block runs, in the order of its page, on the CPU."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfnn.__main__ import parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
pytestmark = pytest.mark.filterwarnings("default")  # whatever transformers warns of is its own


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch, one_thread):
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    found, names = blocks(page, "python"), {"__name__": page.stem}
    assert found
    for block in found:
        exec(compile(block, str(page), "exec"), names)


def test_commands_of_pages_parse():
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    assert lines
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        assert name == "hfnn" and parser().parse_args(arguments).call


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="pip install hfnn[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").exists()
    shutil.rmtree(tmp_path / "site")
