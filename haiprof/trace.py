"""A Chrome trace of a rank, for chrome://tracing, Perfetto and HolisticTraceAnalysis.

Format: "Trace Event Format" of the Chromium project; steps are named as in torch.profiler. Times are microseconds since
1970, so the files of all ranks use one clock, as far as their hosts' clocks agree.
"""

import gzip
import json

PHASES, WAITS, STEPS = 1, 2, 3  # the lanes
LANES = {PHASES: "phases", WAITS: "waits for collectives", STEPS: "steps"}


def events(head, spans, waits=(), steps=(), counters=()) -> list[dict]:
    """The events of a rank. spans, waits, steps: (name, begin, end), seconds; counters: (name, time, value)."""
    pid = head["rank"]
    found = [_named("process_name", pid, 0, f"rank {pid} ({head['host']}, pid {head['pid']})")]
    found += [_named("thread_name", pid, lane, name) for lane, name in LANES.items()]
    for lane, rows in ((PHASES, spans), (WAITS, waits), (STEPS, steps)):
        found += [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": name,
                "pid": pid,
                "tid": lane,
                "ts": _micros(begin),
                "dur": max(0.0, round((end - begin) * 1e6, 3)),
            }
            for name, begin, end in sorted(rows, key=lambda row: row[1])
        ]
    for name, when, value in counters:
        found.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _micros(when), "args": {name: value}})
    return found


def _named(what, pid, tid, name):
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _micros(seconds):
    return round(seconds * 1e6, 3)


def write(path, head, found):
    """gzip'd JSON. HolisticTraceAnalysis searches for the rank in the text of `distributedInfo`, including the
    blank."""
    about = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": head["rank"], "world_size": head["size"], "backend": head.get("backend", "")},
    }
    with gzip.open(path, "wt", encoding="ascii", compresslevel=6) as file:
        file.write(f'{json.dumps(about)[:-1]}, "traceEvents": ')
        json.dump(found, file, separators=(",", ":"))
        file.write("}")


def read(path) -> dict:
    with gzip.open(path, "rt", encoding="ascii") as file:
        return json.load(file)
