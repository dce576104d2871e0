"""Runs a fuzzer: python tests/fuzz/run.py convert --programs 20000 --seed 0 --jobs 2

    --only SEED      one program: shows both sides, and shrinks a difference to a script
    --plant NAME     with a planted fault, to check that it is found; --shrink N: scripts for the first N differences
    --faults         a table: after how many programs each fault is found

Program i of run SEED has the seed SEED * 1000000 + i, which is printed. Exits with 1 on a difference that is not of a
known class, a required feature in fewer than 2% of at least 5000 programs, or a fault that is not found. Programs run
in separate processes, so one that crashes or hangs is a finding.
"""

import argparse
import contextlib
import faulthandler
import importlib
import itertools
import logging
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import engine
import shrink

TIMEOUT = 120  # seconds a program may take
SEEDS = 1_000_000
SHARE = 100  # programs that a process tries a fault on


def fuzzer_of(name: str) -> engine.Fuzzer:
    return importlib.import_module(name).FUZZER


def work(name: str, seeds: range, plant: str | None, pipe) -> None:
    """A worker process: sends each seed before it runs, and its outcome afterwards."""
    fuzzer = fuzzer_of(name)
    with fuzzer.faults[plant]() if plant else contextlib.nullcontext():
        for seed in seeds:
            pipe.send(seed)
            faulthandler.dump_traceback_later(TIMEOUT, exit=True)
            try:
                pipe.send(engine.trial(fuzzer, seed))
            except Exception:
                traceback.print_exc()
                pipe.send((seed, set(), "harness: raises", None))
            faulthandler.cancel_dump_traceback_later()
    pipe.send(None)


def work_on_stock(name: str, seed: int) -> None:
    """A process that runs one program on stock torch only, as it is and as the fuzzer's lenient side."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    fuzzer = fuzzer_of(name)
    fuzzer.run(fuzzer.program(seed), False)
    if fuzzer.lenient is not None:
        fuzzer.lenient(fuzzer.program(seed))
    faulthandler.cancel_dump_traceback_later()


def run(name: str, seeds: range, jobs: int, plant: str | None = None, tell=lambda summary: None) -> engine.Summary:
    """Runs all programs of `seeds` on `jobs` processes. One that dies is replaced, and its program is a finding, unless
    stock torch dies of it, too."""
    context, summary, running = multiprocessing.get_context("spawn"), engine.Summary(), {}

    def start(seeds):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=work, args=(name, seeds, plant, theirs)).start()
        theirs.close()
        running[ours] = seeds, None

    for k in range(jobs):
        start(seeds[k::jobs])
    while running:
        for pipe in wait(list(running)):
            share, at = running[pipe]
            try:
                got = pipe.recv()
            except EOFError:
                del running[pipe]
                at = share[0] if at is None else at
                alone = context.Process(target=work_on_stock, args=(name, at))
                alone.start()
                alone.join()
                torchs = "torch itself crashes (waits: nothing)" if alone.exitcode != 0 else None
                summary.add(at, (), "crash or hang: died", torchs)
                if share[share.index(at) + 1 :]:
                    start(share[share.index(at) + 1 :])
                continue
            if got is None:
                del running[pipe]
            elif isinstance(got, int):
                running[pipe] = share, got
            else:
                summary.add(*got)
                tell(summary)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fuzzer")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--plant")
    parser.add_argument("--shrink", type=int, default=0)
    parser.add_argument("--faults", action="store_true")
    given = parser.parse_args()
    fuzzer = fuzzer_of(given.fuzzer)
    if given.only is not None:
        return only(fuzzer, given.only, given.plant)
    if given.faults:
        return table_of_faults(fuzzer, given)
    began = last = time.monotonic()

    def tell(summary):
        nonlocal last
        if time.monotonic() > last + 60:
            last = time.monotonic()
            print(f"  {summary.programs} programs in {last - began:.0f} s: {summary.found}", flush=True)

    first = given.seed * SEEDS
    summary = run(given.fuzzer, range(first, first + given.programs), given.jobs, given.plant, tell)
    told(fuzzer, summary, time.monotonic() - began)
    for kind, seeds in list(summary.found.items())[: given.shrink]:
        print(f"\n{kind}, seed {seeds[0]}:")
        if not kind.startswith(("crash", "harness")):
            only(fuzzer, seeds[0], given.plant)
    return 1 if summary.found or (summary.programs >= 5000 and summary.rare(fuzzer)) else 0


def only(fuzzer: engine.Fuzzer, seed: int, plant: str | None) -> int:
    program = fuzzer.program(seed)
    with fuzzer.faults[plant]() if plant else contextlib.nullcontext():
        difference, log = fuzzer.difference(program)
        print("features:", *sorted({*fuzzer.features(program), *log.features}), sep="\n  ")
        if difference is None:
            print("no difference")
            return 0
        print("known as:", fuzzer.is_known(program, difference))
        program = shrink.shrink(fuzzer, program, difference)
        difference, _ = fuzzer.difference(program)
    print(f"{difference}\n--- script\n{shrink.script(fuzzer, program)}")
    return 1


def told(fuzzer: engine.Fuzzer, summary: engine.Summary, seconds: float) -> None:
    print(f"{fuzzer.name}: {summary.programs} programs in {seconds:.0f} s")
    for name, count in sorted(summary.features.items(), key=lambda item: -item[1]):
        print(f"  {100 * count / summary.programs:5.1f}%  {name}")
    print("rarer than 2%:", ", ".join(summary.rare(fuzzer)) or "none")
    rows = sorted(summary.found.items(), key=lambda item: -len(item[1]))
    known = [f"{count:6} {name}" for name, count in summary.known.most_common()]
    print("known classes:", *known or ["none"], sep="\n  ")
    print("differences:", *[f"{len(s):6} {kind}: seeds {s[:5]}" for kind, s in rows] or ["none"], sep="\n  ")


def table_of_faults(fuzzer: engine.Fuzzer, given) -> int:
    """For each fault, the number of programs until it was found; at most `--programs` are tried."""
    faults = [given.plant] if given.plant else list(fuzzer.faults)
    first, began, found = given.seed * SEEDS, time.monotonic(), {}

    def try_some(start, fault):
        if fault in found:
            return
        number = search(fuzzer.name, fault, range(first + start, first + min(start + SHARE, given.programs)))
        if number is not None and start + number < found.get(fault, given.programs + 1):
            found[fault] = start + number
            print(f"{fault:60} {found[fault]}", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(try_some, *zip(*itertools.product(range(0, given.programs, SHARE), faults), strict=True)))
    missed = [fault for fault in faults if fault not in found]
    print(f"found {len(found)} of {len(faults)} faults, each in at most {given.programs} programs,")
    print(f"in {time.monotonic() - began:.0f} s; not found: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def search(name: str, fault: str, seeds: range) -> int | None:
    """`first_found` in a separate process; not of a multiprocessing.Pool, whose processes may have no children."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=find, args=(name, fault, seeds, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None  # the process has died
    finally:
        process.join()


def find(name: str, fault: str, seeds: range, pipe) -> None:
    logging.getLogger("hfnn").setLevel(logging.CRITICAL)
    pipe.send(engine.first_found(fuzzer_of(name), fault, seeds))


if __name__ == "__main__":
    sys.exit(main())
