"""The fault matrix of haiscale.survive: real processes, real faults, and a verdict on each case.

    python tests/faults/matrix.py --cases 600 --results /tmp/faults.jsonl     # goes on where it was interrupted
    python tests/faults/matrix.py --only 42 -v                                # one case again, with its output

A case is drawn from its seed: a fault, a moment, victims, a wrapper, a backend. Its verdict is a list of what is wrong:
the reason that the launcher gave; the generations and the ranks in them; the time from the fault to the first step that
is finished after it; samples, each of which counts once; the parameters, which are bitwise those of an orderly training
with the same numbers of ranks; what is left behind.
"""

import argparse
import atexit
import collections
import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "hfreduce")]

import subject  # noqa: E402
from ranks import soon  # noqa: E402

ENDS = {  # faults that end the process: what the launcher says about it
    "kill": r"was killed by SIGKILL",
    "exception": r"failed: ValueError: the loss is nan",
    "exit": r"ended with exit code 0",
    "memory": r"failed: RuntimeError: .*memory",
    "stop": r"did not answer, and was killed [\d.]+ s after",
}
PASSES = ("stop and continue", "slow")  # after which all go on
FAULTS = (*ENDS, *PASSES, "launcher killed")
MOMENTS = (
    "data", "forward", "backward, before averages", "backward, between averages", "backward, after averages",
    "commit, before the step", "commit, after the step", "after the step",
    "after the step, before others", "after training",
    "recovering, before the state", "recovering, after the state",
)  # fmt: skip
SETTINGS = (("haiscale", "hfreduce"), ("torch", "hfreduce"), ("haiscale", "gloo"))
VICTIMS = ("first", "middle", "last", "two")
TIMEOUT = 1.5  # seconds, of groups; on a busy machine more
LIMIT = 1.0  # seconds from a fault that closes a connection to the next finished step; on a busy machine more (`soon`)


def case(seed):
    """The case of a seed. Successive seeds go through all combinations of fault, moment and victims, in some order."""
    every = list(itertools.product(FAULTS, MOMENTS, VICTIMS))
    fault, moment, victims = random.Random(0).sample(every, len(every))[seed % len(every)]
    draw = random.Random(seed)
    size, spares = draw.choice((3, 4)), draw.choice((0, 0, 1))
    return made(fault, moment, victims, SETTINGS[(seed + seed // len(every)) % len(SETTINGS)], size, spares)


def made(fault, moment, victims, setting=SETTINGS[0], size=3, spares=0):
    if victims == "two" and moment.startswith("recovering"):
        size = 4  # one rank is left that has the state
    wrapper, backend = setting
    found = {"wrapper": wrapper, "backend": backend, "size": size, "spares": spares, "timeout": soon(TIMEOUT)}
    struck = {"first": [0], "middle": [1], "last": [size - 1], "two": [0, size - 1]}[victims]
    strike = {"fault": fault, "moment": moment, "victims": struck, "generation": 0}
    before = []
    if moment.startswith("recovering"):
        before = [{"fault": "kill", "moment": "data", "victims": [(struck[0] + 1) % size], "generation": 0}]
        strike["generation"] = 1
    elif moment == "after the step, before others":  # one rank that lives on is late, and cannot finish the step
        late = min(set(range(size)) - set(struck))
        before = [{"fault": "slow", "moment": "backward, after averages", "victims": [late], "generation": 0}]
        strike["moment"] = "after the step"
    return found | {"strikes": [*before, strike], "axes": [fault, moment, victims, f"{wrapper} on {backend}"]}


def verdict(case, folder, defect=None, show=False):
    """What is wrong, as a list of lines, and the seconds from the last fault to the next finished step."""
    own = Path(folder, "tmp")
    own.mkdir(parents=True)
    deadly = any(strike["fault"] == "launcher killed" for strike in case["strikes"])
    launcher = subject.Process(functools.partial(subject.launches, case, folder, defect), folder / "output")
    launcher.join(soon(40))
    code = launcher.exitcode
    if code is None:
        os.kill(launcher.pid, signal.SIGKILL)  # Linux kills the ranks
        launcher.join(10)
    output = (folder / "output").read_text()
    notes = _notes(folder)
    if show:
        print(output, *notes, sep="\n")
    wanted = -signal.SIGKILL if deadly else 0
    wrong = [] if code == wanted else [f"the launcher's exit code is {code}, not {wanted}"]
    wrong += _left(notes, launcher.pid, own)
    took = None
    if not wrong and not deadly:
        wrong += _reasons(case, output, notes) + _generations(case, notes)
        wrong += [] if wrong else _samples(notes) + _values(case, notes)
        took = _seconds(case, notes)
        limit = soon(LIMIT) + (2 * case["timeout"] if _has(case, "stop") else 0)
        wrong += [f"{took:.2f} s from the fault to the next finished step"] if took is not None and took > limit else []
    return wrong + ([output] if wrong else []), took


def _notes(folder):
    found = []
    for path in Path(folder).glob("notes.*"):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda note: note["at"])


def _of(notes, what):
    return [note for note in notes if note["what"] == what]


def _has(case, fault):
    return any(strike["fault"] == fault for strike in case["strikes"])


def _lost(case):
    """The processes that end by a fault, each with its strike, in the order of generations."""
    return {n: strike for strike in case["strikes"] if strike["fault"] in ENDS for n in strike["victims"]}


def _left(notes, launcher, folder):
    """Processes, names in /dev/shm with their numbers, and files that a case has left, a short time after its end."""
    pids = [note["pid"] for note in _of(notes, "process")]
    until = time.monotonic() + soon(2)
    while alive := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    wrong = [f"processes are left: {alive}"] if alive else []
    numbers = {str(pid) for pid in [launcher, *pids]}
    new = {name for name in os.listdir("/dev/shm") if numbers & set(re.findall(r"\d+", name))}
    wrong += [f"shared memory is left: {sorted(new)}"] if new else []
    for name in new:
        os.unlink(f"/dev/shm/{name}")
    wrong += [f"files are left: {os.listdir(folder)}"] if os.listdir(folder) else []
    has = collections.defaultdict(list)
    for note in _of(notes, "has"):
        has[note["process"]].append(note["belongings"])
    for process, counts in has.items():
        grown = any(after > before for later in counts[1:] for before, after in zip(counts[0], later, strict=True))
        wrong += [f"process {process} has more files, threads or mappings than before: {counts}"] if grown else []
    return wrong


def _is_alive(pid):
    """Also a process of the same group, such as a child of a rank."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and (int(path.parent.name) == pid or int(fields[2]) == pid):
            return True
    return False


def _reasons(case, output, notes):
    """The launcher names each victim with its pid and the fault."""
    pids = {note["process"]: note["pid"] for note in _of(notes, "process")}
    wrong = []
    for number, strike in _lost(case).items():
        pattern = rf"haiscale\.survive: .*rank {number} \(pid {pids[number]}\) {ENDS[strike['fault']]}"
        wrong += [] if re.search(pattern, output) else [f"not named: {pattern}"]
    struck = sorted(note["process"] for note in _of(notes, "fault"))
    planned = sorted(number for strike in case["strikes"] for number in strike["victims"])
    wrong += [] if struck == planned else [f"faults came to {struck}, not to {planned}"]
    named = {int(n) for n in re.findall(r"rank (\d+) \(pid \d+\) (?:was killed|did not answer|failed|ended)", output)}
    return wrong + ([f"named: {named}"] if named - set(_lost(case)) else [])


def _generations(case, notes):
    """Each generation has the living ranks, and spares in the places of others; none loses more than one step."""
    sizes, wrong = _sizes(case), []
    for number, size in enumerate(sizes):
        begun = [n for n in _of(notes, "generation") if n["number"] == number]
        if number == 1 and len(sizes) == 3:  # a fault may find it before all have begun
            wrong += [] if all(n["size"] == size for n in begun) else [f"generation 1: {begun}"]
        elif sorted(n["rank"] for n in begun) != list(range(size)) or any(n["size"] != size for n in begun):
            wrong.append(f"generation {number} is not one of {size} ranks: {begun}")
    most = max(note["number"] for note in _of(notes, "generation"))
    wrong += [f"there were {most + 1} generations, not {len(sizes)}"] if most + 1 != len(sizes) else []
    finished = -1
    for number in range(most + 1):
        steps = [note["step"] for note in _of(notes, "samples") if note["generation"] == number]
        if steps and min(steps) != finished + 1:
            wrong.append(f"generation {number} begins with step {min(steps)}, after step {finished} was finished")
        finished = max([finished, *(n["step"] for n in _kept(notes) if n["generation"] == number)])
    ends = {note["process"] for note in _of(notes, "end") if note["generation"] == most}
    wrong += [f"{len(ends)} ranks came to the end, not {sizes[-1]}"] if len(ends) != sizes[-1] else []
    return wrong


def _sizes(case):
    """The number of ranks in each generation."""
    sizes, spares = [case["size"]], case["spares"]
    for strike in case["strikes"]:
        if strike["fault"] in ENDS:
            lost = len(strike["victims"])
            used = min(spares, case["size"] - sizes[-1] + lost)
            sizes.append(sizes[-1] - lost + used)
            spares -= used
    return sizes


def _kept(notes):
    """The finished steps that went on: those of a process that has lived to the next generation, or to the end."""
    lived = {(note["process"], note["number"]) for note in _of(notes, "generation")}
    ended = {(note["process"], note["generation"] + 1) for note in _of(notes, "end")}
    return [n for n in _of(notes, "commit") if (n["process"], n["generation"] + 1) in lived | ended]


def _final(notes):
    """{step: the generation that finished it}."""
    return {note["step"]: note["generation"] for note in sorted(_kept(notes), key=lambda n: n["generation"])}


def _samples(notes):
    """All ranks of the generation that finished a step together read its global batch."""
    final, wrong = _final(notes), []
    for step in range(subject.TOTAL):
        read = [n for n in _of(notes, "samples") if n["step"] == step and n["generation"] == final.get(step)]
        found = [index for note in read for index in note["indices"]]
        if sorted(found) != sorted(subject.batch(step)):
            wrong.append(f"step {step} had the samples {sorted(found)}, not {sorted(subject.batch(step))}")
    return wrong


def _values(case, notes):
    sizes, final = _sizes(case), _final(notes)
    order = tuple(sizes[final[step]] for step in range(subject.TOTAL) if step in final)
    wanted = _orderly(case["wrapper"], case["backend"], order)
    found = {note["digest"] for note in _of(notes, "end")}
    return [] if found == {wanted} else [f"the parameters differ from those of an orderly training: {found}, {wanted}"]


@functools.cache
def _orderly(wrapper, backend, sizes):
    """The digest of a training without faults, with sizes[step] ranks."""
    return _phase(wrapper, backend, sizes)[0]


@functools.cache
def _folder():
    folder = tempfile.mkdtemp(prefix="orderly_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _phase(wrapper, backend, sizes):
    """The digest and the file of the state after these steps."""
    size, count = sizes[-1], len(list(itertools.takewhile(lambda s: s == sizes[-1], reversed(sizes))))
    begin = len(sizes) - count
    state = _folder() / f"{wrapper} {backend} {' '.join(map(str, sizes))}"
    if begin:
        shutil.copyfile(_phase(wrapper, backend, sizes[:begin])[1], state)
    arguments = size, wrapper, backend, begin, len(sizes), state
    started = [subject.Process(functools.partial(subject.in_order, rank, *arguments)) for rank in range(size)]
    for process in started:
        process.join(60)
    assert not any(process.exitcode for process in started), sizes
    return Path(f"{state}.digest").read_text(), state


def _seconds(case, notes):
    """From the last fault to the first step that is finished in the generation after it; None: there is none."""
    if not _lost(case):
        return None
    at = max(note["at"] for note in _of(notes, "fault"))
    last = max(note["number"] for note in _of(notes, "generation"))
    finished = [note["at"] for note in _of(notes, "commit") if note["generation"] == last]
    return min(finished) - at if finished else None


def run(case, **options):
    """The record of a case: its axes, seconds and what is wrong."""
    folder = tempfile.mkdtemp(prefix="fault_")
    try:
        wrong, took = verdict(case, Path(folder), **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"axes": case["axes"], "seconds": took, "wrong": wrong}


def summary(records):
    for name, axis in zip(("fault", "moment", "victims", "setting"), range(4), strict=True):
        counts = collections.Counter(record["axes"][axis] for record in records)
        print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in sorted(counts.items())))
    times = sorted(r["seconds"] for r in records if r["seconds"] is not None and r["axes"][0] != "stop")
    if len(times) > 1:
        print(
            f"seconds to the next step: median {statistics.median(times):.3f}, p99 {times[int(len(times) * 0.99)]:.3f}"
        )
    print(f"{sum(not record['wrong'] for record in records)} of {len(records)} cases are right")


DEFECTS = {  # the case of each function of defects.py, and what the verdict says
    "samples_twice": (("kill", "data", "last"), "had the samples"),
    "older_state": (("kill", "after the step, before others", "last"), "begins with step"),
    "own_state": (("kill", "after the step, before others", "last"), "parameters differ"),
    "buffers_of_the_failed_step": (("kill", "backward, before averages", "last"), "parameters differ"),
    "other_random_numbers": (("slow", "data", "last"), "parameters differ"),
    "old_keys": (("kill", "data", "first", ("haiscale", "gloo")), "generations, not 2"),
    "leaked_socket": (("kill", "data", "last"), "more files, threads or mappings"),
    "leaked_file": (("slow", "data", "last"), "files are left"),
    "leaked_memory": (("slow", "data", "last"), "shared memory is left"),
    "leaked_process": (("kill", "data", "last"), "processes are left"),
    "wrong_name": (("kill", "data", "first"), "not named"),
    "no_reason": (("kill", "data", "first"), "not named"),
    "late": (("kill", "data", "last"), "s from the fault"),
    "gives_up": (("kill", "data", "last"), "exit code"),
    "without_the_living": (("kill", "data", "first"), "is not one of 2 ranks"),
    "needless_generation": (("slow", "data", "last"), "there were 2 generations"),
}


def defects():
    """Whether a verdict misses a planted defect; shows what each finds."""
    missed = []
    for name, (arguments, finding) in DEFECTS.items():
        wrong = run(made(*arguments), defect=name)["wrong"]
        print(f"{name}: {(wrong or ['nothing is wrong'])[0].splitlines()[0]}", flush=True)
        missed += [] if any(finding in line for line in wrong[:-1]) else [name]
    print(f"{len(DEFECTS) - len(missed)} of {len(DEFECTS)} defects are found", *missed, sep="\n")
    return bool(missed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", type=int, help="the seed of the one case to run")
    parser.add_argument("--defects", action="store_true", help="plant each of defects.py: does a verdict find it?")
    parser.add_argument("--results", type=Path, help="a file of records; cases in it are not run again")
    parser.add_argument("-v", action="store_true", help="show the output of each case")
    options = parser.parse_args()
    if options.defects:
        return defects()
    wanted = [options.only] if options.only is not None else range(options.seed, options.seed + options.cases)
    records = []
    if options.results and options.results.exists():
        records = [json.loads(line) for line in options.results.read_text().splitlines()]
    for seed in sorted(set(wanted) - {record["seed"] for record in records}):
        record = {"seed": seed, **run(case(seed), show=options.v)}
        records.append(record)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if record["wrong"]:
            print(f"case {seed} ({', '.join(record['axes'])}):", *record["wrong"], sep="\n  ", flush=True)
    summary(records)
    return any(record["wrong"] for record in records)


if __name__ == "__main__":
    sys.exit(main())
