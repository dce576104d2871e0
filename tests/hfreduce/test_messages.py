"""send, recv and recv_any: order, tags, sizes; through pipes inside a host, over TCP between hosts."""

import itertools
import random
import threading
import time

import pytest
import torch
from definitions import DTYPES, SLOT, filled
from threads import group, run

from hfreduce import _C

PIPE = 256 << 10  # bytes that fit between two ranks of a host
EAGER = 1 << 20  # bytes of one sender's messages, with some overhead for each, sent before they are requested
LAYOUTS = ["aa", "ab"]


def hosts(layout, **config):
    return group(len(layout), **{"host_id": list(layout), "slot_bytes": SLOT, **config})


def send(rank, x, to, tag=0):
    rank.send(x.data_ptr(), x.numel(), DTYPES[x.dtype], to, tag)


def recv(rank, x, source, tag=0):
    rank.recv(x.data_ptr(), x.numel(), DTYPES[x.dtype], source, tag)
    return x


def recv_any(rank, x, tag=0):
    return rank.recv_any(x.data_ptr(), x.numel(), DTYPES[x.dtype], tag)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_every_size_come_in_order(layout):
    counts = [0, 1, 7, 8192, 8193, PIPE - 1, PIPE + 1, 5 * PIPE + 3, 0]
    sent = [filled(count, torch.uint8, i) for i, count in enumerate(counts)]

    def talk(rank):
        if rank.rank == 0:
            for x in sent:
                send(rank, x, 1)
            return [recv(rank, torch.zeros_like(x), 1) for x in sent]
        got = [recv(rank, torch.zeros_like(x), 0) for x in sent]
        for x in sent:
            send(rank, x, 0)
        return got

    with hosts(layout) as ranks:
        for got in run(talk, ranks):
            assert all(torch.equal(x, y) for x, y in zip(sent, got, strict=True))
        assert all(rank.operations == 2 * len(counts) for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_other_tags_are_kept_in_order(layout):
    """More of them than the pipe holds: the receiver stores them while it waits for its own."""
    count = (EAGER - 9 * 100) // 4 // 9
    sent = [(tag, filled(count, torch.int32, 10 * tag + i)) for i in range(3) for tag in (5, 6, 7)]

    def talk(rank):
        if rank.rank == 0:
            for tag, x in sent:
                send(rank, x, 1, tag)
            return None
        return {tag: [recv(rank, torch.zeros(count, dtype=torch.int32), 0, tag) for _ in range(3)] for tag in (7, 5, 6)}

    with hosts(layout) as ranks:
        got = run(talk, ranks)[1]
    for tag in (5, 6, 7):
        wanted = [x for t, x in sent if t == tag]
        assert all(torch.equal(x, y) for x, y in zip(wanted, got[tag], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_message_that_nobody_receives_holds_up_none_of_another_tag(layout):
    """Three senders, in threads, of more than is ever kept; their messages are received last first."""
    sent = {tag: filled(EAGER // 2, torch.int32, tag) for tag in (1, 2, 3)}
    with hosts(layout) as ranks:
        threads = [threading.Thread(target=send, args=(ranks[0], x, 1, tag)) for tag, x in sent.items()]
        for thread in threads:
            thread.start()
        for tag in (3, 2, 1):
            assert torch.equal(recv(ranks[1], torch.zeros_like(sent[tag]), 0, tag), sent[tag])
        for thread in threads:
            thread.join(20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_receivers_of_several_tags_at_once(layout):
    """A thread per tag; they share what arrives. Eager and rendezvous sizes, in both directions."""
    counts, rounds = [1, 3000, EAGER // 16, EAGER], 4

    def talk(rank):
        other, errors = 1 - rank.rank, []

        def sends(tag):
            for i in range(rounds):
                send(rank, filled(counts[(tag + i) % 4], torch.uint8, 10 * tag + i), other, tag)

        def receives(tag):
            for i in range(rounds):
                x = filled(counts[(tag + i) % 4], torch.uint8, 10 * tag + i)
                if not torch.equal(recv(rank, torch.zeros_like(x), other, tag), x):
                    errors.append((tag, i))

        threads = [threading.Thread(target=f, args=(tag,)) for tag in range(8) for f in (receives, sends)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return errors, any(thread.is_alive() for thread in threads)

    with hosts(layout) as ranks:
        assert run(talk, ranks) == [([], False)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_nobody_receives_is_not_sent(layout):
    """Messages of another tag, small and large: the receiver keeps no more of them than its limit."""

    def memory():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    small, large = torch.ones(1000, dtype=torch.uint8), torch.ones(8 * EAGER, dtype=torch.uint8)

    def talk(rank):
        if rank.rank == 1:
            recv(rank, torch.zeros(1), 0, tag=9)
            for x, count, tag in ((small, 50_000, 1), (large, 8, 2)):
                for _ in range(count):
                    recv(rank, torch.zeros_like(x), 0, tag)
            return None

        def sends(x, count, tag):
            for _ in range(count):
                send(rank, x, 1, tag)

        threads = [
            threading.Thread(target=sends, args=(small, 50_000, 1)),
            threading.Thread(target=sends, args=(large, 8, 2)),
        ]
        before = memory()
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        grown = memory() - before
        send(rank, torch.ones(1), 1, tag=9)
        for thread in threads:
            thread.join(30)
        return grown

    with hosts(layout) as ranks:
        grown = run(talk, ranks)[0]
    assert grown < 4 * EAGER, grown


@pytest.mark.parametrize("layout", ["aaa", "abc", "aab"])
def test_from_whoever_sends(layout):
    """recv_any takes every message of its tag once, including those to oneself, and leaves the others."""
    count, each = 40_000, 5

    def talk(rank):
        me = rank.rank
        for i in range(each):
            if me != 1:
                send(rank, torch.full((count,), 10 * me + i), 0, tag=3)
            else:
                send(rank, torch.full((count,), i), 0, tag=4)
        if me:
            return None
        x, seen = torch.zeros(count, dtype=torch.int64), {0: [], 2: []}
        for _ in range(2 * each):
            source = recv_any(rank, x, tag=3)
            assert (x == x[0]).all()
            seen[source].append(int(x[0]) - 10 * source)
        return seen, [int(recv(rank, x, 1, tag=4)[0]) for _ in range(each)]

    with hosts(layout) as ranks:
        seen, others = run(talk, ranks)[0]
    assert seen == {0: list(range(each)), 2: list(range(each))} and others == list(range(each))


@pytest.mark.parametrize("count", [0, 1, 3 * PIPE])
def test_to_oneself(count):
    """Of any size, and before they are received."""
    x = filled(count, torch.uint8, 1)
    with hosts("ab") as ranks:
        send(ranks[0], x, 0, tag=1)
        send(ranks[0], x + 1, 0, tag=2)
        assert torch.equal(recv(ranks[0], torch.zeros_like(x), 0, tag=2), x + 1)
        assert torch.equal(recv(ranks[0], torch.zeros_like(x), 0, tag=1), x)


@pytest.mark.parametrize("layout", ["aab", "abc"])
def test_pairs_and_directions_do_not_wait_for_one_another(layout):
    """A thread for each, concurrently, with messages larger than a pipe; recv_any and recv from the same rank."""
    world, rounds = len(layout), 6
    tensors = {p: [filled(PIPE, torch.int16, 7 * p[0] + 3 * p[1] + i) for i in range(rounds)] for p in pairs_of(world)}
    errors = []

    def guarded(f):
        def body():
            try:
                f()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=body)

    with hosts(layout) as ranks:

        def sends(a, b):
            for i, x in enumerate(tensors[a, b]):
                send(ranks[a], x, b, tag=1)
                send(ranks[a], torch.tensor([100 * a + i]), b, tag=2)

        def receives(a, b):
            for x in tensors[a, b]:
                assert torch.equal(recv(ranks[b], torch.zeros_like(x), a, tag=1), x)

        def takes(b):
            x, seen = torch.zeros(1, dtype=torch.int64), {a: [] for a in range(world) if a != b}
            for _ in range(rounds * (world - 1)):
                seen[recv_any(ranks[b], x, tag=2)].append(int(x))
            assert seen == {a: [100 * a + i for i in range(rounds)] for a in seen}

        threads = [guarded(lambda p=p, f=f: f(*p)) for p in pairs_of(world) for f in (sends, receives)]
        threads += [guarded(lambda b=b: takes(b)) for b in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not errors, errors


def pairs_of(world):
    return [(a, b) for a, b in itertools.product(range(world), repeat=2) if a != b]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_small_messages(layout):
    """Random sizes and tags, received in another order of tags than sent."""
    draw = random.Random(3)
    sent = [(draw.randrange(4), filled(draw.choice([0, 1, 50, 9000]), torch.uint8, i)) for i in range(400)]

    def talk(rank):
        if rank.rank == 0:
            for tag, x in sent:
                send(rank, x, 1, tag)
        else:
            for tag in (2, 0, 3, 1):
                for t, x in sent:
                    assert t != tag or torch.equal(recv(rank, torch.zeros_like(x), 0, tag), x)

    with hosts(layout) as ranks:
        run(talk, ranks)


@pytest.mark.parametrize("any_source", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mismatch_names_both_sides(layout, kept, any_source):
    """Wrong size, or wrong dtype of the same size; whether the message was waited for or kept."""
    for wrong in (torch.zeros(11), torch.zeros(10, dtype=torch.int32)):

        def talk(rank, wrong=wrong):
            with pytest.raises(_C.Fault) as error:
                if rank.rank == 0:
                    send(rank, torch.zeros(10), 1, tag=9)
                    send(rank, torch.zeros(1), 1, tag=8)
                    recv(rank, torch.zeros(1), 1)  # nothing is sent; the fault is raised here, too
                else:
                    if kept:
                        recv(rank, torch.zeros(1), 0, tag=8)
                    recv_any(rank, wrong, tag=9) if any_source else recv(rank, wrong, 0, tag=9)
            return str(error.value), error.value.cause, sorted(error.value.ranks)

        with hosts(layout) as ranks:
            results = run(talk, ranks)
        for message, cause, culprits in results:
            assert cause == "mismatch" and culprits == [0, 1], message
            assert "with tag 9" in message and "10 float32 (40 bytes)" in message, message
            assert f"{wrong.numel()} {str(wrong.dtype)[6:]} ({4 * wrong.numel()} bytes)" in message, message
            assert "rank 0 (" in message and "rank 1 (" in message, message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_timeout_names_who_did_not_send_or_receive(layout):
    for body in (
        lambda rank, x: rank.recv(x.data_ptr(), 1, DTYPES[x.dtype], 1, 0, timeout=0.3),
        lambda rank, x: rank.send(x.data_ptr(), x.numel(), DTYPES[x.dtype], 1, 0, timeout=0.3),
    ):
        with hosts(layout) as ranks:
            with pytest.raises(_C.Fault, match="rank 1") as error:
                body(ranks[0], torch.zeros(8 << 20))
            assert error.value.cause == "timeout" and error.value.ranks == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_abort_wakes_who_waits(layout):
    def talk(rank):
        if rank.rank == 1:
            return rank.abort("enough")
        with pytest.raises(_C.Fault, match="enough"):
            recv(rank, torch.zeros(1), 1)

    with hosts(layout) as ranks:
        run(talk, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_sent_arrives_though_the_sender_has_left(layout):
    x = filled(PIPE // 8, torch.uint8, 3)
    with hosts(layout) as ranks:
        send(ranks[0], x, 1)
        ranks[0].shutdown()
        assert torch.equal(recv(ranks[1], torch.zeros_like(x), 0), x)
