"""Random kills, stops and cuts of working ranks, with printed seeds, and how the others react.

    PYTHONPATH=tests/hfreduce python -P tests/hfreduce/soak.py --trials 100 --seed 7 --hosts --cuts

Each trial starts ranks that call random collectives with known results. It interferes with one rank, or with the link
of a host, at a random time. The survivors must raise in time, name the right rank, and leave nothing behind; a wrong
result ends a rank with an error. To repeat a trial: --trials 1 --seed N, and the same switches. The exit code is 1 if a
trial hung, gave a wrong result or left something behind, or if fewer than 99 in 100 survivors named the right rank.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import hosts
import ranks

WORKER = Path(__file__).with_name("faulty.py")
LAYOUTS = {2: ["aa"], 3: ["aaa"], 4: ["aaaa"]}  # a letter per rank: its host
MORE_LAYOUTS = {2: ["ab"], 3: ["aab", "abc"], 4: ["aabb", "abab"]}
CUT_LAYOUTS = {2: ["ab"], 3: ["aab"], 4: ["aabb"]}  # in network namespaces
HANG = 20.0


@dataclass
class Kind:
    cause: str
    timeout: float  # of the groups
    limit: float  # seconds until every survivor has raised


KINDS = {
    "kill": Kind("died", 20.0, 1.0),
    "stop": Kind("timeout", 1.0, 3.0),  # after the timeout, peers are asked for their state
    "cut": Kind("died", 20.0, 12.0),
}


class Trial:
    def __init__(self, seed, several_hosts, cuts):
        dice = random.Random(seed)
        self.seed = seed
        self.name = dice.choice(["kill", "kill", "stop"] + ["cut"] * cuts)
        self.kind, self.size = KINDS[self.name], dice.choice([2, 3, 4])
        more = MORE_LAYOUTS[self.size] if several_hosts else []
        self.layout = dice.choice(CUT_LAYOUTS[self.size] if self.name == "cut" else LAYOUTS[self.size] + more)
        self.culprits = [dice.randrange(self.size)]
        if self.name == "cut":  # each side takes the other for dead
            self.culprits = [rank for rank in range(self.size) if self.layout[rank] == self.layout[-1]]
        self.delay = dice.random() * 0.3
        self.complaints, self.right, self.judged = [], 0, 0

    def __str__(self):
        return f"seed {self.seed}: {self.name} {self.culprits} of {self.layout} after {self.delay:.3f} s"

    def run(self, folder):
        shared = set(os.listdir("/dev/shm"))
        with contextlib.ExitStack() as stack:
            options = {"seed": self.seed, "patience": min(ranks.soon(self.kind.timeout), HANG)}
            network = None
            if self.name == "cut":
                network = stack.enter_context(hosts.hosts(2))
                options["prefix"] = lambda rank: network.prefix("ab".index(self.layout[rank]))
            elif len(set(self.layout)) > 1:
                options["host_id"] = list(self.layout)
            group = stack.enter_context(ranks.start(WORKER, "soaks", self.size, folder, **options))
            group.until("works")
            time.sleep(self.delay)
            self.interfere(group, network)
        if left := set(os.listdir("/dev/shm")) - shared:
            self.complaints.append(f"left in /dev/shm: {left}")

    def interfere(self, group, network):
        at = time.monotonic()
        judged = list(range(self.size))
        if self.name == "cut":
            network.cut(1)
        else:
            group.signal(self.culprits[0], signal.SIGKILL if self.name == "kill" else signal.SIGSTOP)
            judged.remove(self.culprits[0])
        try:
            codes = group.wait(HANG, judged)
            if self.name == "stop":  # the stopped rank learns of the timeout
                group.signal(self.culprits[0], signal.SIGCONT)
                codes += group.wait(HANG, self.culprits)
                judged += self.culprits
        except AssertionError as error:
            self.complaints.append(f"hang: {error}")
            return
        if any(codes):
            self.complaints.append(f"exit codes {codes}: {group.output()}")
            return
        results = group.results()
        for rank in judged:
            self.judge(rank, results[rank], at + ranks.soon(self.kind.limit))

    def judge(self, rank, result, deadline):
        first, later = result["first"], result["later"]
        guilty = set(self.culprits)
        if self.name == "cut" and rank in guilty:
            guilty = set(range(self.size)) - guilty
        right = first["cause"] == self.kind.cause and first["ranks"] and set(first["ranks"]) <= guilty
        self.judged, self.right = self.judged + 1, self.right + bool(right)
        if not right:
            print(f"  rank {rank} named {first['ranks']} ({first['cause']}): {first['text']}", flush=True)
        if first["at"] > deadline and (self.name != "stop" or rank not in guilty):
            self.complaints.append(f"rank {rank} raised {first['at'] - deadline:.2f} s late: {first['text']}")
        if later["text"] != first["text"] or later["took"] > ranks.soon(0.1):
            self.complaints.append(f"the next operation of rank {rank}: {later}")
        if result["after"] != result["before"]:
            self.complaints.append(f"rank {rank}: files, threads, mappings {result['before']}, now {result['after']}")


def soak(trials, seed, several_hosts=False, cuts=False):
    """The seeds of failed trials, and the share of survivors that named the right rank."""
    bad, right, judged, begun = [], 0, 0, time.monotonic()
    for number in range(seed, seed + trials):
        trial = Trial(number, several_hosts, cuts)
        with tempfile.TemporaryDirectory() as folder:
            trial.run(Path(folder))
        right, judged = right + trial.right, judged + trial.judged
        print(f"{trial}: {'BAD' if trial.complaints else 'ok'}, {trial.right}/{trial.judged} named it", flush=True)
        for complaint in trial.complaints:
            print(f"  {complaint}", flush=True)
        if trial.complaints:
            bad.append(number)
    print(f"{trials} trials in {time.monotonic() - begun:.0f} s, bad: {bad}, named the right rank: {right}/{judged}")
    return bad, right / max(judged, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count on from it")
    parser.add_argument("--hosts", action="store_true", help="also several hosts, on one machine")
    parser.add_argument("--cuts", action="store_true", help="also cut hosts off, in network namespaces; needs root")
    options = parser.parse_args()
    bad, share = soak(options.trials, options.seed, options.hosts, options.cuts)
    return int(bool(bad) or share < 0.99)


if __name__ == "__main__":
    sys.exit(main())
