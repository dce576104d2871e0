"""haiscale.launch: how the failures of programs are reported, and the options of Python."""

import os
import subprocess
import sys

import pytest

from .test_launch import run

CAUGHT = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('caught')\n"


def script(folder, text):
    (folder / "train.py").write_text(text)
    return "train.py"


def test_the_first_traceback_is_shown_once(tmp_path):
    """With its causes and what the rank printed behind it, without Python's own frames. Those of others are output."""
    script(
        tmp_path,
        "import os, sys, time\nclass Late:\n    def __del__(self):\n        raise OSError('late')\nlate = Late()\n"
        "rank = os.environ['RANK']\ntime.sleep(0.5 * (rank == '0'))\n"
        "try:\n    {}['key']\nexcept KeyError as error:\n"
        "    raise ValueError('rank ' + rank + '\\nand more') from error\n",
    )
    done = run(tmp_path, "--nproc", 2, "-m", "train", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    before, report = done.stderr.split("rank 1 (pid ")
    assert done.returncode == 1 and "ValueError: rank 1" not in before, done.stderr
    assert "runpy" not in report and "KeyError: 'key'\n\nThe above exception was the direct cause" in report
    assert "ValueError: rank 1\nand more\n" in report and "OSError: late" in report
    assert report.endswith("then rank 0: ValueError: rank 0\n") and "[rank 0] ValueError: rank 0\n" in before


@pytest.mark.parametrize("end", ["", "time.sleep(1.5)", "print('on')\ntime.sleep(0.2)", "os.kill(os.getpid(), 9)"])
def test_a_traceback_of_a_caught_error_is_output(tmp_path, end):
    text = f"import logging, os, time; logging.basicConfig(format='%(message)s')\n{CAUGHT}{end}\n"
    done = run(tmp_path, "--nproc", 1, script(tmp_path, text))
    assert done.returncode == (128 + 9 if "kill" in end else 0)
    assert done.stderr.startswith("[rank 0] caught\n[rank 0] Traceback (most recent call last):\n")
    assert done.stderr.count("ZeroDivisionError: division by zero") == 1
    assert "kill" not in end or done.stderr.endswith(
        "\nit was killed by SIGKILL; dmesg may say why; what it printed is above\n"
    )


@pytest.mark.slow
def test_ranks_with_a_process_group(tmp_path):
    """torch's excepthook begins each line with the rank."""
    text = (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank():\n    raise KeyError('of rank 1')\ndist.barrier()\n"
    )
    done = run(tmp_path, "--nproc", 2, script(tmp_path, text))
    report = done.stderr[done.stderr.index("rank 1 (pid") :].splitlines()
    assert report[1] == "Traceback (most recent call last):" and "KeyError: 'of rank 1'" in report, done.stderr


@pytest.mark.slow
def test_record_of_torch(tmp_path):
    """What torch's @record writes is the reason, and the time is when it was written, however long the exit takes."""
    text = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    from torch.distributed.elastic.multiprocessing.errors import record\n"
        "    import atexit; atexit.register(time.sleep, 1)\n"
        "    @record\n    def main():\n        open('failing', 'w').close()\n        raise KeyError('of rank 1')\n"
        "    sys.excepthook = lambda *_: None\n    main()\n"
        "while not os.path.exists('failing'):\n    time.sleep(0.01)\n"
        "time.sleep(0.3)\nraise ValueError('of rank 0')\n"
    )
    done = run(tmp_path, "--nproc", 2, "--no-prefix", script(tmp_path, text))
    report = done.stderr[done.stderr.index("rank 1 (pid") :]
    assert "was the first to fail" in report and "raise KeyError('of rank 1')\nKeyError: 'of rank 1'\n" in report


def test_nobody_reads_the_output(tmp_path):
    """Ranks learn it, as they do under torchrun; they waited for space in their pipe."""
    path = script(tmp_path, "while True:\n    print('a line')\n")
    command = f"{sys.executable} -P -m haiscale.launch --nproc 1 {path} | head -n 1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[rank 0] a line\n" and "\nBrokenPipeError: [Errno 32] Broken pipe" in done.stderr


def test_options_of_python(tmp_path):
    path = script(tmp_path, "import sys; print(sys.orig_argv[1:], sys._xoptions, sys.warnoptions)")
    options = ["-W", "ignore", "-Wdefault", "-X", "mine=1", "-Xdev"]
    command = [sys.executable, *options, "-bPm", "haiscale.launch", "--nproc", "1", "--no-prefix", path, "-m"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    alone = [sys.executable, *options, "-bP", "-u", path, "-m"]
    assert done.stdout == subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout != ""
