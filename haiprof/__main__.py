"""Profile training runs without a change to them.

haiprof run -- torchrun --nproc-per-node 8 train.py    # run it, then report
haiprof attach 4711 --operators                        # a process that is already running
haiprof report profile
haiprof diff before after
"""

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from haiprof import command


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    return command.run("haiprof", functools.partial(args.do, args), (RuntimeError,))


def parser():
    found = command.Parser(prog="haiprof", description=__doc__)
    commands = found.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser("run", help="run a command with its ranks profiled, and report")
    run.add_argument("--out", help="folder for the files (default: haiprof-<date>-<time>-<pid>)")
    run.add_argument("--hz", type=float, default=1.0, help="counter readings per second, 1 to 10 (default: 1)")
    run.add_argument("--port", type=int, help="serve Prometheus metrics on this port + the local rank")
    run.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND...")
    run.set_defaults(do=_run)
    attach = commands.add_parser("attach", help="profile running processes for a while")
    attach.add_argument("target", help="a process id, or the HAIPROF_DIR of a run")
    attach.add_argument("--out", help="folder for the files (default: haiprof-<date>-<time>-<pid>)")
    attach.add_argument("--steps", type=int, default=10, help="steps to record (default: 10)")
    attach.add_argument(
        "--seconds", type=float, default=60.0, help="time limit; always 2 for a process started without haiprof"
    )
    attach.add_argument("--operators", action="store_true", help="torch.profiler's operators, kernels, shapes, memory")
    attach.add_argument("--stacks", action="store_true", help="sample the stacks of Python threads")
    attach.add_argument("--memory", action="store_true", help="take a snapshot of torch's CUDA allocator")
    attach.set_defaults(do=_attach)
    report = commands.add_parser("report", help="report on the files in a folder, here and in its report.html")
    report.add_argument("folder")
    report.add_argument("--no-html", dest="html", action="store_false", help="report in the terminal only")
    report.set_defaults(do=lambda args: _report(args.folder, args.html))
    diff = commands.add_parser("diff", help="compare two runs")
    diff.add_argument("a")
    diff.add_argument("b")
    diff.set_defaults(do=_diff)
    return found


def _run(args):
    program = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not program:
        raise ValueError("run: what? haiprof run -- torchrun ... train.py")
    if not 1 <= args.hz <= 10:
        raise ValueError(f"--hz takes 1 to 10, got {args.hz}")
    folder = os.path.abspath(args.out) if args.out else _new_folder()
    env = {**os.environ, "HAIPROF": "1", "HAIPROF_DIR": folder, "HAIPROF_HZ": str(args.hz)}
    if args.port:
        env["HAIPROF_PORT"] = str(args.port)
    earlier = _written(folder)
    process = subprocess.Popen(program, env=env)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: process.send_signal(number))
    before = signal.signal(signal.SIGINT, lambda *_: None)  # the terminal interrupts the command, too
    status = process.wait()
    signal.signal(signal.SIGINT, before)
    if _written(folder) == earlier:
        print(
            f"haiprof: {program[0]} left nothing in {folder}: no module was called, or its Python has another torch, "
            "where hfnn is not installed",
            file=sys.stderr,
        )
        status = status or 1
    else:
        _report(folder)
    return status if status >= 0 else 128 - status


def _written(folder) -> dict[str, int]:
    """The profiles in a folder, and when they were last written to."""
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).glob("*.jsonl")}


def _new_folder():
    return os.path.abspath(time.strftime(f"haiprof-%Y%m%d-%H%M%S-{os.getpid()}"))


def _report(folder, as_html=True):
    from rich.console import Console

    from haiprof import page, record, report, verdict

    found = verdict.judge(record.load(folder))
    report.show(found, Console())
    if as_html:
        path = Path(folder, "report.html")
        try:
            page.write(found, path)
        except ImportError as error:
            print(f"haiprof: {error}", file=sys.stderr)
        else:
            print(f"{path}, and a Chrome trace a rank beside it")
    return 0


def _diff(args):
    from rich.console import Console

    from haiprof import diff, record, verdict

    a, b = (verdict.judge(record.load(folder)) for folder in (args.a, args.b))
    Console().print(diff.page(a, b, (args.a, args.b)))
    return 0


def _attach(args):
    from haiprof import attach

    what = [name for name in ("operators", "stacks", "memory") if getattr(args, name)]
    folder = os.path.abspath(args.out) if args.out else _new_folder()
    folder = attach.attach(args.target, folder, args.steps, args.seconds, what)
    return _report(folder) if list(Path(folder).glob("*.jsonl")) else 0


if __name__ == "__main__":
    sys.exit(main())
