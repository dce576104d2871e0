"""A script without a main guard, for python, torchrun and haiscale.launch: rank 0 writes what it sees into `sees.json`
beside it, then raises. See tests/haiscale/test_what_a_script_sees.py."""

import sys

LOADED = {"haiscale", "multiprocessing", "runpy", "subprocess", "torch"} & set(sys.modules)
NAMES = {name for name in globals() if name != "LOADED"}

import ctypes  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

FOLDER = Path(__file__).resolve().parent
BEFORE = json.loads(os.environ["BEFORE"])  # the variables of the test


class Local:
    pass


def here(path):
    return str(path).replace(str(FOLDER), "/home/me")


def in_a_process(function):
    """What a function returns in a forked process."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(function()))
    process.start()
    process.join()
    return queue.get()


def parent():
    command = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    return "the launcher" if "torch.distributed.run" in command or "haiscale.launch" in command else "your shell"


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
    return number.value


def limits():
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = os.umask(0)
    os.umask(umask)
    return [resource.getrlimit(getattr(resource, name)) for name in names], umask, os.nice(0)


def variables(*names):
    return ", ".join(os.environ.pop(name, "unset") for name in names)


def later_ones():
    return sorted(set(os.environ) - {*BEFORE, "BEFORE"}) or "none"


# What a script sees: its name in the page, the value, and words in place of a value that is not the same everywhere.
THINGS = [
    ("`__name__`", lambda: __name__),
    ("`__file__`", lambda: here(__file__)),
    ("`__spec__`", lambda: __spec__),
    ("`__loader__`", lambda: type(__loader__).__name__),
    ("names that are defined", lambda: sorted(NAMES), "Python's"),
    ("`sys.modules['__main__']`", lambda: vars(sys.modules["__main__"]) is globals(), "the script"),
    ("modules imported before", lambda: sorted(LOADED) or "none"),
    ("`sys.argv`", lambda: sys.argv),
    ("`sys.orig_argv[1:]`", lambda: [*sys.orig_argv[1:-4], "..."]),
    ("`sys.path`", lambda: here(sys.path), "the script's folder, Python's"),
    ("`sys.executable`", lambda: sys.executable, "your Python"),
    ("`sys.flags`, `sys.warnoptions`", lambda: (sys.flags, sys.warnoptions), "Python's"),
    ("a source line of the script", lambda: inspect.getsource(Local).strip(), "found"),
    ("a class of the script, pickled", lambda: pickle.loads(pickle.dumps(Local)).__module__),
    ("a lambda in a forked process", lambda: in_a_process(lambda: "runs")),
    ("start method that was set", lambda: multiprocessing.get_start_method(allow_none=True)),
    ("`multiprocessing.current_process()`", lambda: multiprocessing.current_process().name),
    ("`multiprocessing.parent_process()`", multiprocessing.parent_process),
    ("threads", threading.active_count),
    ("standard input", lambda: sys.stdin.read().strip(), "yours"),
    ("standard output", lambda: stat.S_ISREG(os.fstat(1).st_mode), "yours"),
    ("`sys.stdout.write_through`", lambda: sys.stdout.write_through),
    ("its encoding and errors", lambda: (sys.stdout.encoding, sys.stdout.errors), "your locale's"),
    ("open files", lambda: sorted(map(int, os.listdir("/proc/self/fd")))[:-1]),  # listdir has one, too
    ("working directory", lambda: here(Path.cwd())),
    ("limits, umask, niceness", limits, "yours"),
    ("cores", lambda: sorted(os.sched_getaffinity(0)), "yours"),
    ("parent process", parent),
    ("leads a session and a process group", lambda: os.getsid(0) == os.getpgrp() == os.getpid()),
    ("killed with its parent", lambda: death_signal() == signal.SIGKILL),
    ("handlers of SIGTERM, SIGUSR1", lambda: [signal.getsignal(n).name for n in (signal.SIGTERM, signal.SIGUSR1)]),
    ("handler of SIGINT", lambda: signal.getsignal(signal.SIGINT).__name__),
    ("blocked signals", lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])) or "none"),
    ("your environment variables", lambda: BEFORE.items() <= os.environ.items(), "as they were"),
    ("`RANK`, `LOCAL_RANK`", lambda: variables("RANK", "LOCAL_RANK")),
    ("`WORLD_SIZE`, `LOCAL_WORLD_SIZE`", lambda: variables("WORLD_SIZE", "LOCAL_WORLD_SIZE")),
    ("`GROUP_RANK`, `GROUP_WORLD_SIZE`", lambda: variables("GROUP_RANK", "GROUP_WORLD_SIZE")),
    ("`ROLE_NAME`, `ROLE_RANK`, `ROLE_WORLD_SIZE`", lambda: variables("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")),
    ("`MASTER_ADDR`", lambda: variables("MASTER_ADDR")),
    ("`MASTER_PORT`", lambda: "a free port" if variables("MASTER_PORT").isdigit() else "unset"),
    ("`OMP_NUM_THREADS`", lambda: variables("OMP_NUM_THREADS")),
    ("`TORCHELASTIC_RUN_ID`", lambda: variables("TORCHELASTIC_RUN_ID")),
    ("`TORCHELASTIC_RESTART_COUNT`, `_MAX_RESTARTS`", lambda: variables(*(f"TORCHELASTIC_{n}" for n in RESTARTS))),
    ("`TORCHELASTIC_USE_AGENT_STORE`", lambda: variables("TORCHELASTIC_USE_AGENT_STORE")),
    ("`TORCHELASTIC_ERROR_FILE`", lambda: "a file" if os.path.isabs(variables("TORCHELASTIC_ERROR_FILE")) else "unset"),
    ("`TORCHELASTIC_SIGNALS_TO_HANDLE`", lambda: variables("TORCHELASTIC_SIGNALS_TO_HANDLE").replace(",", ", ")),
    ("`TORCH_NCCL_ASYNC_ERROR_HANDLING`", lambda: variables("TORCH_NCCL_ASYNC_ERROR_HANDLING")),
    ("further variables", later_ones),
]
RESTARTS = ("RESTART_COUNT", "MAX_RESTARTS")


def hook(kind, error, trace):
    FOLDER.joinpath("hook").write_text(f"{kind.__name__}: {error}")


if os.environ.get("RANK", "0") != "0":
    sys.exit()
found = [(name, str(value()), *words) for name, value, *words in THINGS]
FOLDER.joinpath("sees.json").write_text(json.dumps(found))
sys.stdout.buffer.write(b"a\xffb\r\n")
sys.excepthook = hook
raise ValueError("the end")
