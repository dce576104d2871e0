"""Random batches of 64 records, cold and warm, with hfrecord and other formats in the same process.

    bench/records.py                                   # rows in bench/results/<cpu>-records.csv, and a table
    bench/records.py --size 2K-20K --mode hfrecord lmdb --megabytes 100
    bench/records.py --tiny                            # a smoke test

`pread` is a loop over a flat file, as FFRecord reads without its private file system; `advised` is the same with a
batch advised ahead, and without checks. `disk` is the speed of the disk itself for random reads of this size, in whole
pages that bypass the page cache, with one to two batches of reads at once. Cold: files are dropped from the page cache
and opened anew, which is included in the time; readers whose files stay in the cache have no such row. Warm: the third
pass over the files. `CPU us` is the CPU time of the process per record, which other work on the machine hardly changes.
Readers that are not installed are reported. The records read are compared with those written. malloc keeps freed
memory: otherwise page faults, which take longer than reading, would depend on which reader ran before.

--share 0.1 reads a tenth of the records, as with files larger than memory, where additional prefetched data is useless.
`disk bytes` is the number of bytes read from the disk per byte of a record.

Some readers have their own order. webdataset shuffles within 1000 records. `ffcv_like` shuffles within 8 pages of 8 MiB
at a time, each read as a whole by a thread. This is FFCV's quasi-random order (Leclerc et al., "FFCV: Accelerating
training by removing data bottlenecks", 2023), reimplemented here because its package needs OpenCV. `hfrecord-window` is
hfrecord with a similar order, the sampler's window=1024. datasets maps its file and fetches all of it when it is
opened; `hfrecord-all` does the same with advice.
"""

import ctypes
import gc
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import cli
import numpy as np
import report
from record_readers import BATCH, MODES, ORDERED

SIZES = {"2K-20K": (2 << 10, 20 << 10), "100K": (100 << 10, 100 << 10), "1M": (1 << 20, 1 << 20)}


def dropped(path: Path) -> bool:
    """Removes a file, or the files of a folder, from the page cache; returns whether this worked: mapped files stay."""
    gc.collect()
    largest = max(path.rglob("*") if path.is_dir() else [path], key=lambda file: file.stat().st_size)
    fd = os.open(largest, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size // 2, os.RWF_NOWAIT)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def measure(size: str, options) -> list[dict]:
    """Rows of one size: the epochs of all readers in turns, in a new random order in each round."""
    low, high = SIZES[size]
    rng = np.random.default_rng(0)
    count = max(2 * BATCH, (options.megabytes << 20) * 2 // (low + high)) // BATCH * BATCH
    lengths = rng.integers(low, high + 1, count)
    blob = rng.bytes(high + count)

    def record(number):
        return blob[number : number + int(lengths[number])]

    order = rng.permutation(count)[: max(2, round(options.share * count / BATCH)) * BATCH].reshape(-1, BATCH)
    folder, made, timed = Path(tempfile.mkdtemp(dir=options.folder)), {}, {}
    try:
        for mode in options.mode:
            if mode in ORDERED and options.share < 1:
                continue
            try:
                (folder / mode).mkdir()
                made[mode] = MODES[mode](folder / mode)
            except ImportError as error:
                print(f"skipped: {mode}: {error}")
                continue
            made[mode].write(map(record, range(count)))
        readers = list(made.items())
        for _ in range(options.rounds):
            for k in rng.permutation(len(readers)):  # a disk is faster for a while after idle time
                mode, given = readers[k]
                cold = dropped(given.path)
                for name in ("cold" if cold else "not cold", "second", "warm"):
                    before, begin, cpu, read = from_disk(), time.perf_counter(), time.process_time(), 0
                    if name not in ("second", "warm"):
                        given.open()  # which may fetch much
                    for batch in given.epoch(order):
                        read += len(batch[0])
                    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
                    timed.setdefault((mode, name), []).append((seconds, cpu, from_disk() - before))
                    right = all(bytes(a) == record(n) for n, a in zip(*batch, strict=True))
                    assert right and (mode == "disk" or read == order.size), f"{mode}: wrong records"
                given.close()
    finally:
        shutil.rmtree(folder)
    nbytes = int(lengths[order].sum())
    return [
        row(size, mode, name, found, order.size, nbytes, options.share)
        for (mode, name), found in timed.items()
        if name in ("cold", "warm") and (mode, name) != ("disk", "warm")
    ]


def from_disk() -> int:
    """Bytes that this process has read from disks, by itself or by advice."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def keeps_memory() -> None:
    """Makes glibc's malloc keep freed memory, and not use mmap below 32 MiB, the largest possible limit."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)


def row(size: str, mode: str, name: str, found: list[tuple], count: int, nbytes: int, share: float) -> dict:
    times, cpu, fetched = zip(*found, strict=True)
    middle = float(np.median(times))
    spread = 100 * (max(times) - min(times)) / middle
    clock = SimpleNamespace(device_us=1e6 * middle / (count / BATCH), host_us=None, spread_pct=spread)
    more = {"gbps": nbytes / middle / 1e9, "records_per_s": count / middle, "records": count, "bytes": nbytes}
    more |= {"best_records_per_s": count / min(times), "cpu_us_per_record": 1e6 * float(np.median(cpu)) / count}
    more |= {"disk_bytes_per_byte": float(np.median(fetched)) / nbytes}
    shape = (size, BATCH) if share == 1 else (size, BATCH, share)
    return report.row("records", shape, "bytes", mode, name, clock, None, more)


def table(rows: list[dict], title: str) -> None:
    found = report.grid(
        title, ("size", "pass", "reader"), ("records a second", "best", "GB/s", "CPU us", "disk bytes", "spread")
    )
    for r in sorted(rows, key=lambda r: (r["case"], r["pass"])):
        rate, best = (f"{float(r[name]):,.0f}" for name in ("records_per_s", "best_records_per_s"))
        cpu, fetched = float(r["cpu_us_per_record"]), float(r["disk_bytes_per_byte"])
        shown = (rate, best, f"{float(r['gbps']):.2f}", f"{cpu:.2f}", f"{fetched:.1f}", f"{r['spread_pct']}%")
        found.add_row(r["case"], r["pass"], r["provider"], *shown)
    report.put(found)


def main(argv=None) -> int:
    parser = cli.parser(__doc__, seconds="not used", tiny="little data")
    parser.add_argument("--size", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--megabytes", type=int, default=300, help="of records, per size and reader")
    parser.add_argument("--share", type=float, default=1, help="the part of the records to read")
    parser.add_argument("--folder", help="for the files, on the disk to measure")
    options = parser.parse_args(argv)
    options.megabytes = 1 if options.tiny else options.megabytes
    path = report.path(options.results, "cpu", "-records")
    keeps_memory()
    with report.shown(table, f"{path.stem}: random batches of {BATCH}") as rows:
        for size in options.size:
            rows += report.append(path, measure(size, options))
    return 0


if __name__ == "__main__":
    cli.run(main)
