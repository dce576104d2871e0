"""Counters of the process and its machine, and the reasons for missing ones.

A source is a function that opens it and returns a function that reads names and numbers. Rates refer to the time since
the last reading. Bytes are bytes, shares are from 0 to 1, power is in watts, clocks are in MHz.
"""

import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

IB = Path("/sys/class/infiniband")
RESCTRL = Path("/sys/fs/resctrl")
FILESYSTEMS = Path("/proc/filesystems")
NODES = Path("/sys/devices/system/node")
PRESSURE = Path("/proc/pressure")
VMSTAT = Path("/proc/vmstat")


class Missing(Exception):
    """A source is not available; the message gives the reason."""


class Counters:
    """All sources of this machine. `missing`: the reasons for the others, by name.

    pid: of another process. gpu(): (index, NVML's name) of this process's GPU, or None while it uses none. thread():
    the ident of the training thread. folders: whose free space is read.
    """

    def __init__(self, pid=None, gpu=lambda: None, thread=lambda: threading.main_thread().ident, folders=()):
        self.missing: dict[str, str] = {}
        self._readers: dict[str, Callable[[], dict]] = {}
        self._rates = _Rates()
        self._open("process", lambda: _process(pid or os.getpid(), self._rates))
        self._open("machine", lambda: _machine(self._rates))
        self._open("delay", lambda: _delay(self._rates, pid, thread))
        self._open("infiniband", lambda: _infiniband(self._rates))
        self._open("memory bandwidth", lambda: _resctrl(self._rates))
        self._open("numa", lambda: _numa(self._rates))
        self._open("pressure", lambda: _pressure(self._rates))
        self._open("swap", lambda: _swap(self._rates))
        self._open("disk space", lambda: _space(folders))
        self._gpu = gpu if pid is None else None  # called while it returns None
        if pid is None:
            self.missing["gpu"] = "the process does not use CUDA"
        else:
            self._open_gpu(lambda nvml: _gpu_of(nvml, environment(pid)))

    def _open(self, name, source):
        try:
            self._readers[name] = source()
        except (Missing, ImportError, OSError, ValueError) as error:
            self.missing[name] = str(error) or type(error).__name__

    def _open_gpu(self, find):
        """find(nvml): NVML's handle."""
        self.missing.pop("gpu", None)
        self._open("gpu", lambda: _nvml(self.missing, find))
        if "gpu" in self._readers:
            self._open("gpu activity", lambda: _gpm(self.missing, find))

    def read(self) -> dict[str, float | list]:
        """The present values of all sources. A source that fails is dropped, with its reason."""
        found = {}
        if self._gpu is not None and (device := self._gpu()):
            self._gpu, (index, name) = None, device
            self._readers["torch"] = lambda: _torch_memory(index)
            self._open_gpu(lambda nvml: _gpu_named(nvml, index, name))
        self._rates.tick()
        for name, reader in list(self._readers.items()):
            try:
                found.update(reader())
            except Exception as error:
                self.missing[name] = f"gave up: {type(error).__name__}: {error}"
                del self._readers[name]
        return found


class _Rates:
    """Rates per second of increasing numbers."""

    def __init__(self):
        self._before, self._at = {}, time.monotonic()

    def tick(self):
        self._at = time.monotonic()

    def of(self, name, value) -> dict[str, float]:
        """The rate since this number was last reported, which may be several readings ago."""
        before, at = self._before.get(name, (value, self._at))
        self._before[name] = value, self._at
        return {name: max(0.0, value - before) / (self._at - at)} if self._at > at else {}


def _process(pid, rates):
    import psutil

    process = psutil.Process(pid)

    def read():
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
            found = rates.of("process.cpu", times.user + times.system)
            found |= rates.of("workers.cpu", times.children_user + times.children_system)
            found |= {"process.memory": memory.rss, "process.threads": process.num_threads()}
        try:
            io = process.io_counters()
        except (AttributeError, psutil.AccessDenied):
            return found
        return found | rates.of("process.disk_read", io.read_bytes) | rates.of("process.disk_write", io.write_bytes)

    return read


def _machine(rates):
    import psutil

    psutil.cpu_percent(percpu=True)

    def read():
        cores = [share / 100 for share in psutil.cpu_percent(percpu=True)]
        memory, net, disk = psutil.virtual_memory(), psutil.net_io_counters(), psutil.disk_io_counters()
        found = {"machine.cores": cores, "machine.memory": memory.used, "machine.memory_total": memory.total}
        if net:
            found |= rates.of("net.sent", net.bytes_sent) | rates.of("net.received", net.bytes_recv)
        if disk:
            found |= rates.of("disk.read", disk.read_bytes) | rates.of("disk.write", disk.write_bytes)
        return found

    return read


def _infiniband(rates):
    """Ports count words of 4 bytes (Documentation/ABI/stable/sysfs-class-infiniband of Linux)."""
    ports = sorted(IB.glob("*/ports/*/counters"))
    if not ports:
        raise Missing(f"no port in {IB}")

    def read():
        found = {}
        for port in ports:
            name = f"ib.{port.parts[-4]}.{port.parts[-2]}"
            for what, file in (("sent", "port_xmit_data"), ("received", "port_rcv_data")):
                found |= rates.of(f"{name}.{what}", 4 * int((port / file).read_text()))
        return found

    return read


def _resctrl(rates):
    """Bytes of memory traffic, and of that to other sockets (Documentation/arch/x86/resctrl.rst of Linux)."""
    domains = sorted(RESCTRL.glob("mon_data/mon_L3_*"))
    if not domains:
        raise Missing(_why_no_resctrl())
    files = {
        which: [path for path in (domain / f"mbm_{which}_bytes" for domain in domains) if path.exists()]
        for which in ("total", "local")
    }
    if not files["total"]:
        raise Missing(f"the processor does not count it: no mbm_total_bytes in {domains[0]}")

    def read():
        total, local = (_sum(files[which]) for which in ("total", "local"))
        if total is None:
            return {}
        found = rates.of("memory.traffic", total)
        return found if local is None else found | rates.of("memory.to_other_sockets", max(0, total - local))

    read()
    return read


def _sum(files):
    """None if there is none, or if a domain reports "Unavailable" at the moment."""
    texts = [path.read_text().strip() for path in files]
    return sum(map(int, texts)) if texts and all(text.isdigit() for text in texts) else None


def _why_no_resctrl():
    if "resctrl" not in FILESYSTEMS.read_text():
        return "the kernel or the processor has no resctrl"
    if not RESCTRL.is_mount():
        return f"resctrl is not mounted (mount -t resctrl resctrl {RESCTRL}, as root)"
    return f"resctrl monitors nothing here: no mon_data/mon_L3_* in {RESCTRL}"


def _numa(rates):
    """Pages per second that a node gave to processes of other nodes (Documentation/admin-guide/numastat.rst of
    Linux)."""
    nodes = sorted(NODES.glob("node[0-9]*/numastat"))
    if len(nodes) < 2:
        raise Missing("the machine has one NUMA node")

    def read():
        rows = [dict(line.split() for line in node.read_text().splitlines()) for node in nodes]
        return rates.of("numa.remote_pages", sum(int(row["other_node"]) for row in rows))

    return read


def _delay(rates, pid, thread):
    """The share of the time for which the training thread could run and had no processor
    (Documentation/scheduler/sched-stats.rst of Linux)."""

    def read():
        path = f"/proc/{pid}/schedstat"
        if pid is None:
            ident = thread()
            own = next((each.native_id for each in threading.enumerate() if each.ident == ident), os.getpid())
            path = f"/proc/self/task/{own}/schedstat"
        return rates.of("process.delay", int(Path(path).read_text().split()[1]) / 1e9)

    read()
    return read


def _pressure(rates):
    """Shares of the time for which some task of the machine waits for a processor, memory or a disk
    (Documentation/accounting/psi.rst of Linux)."""
    files = {name: PRESSURE / name for name in ("cpu", "memory", "io")}
    if not files["io"].exists():
        raise Missing(f"the kernel counts none: no {PRESSURE}")

    def read():
        found = {}
        for name, file in files.items():
            found |= rates.of(f"pressure.{name}", int(file.read_text().split("total=", 1)[1].split()[0]) / 1e6)
        return found

    read()
    return read


def _swap(rates):
    """Bytes per second that the machine reads from swap and writes to it."""
    page = os.sysconf("SC_PAGE_SIZE")

    def read():
        text, found = VMSTAT.read_text(), {}
        for name, row in (("swap.read", "pswpin "), ("swap.written", "pswpout ")):
            found |= rates.of(name, page * int(text.split(row, 1)[1].split("\n", 1)[0]))
        return {name: rate for name, rate in found.items() if rate}

    read()
    return read


SCARCE = 0.05  # share of a disk


def _space(folders):
    """Free bytes where a process writes, if they are scarce: in its working directory, for temporary files, and for
    those of haiprof."""
    folders = {os.path.realpath(folder) for folder in (os.getcwd(), tempfile.gettempdir(), *folders)}

    def read():
        found = {}
        for folder in sorted(folders):
            space = os.statvfs(folder)
            free = space.f_bavail if os.getuid() else space.f_bfree  # some is kept for root
            share = free / space.f_blocks if space.f_blocks else 1.0
            if "disk.free" not in found or share < found["disk.free"] / found["disk.size"]:
                size = space.f_blocks * space.f_frsize
                found = {"disk.free": share * size, "disk.size": size, "disk.folder": folder}
        return found if found["disk.free"] < SCARCE * found["disk.size"] else {}

    read()
    return read


def _torch_memory(device):
    """Statistics of torch's allocator, which need no CUDA calls."""
    torch = sys.modules["torch"]
    return {"gpu.allocated": torch.cuda.memory_allocated(device), "gpu.reserved": torch.cuda.memory_reserved(device)}


# Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down, excluding idleness.
THROTTLED = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat", 0x80: "power brake"}


def environment(pid) -> dict[str, str]:
    """The environment with which another process started. Raises OSError if it has ended or belongs to another user."""
    rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(row.decode(errors="replace").partition("=")[::2] for row in rows if row)


def _gpu_named(nvml, index, name):
    """The handle of the GPU with this index in torch."""
    return nvml.nvmlDeviceGetHandleByUUID(name) if name else nvml.nvmlDeviceGetHandleByIndex(index)


def _gpu_of(nvml, environment):
    """The GPU of the local rank, among those visible in its environment: numbers or names."""
    rank = int(environment.get("LOCAL_RANK", "0"))
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    own = visible[rank] if rank < len(visible) else str(rank)
    return nvml.nvmlDeviceGetHandleByIndex(int(own)) if own.isdigit() else nvml.nvmlDeviceGetHandleByUUID(own)


def _opened(find):
    """(NVML, a handle). Raises Missing with NVML's message if there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml, find(pynvml)
    except pynvml.NVMLError as error:
        raise Missing(f"NVML: {error}") from None


def _nvml(missing, find):
    """Values that the GPU does not support or permit are dropped one by one."""
    nvml, device = _opened(find)

    def throttled():
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
        return sum(bit for bit in THROTTLED if reasons & bit)

    asked = {
        "gpu.busy": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
        "gpu.power": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
        "gpu.clock": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "gpu.clock_max": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        "gpu.throttled": throttled,
        "gpu.used": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
        "gpu.total": lambda: nvml.nvmlDeviceGetMemoryInfo(device).total,
    }

    def read():
        found = {}
        for name, ask in list(asked.items()):
            try:
                found[name] = ask()
            except (nvml.NVMLError, AttributeError) as error:
                missing[name] = f"NVML: {error}"
                del asked[name]
        return found

    return read


SHORTEST = 0.1  # minimum seconds between two samples of GPM


def _gpm(missing, find):
    """Activity of multiprocessors, tensor cores and memory between two samples: NVML's GPM, Hopper and newer."""
    nvml, device = _opened(find)
    try:
        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            raise Missing("GPM: the GPU has none (it came with Hopper)")
        samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        nvml.nvmlGpmSampleGet(device, samples[0])
    except (AttributeError, nvml.NVMLError) as error:
        raise Missing(f"GPM: {error}") from None
    metrics = {
        "gpu.sm": nvml.NVML_GPM_METRIC_SM_UTIL,
        "gpu.tensor": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        "gpu.dram": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    }
    last = time.monotonic()

    def read():
        nonlocal last
        if time.monotonic() - last < SHORTEST:
            return {}
        nvml.nvmlGpmSampleGet(device, samples[1])
        last = time.monotonic()
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(metrics)
        asked.sample1, asked.sample2 = samples
        for i, metric in enumerate(metrics.values()):
            asked.metrics[i].metricId = metric
        nvml.nvmlGpmMetricsGet(asked)
        samples.reverse()
        found = {}
        for name, row in zip(metrics, asked.metrics, strict=False):
            if row.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(row.value):
                found[name] = row.value / 100
                missing.pop(name, None)
            else:
                missing[name] = f"GPM: {nvml.NVMLError(row.nvmlReturn) if row.nvmlReturn else 'no number'}"
        return found

    return read
