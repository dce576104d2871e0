"""Memory that grows step after step, and the Python objects that hold it: their type and the line that made them."""

import ctypes
import gc
import itertools
import os
import sys
import time
import tracemalloc
from collections import Counter
from statistics import median

from haiprof.stacks import by_user, source

LEAST, LEAST_A_STEP = 6 * 2**20, 1024  # bytes of growth that are noticed
BLOCKS, EVEN = 4, 0.4  # parts of a run that must all grow, each by this share of the mean at least
READINGS, STEPS = 8, 16
FIRST, LAST = 4, 12  # steps after which the objects are counted for the first and the last time
FRAMES = 12  # of an allocation, among which the innermost outside libraries is shown
NODES = 20000  # nodes of a graph that are counted
BETWEEN = {os.path.dirname(__file__)}


def per_step(readings) -> float:
    """Bytes per step of memory that has grown in all parts of a run; else 0. readings: (steps, bytes).

    The first fifth of the steps is left out, in which caches are filled.
    """
    if len(readings) < READINGS:
        return 0.0
    first, last = readings[0][0], readings[-1][0]
    kept = [row for row in readings if row[0] >= first + (last - first) / 5]
    if len(kept) < READINGS - 2 or last - first < STEPS:
        return 0.0
    size = len(kept) / BLOCKS
    blocks = [kept[round(i * size) : round((i + 1) * size)] for i in range(BLOCKS)]
    middles = [(median(at for at, _ in block), median(held for _, held in block)) for block in blocks]
    steps = middles[-1][0] - middles[0][0]
    total = middles[-1][1] - middles[0][1]
    if steps <= 0 or total * BLOCKS / (BLOCKS - 1) < LEAST or total / steps < LEAST_A_STEP:
        return 0.0
    slopes = [
        (after - before) / (later - sooner)
        for (sooner, before), (later, after) in itertools.pairwise(middles)
        if later > sooner
    ]
    return total / steps if min(slopes) >= EVEN * total / steps else 0.0


class Watch:
    """Of a process: follows its memory, and counts its objects once, if it grows step after step."""

    def __init__(self):
        self._held, self._census, self._over, self._line = [], None, False, None

    def note(self, steps, held):
        """held: bytes, or None. steps: 0 begins anew."""
        if not steps:
            self._held.clear()
        elif held is not None:
            self._held.append((steps, held))
        if len(self._held) > 200:
            del self._held[::2]
        if self._census is None and per_step(self._held):
            self._census = Census()

    def step(self) -> bool:
        """Between two steps, in the training thread: whether it has worked there."""
        if self._census is None or self._over:
            return False
        if not self._census.step():
            self._over, self._line = True, self._census.line
        return True

    def line(self) -> dict | None:
        """A line for the file, once."""
        line, self._line = self._line, None
        return line and {**line, "wall": time.time()}

    def close(self):
        self._over = True
        if self._census is not None:
            self._census.close()


class Census:
    """Counts the objects that stay alive over some steps, by type and line. `step` is called between steps, in the
    training thread."""

    def __init__(self):
        self._steps, self._before, self._sizes, self._ours, self._frozen = 0, None, None, False, False
        self.line = None  # for the file, at the end

    def step(self) -> bool:
        """Whether it goes on."""
        if self._steps == 0:
            self._ours = not tracemalloc.is_tracing()
            self._frozen = gc.get_freeze_count() == 0
            if self._frozen:
                gc.freeze()  # which leaves only later objects to be looked at
            if self._ours:
                tracemalloc.start(FRAMES)
        elif self._steps == FIRST:
            self._before, self._sizes = _alive(), _by_line()
        elif self._steps == LAST:
            self._compare(_alive(), _by_line())
            self.close()
            return False
        self._steps += 1
        return True

    def close(self):
        if self._ours and tracemalloc.is_tracing():
            tracemalloc.stop()
        if self._frozen:
            gc.unfreeze()
        self._ours = self._frozen = False

    def _compare(self, after, sizes):
        """Rows: type, line, objects per step, bytes per step; of graphs, nodes per step."""
        steps, rows, graphs = LAST - FIRST, [], []
        for key, (n, size, nodes) in after.items():
            n_before, size_before, nodes_before = self._before.get(key, (0, 0, 0))
            if n - n_before >= steps / 2:
                graph = " with its graph" if nodes else ""
                rows.append([key[0] + graph, key[1], (n - n_before) / steps, (size - size_before) / steps])
            elif nodes - nodes_before >= steps:
                graphs.append([key[0], key[1], (nodes - nodes_before) / steps])
        rows += [["memory", line, 0, (size - self._sizes.get(line, 0)) / steps] for line, size in sizes.items()]
        rows = [row for row in rows if row[3] >= LEAST_A_STEP or row[0].endswith("its graph")]
        rows.sort(key=lambda row: (not row[0].endswith("its graph"), -row[3], row[0] == "memory"))
        graphs.sort(key=lambda row: -row[2])
        for row in (*rows[:5], *graphs[:3]):
            row[1] = source(*row[1]) if row[1] else ""
        self.line = {"kind": "growth", "rows": rows[:5], "graphs": graphs[:3]}


def _alive() -> dict:
    """(type, line that made it) -> number, bytes, nodes of the graphs of tensors."""
    torch = sys.modules["torch"]
    found, storages = {}, set()
    for each in gc.get_objects():
        tensor = issubclass(type(each), torch.Tensor)
        graph = tensor and each.grad_fn is not None
        made = _made(each)
        if (made is None and not graph) or (made and os.path.dirname(made[0]) in BETWEEN):
            continue
        size = _bytes(each, storages) if tensor else sys.getsizeof(each, 0)
        n, total, nodes = found.get((type(each).__name__, made), (0, 0, 0))
        found[type(each).__name__, made] = n + 1, total + size, nodes + (_nodes(each.grad_fn) if graph else 0)
    return found


def _made(thing):
    """The file and line that made an object since tracing began, or None."""
    traceback = tracemalloc.get_object_traceback(thing)
    if traceback is not None:
        return _users((frame.filename, frame.lineno) for frame in reversed(traceback))
    found = None if _of_address is None else _of_address(0, id(thing) - PREFIX)
    return found and _users(frame[:2] for frame in found)


def _users(places) -> tuple:
    """The innermost of places that is in no library; places: (file, line), from the innermost on."""
    places = list(places)
    return next((place for place in places if by_user(place[0])), places[0])


# Python 3.11 does not find objects of classes with a dict, whose memory begins two pointers earlier than it looks.
PREFIX, _of_address = 4 * ctypes.sizeof(ctypes.c_void_p), None
if sys.version_info[:2] == (3, 11) and hasattr(ctypes.pythonapi, "_PyTraceMalloc_GetTraceback"):
    _of_address = ctypes.pythonapi._PyTraceMalloc_GetTraceback
    _of_address.restype, _of_address.argtypes = ctypes.py_object, (ctypes.c_uint, ctypes.c_size_t)


def _bytes(tensor, storages) -> int:
    try:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages:
            return 0
        storages.add(storage.data_ptr())
        return storage.nbytes()
    except (RuntimeError, NotImplementedError):  # it has none
        return 0


def _nodes(node) -> int:
    seen, left = {node}, [node]
    while left and len(seen) < NODES:
        for following, _ in left.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return len(seen)


def _by_line() -> Counter:
    sizes = Counter()
    for trace in tracemalloc.take_snapshot().traces:
        frame = trace.traceback[-1]
        if os.path.dirname(frame.filename) not in BETWEEN and frame.filename != tracemalloc.__file__:
            sizes[frame.filename, frame.lineno] += trace.size
    return sizes
