"""A step of AdamW over the parameters of a model: time, host time, kernels, bytes; against torch and torchao.

    bench/optim.py                                          # rows in bench/results/<device>-optim.csv, and a table
    bench/optim.py --case llama-1.1b --dtype bfloat16 --mode hfnn-8bit torch-fused
    bench/optim.py --device cpu --tiny                      # a smoke test

Correctness first: after two steps from the same weights, the parameters of every mode are compared with float64's,
within the precision of the states' format. The per cent of a copy's bandwidth refers to the bytes that a step moves:
parameters, gradients and states read, parameters and states written.
"""

import argparse
import functools

import cli
import report
import rivals
import timing
import torch
from torch.profiler import ProfilerActivity, profile

import hfnn

LR = 1e-3
# By mode: the allowed difference from float64's result, as a share of two steps.
MODES = {
    "hfnn": 0.02,
    "hfnn-float32": 0.02,
    "hfnn-8bit": 0.3,
    "hfnn-4bit": 1.0,
    "hfnn-remainder": 0.02,
    "torch-fused": 0.02,
    "torch-foreach": 0.02,
    "torchao-8bit": 0.3,
}


def gpt2() -> list[tuple[int, ...]]:
    """124 M in 148 tensors."""
    h = 768
    block = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    return [(50257, h), (1024, h), *12 * block, (h,), (h,)]


def llama() -> list[tuple[int, ...]]:
    """1.1 B in 201 tensors."""
    h, kv, inner = 2048, 256, 5632
    block = [(h, h), (kv, h), (kv, h), (h, h), (inner, h), (inner, h), (h, inner), (h,), (h,)]
    return [(32000, h), *22 * block, (h,), (32000, h)]


def many() -> list[tuple[int, ...]]:
    """1000 small tensors: measures the host's time."""
    return [(8 + i % 7, 64) for i in range(1000)]


CASES = {"gpt2-124m": gpt2, "llama-1.1b": llama, "1000-tensors": many}


class Parameters:
    """The parameters of a case with their gradients, and an optimizer for them."""

    def __init__(self, shapes, dtype: torch.dtype, mode: str, options):
        generator = torch.Generator(options.device).manual_seed(0)
        draw = functools.partial(torch.randn, generator=generator, device=options.device)
        self.params = [torch.nn.Parameter((0.02 * draw(shape)).to(dtype)) for shape in shapes]
        for p in self.params:
            p.grad = (0.01 * draw(p.shape)).to(dtype)
        self.optimizer = make(mode, self.params)

    def step(self) -> None:
        self.optimizer.step()

    def state_bytes(self) -> int:
        """Bytes of all states, without the step counts."""
        found = 0
        for state in self.optimizer.state.values():
            for name, x in state.items():
                if name != "step" and isinstance(x, torch.Tensor):
                    found += sum(part.nbytes for part in _parts(x))
        return found


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, or the tensors inside a subclass."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(x, name))]


def make(mode: str, params):
    """The optimizer of a mode. Raises rivals.Skip."""
    library, _, form = mode.partition("-")
    if library == "torch":
        return torch.optim.AdamW(params, lr=LR, **{form: True})
    if library == "torchao":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise rivals.Skip(f"cannot be imported: {error}") from error
        return AdamW8bit(params, lr=LR)
    extra = {
        "": {},
        "float32": {"state_dtype": torch.float32},
        "8bit": {"state_dtype": "8bit"},
        "4bit": {"state_dtype": "4bit"},
        "remainder": {"state_dtype": torch.float32, "master": "remainder"},
    }[form]
    if form == "remainder" and params[0].dtype is not torch.bfloat16:
        raise rivals.Skip("a remainder is of bfloat16 parameters")
    return hfnn.optim.AdamW(params, lr=LR, **extra)


def error(shapes, dtype, mode: str, options) -> float:
    """The difference of two steps from float64's, as a share of their change, over a few of the tensors."""
    some = sorted(shapes, key=lambda shape: torch.Size(shape).numel())[:: max(1, len(shapes) // 6)][:7]
    some = [shape for shape in some if torch.Size(shape).numel() <= 1 << 24]
    given = Parameters(some, dtype, mode, options)
    before = [p.detach().double() for p in given.params]
    exact = [torch.nn.Parameter(x.clone()) for x in before]
    for p, q in zip(given.params, exact, strict=True):
        q.grad = p.grad.double()
    wide = torch.optim.AdamW(exact, lr=LR, foreach=False)
    for _ in range(2):
        given.step()
        wide.step()
    # Rounding to the parameter's dtype is unavoidable: one ulp is subtracted.
    ulp = torch.finfo(dtype).eps
    off = sum(
        ((p.double() - q).abs() - 2 * ulp * q.abs()).clamp(min=0).square().sum()
        for p, q in zip(given.params, exact, strict=True)
    )
    moved = sum((q - x).square().sum() for q, x in zip(exact, before, strict=True))
    return (off / moved).sqrt().item()


def launches(step) -> int:
    """Kernels, and copies on the device, of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if event.self_device_time_total > 0)


def measure(case: str, dtype: torch.dtype, options) -> list[dict]:
    """Rows of one case and dtype."""
    shapes = CASES[case]()
    if options.tiny:
        shapes = [tuple(-(-size // 64) for size in shape) for shape in shapes[:30]]
    made, found, rows = {}, {}, []
    for mode in options.mode:
        try:
            wrong = error(shapes, dtype, mode, options)
            given = Parameters(shapes, dtype, mode, options)
            given.step()
        except Exception as why:  # a row with its reason
            print(f"skipped: {mode} {case}: {type(why).__name__}: {' '.join(str(why).split())[:160]}")
            continue
        made[mode], found[mode] = given, wrong
        if not wrong <= MODES[mode]:
            print(f"RED: {mode} {case} {dtype}: {wrong:.3g} of two steps away from float64's")
            del made[mode]
    calls = {mode: timing.Call((given.step,)) for mode, given in made.items()}
    clocks = timing.interleaved({**calls, "copy": options.copy}, options.device, options.rounds, options.seconds)
    copy = 2 * timing.COPY_BYTES[options.device] / clocks.pop("copy").device_us / 1e3
    count = sum(p.numel() for p in next(iter(made.values())).params) if made else 0
    for mode, clock in clocks.items():
        given = made[mode]
        states = given.state_bytes()
        moved = sum(3 * p.nbytes for p in given.params) + 2 * states
        kernel = ",".join(getattr(given.optimizer, "_ran", ())) or "torch"
        more = {"kernel": kernel, **report.rates(moved, clock.device_us, copy), "tensors": len(shapes)}
        more |= {"parameters": count, "state_bytes": states / count}
        more |= {"launches": launches(given.step) if options.device == "cuda" else ""}
        rows.append(report.row("adamw", (case,), dtype, mode, "step", clock, found[mode], more))
    return rows


def compare(options) -> int:
    options.copy = timing.copy_call(options.device)
    path, rows, asked = report.path(options.results, options.device, "-optim"), [], 0
    for case in options.case:
        for dtype in options.dtype:
            asked += 1
            rows += report.append(path, measure(case, dtype, options))
    table(rows, f"{path.stem}: a step of AdamW")
    ours = {(r["case"], r["dtype"]) for r in rows if r["provider"].startswith("hfnn")}
    return int(len(ours) < asked)


def table(rows: list[dict], title: str) -> None:
    found = report.grid(
        title, ("case", "dtype", "mode"), ("time", "of copy", "host", "launches", "bytes of state", "error")
    )
    for r in rows:
        host = f"{float(r['host_us']):,.0f} us" if r["host_us"] else ""
        cells = f"{float(r['device_us']):,.0f} us", f"{float(r['pct_of_copy']):.0f}%", host, str(r["launches"])
        found.add_row(r["case"], r["dtype"], r["provider"], *cells, f"{float(r['state_bytes']):.2f}", r["rel_error"])
    report.put(found)


def parse(argv=None) -> argparse.Namespace:
    parser = cli.parser(__doc__, seconds="time per mode", tiny="tiny parameters")
    add = parser.add_argument
    add("--case", nargs="*", default=list(CASES), choices=CASES)
    add("--mode", nargs="*", default=list(MODES), choices=MODES)
    add("--dtype", nargs="*", default=["float32", "bfloat16"], choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(argv)
    options.dtype = [getattr(torch, name) for name in options.dtype]
    return options


def main(argv=None) -> int:
    return compare(parse(argv))


if __name__ == "__main__":
    cli.run(main)
