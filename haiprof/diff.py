"""`diff A B`: two runs side by side, and the source of the difference between their steps."""

from statistics import fmean

from rich.console import Group
from rich.table import Table
from rich.text import Text

from haiprof.verdict import PARTS, Verdict, ms


def means(verdict: Verdict) -> dict[str, float]:
    """Seconds per step, over all ranks: by phase, "a step", and "blocked in collectives", which is part of the
    phases."""
    found = {name: fmean(rank.phases[name] for rank in verdict.ranks) for name in PARTS}
    blocked = fmean(rank.communication() for rank in verdict.ranks)
    return {**found, "a step": verdict.step, "blocked in collectives": blocked}


def page(a: Verdict, b: Verdict, names=("A", "B")) -> Group:
    """Raises ValueError if one of the runs has no steps."""
    for verdict, name in ((a, names[0]), (b, names[1])):
        if not verdict.ranks:
            raise ValueError(f"{name}: {verdict.findings[0].text}")
    before, after = means(a), means(b)
    table = Table("", str(names[0]), str(names[1]), "change", "of the step of A")
    for name in before:
        change = after[name] - before[name]
        table.add_row(name, ms(before[name]), ms(after[name]), f"{change * 1e3:+.1f} ms", f"{change / a.step:+.1%}")
    most = max(PARTS, key=lambda name: abs(after[name] - before[name]))
    ratio = a.step / b.step
    faster = f"B is {ratio:.2f} times as fast" if ratio >= 1 else f"B takes {1 / ratio:.2f} times as long"
    text = f"{faster}; most of the difference is in {most} ({(after[most] - before[most]) * 1e3:+.1f} ms a step)"
    kinds = [", ".join(finding.kind for finding in verdict.findings) for verdict in (a, b)]
    return Group(Text(text, style="bold"), table, Text(f"verdicts: A {kinds[0]}; B {kinds[1]}"))
