"""50 ms planted in a phase, or in one rank: told by haiprof as the ranks themselves have timed it."""

from pathlib import Path

import planted
import pytest
import ranks

from haiprof import arrivals, record, verdict

WORKER = Path(planted.__file__)
PHASES = ("data", "forward", "backward", "optimizer")
EXACT = 0.05  # of what was planted


def profiled(tmp_path, where, slow=None, backend="gloo", size=2):
    folder = tmp_path / "profile"
    more = {"folder": str(folder), "where": where, "slow": slow, "backend": backend}
    truth = ranks.run(WORKER, "trains", size, tmp_path, timeout=120, **more)
    runs = record.load(folder)
    assert [run["run"]["rank"] for run in runs] == list(range(size))
    return truth, runs


@pytest.mark.parametrize("where", PHASES)
def test_what_is_planted_is_in_its_phase(tmp_path, where):
    truth, runs = profiled(tmp_path, where)
    for timed, rank in zip(truth, verdict.judge(runs).ranks, strict=True):
        n, allowed = planted.STEPS - 1, EXACT * planted.PLANTED
        assert rank.steps == planted.STEPS and len(timed["seconds"]["planted"]) == n
        for phase in PHASES:
            assert rank.phases[phase] == pytest.approx(sum(timed["seconds"][phase]) / n, abs=allowed), phase
        assert rank.phases[where] >= sum(timed["seconds"]["planted"]) / n - 1e-4
        assert rank.waited == pytest.approx(sum(timed["seconds"]["wait"]) / n, abs=allowed)
        assert sum(rank.phases.values()) == pytest.approx(rank.seconds, rel=0.02)


def expected(truth, slow):
    """Seconds that rank 0 has waited for the slow one, from the ranks' own times: step by step, of steps 2 and later."""
    late = 0.0
    for place in ("backward", "all_reduce"):
        came = [timed["arrivals"][place][2:] for timed in truth]
        late += sum(max(0.0, slow - other) for other, slow in zip(came[1 - slow], came[slow], strict=True))
    return late


@pytest.mark.parametrize("backend", ["gloo", "hfreduce"])
@pytest.mark.parametrize("where", [*PHASES, "all_reduce"])
def test_the_rank_that_makes_others_wait_is_named(tmp_path, where, backend):
    slow = 1
    truth, runs = profiled(tmp_path, where, slow, backend)
    since = max(timed["arrivals"]["all_reduce"][0] for timed in truth) + 1e-3  # from the second step on
    found = arrivals.lateness(runs, since)
    planted_in_all = sum(truth[slow]["seconds"]["planted"][1:])
    waited = expected(truth, slow)
    assert waited > 0.7 * planted_in_all
    assert found.waits[0] == pytest.approx(waited, rel=EXACT)
    assert found.charged[slow] == pytest.approx(waited, rel=EXACT)
    assert found.charged[0] < 0.3 * waited

    judged = verdict.judge(runs)
    finding = next(each for each in judged.findings if each.kind == "slow rank")
    phase = {"all_reduce": "other"}.get(where, where)
    assert finding.text.startswith("Rank 1 ") and finding.text.endswith(f"it is late in {phase}."), finding.text
