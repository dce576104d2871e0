"""Each planted cause is the first finding of the verdict; healthy runs have none."""

import os
import shutil
import subprocess
import sys

import psutil
import pytest
from causes import BEGIN, HEALTHY, PLANTED
from test_output import text_of
from test_scripts import TORCHRUN

from haiprof import record, report, verdict

NAMESPACE = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$FULL" && exec "$@"', "sh"]


def judged(tmp_path, script, ranks, before=()):
    """The verdict on a script."""
    path = tmp_path / "train.py"
    path.write_text(BEGIN + script)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FULL": str(tmp_path / "full")}
    (tmp_path / "full").mkdir()
    launcher = TORCHRUN if ranks > 1 else [sys.executable]
    run = [sys.executable, "-m", "haiprof", "run", "--hz", "5", "--out", str(tmp_path / "profile"), "--"]
    command = [*before, *run, *launcher, str(path), str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) as process:
        try:
            out, _ = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            raise
    assert process.returncode == 0 and "haiprof stops" not in out, out[-3000:]
    return verdict.judge(record.load(tmp_path / "profile"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(tmp_path, name):
    kind, said, ranks, script = PLANTED[name]
    before = NAMESPACE if "FULL" in script else ()
    if before and (not shutil.which("unshare") or subprocess.run(["unshare", "-Urm", "true"]).returncode):
        pytest.skip("no disk can be mounted here")
    found = judged(tmp_path, script, ranks, before)
    text = " ".join(text_of(report.page(found), 200).split())
    assert found.findings[0].kind == kind and said in text, text[:3000]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(tmp_path, name):
    ranks, script = HEALTHY[name]
    found = judged(tmp_path, script, ranks)
    assert [each.kind for each in found.findings] == ["compute-bound"], text_of(report.page(found), 1000)
