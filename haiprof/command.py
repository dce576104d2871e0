"""Common code of the command lines hfnn, hfrecord, haiprof and hfreduce; uses only the standard library.

A command exits with 0 on success, with 2 after one line on stderr on failure, and with 130 if it was interrupted.
Results go to stdout, progress and errors to stderr.
"""

import argparse
import signal
import sys
from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line. Options are not abbreviated."""

    def __init__(self, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def run(prog: str, call: Callable[[], int | None], errors: tuple[type[Exception], ...] = ()) -> int:
    """Returns the exit status of `call()`; None is 0. ValueError, OSError, ImportError and `errors` are user errors:
    one line is printed. Any other exception is a defect and is raised.
    """
    try:
        return call() or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        sys.stdout = None
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, ImportError, *errors) as error:
        print(f"{prog}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
