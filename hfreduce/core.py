"""What a group needs of this process: the core, measured plans, the order of hosts, what its main thread is doing."""

import logging
import os
import sys
import threading

_log = logging.getLogger("hfreduce")
_warned = []  # not empty once the first group, which has most hosts, was found to be out of order


def native():
    """hfreduce._C. The ImportError says what to run."""
    try:
        from hfreduce import _C
    except ImportError as error:
        raise ImportError(f"hfreduce was not built ({error}): it needs a C++ compiler; run `make`") from error
    return _C


def plan_rows(size, slot_bytes=None):
    """The measured plan of this machine, as rows of numbers; empty without one, or for slots of another size."""
    from hfreduce import plan

    return plan.rows(size) if slot_bytes in (None, plan.SLOT) else []


def device_plan_rows(size):
    """The same for CUDA tensors."""
    from hfreduce import plan

    return plan.device_rows(size)


def sorted_hosts(hosts):
    """The order in which hosts are neighbours, as (indices, source), of [(name, SLURM_TOPOLOGY_ADDR)] by lowest rank.

    ([], ""): their switches are not known, so the order of ranks stands.
    """
    from hfreduce import topology_sources

    names = [name for name, _ in hosts]
    fabric = topology_sources.find(names, addresses=dict(hosts))
    if not fabric.hosts:
        return [], ""
    order = sorted(range(len(names)), key=lambda host: fabric.key(names[host]))
    crossed, least = fabric.crossings(names)
    if crossed > least and not _warned:
        _warned.append(True)
        _log.warning(
            "hfreduce: a ring in the order of ranks crosses %d of %d links between leaf switches, %d are enough. "
            "hfreduce follows %s; NCCL does not: start the hosts in this order: %s",
            crossed, len(names), least, fabric.source, " ".join(names[host] for host in order),
        )  # fmt: skip
    return order, fabric.source


def where():
    """Where the main thread is: its innermost frame outside torch and these packages, as "train.py:42 in step"."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "hfreduce", "haiscale", "hfnn", "contextlib", "threading", "importlib"):
            code = frame.f_code
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def why():
    """The exception that makes groups close: the one that ends the program or is being handled. "" if there is none."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at the end of the program, unless it is interactive
        error = getattr(sys, "last_value", None)
    if (isinstance(error, SystemExit) and error.code in (None, 0)) or isinstance(error, GeneratorExit):
        return ""
    return "" if error is None else f"{type(error).__name__}: {error}"[:2000]
