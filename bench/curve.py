"""Losses of GPT-2 small in training, stock and converted, three seeds each: rows, a table and a picture.

    bench/curve.py                                          # six runs at once on one GPU: rows, and the table
    bench/curve.py --draw                                   # docs/curve.svg and the table, from the newest rows
    bench/curve.py --device cpu --tiny --steps 20           # a smoke test

The model is that of models.py, transformers' GPT-2 with dropout 0.1, from random weights, under autocast to bfloat16. A
step is zero_grad, forward, backward, clipping of the gradients' norm, and torch's fused AdamW; `hfnn.convert(model)` is
the only difference. Both runs of a seed start from the same weights and take the same batches in the same order; their
dropout masks differ. The text is taken from the machine, sources and documents of Python packages, so losses from two
machines cannot be compared: `text_bytes` and `text_sha256` in each row identify the text.

Rows are appended to bench/results/<device>-curve.csv immediately; `run` is the start time of the command. A `train` row
has the mean loss of the steps since the last one, a `validation` row the loss without dropout on a fixed set of windows
of held-out files. All runs share the GPU, so `seconds` does not show the speed; `peak_gib` is that of the process.

Verdict: the difference between the mean last validation losses, stock and converted, must not exceed the difference
between the best and the worst stock seed. Smaller differences are not detected, and with three seeds independent noise
alone fails it 14 times in 100. The exit status is 1 if it fails, or if a run fails.
"""

import argparse
import array
import datetime
import hashlib
import itertools
import math
import os
import sys
import sysconfig
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

import curve_drawing as drawing
import models
import report
import timing
import torch
from torch import multiprocessing
from zoo import MODELS

HERE = Path(__file__).parent
PROVIDERS = tuple(drawing.STYLES)
BATCH, LENGTH, RATE, CLIP = 6, 512, 6e-4, 1.0
WARM_UP, ROW, VALIDATION = 15, 60, 5  # the rate rises for steps / 15; a row each steps / 60, each 5th with a validation
WINDOWS, AT_ONCE = 128, 8  # to validate on
TEXT, LARGEST, LEARNT = 60 << 20, 1 << 19, 16 << 20  # bytes: of all files, of one file, of the text for the vocabulary
VOCABULARY, HELD_OUT = 32768, 13  # HELD_OUT: files of 256


# The text


def files():
    """Sources and documents of Python and its packages, ordered by the hashes of their names, as a random sample."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {Path(torch.__file__).parents[1]}
    found = ((path.relative_to(root).as_posix(), path) for root in map(Path, roots) for path in root.rglob("*"))
    found = [pair for pair in found if pair[1].suffix in (".py", ".txt", ".md", ".rst") or "LICENSE" in pair[1].name]
    found.sort(key=lambda pair: (hashlib.sha256(pair[0].encode()).digest(), pair[1]))
    return (path for _, path in found if path.is_file())


def read(limit: int) -> tuple[list[str], list[str], dict]:
    """Files for training, files for validation, and the columns that identify them; no duplicate content."""
    texts, seen, size, of_all = ([], []), set(), 0, hashlib.sha256()
    for path in files():
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or len(content) > LARGEST or b"\0" in content:
            continue
        seen.add(digest)
        of_all.update(content)
        texts[digest[0] < HELD_OUT].append(content.decode(errors="replace"))
        size += len(content)
        if size >= limit:
            break
    return *texts, {"text_bytes": size, "text_sha256": of_all.hexdigest()[:16]}


def tokens(training: list[str], held_out: list[str], vocabulary: int) -> list[torch.Tensor]:
    """Both as int32 (n,), by a byte-level BPE trained here; token 0 comes before each file."""
    import tokenizers as t

    tokenizer = t.Tokenizer(t.models.BPE())
    tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = t.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": vocabulary, "initial_alphabet": alphabet, "special_tokens": ["<|endoftext|>"]}
    before = itertools.accumulate(map(len, training), initial=0)
    first = [text for text, size in zip(training, before, strict=False) if size < LEARNT]
    tokenizer.train_from_iterator(first, t.trainers.BpeTrainer(show_progress=False, **options))
    found = []
    for texts in (training, held_out):
        ids = array.array("i")
        for begin in range(0, len(texts), 512):  # encodings are much larger than their tokens
            for one in tokenizer.encode_batch_fast(texts[begin : begin + 512]):
                ids.extend((0, *one.ids))
        found.append(torch.tensor(ids, dtype=torch.int32))
    return found


# One run, in its own process


def train(pipe, provider: str, seed: int, text: Path, options) -> None:
    """Send the columns of a row whenever there is one."""
    torch.set_num_threads(options.threads)
    of, (batch, length) = MODELS["gpt2"], options.shape
    training, held_out = (ids.to(options.device) for ids in torch.load(text))
    windows = held_out[: len(held_out) // length * length].view(-1, length)
    windows = windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS].split(AT_ONCE)
    order = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(training) - length, (options.steps, batch, 1), generator=order).to(options.device)
    within = torch.arange(length, device=options.device)
    torch.manual_seed(seed)
    with torch.device(options.device):
        model = of.build(None, options.tiny).train()
    model = models.prepare(provider, of)(model)
    step = stepper([*model.parameters()], options.steps)
    torch.manual_seed(seed)  # converting may have drawn numbers

    def loss(ids):
        with torch.autocast(options.device, torch.bfloat16):
            return of.loss(model, input_ids=ids.long(), labels=ids.long())

    start, losses, each = time.time(), [], max(1, options.steps // ROW)
    for done in range(options.steps + 1):
        found = {}
        if losses and (done % each == 0 or done == options.steps):
            found["train"], losses = torch.stack(losses).mean().item(), []
        if done % (VALIDATION * each) == 0 or done == options.steps:
            found["validation"] = validate(model, loss, windows)
        for name, value in found.items():
            peak = torch.cuda.max_memory_allocated() / models.GIB if options.device == "cuda" else None
            pipe.send({"pass": name, "step": done, "loss": value, "seconds": time.time() - start, "peak_gib": peak})
        if done < options.steps:
            losses.append(step(loss(training[begins[done] + within])))


def stepper(parameters: list, steps: int):
    """A function that makes a step from a loss, and returns the loss as a number on the device."""
    rising = max(1, steps // WARM_UP)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)

    def rate(step):
        falling = max(0, step - rising) / max(1, steps - rising)
        return min(1, (step + 1) / rising) * (1 + math.cos(math.pi * falling)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(loss):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step


@torch.no_grad()
def validate(model, loss, windows) -> float:
    model.eval()
    found = torch.stack([loss(ids) for ids in windows]).mean().item()
    model.train()
    return found


# All of them


def compare(options) -> list[dict]:
    """Train all runs at once, and append their rows to the file; returns the rows."""
    path, rows = report.path(options.results, options.device, "-curve"), []
    *texts, more = read(TEXT // 64 if options.tiny else TEXT)
    more |= {"vocabulary": 512 if options.tiny else VOCABULARY, "steps": options.steps, **models.versions()}
    more["run"] = datetime.datetime.now().isoformat(" ", "seconds")
    case = (*options.shape, "tiny") if options.tiny else options.shape
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tokens(*texts, more["vocabulary"]), Path(folder, "text.pt"))
        for provider, seed, found in started(Path(folder, "text.pt"), options):
            columns = dict.fromkeys(("step", "loss", "seconds", "peak_gib", "error")) | found | more | {"seed": seed}
            what, clock = columns.pop("pass"), timing.Timing(None, None, None)
            rows += report.append(path, [report.row("gpt2", case, "autocast", provider, what, clock, None, columns)])
    return rows


def started(text: Path, options):
    """(provider, seed, columns) of each row as it arrives; if a run fails, of a last row with an error."""
    context, runs = multiprocessing.get_context("spawn"), {}
    deadline = time.monotonic() + options.limit
    for seed, provider in itertools.product(options.seeds, PROVIDERS):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(writer, provider, seed, text, options), daemon=True)
        process.start()
        writer.close()  # now only the process holds it, so reading ends when the process ends
        runs[reader] = process, provider, seed
    try:
        while runs:
            ready = connection.wait(runs, max(0.0, deadline - time.monotonic()))
            for process, *_ in () if ready else runs.values():
                process.kill()
            for reader in ready:
                process, *who = runs[reader]
                try:
                    found = reader.recv()
                except (EOFError, OSError):
                    del runs[reader]
                    process.join()
                    found = {"pass": "error", "error": f"status {process.exitcode}"} if process.exitcode else None
                if found:
                    yield *who, found
    finally:
        for process, *_ in runs.values():
            process.kill()


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=3000)
    add("--batch", type=int, default=BATCH, help=f"sequences of {LENGTH} tokens per step")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--tiny", action="store_true", help="a tiny model, batches and text")
    add("--limit", type=int, default=450, help="seconds for all runs together; then they are killed: status -9")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--results", type=Path, default=HERE / "results", help="folder of the CSV files")
    add("--draw", action="store_true", help="only draw the newest rows of the folder's *-curve.csv")
    add("--svg", type=Path, default=HERE.parent / "docs" / "curve.svg", help="the output of --draw")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    options.shape = MODELS["gpt2"].tiny if options.tiny else (options.batch, LENGTH)
    if options.draw:
        return drawing.draw(options.results, options.svg)
    options.threads = max(1, len(os.sched_getaffinity(0)) // (len(options.seeds) * len(PROVIDERS)))
    torch.set_num_threads(options.threads)  # as the rows tell
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return drawing.table(compare(options))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
