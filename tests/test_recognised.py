"""What `convert` recognises is at least what recognised.txt says, and it keeps no more bytes."""

import re
import warnings

import pytest

from . import recognised

pytest.importorskip("transformers")


def parsed(lines):
    """{what: (stock's bytes, kept bytes, {lines})}"""
    found, name = {}, None
    for line in lines:
        head = re.match(r"\[(.*)\]  (\d+) -> (\d+)$", line)
        if head:
            name, *kept = head.groups()
            found[name] = *map(int, kept), set()
        else:
            found[name][2].add(line.strip())
    return found


@pytest.mark.slow
def test_what_was_recognised_is():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        now = parsed(recognised.listing())
    before = parsed(recognised.WRITTEN.read_text().splitlines())
    assert now.keys() == before.keys()
    lost = {name: before[name][2] - now[name][2] for name in before if before[name][2] - now[name][2]}
    assert not lost
    # Other versions of the libraries may keep other bytes than stock's written here.
    more = {n: (now[n], then) for n, then in before.items() if now[n][1] * then[0] > then[1] * now[n][0]}
    assert not more
