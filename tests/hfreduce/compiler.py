"""The C++ compiler of tests that build programs of their own: by way of ccache, where it is installed."""

import os
import shutil
import subprocess

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
CACHE = shutil.which("ccache")
# The folder of a test is another one at each run.
ENVIRONMENT = {**os.environ, "CCACHE_NOHASHDIR": "1"}


def run(*arguments, **options):
    """The compiler with these arguments; an error where it fails."""
    command = [*([CACHE] if CACHE and "-c" in arguments else []), COMPILER, *arguments]
    subprocess.run(command, check=True, env=ENVIRONMENT, **options)
