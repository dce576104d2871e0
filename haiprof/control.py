"""The socket for requests to a running process, and both of its ends.

It is `<pid>.sock` in $HAIPROF_DIR, or else in a folder of this user in the runtime folder. A request and its answer are
one line of JSON each: {"do": "info" | "start" | "deep" | "stop"}.
"""

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
from pathlib import Path

from haiprof.counters import environment

log = logging.getLogger("haiprof")


class State:
    """The state of this process: its collector, and whether it existed from the start."""

    collector = server = None
    folder = None  # output folder of the collector
    always = False


def begin(mode: str):
    """Runs at the end of `import torch`. mode: "idle" only opens the socket; any other value also starts the
    collector."""
    from haiprof import collectives

    place = os.environ.get("HAIPROF_DIR") or default_sockets()
    collectives.prepare()
    State.always = mode != "idle"
    if State.always:
        from haiprof import collector

        State.folder = os.environ.setdefault("HAIPROF_DIR", collector.new_folder())  # for child processes
        State.collector = collector.Collector(State.folder, float(os.environ.get("HAIPROF_HZ", "1"))).start()
    State.server = Server(place)
    os.register_at_fork(after_in_child=_forked)


def _forked():
    """Resets the state in a forked child: threads do not exist there, and open files belong to the parent."""
    State.server = None
    if State.collector is None:
        return
    try:
        before = State.collector
        before.detach()
        State.collector = None
        if State.always:
            State.collector = type(before)(State.folder, 1 / before.interval).start()
    except Exception:
        log.warning("haiprof does not profile this child of a fork", exc_info=True)


def default_sockets() -> str:
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"haiprof-{os.getuid()}")


class Server:
    """A thread that sleeps in accept. folder: created if missing, accessible only to this user."""

    def __init__(self, folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._path = os.path.join(folder, f"{os.getpid()}.sock")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(self._path) as path:
            self._socket.bind(path)
        os.chmod(self._path, 0o600)
        self._socket.listen(8)
        import atexit

        atexit.register(self.close, os.getpid())
        self.thread = threading.Thread(target=self._run, name="haiprof socket", daemon=True)
        self.thread.start()

    def close(self, pid):
        """Removes the socket, after which the thread ends. Not in a forked child: the socket is its parent's."""
        if pid == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):  # closed before
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread from accept

    def _run(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return self._socket.close()
            with connection, connection.makefile("rw", encoding="ascii") as file:
                try:
                    answer = _answer(json.loads(file.readline()))
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                with contextlib.suppress(OSError):  # the client has gone
                    file.write(json.dumps(answer) + "\n")
                    file.flush()


@contextlib.contextmanager
def _short(path):
    """The path of a socket through its folder's descriptor, because addresses are limited to 108 bytes."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{os.path.basename(path)}"
    finally:
        os.close(descriptor)


def _answer(request) -> dict:
    do = request["do"]
    if do == "start":
        _start(request["folder"], request.get("hz", 1.0))
    elif do == "deep":
        return _deep(request)
    elif do == "wait":
        done = State.collector is not None and State.collector.wait_for(request["steps"], request["seconds"])
        return {**_info(), "done": done}
    elif do == "stop" and State.collector is not None:
        if State.always:
            State.collector.flush()
        else:
            collector, State.collector = State.collector, None
            collector.stop()
    return _info()


def _info():
    from haiprof import record

    rank, size = record.rank_of()
    running = State.collector is not None
    steps = State.collector.done if running else 0
    return {"pid": os.getpid(), "rank": rank, "size": size, "folder": State.folder, "running": running, "steps": steps}


def _start(folder, hz):
    from haiprof.collector import Collector

    if State.collector is None:
        State.folder = folder
        State.collector = Collector(folder, hz, partial=True).start()


def _deep(request):
    from haiprof.deep import Window

    if State.collector is None:
        raise RuntimeError("the collector does not run: start it first")
    window = Window(State.collector, request["steps"], request["what"])
    return {**_info(), "files": window.wait(request["seconds"])}


def ask(path, request, timeout=10.0) -> dict:
    """The answer of the process behind a socket. Raises OSError if there is none, RuntimeError if the request fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        with _short(str(path)) as short:
            connection.connect(short)
        with connection.makefile("rw", encoding="ascii") as file:
            file.write(json.dumps(request) + "\n")
            file.flush()
            answer = json.loads(file.readline() or '{"error": "it has ended"}')
    if "error" in answer:
        raise RuntimeError(f"process {Path(path).stem}: {answer['error']}")
    return answer


def sockets(target: str) -> list[Path]:
    """The sockets of a process, by its id, or of all processes in a folder; sockets of dead processes are removed."""
    if target.isdigit():
        try:
            own = environment(int(target)).get("HAIPROF_DIR")
        except OSError:  # it has ended, or belongs to another user
            own = None
        folders = [own, default_sockets()]
        found = [Path(folder, f"{target}.sock") for folder in folders if folder]
    else:
        found = sorted(Path(target).glob("*.sock"))
    alive = []
    for path in found:
        try:
            ask(path, {"do": "info"})
            alive.append(path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, RuntimeError):
            continue
    return alive
