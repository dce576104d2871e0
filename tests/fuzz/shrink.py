"""The smallest program that still shows a difference, and a script that prints it."""

import itertools
import pprint
import time
from collections.abc import Iterator

from engine import Difference, Fuzzer, told


def shorter(part) -> Iterator:
    """Copies of a program without a part of a list, with an item's inner list in its place, or with a flag less."""
    if isinstance(part, list):
        for size in dict.fromkeys((len(part), len(part) // 2, len(part) // 4, 1)):
            for at in range(0, len(part), size) if size else ():
                yield part[:at] + part[at + size :]
        for at, item in enumerate(part):
            inner = item.values() if isinstance(item, dict) else item if isinstance(item, tuple) else ()
            for found in inner:
                if isinstance(found, list):
                    yield part[:at] + found + part[at + 1 :]
            for changed in shorter(item):
                yield [*part[:at], changed, *part[at + 1 :]]
    elif isinstance(part, tuple):
        for at, item in enumerate(part):
            for changed in shorter(item):
                yield (*part[:at], changed, *part[at + 1 :])
    elif isinstance(part, dict):
        for key, item in part.items():
            for changed in shorter(item):
                yield {**part, key: changed}
    elif part is True:
        yield False


def shrink(fuzzer: Fuzzer, program, difference: Difference, seconds: float = 60):
    """The smallest program found within `seconds` that still shows a difference of the same class."""
    known, until, again = fuzzer.is_known(program, difference), time.monotonic() + seconds, True
    while again:
        again = False
        for candidate in itertools.chain(shorter(program), fuzzer.simpler(program)):
            if time.monotonic() > until:
                return program
            try:
                found, _ = fuzzer.difference(candidate)
            except Exception:  # a candidate may be invalid, which is no finding
                continue
            if found is not None and found.kind == difference.kind and fuzzer.is_known(candidate, found) == known:
                program, again = candidate, True
                break
    return program


def script(fuzzer: Fuzzer, program) -> str:
    """A script, for the repository's root, that prints what both sides log for a program."""
    return f"""import sys

sys.path.insert(0, "tests/fuzz")
import {fuzzer.name}
import shrink

program = {pprint.pformat(program, width=110, sort_dicts=False)}
shrink.show({fuzzer.name}.FUZZER, program)
"""


def show(fuzzer: Fuzzer, program) -> None:
    """Prints both sides, and their first difference."""
    stock, ours = fuzzer.run(program, False), fuzzer.run(program, True)
    for label in dict.fromkeys(itertools.chain(stock.seen, ours.seen)):
        a, b = (log.seen.get(label, "not there") for log in (ours, stock))
        print(f"{label}\n  ours:  {told(a)}\n  stock: {told(b)}")
    print("first difference:", fuzzer.difference(program)[0])
