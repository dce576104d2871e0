"""Rank programs on hfreduce's own groups and functions: see tests/hfreduce/test_c10d.py."""

import os
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_groups import of

import hfreduce


def stores(rank, size, store):
    """Two groups made by two threads on one TCPStore client, in the opposite order on the other rank."""
    port = f"{store}.port"
    if rank == 0:
        tcp = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        with open(f"{port}.part", "w") as file:
            file.write(str(tcp.port))
        os.rename(f"{port}.part", port)
    else:
        while not os.path.exists(port):
            time.sleep(0.01)
        with open(port) as file:
            tcp = dist.TCPStore("127.0.0.1", int(file.read()), None, False, timedelta(seconds=30))
    groups = {}

    def make(name):
        groups[name] = hfreduce.Group(tcp, rank, size, name=name, timeout=20)

    first = threading.Thread(target=make, args=("ab"[rank],))
    first.start()
    time.sleep(0.5)  # it waits for the other rank, which makes the other group first
    make("ba"[rank])
    first.join(20)
    assert sorted(groups) == ["a", "b"]
    for group in groups.values():
        assert group.all_reduce_(torch.ones(2))[0] == size
        group.close()
    # And with torchrun's environment variables for its own store.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(tcp.port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    hfreduce.init()
    assert hfreduce.all_reduce_(torch.ones(2))[0] == size
    hfreduce.close()


def direct(rank, size, store):
    """hfreduce's own functions."""
    hfreduce.init(dist.FileStore(store, size), rank, size)
    everyone, x = range(size), of(rank, 6)
    assert torch.equal(hfreduce.all_reduce_(x.clone()), sum(of(r, 6) for r in everyone))
    largest = torch.stack([of(r, 6) for r in everyone]).amax(0)
    assert torch.equal(hfreduce.all_reduce(x, "max"), largest) and torch.equal(x, of(rank, 6))
    assert torch.equal(hfreduce.all_reduce_(x.clone(), "premul_sum", factor=2.0), 2 * sum(of(r, 6) for r in everyone))
    stacked = torch.stack([of(r, 6) for r in everyone])
    assert torch.equal(hfreduce.all_gather(x), stacked)
    assert torch.equal(hfreduce.reduce_scatter(stacked), size * x)
    assert torch.equal(hfreduce.broadcast_(x.clone(), 1), stacked[1])
    assert torch.equal(hfreduce.reduce_(x.clone(), 1, "max"), stacked.amax(0) if rank == 1 else x)
    gathered = hfreduce.gather(x, 1)
    assert torch.equal(gathered, stacked) if rank == 1 else gathered is None
    assert torch.equal(hfreduce.scatter(stacked if rank == 1 else None, torch.empty(6), 1), x)
    assert torch.equal(hfreduce.all_to_all(stacked), x.expand(size, 6))
    counts = [r + 1 for r in everyone]
    rows = torch.arange(float(sum(counts))).view(-1, 1) + 100 * rank
    got = hfreduce.all_to_all(rows, input_splits=counts, output_splits=[rank + 1] * size)
    first = sum(counts[:rank])
    assert torch.equal(got.flatten(), torch.cat([torch.arange(first, first + rank + 1.0) + 100 * r for r in everyone]))
    hfreduce.send(x, (rank + 1) % size, 3)
    assert torch.equal(hfreduce.recv_(torch.empty(6), (rank - 1) % size, 3), of((rank - 1) % size, 6))
    for wrong, words in (
        (lambda: hfreduce.all_reduce_(torch.ones(3, 3).t()[:2]), "contiguous"),
        (lambda: hfreduce.all_reduce_(x, "mean"), "op must be one of"),
        (lambda: hfreduce.reduce_scatter(torch.ones(size + 1, 2)), f"first dimension of {size}"),
        (lambda: hfreduce.all_to_all(torch.ones(size + 1, 2)), "evenly"),
        (lambda: hfreduce.all_gather(x, out=torch.ones(3)), "output of"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    hfreduce.barrier()
    with pytest.raises(hfreduce.Fault) as caught:
        hfreduce.all_reduce_(torch.ones(2 + rank), timeout=5)
    assert caught.value.cause == "mismatch", caught.value
    hfreduce.close()
    with pytest.raises(RuntimeError, match="init"):
        hfreduce.barrier()


def names(rank, size, store):
    """Groups with one name: distinguished if made one after another, refused if made at once."""
    keys = dist.FileStore(store, size)
    for _ in range(2):
        group = hfreduce.Group(keys, rank, size, timeout=20)
        assert group.all_reduce_(torch.ones(2)).tolist() == [size] * 2
    told, prefixed = [None, None], dist.PrefixStore

    def meanwhile(*arguments):
        """The first group waits here until the second is being made."""
        while all(making._alone for making in hfreduce.group._Making._all.values()):
            time.sleep(0.01)
        return prefixed(*arguments)

    def make(i):
        try:
            told[i] = hfreduce.Group(keys, rank, size, timeout=5).all_reduce_(torch.full((2,), i + 1.0)).tolist()
        except ValueError as error:
            told[i] = str(error)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(2)]
    with mock.patch.object(dist, "PrefixStore", meanwhile):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return told
