"""The C++ compiler for tests that build programs of their own; uses ccache if installed."""

import os
import shutil
import subprocess

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
CACHE = shutil.which("ccache")
# A test's folder differs in each run.
ENVIRONMENT = {**os.environ, "CCACHE_NOHASHDIR": "1"}


def run(*arguments, **options):
    """Runs the compiler with these arguments; raises if it fails."""
    command = [*([CACHE] if CACHE and "-c" in arguments else []), COMPILER, *arguments]
    subprocess.run(command, check=True, env=ENVIRONMENT, **options)
