"""Rank programs that leave while an asynchronous save is pending: see tests/haiscale/test_checkpoint_exit.py."""

import contextlib
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import hfreduce  # noqa: F401
from haiscale import checkpoint


def init(rank, size, store, backend):
    torch.set_num_threads(1)
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, **options)


def slow(rank, fails=False, write=checkpoint.dcp.FileSystemWriter.write_data):
    """From now on writing takes a while, and fails on rank 1."""

    def write_data(*arguments):
        time.sleep(0.3)
        if fails and rank == 1:
            raise OSError("no room")
        return write(*arguments)

    checkpoint.dcp.FileSystemWriter.write_data = write_data


def destroys(rank, size, store, backend, target):
    init(rank, size, store, backend)
    slow(rank)
    checkpoint.save(target, nn.Linear(2, 2), step=7, async_=True)
    dist.destroy_process_group()
    return checkpoint.latest(target).name


def ends(rank, size, store, backend, target):
    init(rank, size, store, backend)
    slow(rank)
    checkpoint.save(target, nn.Linear(2, 2), step=7, async_=True)


def fails(rank, size, store, backend, target):
    init(rank, size, store, backend)
    slow(rank, fails=True)
    checkpoint.save(target, nn.Linear(2, 2), step=7, async_=True)


def dies(rank, size, store, backend, target):
    """The error and the seconds of a destruction after the other rank's death."""
    init(rank, size, store, backend)
    checkpoint.save(target, nn.Linear(2, 2), step=6, async_=True).result()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(target, nn.Linear(2, 2), step=7, async_=True)
    begin, text = time.monotonic(), None
    try:
        dist.destroy_process_group()
    except RuntimeError as error:
        text = str(error)
    dist.destroy_process_group()
    return text, time.monotonic() - begin


def caught_elsewhere(rank, size, store, backend, target):
    """A rank that fails leaves while the save, which all ranks have begun, is pending."""
    init(rank, size, store, backend)
    slow(rank)
    checkpoint.save(target, nn.Linear(2, 2), step=7, async_=True)
    with contextlib.suppress(KeyError):
        try:
            if rank == 1:
                raise KeyError("no such sample")
        finally:
            dist.destroy_process_group()
    return checkpoint.latest(target).name
