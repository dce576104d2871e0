"""The cost model of the plan: hops, bytes and predicted times."""

import pytest
from test_plan import default

from hfreduce import cost, plan


def depth(hosts: int) -> int:
    """Levels below the top of the tree with nodes 1 to `hosts`, by the rule of tree.cpp."""

    def above(node):
        bit = node & -node
        up = (node - bit) | 2 * bit
        return up if up <= hosts else node - bit

    def hops(node):
        return 1 + hops(above(node)) if above(node) else 0

    return max(hops(node) for node in range(1, hosts + 1))


@pytest.mark.parametrize("hosts", (2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 1000, 1024))
def test_hops_and_bytes_between_hosts(hosts):
    n = 1 << 20
    share = (hosts - 1) / hosts * n
    assert cost.between("all_reduce", "tree", n, hosts).hops == 2 * depth(hosts)
    assert cost.between("broadcast", "tree", n, hosts).hops == 1 + (depth(hosts - 1) if hosts > 2 else 0)
    ring, direct = (cost.between("all_reduce", name, n, hosts) for name in ("ring", "direct"))
    assert (ring.hops, direct.hops) == (2 * (hosts - 1), 2)
    assert ring.sent == direct.sent == pytest.approx(2 * share)
    assert cost.between("all_gather", "ring", n, hosts).sent == pytest.approx(share)


def test_nothing_is_counted_where_nothing_is_done():
    assert cost.inside("all_reduce", "two_shot", 1 << 20, 1, 1 << 18, plan.SLOT) == cost.Inside(0, 0, 0)
    assert cost.between("all_reduce", "ring", 1 << 20, 1) == cost.Between(0, 0, 0)
    assert cost.seconds("all_reduce", "ring", 1 << 20, 1, 1, cost.Link(1e-5, 1e9)) == 0


def test_predicted_time_is_latency_for_small_messages_and_bandwidth_for_large_ones():
    link = cost.Link(latency=1e-4, bandwidth=1e9, overhead=0)
    for name, hops in (("direct", 2), ("ring", 30), ("tree", 2 * depth(16))):
        assert cost.seconds("all_reduce", name, 4, 16, 1, link) == pytest.approx(hops * 1e-4, rel=0.01)
        assert cost.seconds("all_reduce", name, 1 << 34, 16, 1, link) == pytest.approx(2 * 2**34 / 1e9, rel=0.1)


def test_the_plan_is_never_far_from_the_best_that_is_predicted():
    for hosts in (2, 8, 16, 64, 256, 1024):
        for nbytes in (4 << 10, 1 << 20, 16 << 20, 256 << 20):
            for local in (1, 8):
                link = cost.Link(latency=30e-6, bandwidth=1.25e9)
                times = {name: cost.seconds("all_reduce", name, nbytes, hosts, local, link) for name in plan.BETWEEN}
                if hosts > 8:
                    del times["direct"]  # left out for its many connections, not its speed
                chosen = default("all_reduce", nbytes, hosts * local, hosts).between
                assert times[chosen] <= 1.5 * min(times.values()), (hosts, nbytes, local, times, chosen)
