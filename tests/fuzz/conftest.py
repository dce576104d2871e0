"""Shared by the fuzzers' test modules."""

from collections.abc import Iterator

import pytest
import torch
from engine import Summary, check


@pytest.fixture(scope="module")
def summary(request) -> Iterator[Summary]:
    """The summary of the first `PROGRAMS` programs of a test module's `FUZZER`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield check(request.module.FUZZER, range(request.module.PROGRAMS))
    torch.set_num_threads(threads)
