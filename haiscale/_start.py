"""Run as a program, with the arguments PARENT COMMAND...: has Linux kill this process together with PARENT, and becomes
COMMAND. It is a program because a launcher with threads may not run Python between fork and exec."""

import ctypes
import os
import signal
import sys


def die_with(parent: int) -> None:
    """Linux kills this process when the thread that started it ends. The process keeps this in exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has died meanwhile
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
