"""The flow model of a fabric: rates, routes, times; the command line."""

import itertools
import json
import math
import random
import time
from collections import defaultdict

import pytest

from hfreduce import simulate, topo
from hfreduce.simulate import GIGABIT, Network, fair, ideal, network, steps

MIB = 1 << 20


def test_rates_are_max_min_fair():
    """No link is over its rate, and each flow has a full link on which no flow is faster."""
    rng = random.Random(0)
    for _ in range(100):
        rates = [rng.uniform(0.1, 10) for _ in range(rng.randint(1, 12))]
        paths = [rng.sample(range(len(rates)), rng.randint(1, min(4, len(rates)))) for _ in range(rng.randint(1, 40))]
        found, on = fair(paths, rates), defaultdict(list)
        for path, rate in zip(paths, found, strict=True):
            for link in path:
                on[link].append(rate)
        assert all(sum(on[link]) <= rates[link] * (1 + 1e-9) for link in on)
        for path, rate in zip(paths, found, strict=True):
            full = [link for link in path if math.isclose(sum(on[link]), rates[link], rel_tol=1e-6)]
            assert any(rate >= max(on[link]) * (1 - 1e-6) for link in full)


@pytest.mark.parametrize(
    "line", ["fat_tree", "rails", "planes", "dragonfly", "fat_tree leaves=3 hosts=5 spines=2 rate=25"]
)
def test_routes_are_links_from_end_to_end(line):
    on = network(line)
    for a, b in (random.Random(seed).sample(on.hosts, 2) for seed in range(50)):
        paths = [*on.paths(a, b)]
        assert len(paths) == len(on.leaves[a])
        for path in paths:
            assert path[0][0] == a and path[-1][1] == b and set(path) <= set(on.rates)
            assert all(x[1] == y[0] for x, y in itertools.pairwise(path))
            assert not {host for _, host in path[:-1]} & set(on.hosts), "hosts do not forward"


def test_one_switch_has_the_time_of_the_bytes():
    on, nbytes = network("fat_tree leaves=1 hosts=8 spines=1 rate=10"), 64 * MIB
    each = 2 * 7 / 8 * nbytes / (10 * GIGABIT)
    for algorithm in ("ring", "direct"):
        assert math.isclose(simulate.simulate(on, on.hosts, "all_reduce", algorithm, nbytes).seconds, each)
        half = simulate.simulate(on, on.hosts, "all_gather", algorithm, nbytes).seconds
        assert math.isclose(half, each / 2)
    found = simulate.simulate(on, on.hosts, "all_reduce", "tree", nbytes)
    assert each <= found.seconds <= 2.1 * nbytes / (10 * GIGABIT) and max(found.busy.values()) <= 1 + 1e-9


def test_the_order_of_switches_takes_congestion_from_a_ring():
    """2:1 and 4:1: hosts at random are at least twice as slow, sorted ones as fast as on one switch."""
    for spines in (8, 4):
        on = network(f"fat_tree leaves=8 hosts=16 spines={spines}")
        for seed in range(5):
            job = random.Random(seed).sample(on.hosts, 64)
            best = ideal(on, job, "all_reduce", "ring", MIB)
            wild, tidy = (simulate.simulate(on, h, "all_reduce", "ring", MIB) for h in (job, on.fabric.sorted(job)))
            assert wild.seconds > 2 * best and math.isclose(tidy.seconds, best)


def test_hosts_on_several_switches_send_over_all():
    for line in ("rails", "planes"):
        on = network(line)
        found = simulate.simulate(on, on.fabric.sorted(on.hosts), "all_reduce", "ring", MIB).seconds
        assert math.isclose(found, ideal(on, on.hosts, "all_reduce", "ring", MIB))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 15, 16, 33])
def test_trees_are_two_that_reach_all_hosts(n):
    """An inner host of one is a leaf of the other, but for one of an odd number."""
    hosts = list(range(n))
    ((times, flows),) = steps("all_reduce", "tree", hosts, 1.0)
    half, inner = len(flows) // 2, []
    assert times == 1 and len(flows) == 4 * (n - 1)
    for tree in (flows[:half], flows[half:]):
        up = {a: b for a, b, _ in tree[::2]}
        assert [(b, a, s) for a, b, s in tree[::2]] == tree[1::2] and len(up) == n - 1
        (top,) = set(hosts) - set(up)
        for host in hosts:
            path = [host]
            while path[-1] != top:
                path.append(up[path[-1]])
            assert len(path) <= 2 + math.log2(n)
        inner.append(set(up.values()))
    assert len(inner[0] & inner[1]) <= n % 2


@pytest.mark.parametrize("algorithm", simulate.ALGORITHMS)
def test_200_hosts_in_two_seconds(algorithm):
    on = network("fat_tree leaves=40 hosts=20 spines=10")
    job = random.Random(0).sample(on.hosts, 200)
    began = time.process_time()
    simulate.simulate(on, job, "all_reduce", algorithm, 25 * MIB)
    assert time.process_time() - began < 2


def test_files_and_mistakes(tmp_path):
    file = tmp_path / "fabric.json"
    links = [{"source": f"n{i}", "target": f"s{i % 2}"} for i in range(4)] + [
        {"source": "s0", "target": "s1", "rate": 50}
    ]
    nodes = [{"id": f"n{i}"} for i in range(4)] + [{"id": f"s{i}", "type": "switch"} for i in range(2)]
    file.write_text(json.dumps({"nodes": nodes, "links": links}))
    on = network(str(file))
    assert on.fabric.sorted(on.hosts) == ["n0", "n2", "n1", "n3"] and on.rates["s1", "s0"] == 50 * GIGABIT
    wild, tidy = (
        simulate.simulate(on, h, "all_reduce", "ring", MIB).seconds for h in (on.hosts, on.fabric.sorted(on.hosts))
    )
    assert math.isclose(wild, 4 * tidy / 2)
    with pytest.raises(ValueError, match="not in the fabric, or on no switch: n9"):
        simulate.simulate(on, ["n0", "n9"], "all_reduce", "ring", MIB)
    apart = Network(["a", "b"], {("a", "s"): 1.0, ("s", "a"): 1.0, ("b", "t"): 1.0, ("t", "b"): 1.0}, "apart")
    with pytest.raises(ValueError, match="no path from a to b"):
        simulate.simulate(apart, ["a", "b"], "all_reduce", "ring", MIB)
    for wrong in ("fat_tree leaves", "fat_tree leaves=0", "fat_tree x=1", "rails groups=two"):
        with pytest.raises(ValueError, match=r"give [a-z]+=NUMBER"):
            network(wrong)
    for text in (
        "[]",
        "{",
        '{"nodes": [], "links": [{"source": "a"}]}',
        json.dumps({"nodes": nodes, "links": [links[0] | {"rate": 0}]}),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match="is no graph"):
            network(str(file))


def test_command(tmp_path, capsys):
    (tmp_path / "hosts").write_text("\n".join(f"host{i * 5 % 16}" for i in range(16)))
    line = "fat_tree leaves=4 hosts=4 spines=1"
    assert topo.main(["simulate", line, "--hosts", str(tmp_path / "hosts"), "--bytes", "4M"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"all_reduce of 4 MiB between 16 hosts on {line}"
    times = {row.split()[0]: row for row in shown}
    assert "4.00x" in times["ring"] and "1.00x" in times["ring"] and "leaf" in shown[-1]
    assert (
        topo.main(["simulate", "fat_tree", "--op", "all_gather"]) == 0 and "tree " not in capsys.readouterr().out[60:]
    )
    assert topo.main(["simulate", "/nowhere"]) == 2 and "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        topo.main(["simulate", "fat_tree", "--bytes", "many"])
