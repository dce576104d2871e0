"""The flight recorder, as read by torch's own analyser."""

import logging
import pickle
import re
from pathlib import Path

import ranks
from torch.distributed.flight_recorder import fr_trace

WORKER = Path(__file__).with_name("faulty.py")


def analysed(records, folder, caplog, *options):
    """The analyser's log and tables for dumps stored as torch stores them: one pickle per global rank."""
    dumps = folder / "dumps"
    dumps.mkdir()
    for rank, record in records.items():
        (dumps / f"rank_{rank}").write_bytes(pickle.dumps(record))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(dumps), "-p", "rank_", "-o", str(folder / "tables"), *options])
    _, tables = pickle.loads((folder / "tables").read_bytes())
    return caplog.text, tables


def dumps_of(tmp_path, case, size=2):
    results = ranks.run(WORKER, "records", size, tmp_path, case=case)
    return {2 * rank: record for rank, record in enumerate(results)}


def test_all_well(tmp_path, caplog):
    records = dumps_of(tmp_path, "well", size=3)
    text, tables = analysed(records, tmp_path, caplog)
    names = [c.collective_name for c in tables.collectives]
    assert names == ["nccl:all_reduce", "nccl:reduce", "nccl:all_gather", "nccl:reduce_scatter"]
    assert all(c.pass_check and c.collective_state == "completed" for c in tables.collectives), text
    assert len(tables.ncclcalls) == 3 * 4 and {m.global_rank for m in tables.memberships} == {0, 2, 4}
    for entry in records[0]["entries"]:
        times = [entry[f"time_{when}_ns"] for when in ("created", "discovered_started", "discovered_completed")]
        assert times == sorted(times) and times[0] > 1_600_000_000_000_000_000


def test_mismatch(tmp_path, caplog):
    text, tables = analysed(dumps_of(tmp_path, "mismatch"), tmp_path, caplog)
    assert "Collective sequence number: 5 has errors" in text
    assert re.search(r"Culprit rank [02]; Error type: SIZE_OR_SYNTAX_MISMATCH, .*'\[\[[45]\]\]'", text), text
    assert [c.pass_check for c in tables.collectives] == [True] * 4 + [False]


def test_missing_rank(tmp_path, caplog):
    text, _ = analysed(dumps_of(tmp_path, "missing"), tmp_path, caplog)
    assert "Not all ranks joining collective, sequence number: 5" in text
    for said in ("missing ranks: {2}", "collective: nccl:all_reduce_barrier", "collective state: started"):
        assert said in text


def test_messages(tmp_path, caplog):
    """A message is matched with its receiver and no other rank, also in a group of more than two."""
    text, tables = analysed(dumps_of(tmp_path, "messages", size=3), tmp_path, caplog)
    ranks_of = {c.collective_name[5:]: c.expected_ranks for c in tables.collectives[4:]}
    assert ranks_of.pop("all_reduce_barrier") == {0, 2, 4}
    assert list(ranks_of.values()) == [{0, 2}, {0, 2}] and set(ranks_of) <= {
        "send 0->1",
        "recv 1<-0",
        "send 1->0",
        "recv 0<-1",
    }
    assert all(c.pass_check and c.collective_state == "completed" for c in tables.collectives), text
    assert len(tables.ncclcalls) == 3 * 5 + 2 * 2
