"""Where hosts hang, from every source: leaves, orders, errors with lines; the command line."""

import logging
import random

import fabrics
import pytest

from hfreduce import core, plan, topo
from hfreduce import topology_sources as topology
from hfreduce.topology import TopologyError, expand, natural
from hfreduce.topology_sources import parse

TREE = "SwitchName=s1 Nodes=n[3,11]\nSwitchName=s0 Nodes=n[2,10]\nSwitchName=top Switches=s[0-1]\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("HFREDUCE_TOPO", "SLURM_JOB_NODELIST", "SLURM_TOPOLOGY_ADDR"):
        monkeypatch.delenv(name, raising=False)
    topology._tell.cache_clear()
    (tmp_path / "topology.conf").write_text(TREE)
    (tmp_path / "hosts").write_text("n11 slots=8\nn10 slots=8\n# n4\nn2 slots=4\nn3\n")
    return str(tmp_path / "topology.conf"), str(tmp_path / "hosts")


@pytest.mark.parametrize("name", fabrics.FORMATS)
def test_generated_fabrics(name):
    for seed in range(200):
        fabrics.check(name, seed)


@pytest.mark.parametrize("name", fabrics.FORMATS)
def test_damaged_files(name):
    refused = [fabrics.check_damaged(name, seed) for seed in range(100)]
    assert any(refused) and not all(refused)


def test_numbers_are_compared_as_numbers():
    names = ["node70", "node7", "node007", "r2n1", "r10n1", "r2n10", "node8", "node66", "node"]
    assert sorted(names, key=natural)[:4] == ["node", "node007", "node7", "node8"]
    assert sorted(names[3:6], key=natural) == ["r2n1", "r2n10", "r10n1"]


def test_lists_of_names():
    assert expand("n[01-03,7],login") == ["n01", "n02", "n03", "n7", "login"]
    assert expand("r[1-2]n[08-09]x") == ["r1n08x", "r1n09x", "r2n08x", "r2n09x"]
    assert expand("") == [] and expand("a") == ["a"]
    for wrong in ("n[1-3", "n1-3]", "n[3-1]", "n[a]", "n[]", "n[1-99999999]", "n[[1]]"):
        with pytest.raises(TopologyError):
            expand(wrong)


CONTRADICTIONS = {
    "twice": (TREE + "SwitchName=s0 Nodes=n5", "line 4: switch s0 is there twice, first in line 2"),
    "two leaves": (TREE + "SwitchName=s2 Nodes=n[1-2]", "line 4: host n2 is under s2 and, in line 2, under s0"),
    "two parents": (TREE + "SwitchName=t2 Switches=s0", "line 4: switch s0 is under t2 and under top"),
    "partial": (TREE.replace("SwitchName=s0", "SwitchName=s7"), "line 3: switch s0, under top, is not described"),
    "a circle": (
        "SwitchName=l Nodes=n1\nSwitchName=a Switches=b\nSwitchName=b Switches=a",
        "line 2: switch a is above",
    ),
    "itself": ("SwitchName=l Nodes=n1\nSwitchName=a Switches=a", "line 2: switch a is above itself"),
    "no list": (TREE + "SwitchName=s2 Nodes=n[4-", "line 4: 'n[4-' is not a list of names"),
    "no switch": (TREE + "Nodes=n4", "line 4: neither SwitchName nor BlockName"),
    "no key": (TREE + "SwitchName=s5 n4", "line 4: 'n4' is not KEY=VALUE"),
    "nothing below": (TREE + "SwitchName=s5", "line 4: switch s5 has neither Nodes nor Switches"),
    "empty": ("# nothing\n\n", "there is nothing in it"),
    "unknown": ("\nhello world", "line 2: of no known format: 'hello world'"),
    "json": ('{"switches": {\n "a": {"nodes": ["n1"]},\n}', "line 3: it cannot be read as JSON"),
    "json of lists": ('{"switches": {\n "a": {"nodes": "n1"}}}', "line 2: nodes and switches of a must be lists"),
    "json of links": ('{"nodes": [{"id": "a"}],\n "links": [{"source": "a", "target": "b"}]}', "line 2: a link of 'b'"),
    "json of neither": ("[1]", 'line 1: neither "switches" nor a graph'),
    "two addresses": ("a.n1\nb.n1", "line 2: host n1 has another address in line 1"),
    "no address": ("a.n1\nb n2", "line 2: 'b n2' is not SWITCH.SWITCH.HOST"),
    "opensm": ("0x0001\tn1 HCA-1\nn2", "line 2: neither LID and host nor DUMMY"),
    "lldp": ("lldp.eth0.chassis.name=a\nb", "line 2: not lldp.INTERFACE.KEY=VALUE"),
    "ports": (
        'Switch\t2 "S-1"\t# "s"\n[1]\t"H-1"[1]\n[2]\t"H-1"[1]\n',
        'line 3: port 2 of "S-1" or its other end is connected to two',
    ),
    "devices": ('Ca\t1 "H-1"\t# "n"\nCa\t1 "H-1"\t# "n"\n', "line 2: Ca H-1 is there twice"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_broken_files(case, tree, tmp_path, caplog):
    """The line is named. `find` warns and orders hosts by name."""
    text, why = CONTRADICTIONS[case]
    with pytest.raises(TopologyError) as error:
        parse(text)
    assert str(error.value).startswith(why)
    (tmp_path / "broken").write_text(text)
    with caplog.at_level(logging.WARNING, "hfreduce"):
        found = topology.find(["n10", "n9"], str(tmp_path / "broken"))
    assert found.sorted(["n10", "n9"]) == ["n9", "n10"] and why in caplog.text and "broken" in caplog.text


def test_hosts_that_the_file_does_not_know_are_last(tree, caplog):
    hosts = ["m1", "n10", "n3.cluster", "n2", "n11.cluster"]
    with caplog.at_level(logging.WARNING, "hfreduce"):
        found = topology.find(hosts, tree[0])
        assert found.sorted(hosts) == ["n2", "n10", "n3.cluster", "n11.cluster", "m1"]
        assert "1 of 5 hosts is not in" in caplog.text
        none = topology.find(["m2", "m10"], tree[0])
    assert none.sorted(["m10", "m2"]) == ["m2", "m10"] and "none of the hosts is in" in caplog.text
    assert topology.find(hosts, "/nowhere").source == "the hosts' names"
    assert parse(TREE).known("10.0.0.1") is None


def test_addresses_of_slurm():
    given = {"n1": "top.s[2,10].l2.n1", "n2": "top.s[2,10].l10.n2", "n3": "top.s[2,10].l2.n3"}
    found = topology.find([*given], "", given)
    assert found.source == "SLURM_TOPOLOGY_ADDR" and found.sorted(given) == ["n1", "n3", "n2"]
    assert found.path("n1") == (("top",), ("s2", "s10"), ("l2",))
    for useless in ({"n1": "n1", "n2": "n2"}, {"n1": "s.n1", "n2": ""}, {"n1": "s[.n1", "n2": "s.n2"}):
        assert topology.find(["n1", "n2"], "", useless).source == "the hosts' names"


def test_a_ring_over_unordered_hosts_crosses_more_leaves():
    found = parse(TREE)
    assert found.crossings(["n2", "n3", "n10", "n11"]) == (4, 2)
    assert found.crossings(["n2", "n10", "n3", "n11"]) == (2, 2)
    assert found.crossings(["n2", "n10"]) == (0, 0) and found.crossings([]) == (0, 0)


def test_rails_and_planes():
    """A host on several switches belongs with those on the same."""
    drawn = {f"n{i}": [f"rail{rail}-{i // 4}" for rail in range(2)] for i in range(8)}
    text = "\n".join(f"{n}: lldp.eth{i}.chassis.name={s}" for n, of in drawn.items() for i, s in enumerate(of))
    found, hosts = parse(text), random.Random(0).sample([*drawn], 8)
    assert found.sorted(hosts) == [*drawn] and found.leaf("n5") == ("rail0-1", "rail1-1")


def test_groups_follow_the_fabric(tree, monkeypatch, caplog):
    """The order of hosts by their lowest rank, with a warning if a ring over ranks crosses more leaves than it must."""
    hosts = [("n3", ""), ("n10", ""), ("n11", ""), ("n2", "")]
    assert core.sorted_hosts(hosts) == ([], "")
    monkeypatch.setattr(core, "_warned", [])
    monkeypatch.setenv("HFREDUCE_TOPO", tree[0])
    with caplog.at_level(logging.WARNING, "hfreduce"):
        for _ in range(2):
            assert core.sorted_hosts(hosts) == ([3, 1, 0, 2], tree[0])
    assert "crosses 4 of 4 links between leaf switches, 2 are enough" in caplog.text
    assert caplog.text.strip().endswith("in this order: n2 n10 n3 n11") and len(caplog.records) == 1
    assert core.sorted_hosts([("vm", ""), ("vm", "")]) == ([], "")  # and the file knows none of them
    monkeypatch.setenv("HFREDUCE_TOPO", "")
    assert core.sorted_hosts([("n1", "s2.n1"), ("n2", "s1.n2")]) == ([1, 0], "SLURM_TOPOLOGY_ADDR")
    assert "neighbours: hosts in the order of ranks" in plan.explain("all_reduce", 1 << 20, ranks=4, hosts=2)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "s2.n1")
    assert "neighbours: hosts in the order of SLURM_TOPOLOGY_ADDR" in plan.explain("barrier", 0, ranks=4, hosts=2)


def test_commands(tree, capsys, monkeypatch):
    file, hosts = tree
    assert topo.main(["order", hosts, "--topology", file]) == 0
    assert capsys.readouterr().out == "n2 slots=4\nn10 slots=8\nn3\nn11 slots=8\n"
    assert topo.main(["order", hosts]) == 0
    assert capsys.readouterr().out == "n2 slots=4\nn3\nn10 slots=8\nn11 slots=8\n"
    assert topo.main(["show", "--hosts", hosts, "--topology", file]) == 0
    assert capsys.readouterr().out == (
        f"4 hosts, by {file} (as Slurm's administrator has written it)\n"
        "  top\n    s0\n      n2\n      n10\n    s1\n      n3\n      n11\n"
    )
    monkeypatch.setenv("HFREDUCE_TOPO", file)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[2-3,10-11],m1")
    assert topo.main([]) == 0
    shown = capsys.readouterr().out
    assert "m1  (unknown)" in shown and "a ring in the given order crosses 5 of 5 links between leaves, 3 are" in shown
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    assert topo.main([]) == 0 and "n11" in capsys.readouterr().out
    for wrong in (["order", "/nowhere"], ["order", "/dev/null"]):
        assert topo.main(wrong) == 2 and capsys.readouterr().err.startswith("python -m hfreduce.topo: ")
