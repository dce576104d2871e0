"""Output made from the files: Chrome traces, the HTML page in a browser, the comparison of two runs."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from haiprof import __main__ as command
from haiprof import arrivals, diff, record, trace, verdict
from haiprof.collector import Collector
from haiprof.verdict import PARTS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("profile")
    collector = Collector(folder, hz=10).start()
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in DataLoader(TensorDataset(torch.randn(4000, 256)), batch_size=32):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    collector.stop()
    return folder


def test_the_trace_keeps_the_rules_of_its_format(profile):
    """The rules of "Trace Event Format" for the events that we write, and what HolisticTraceAnalysis requires."""
    (path,) = profile.glob("*.trace.json.gz")
    found = trace.read(path)
    assert found["distributedInfo"]["rank"] == 0 and found["distributedInfo"]["world_size"] == 1
    lanes = {}
    for event in found["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys() and event["ph"] in "XMC"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"]
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
        else:
            assert all(isinstance(value, int | float) for value in event["args"].values())
    for spans in lanes.values():  # ordered by time; a lane's events do not overlap
        assert spans == sorted(spans)
        assert all(b[0] >= a[1] - 1 for a, b in itertools.pairwise(spans))
    assert lanes.keys() == {trace.PHASES, trace.STEPS} and len(lanes[trace.STEPS]) == 125
    (run,) = record.load(profile)
    first, last = run["steps"][0]["wall"], run["steps"][-1]["until"]
    assert lanes[trace.STEPS][0][0] / 1e6 == pytest.approx(first, abs=1e-4)
    assert lanes[trace.STEPS][-1][1] / 1e6 == pytest.approx(last, abs=1e-4)


def test_phases_of_the_trace_and_of_the_lines_agree(profile):
    (path,) = profile.glob("*.trace.json.gz")
    (run,) = record.load(profile)
    for name in PARTS[:-1]:
        events = [e for e in trace.read(path)["traceEvents"] if e["ph"] == "X" and e["name"] == name]
        assert sum(e["dur"] for e in events) / 1e6 == pytest.approx(sum(line[name] for line in run["steps"]), rel=1e-3)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore")  # its own
def test_two_ranks_in_holistic_trace_analysis(profile, tmp_path):
    """It finds the ranks, the steps by name, and the same time in each phase as in the trace."""
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    (path,) = profile.glob("*.trace.json.gz")
    found = trace.read(path)
    for rank in range(2):
        trace.write(tmp_path / f"{rank}.trace.json.gz", {"rank": rank, "size": 2}, found["traceEvents"])
    loaded = analysis.TraceAnalysis(trace_dir=str(tmp_path)).t
    spans = [e for e in found["traceEvents"] if e["ph"] == "X"]
    last = max(e["ts"] for e in spans if e["tid"] == trace.STEPS)
    assert sorted(loaded.get_all_traces()) == [0, 1]
    names = loaded.symbol_table.get_sym_table()
    for rank in range(2):
        frame = loaded.get_trace(rank)
        assert loaded.get_iterations(rank) == [*range(124)], "the last one it leaves out of every trace"
        for name in PARTS[:-1]:
            rows = frame[(frame["name"] == names.index(name)) & (frame["iteration"] >= 0)]
            own = [e["dur"] for e in spans if e["name"] == name and e["ts"] < last]
            assert len(rows) == len(own) >= 124
            assert rows["dur"].sum() == pytest.approx(sum(own), abs=2 * len(own)), "in whole microseconds"


PERFETTO = shutil.which("trace_processor_shell") or shutil.which("trace_processor")


@pytest.mark.skipif(PERFETTO is None, reason="Perfetto's trace processor is not installed")
def test_a_rank_in_perfettos_trace_processor(profile, tmp_path):
    (path,) = profile.glob("*.trace.json.gz")
    query = tmp_path / "query.sql"
    query.write_text("select count(*) as n from slice where name glob 'ProfilerStep#*';")
    done = subprocess.run([PERFETTO, "-q", query, path], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-1] == "125", done.stdout


# Appended to the page: reports the contents of its plots, and its errors.
ASK = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const plots = Bokeh.documents.flatMap(d => d.roots()).filter(each => each.renderers)
  const columns = Object.fromEntries(plots.map(each =>
    [each.title.text, each.renderers.map(r => Object.fromEntries(Object.entries(r.data_source.data).map(
      ([name, values]) => [name, Array.from(values)])))]))
  const answer = document.createElement("pre")
  answer.id = "answer"
  const starts = plots.map(each => [each.title.text, each.y_range.start])
  const fits = document.documentElement.scrollWidth <= window.innerWidth
  answer.textContent = JSON.stringify([columns, Object.fromEntries(starts), fits])
  document.body.append(answer)
}, 500))
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(profile, tmp_path, width):
    """No console errors and no external resources; its table and plots show the numbers of the files. Wide or narrow,
    nothing is cut off, curves start at zero, and headers have units."""
    assert command.main(["report", str(profile)]) == 0
    text = (profile / "report.html").read_text()
    assert len(text) < 2_000_000 and not re.search(r'<script[^>]* src=|<link[^>]* href="(?!data:)', text)
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", ASK))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    options += ["--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'user'}"]
    options.append(f"--window-size={width},900")
    done = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    assert not [line for line in console if "[bokeh " not in line or "rror" in line], console
    shown = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown, done.stdout[-2000:]
    plots, starts, fits = json.loads(shown[1])
    assert fits and all(
        start == 0 for title, start in starts.items() if "last steps" not in title and "means" not in title
    )
    assert all(re.search(r"\(.+\)$", title) for title in plots), list(plots)
    heads = re.findall(r"<th>(.*?)</th>", done.stdout)
    assert all("(ms)" in head for head in heads if head not in ("rank", "steps")), heads
    assert "waits in collectives" in heads[-2] and "others wait at collectives" in heads[-1]

    runs = record.load(profile)
    later = [line for line in runs[0]["steps"] if line["first"] > 0]
    lines = [line for line in later if not line.get("own")] or later  # a slow machine has steps with work of haiprof
    n = sum(line["n"] for line in lines)
    means = {name: 1e3 * sum(line[name] for line in lines) / n for name in (*PARTS, "seconds")}
    (row,) = re.findall(r'<tr class="rank">(.*?)</tr>', done.stdout)
    cells = re.findall(r"<td>(.*?)</td>", row)
    assert cells[:2] == ["0", "125"]
    assert cells[2:8] == [f"{means[name]:.1f}" for name in ("seconds", *PARTS)]
    for name in PARTS:
        assert plots["means of a step (ms)"][0][name] == [pytest.approx(means[name], rel=1e-6)]
    (over_time,) = plots["a step (ms)"]
    assert over_time["v"] == pytest.approx([1e3 * line["seconds"] / line["n"] for line in runs[0]["steps"]])
    (memory,) = plots["memory of the process (MiB)"]
    assert memory["v"] == pytest.approx([line["process.memory"] / 2**20 for line in runs[0]["counters"]])
    assert sum(len(bars["left"]) for bars in plots["the last steps (ms)"]) == 12 * 5


def text_of(printed, width=160):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(printed)
    return console.export_text()


def played(seconds, n=10, rank=0, size=1, **more):
    """A run as loaded from files: n steps after a first one, with these seconds per phase."""
    phases = {**dict.fromkeys(PARTS, 0.0), **seconds}
    line = {**{name: value * n for name, value in phases.items()}, "seconds": sum(phases.values()) * n, "n": n}
    line |= {"first": 1, "wall": 10.0, "until": 20.0, "gap": 0.0, "waited": {}, "passes": n, "slowest": 1.0}
    warm = {**line, "first": 0, "n": 1, "wall": 0.0, "until": 10.0, "seconds": 99.0}
    head = {"rank": rank, "size": size, "host": "played", "pid": 7, "wall": 0.0}
    return {"run": head, "stem": "nowhere", "steps": [warm, line], **more}


def test_a_run_that_leaves_nothing_does_not_report_an_earlier_one(capfd, profile, tmp_path):
    for path in profile.glob("*.jsonl"):
        shutil.copy2(path, tmp_path)
    assert command.main(["run", "--out", str(tmp_path), "--", sys.executable, "-c", ""]) == 1
    out, err = capfd.readouterr()
    assert "left nothing in" in err and not out


def test_a_run_that_writes_to_the_folder_of_an_earlier_one_is_reported(capfd, profile, tmp_path):
    (path,) = profile.glob("*.jsonl")
    shutil.copy2(path, tmp_path)
    again = f"import shutil; shutil.copyfile({str(path)!r}, {str(tmp_path / path.name)!r})"
    assert command.main(["run", "--out", str(tmp_path), "--", sys.executable, "-c", again]) == 0
    assert "report.html" in capfd.readouterr().out


def test_two_runs_side_by_side(capsys, profile):
    a = verdict.judge([played({"data": 0.05, "forward": 0.1, "backward": 0.2})])
    b = verdict.judge([played({"data": 0.01, "forward": 0.1, "backward": 0.19})])
    said = text_of(diff.page(a, b))
    assert "B is 1.17 times as fast; most of the difference is in data (-40.0 ms a step)" in said
    assert re.search(r"data +│ 50.0 ms +│ 10.0 ms +│ -40.0 ms +│ -11.4%", said), said
    assert command.main(["diff", str(profile), str(profile)]) == 0
    assert "1.00 times as fast" in capsys.readouterr().out
    assert command.main(["diff", str(profile), "/nowhere"]) == 2


def arrived(rank, rows):
    line = {"backend": "b", "group": "0", "ranks": [0, 1], "wall": 0, "rows": rows}
    return {"run": {"rank": rank}, "collectives": [line]}


def test_a_burst_of_asynchronous_collectives_counts_once():
    """Rank 1 is 20 ms late to each of three buckets, which rank 0 has started one after the other."""
    first = [[i, at, None, 0] for i, at in enumerate((0.0, 1.000, 1.001, 1.002, 2.0))]
    second = [[i, at, None, 0] for i, at in enumerate((0.0, 1.020, 1.021, 1.022, 2.0))]
    found = arrivals.lateness([arrived(0, first), arrived(1, second)])
    assert found.waits[0] == pytest.approx(0.020) and found.waits[1] == 0
    assert found.charged[1] == pytest.approx(0.020) and found.covered == pytest.approx(2.0)


def test_durations_tell_where_clocks_of_hosts_differ():
    """On GPUs: the rank with the shortest kernel came last, whatever the hosts' clocks show."""
    first = [[i, i + 100.0, 0.030, 0] for i in range(5)]
    second = [[i, i * 1.0, 0.002, 0] for i in range(5)]
    found = arrivals.lateness([arrived(0, first), arrived(1, second)])
    assert found.waits[0] == pytest.approx(4 * 0.028) and found.charged[1] == pytest.approx(4 * 0.028)


def test_reports_do_without_torch():
    script = "import sys, haiprof.attach, haiprof.diff, haiprof.page; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
