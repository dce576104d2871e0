"""`attach`: profiles running processes through their sockets, or from outside if a process has no socket."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from haiprof import control, record
from haiprof.counters import Counters

OUTSIDE = 2.0  # seconds of profiling from outside
UNDISTURBED = 6  # steps before a window
HZ = 5  # readings per second from outside


def attach(target, folder, steps, seconds, what) -> str:
    """Profiles `steps` steps, or as many as run in `seconds`; returns the folder of the files.

    target: a process id, including its children, or a folder with sockets. Raises ValueError if there is no process.
    """
    paths = [path for each in _processes(target) for path in control.sockets(each)]
    if not paths:
        if not target.isdigit():
            raise ValueError(f"{target}: no process that runs has a socket there")
        print(
            f"haiprof: process {target} was started without haiprof: it is looked at from outside for {OUTSIDE:g} s "
            "(stacks once, counters). For steps, operators and memory start it with HAIPROF=idle",
            file=sys.stderr,
        )
        return outside(int(target), folder)
    infos = [control.ask(path, {"do": "start", "folder": folder}) for path in paths]
    requests = [{"do": "deep", "what": what, "steps": steps}] if what else [{"do": "wait", "steps": steps}]
    if {"operators", "memory"} & set(what):  # which take time: before, steps without them
        requests.insert(0, {"do": "wait", "steps": UNDISTURBED})
    answers = []
    for request in requests:
        with ThreadPoolExecutor(len(paths)) as pool:  # ranks wait for one another, so all are asked in parallel
            answers += pool.map(lambda path: _asked(path, {**request, "seconds": seconds}, seconds), paths)  # noqa: B023
    answers += [_asked(path, {"do": "stop"}, 0) for path in paths]
    for answer in answers:
        if "error" in answer:
            print(f"haiprof: {answer['error']}", file=sys.stderr)
        for file in answer.get("files", ()):
            print(file)
    return infos[0]["folder"]


def _asked(path, request, seconds):
    try:
        return control.ask(path, request, timeout=seconds + 60)
    except TimeoutError:
        return {"error": f"process {path.stem}: no answer to {request['do']!r} after {seconds + 60:g} s"}
    except (OSError, RuntimeError) as error:
        return {"error": str(error)}


def _processes(target) -> list[str]:
    """A process and its descendants."""
    if not target.isdigit():
        return [target]
    import psutil

    try:
        children = psutil.Process(int(target)).children(recursive=True)
    except psutil.NoSuchProcess:
        raise ValueError(f"there is no process {target}") from None
    return [target, *(str(child.pid) for child in children)]


def outside(pid, folder) -> str:
    """Stacks from py-spy, if it is installed, and counters from /proc and NVML; the process does not change."""
    import psutil

    process = psutil.Process(pid)
    wall = {"wall": time.time(), "perf": time.perf_counter()}
    head = {"kind": "run", "rank": 0, "size": 1, "host": socket.gethostname(), "pid": pid, **wall}
    head["command"] = record.command(process.cmdline())
    writer = record.Writer(folder, head)
    counters = Counters(pid)
    counters.read()
    stacks, why = _stacks(pid)
    missing = dict(counters.missing)
    if why:
        missing["stacks"] = why
    else:
        Path(f"{writer.stem}.stacks.txt").write_text(stacks)
        print(stacks)
    missing["phases"] = "the process was started without HAIPROF=1 or HAIPROF=idle"
    writer.write({"kind": "missing", "why": missing})
    deadline = time.monotonic() + OUTSIDE
    while time.monotonic() < deadline and process.is_running():
        time.sleep(1 / HZ)
        writer.write({"kind": "counters", "wall": time.time(), **counters.read()})
    writer.close()
    return folder


def _stacks(pid):
    """(the output of py-spy, None), or (None, why there is none)."""
    found = Path(sys.executable).with_name("py-spy")
    command = str(found) if found.exists() else shutil.which("py-spy")
    if not command:
        return None, "py-spy is not installed (pip install py-spy)"
    done = subprocess.run([command, "dump", "--json", "--pid", str(pid)], capture_output=True, text=True, timeout=30)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return None, f"py-spy: {words}" + ("" if os.getuid() == 0 else "; it needs the right to ptrace (root)")
    lines = []
    for thread in json.loads(done.stdout):
        lines.append(f"{thread['thread_name'] or 'thread'} {thread['thread_id']}{' (active)' * thread['active']}")
        lines += [f"    {frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]]
    return "\n".join(lines) + "\n", None
