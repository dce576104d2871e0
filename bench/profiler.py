"""The cost of haiprof per training step, the correctness of its numbers, and the delay of `attach`.

    bench/profiler.py                                    # everything: rows in results/<device>-haiprof.csv, and a table
    bench/profiler.py --part overhead --batches 4 25     # GPT-2 of these batches, captured, without haiprof and with it
    bench/profiler.py --device cpu --tiny                # a smoke test

`overhead`: one process makes steps in alternating blocks, with and without the collector; the result is the median
ratio over pairs. The order changes in each pair. The benchmark's own marks around forward, backward and optimizer give
the expected values of haiprof's phases. `scripts`: the three unchanged scripts of the tests, run with `python -m
haiprof run`. `attach`: to a run that was started without haiprof, and to one with HAIPROF=idle. If a limit (MOST) is
exceeded, the exit status is 1, except with --tiny.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import cli
import models
import report
import timing
import torch

from haiprof import record, verdict
from haiprof.collector import Collector

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "haiprof" / "scripts"
PARTS = ("overhead", "scripts", "attach")
# ratio: of a step with haiprof to one without. phases: the deviation of sums from the whole, and of phases from the
# benchmark's own times. seconds: until stacks and counters of another process arrive.
MOST = {"ratio": 1.01, "phases": 0.02, "seconds": 3.0}
COUNTERS = ("gpu.busy", "gpu.sm", "gpu.tensor", "gpu.dram", "gpu.power", "gpu.clock", "process.cpu")
OWN = (
    "ratio",
    "low",
    "high",
    "host_ratio",
    "pairs",
    "covered",
    "named",
    "bytes_per_hour",
    *COUNTERS,
    "missing",
    "error",
)


def row(op: str, case: str, provider: str, name: str, us: float | None, **more) -> dict:
    """A line of the CSV file; more: columns of OWN."""
    clock = timing.Timing(us, None, None)
    return report.row(op, (case,), "autocast", provider, name, clock, None, dict.fromkeys(OWN) | more)


def counters_of(run: dict) -> dict:
    """Means of a run's counters, and the reasons for missing ones."""
    lines = run.get("counters", [])
    found = {name: [line[name] for line in lines if name in line] for name in COUNTERS}
    means = {name: statistics.fmean(values) for name, values in found.items() if values}
    return means | {"missing": "; ".join(f"{name}: {why}" for name, why in record.missing(run).items())}


# overhead


class Steps:
    """Training of GPT-2, captured if there is a GPU, with a collector that is switched on and off."""

    def __init__(self, options, folder: Path):
        self.training = models.Training("gpt2", "hfnn-captured", options)
        self.wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
        self.folder, self.cuda = folder, options.device == "cuda"

    def time(self, n: int) -> tuple[float, float]:
        """Microseconds of a step, mean of n: wall time, and CPU time of all threads of the process."""
        self.wait()
        begin, own = time.perf_counter(), time.process_time()
        for _ in range(n):
            self.training.step()
        self.wait()
        return (time.perf_counter() - begin) * 1e6 / n, (time.process_time() - own) * 1e6 / n

    def start(self, name: str) -> Collector:
        """A collector that has started to count."""
        collector = Collector(self.folder / name).start()
        deadline = time.perf_counter() + 10
        while "process.memory" not in collector.latest and time.perf_counter() < deadline:
            self.time(1)
        return collector

    def timed(self, n: int) -> dict[str, float]:
        """Microseconds of n steps by phase, from the benchmark's own marks."""
        marks = []
        for _ in range(n):
            row = [self.mark()]
            self.training.forget()
            row.append(self.mark())
            loss = self.training.loss()
            row.append(self.mark())
            loss.backward()
            row.append(self.mark())
            self.training.optimizer.step()
            row.append(self.mark())
            marks.append(row)
        self.wait()
        between = (lambda a, b: a.elapsed_time(b) * 1e3) if self.cuda else (lambda a, b: (b - a) * 1e6)
        sums = {
            name: sum(between(row[i], row[i + 1]) for row in marks) / n
            for i, name in enumerate(("forget", "forward", "backward", "optimizer"))
        }
        # From one forward to the next, as in haiprof without a loader.
        whole = between(marks[0][1], marks[-1][1]) / (n - 1)
        return sums | {"seconds": whole}

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def overhead(options, folder: Path):
    steps = Steps(options, folder)
    for batch in options.batches:
        case = f"gpt2-{batch}x{options.tokens}"
        steps.training.take((batch, options.tokens))
        steps.time(models.WARM_UP + 5)
        n = max(3, int(options.seconds * 1e6 / steps.time(3)[0]))
        pairs, on = [], []
        for turn in range(options.rounds):
            times = {}
            for profiled in (False, True) if turn % 2 else (True, False):
                collector = steps.start(f"{case}-{turn}") if profiled else None
                steps.time(3)
                times[profiled] = steps.time(n)
                if collector is not None:
                    collector.stop()
            pairs.append([a / b for a, b in zip(times[True], times[False], strict=True)])
            on.append(times)
        ratios, of_host = zip(*pairs, strict=True)
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        middle = {profiled: statistics.median(times[profiled][0] for times in on) for profiled in (False, True)}
        lines = [line for turn in range(options.rounds) for line in record.load(folder / f"{case}-{turn}")]
        merged = {"counters": [c for run in lines for c in run.get("counters", ())], "missing": lines[0]["missing"]}
        more = {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": len(pairs)}
        more["host_ratio"] = statistics.median(of_host)
        rows = [row("overhead", case, "without", "step", middle[False], ratio=1.0, pairs=len(pairs))]
        rows.append(row("overhead", case, "haiprof", "step", middle[True], **more, **counters_of(merged)))
        yield rows + phases(steps, case, n)
        said = steps.training.calls()
        print(f"{case}: {said}" if said else f"{case}: not captured", flush=True)


def phases(steps: Steps, case: str, n: int) -> list[dict]:
    """haiprof's phases and the benchmark's own marks, in the same steps; on the GPU's clock if there is one."""
    collector = Collector(steps.folder / f"{case}-phases").start()
    steps.training.step()  # the first one has a separate line
    own = steps.timed(n)
    collector.stop()
    (run,) = record.load(steps.folder / f"{case}-phases")
    lines = [line for line in run["steps"] if line["first"] > 0]
    if steps.cuda:
        lines = [line["gpu"] for line in lines if "gpu" in line]
    total = sum(line["n"] for line in lines)
    if not total:
        return [row("phases", case, "haiprof", "step", None, error="no step on this clock")]
    found = {name: sum(line.get(name, 0.0) for line in lines) / total * 1e6 for name in ("seconds", *record.PHASES)}
    named = sum(found[name] for name in record.PHASES) / found["seconds"]
    rows = []
    for name in ("seconds", "forward", "backward", "optimizer"):
        shown = "step" if name == "seconds" else name
        rows.append(row("phases", case, "own marks", shown, own[name]))
        rows.append(row("phases", case, "haiprof", shown, found[name], ratio=found[name] / own[name], named=named))
    return rows


# scripts


def commands(options, folder: Path) -> dict[str, list]:
    tiny, ranks = options.tiny, options.ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    launcher = torchrun if ranks > 1 else [sys.executable]  # otherwise the Trainer would use all GPUs
    example = ["--out", folder, "--no-band", "--device", options.device]
    example += ["--dist", "ddp", "--nproc", ranks] if ranks > 1 else []
    small = ["--layers", 1, "--width", 32, "--heads", 2, "--seq", 32, "--batch", 2, "--steps", 5]
    return {
        "trainer": [*launcher, SCRIPTS / "trainer.py", 6 if tiny else 200],
        "ddp": [*torchrun, SCRIPTS / "ddp.py", 20 if tiny else 2000, 64 if tiny else 2048],
        "train_gpt": [
            sys.executable,
            ROOT / "examples" / "train_gpt.py",
            *example,
            *(small if tiny else ["--steps", 33]),
        ],
    }


def environment(options, **more) -> dict[str, str]:
    """The environment of a process started without haiprof."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HAIPROF")}
    env |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"} | more
    return env | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if options.device == "cpu" else {})


def scripts(options, folder: Path):
    for name, command in commands(options, folder).items():
        out = folder / name
        run = [sys.executable, "-m", "haiprof", "run", "--out", out, "--", *command]
        try:
            done = subprocess.run(
                list(map(str, run)), env=environment(options), cwd=folder, timeout=options.limit,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            (options.results / f"haiprof-{name}.log").write_text(done.stdout)
            runs = record.load(out)
        except (OSError, subprocess.SubprocessError) as error:
            yield [row("scripts", name, "haiprof", "step", None, error=str(error)[:300])]
            continue
        error = None if done.returncode == 0 else f"status {done.returncode}: {done.stdout.strip().splitlines()[-1]}"
        yield [script_row(name, rank, error) for rank in verdict.judge(runs).ranks]


def script_row(name: str, rank: verdict.Rank, error: str | None) -> dict:
    lines = rank.run["steps"]
    passed = lines[-1]["until"] - lines[0]["wall"]
    covered = sum(line["seconds"] + line["gap"] for line in lines) / passed
    more = {"covered": covered, "named": 1 - rank.phases["other"] / rank.seconds, "error": error}
    if rank.gpu:  # the same steps on the GPU's clock
        steady = [line for line in lines if "gpu" in line]
        more["ratio"] = rank.gpu["seconds"] / rank.seconds if steady else None
    more |= {"bytes_per_hour": hourly(rank.run["path"]), "pairs": rank.steps}
    return row("scripts", name, f"rank {rank.rank}", "step", rank.seconds * 1e6, **more, **counters_of(rank.run))


def hourly(path: Path) -> float:
    """Bytes per hour of a file's lines, without the first, which describes the run."""
    lines = [(len(text) + 1, json.loads(text)) for text in path.read_text().splitlines()]
    walls = [line["wall"] for _, line in lines if "wall" in line]
    return sum(n for n, _ in lines[1:]) / (max(walls) - min(walls)) * 3600


# attach


def attach(options, folder: Path):
    for mode in ("", "idle"):
        yield attached(options, folder, mode)


def attached(options, folder: Path, mode: str) -> list[dict]:
    """mode: HAIPROF's value, or empty."""
    provider, out = mode or "nothing", folder / f"attach-{mode or 'nothing'}"
    more = {"HAIPROF": mode, "HAIPROF_DIR": str(folder / "sockets")} if mode else {}
    more["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = [sys.executable, str(SCRIPTS / "trainer.py"), str(10**6)]
    process = subprocess.Popen(
        command, env=environment(options, **more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in process.stdout:  # it has made some steps
            if "loss" in line:
                break
        else:
            return [row("attach", "trainer", provider, "step", None, error=f"the script ended: {line.strip()[:200]}")]
        time.sleep(1)
        before = threads(process.pid)
        ask = [sys.executable, "-m", "haiprof", "attach", str(process.pid), "--out", str(out), "--steps", "20"]
        begin = time.perf_counter()
        asking = subprocess.Popen(
            [*ask, *(["--stacks", "--operators"] if mode else [])], env=environment(options), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        seen = {}
        while asking.poll() is None and time.perf_counter() - begin < 60:
            seen |= {what: time.perf_counter() - begin for what in found_in(out) if what not in seen}
            time.sleep(0.01)
        if asking.poll() is None:
            asking.kill()
        said = asking.communicate()[0]
        (options.results / f"haiprof-attach-{provider}.log").write_text(said)
        time.sleep(0.5)
        more = counters_of(record.load(out)[0]) if list(out.glob("*.jsonl")) else {"error": said.strip()[-200:]}
        rows = [
            row("attach", "trainer", provider, what, seen[what] * 1e6 if what in seen else None, **more)
            for what in ("stacks", "counters")
        ]
        error = None
        if process.poll() is not None:
            error = "the process has ended"
        elif (after := threads(process.pid)) != before:
            error = f"{after} threads, {before} before"
        return [*rows, row("attach", "trainer", provider, "threads left", None, error=error)]
    finally:
        process.kill()
        process.communicate()


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def found_in(folder: Path) -> list[str]:
    """The stacks and counters found."""
    found = ["stacks"] if any(path.stat().st_size for path in folder.glob("*.stacks.txt")) else []
    counted = any(path.read_text().count('"kind":"counters"') > 0 for path in folder.glob("*.jsonl"))
    return found + ["counters"] * counted


# All of them


def wrong(r: dict) -> str | None:
    """A description of a row's exceeded limit, or None."""
    if r["error"]:
        return r["error"]
    if r["op"] == "overhead" and float(r["ratio"]) > MOST["ratio"]:
        return f"a step takes {r['ratio']} of one without"
    if r["op"] == "phases" and r["provider"] == "haiprof" and abs(float(r["ratio"]) - 1) > MOST["phases"]:
        return f"{r['ratio']} of the benchmark's own marks"
    if r["op"] == "scripts" and abs(float(r["covered"]) - 1) > MOST["phases"]:
        return f"steps and validation are {r['covered']} of the time from the first to the last"
    if r["op"] == "attach" and r["pass"] != "threads left":
        if r["device_us"] == "":
            return f"none: {r['missing']}"
        if float(r["device_us"]) > MOST["seconds"] * 1e6:
            return f"came after {float(r['device_us']) / 1e6:.1f} s"
    return None


def table(rows: list[dict], title: str) -> None:
    columns = ("us", "ratio", "host", "covered", "named", "busy", "SM", "tensor", "DRAM", "W", "MHz", "MB/h")
    found = report.grid(title, ("what", "case", "who", "pass"), columns)
    for r in rows:
        per_hour = f"{r['bytes_per_hour'] and float(r['bytes_per_hour']) / 1e6:.2f}" if r["bytes_per_hour"] else ""
        keys = ("op", "case", "provider", "pass", "device_us", "ratio", "host_ratio", "covered", "named", *COUNTERS[:6])
        found.add_row(*(str(r[key]) for key in keys), per_hour)
    report.put(found)
    for text in dict.fromkeys(r["missing"] for r in rows if r["missing"]):
        print(f"not measured: {text}")


def parse(argv=None):
    parser = cli.parser(__doc__, "of a block of steps", "tiny models and batches; no limits")
    add = parser.add_argument
    add("--part", nargs="*", choices=PARTS, default=PARTS)
    add("--batches", nargs="*", type=int, help="batch sizes of GPT-2 (default: 4 and 25; tiny: 1)")
    add("--ranks", type=int, default=max(1, torch.cuda.device_count()), help="ranks of the script under torchrun")
    add("--limit", type=float, default=90, help="seconds per script")
    parser.set_defaults(rounds=8, seconds=1.2)
    options = parser.parse_args(argv)
    options.batches = options.batches or ([1] if options.tiny else [4, 25])
    options.tokens, options.layers = 32 if options.tiny else 1024, None
    return options


def main(argv=None) -> int:
    options = parse(argv)
    os.environ.pop("HAIPROF", None)
    path, failed = report.path(options.results, options.device, "-haiprof"), 0
    options.results.mkdir(parents=True, exist_ok=True)
    for name in ("pynvml", "psutil", "bokeh"):
        if find_spec(name) is None:
            print(f"{name} is not installed: what needs it is left out", flush=True)
    with report.shown(table, path.stem) as rows, tempfile.TemporaryDirectory() as folder:
        for part in options.part:
            begin = time.perf_counter()
            for new in {"overhead": overhead, "scripts": scripts, "attach": attach}[part](options, Path(folder)):
                rows += report.append(path, new)
                for r in new:
                    if not options.tiny and wrong(r):
                        failed = 1
                        print(f"RED {r['op']} {r['case']} {r['provider']} {r['pass']}: {wrong(r)}", flush=True)
            print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    cli.run(main)
