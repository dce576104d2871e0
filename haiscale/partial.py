"""Folders that are being written or removed, with their owner: `.partial-WHAT-HOST-MACHINE-PROCESS-START-RANDOM`.

Several jobs may save into one folder. So a job removes such a part only if nothing uses it any more: if the named
process has ended, or, if this cannot be seen from here, if nothing in it has changed for a day.
"""

import hashlib
import os
import re
import shutil
import socket
import time
import uuid
from pathlib import Path

PREFIX = ".partial-"
STALE = 24 * 3600  # seconds without a change after which a part of another machine counts as abandoned

_OWNED = re.compile(r".*-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-(?P<start>\d+)-[0-9a-f]{8}")
_claimed: set[str] = set()  # names in use by this process


def claim(what: str) -> str:
    """A new name for a folder that this process will write or remove, until it calls `release`."""
    process = os.getpid()
    host = re.sub(r"[^\w.]", "_", socket.gethostname())
    name = f"{PREFIX}{what}-{host}-{_machine()}-{process}-{_start(process)}-{uuid.uuid4().hex[:8]}"
    _claimed.add(name)
    return name


def release(name: str) -> None:
    """Releases a name: what is left under it may be removed."""
    _claimed.discard(name)


def remove_abandoned(folder: Path) -> None:
    """Removes leftovers of killed saves."""
    for path in folder.glob(f"{PREFIX}*"):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    found = _OWNED.fullmatch(path.name)
    if found is None or found["machine"] != _machine():
        return time.time() - _changed(path) > STALE
    process = int(found["process"])
    if _start(process) != int(found["start"]):
        return True
    return process == os.getpid() and path.name not in _claimed


def _machine() -> str:
    """Identifies processes that share process numbers: a boot of a host, and a container on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    numbers = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{boot} {numbers}".encode()).hexdigest()[:8]


def _start(process: int) -> int | None:
    """Its start time, in ticks since the machine booted; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _changed(path: Path) -> float:
    """The last modification time in a folder."""
    times = []
    for one in (path, *path.rglob("*")):
        try:
            times.append(one.stat().st_mtime)
        except OSError:  # it is being removed
            times.append(time.time())
    return max(times)
