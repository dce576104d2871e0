"""Plain attention with the fastest of torch's own backends: cuDNN, flash or efficient, measured per kind of call.

torch tries its backends in a fixed order. The fastest one depends on the GPU, the width of a head, the length, and
whether a backward follows. So the order is set for one call and restored after it (`torch._C._set_sdp_priority_order`,
as in `torch.nn.attention.sdpa_kernel(set_priority=True)`). torch's checks and switches still apply: a backend that the
user turned off stays off. No order is set inside `sdpa_kernel`, under deterministic algorithms, `hfnn.use` or
torch.compile.

The first call of a kind times the backends on tensors of its own (tens of milliseconds, some dozens of MiB). The times
are kept in a file for the next process (backend_times.py), and `python -m hfnn.info` prints them. With dropout, calls
with and without a backward use the same backend, because a checkpoint that runs forward again must draw the same mask.

cuDNN makes a plan for each new shape, which takes some tens of milliseconds. So only the first `PLANS` shapes of a kind
use cuDNN, and others always use the next best backend. Otherwise batches with ever new lengths would make plans at
every step. cuDNN cannot plan while a CUDA graph is captured. So calls that first occur in a capture use torch's own
order.
"""

import contextlib
import functools
import logging

import torch
from torch._C import _SDPBackend

from hfnn.core import kernel
from hfnn.core.context import capturing, compiling, context
from hfnn.core.kernel import FLOATS
from hfnn.ops.attention import backend_times
from hfnn.ops.attention.backend_times import BUCKETS, MEASURED, NUMBERS, Kind, get_order, in_order, lock, set_order

log = logging.getLogger("hfnn")

# Imported as names, because each look-up counts in a small call.
Tensor, _sdpa = torch.Tensor, torch.nn.functional.scaled_dot_product_attention
_cudnn, _flash = torch._C._get_cudnn_sdp_enabled, torch._C._get_flash_sdp_enabled
_efficient, _other = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_overrideable_sdp_enabled
_deterministic, _cuda_autocasts, _records = (
    torch._C._get_deterministic_algorithms,
    torch.is_autocast_enabled,
    torch.is_grad_enabled,
)

MATH = int(_SDPBackend.MATH)
# The default orders of torch. Any other was set by a user and is left alone.
_FLASH_FIRST = [NUMBERS["flash"], NUMBERS["efficient"], MATH, NUMBERS["cudnn"], int(_SDPBackend.OVERRIDEABLE)]
_CUDNN_FIRST = [NUMBERS["cudnn"], NUMBERS["flash"], NUMBERS["efficient"], MATH, int(_SDPBackend.OVERRIDEABLE)]
_TORCHS = (_FLASH_FIRST, _CUDNN_FIRST)

NOISE = 1.03  # backends within this factor of the fastest count as equal, and torch's own order decides
PLANS, MOST = 16, 4096  # shapes per kind that cuDNN may plan for; number of remembered calls

_UNKNOWN = object()
_known: dict[tuple, list[int] | None] = {}  # call -> its order; None: torch's own
_planned: dict[Kind, set] = {}  # shapes that cuDNN was chosen for


def plain(query, key, value, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` without a mask, with the backend that was measured fastest.

    Raises what torch raises. On the CPU, and wherever there is no choice, it is torch's op unchanged.
    """
    if query.is_cuda and not compiling():
        call = _call(query, key, value, dropout_p, is_causal, enable_gqa)
        if call is not None:
            return _ordered(call, query, key, value, dropout_p, is_causal, scale, enable_gqa)
    return _sdpa(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _call(query, key, value, dropout_p, is_causal, enable_gqa) -> tuple | None:
    """Everything that a choice depends on, or None for torch's own order."""
    if type(query) is not Tensor or kernel._forced is not None or _deterministic() or not _other():
        return None  # only `sdpa_kernel` also turns off the OVERRIDEABLE backend
    try:
        shapes = query.shape, key.shape, value.shape
    except RuntimeError:  # nested
        return None
    dtype = query.dtype
    if _cuda_autocasts() and dtype in FLOATS:
        dtype = torch.get_autocast_dtype("cuda")
    dropout = dropout_p > 0
    grad = dropout or (_records() and (query.requires_grad or key.requires_grad or value.requires_grad))
    return shapes, dtype, is_causal, dropout, grad, enable_gqa, (_cudnn(), _flash(), _efficient()), query.get_device()


def _ordered(call, query, key, value, dropout_p, is_causal, scale, enable_gqa):
    """torch's op in the order for the call, found now if it is not known."""
    order = _known.get(call, _UNKNOWN)
    if order is _UNKNOWN:
        order = _resolve(call, query, key, value)
    if order is not None:
        with lock:
            before = get_order()
            if order != before and before in _TORCHS:
                set_order(order)
                try:
                    return _sdpa(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
                # cuDNN may find no plan for a shape, or no memory. Then torch's own order runs.
                except RuntimeError as why:
                    if not isinstance(why, torch.OutOfMemoryError):  # which does not concern the next call
                        _known[call] = None
                    log.info("attention goes by torch's own order of backends: %s", why)
                finally:
                    set_order(before)
    return _sdpa(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def choice(query, key, value, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> str | None:
    """The backend that `plain` uses: "cudnn", "flash", "efficient" or "math"; None if torch cannot tell.

    Measures if `plain` would.
    """
    if type(query) is not Tensor or compiling():
        return None
    call = _call(query, key, value, dropout_p, is_causal, enable_gqa) if query.is_cuda else None
    order = None if call is None else _known.get(call, _UNKNOWN)
    if order is _UNKNOWN:
        order = _resolve(call, query, key, value)
    try:
        with in_order(order) if order is not None and _torch_decides() else contextlib.nullcontext():
            number = torch._fused_sdp_choice(
                query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    except RuntimeError:
        return None
    return next((name for name, n in (*NUMBERS.items(), ("math", MATH)) if n == number), None)


def _torch_decides() -> bool:
    """Whether the order of backends is one of torch's own."""
    with lock:
        return get_order() in _TORCHS


# From a call to an order


def _resolve(call: tuple, query, key, value) -> list[int] | None:
    """The order for a new call; remembered, unless it may be measured later."""
    (shape, keys, values), dtype, causal, dropout, grad, gqa, enabled, place = call
    if {len(shape), len(keys), len(values)} != {4} or 0 in (*shape, *keys, *values) or dtype not in FLOATS:
        return _remember(call, None)
    if not any(enabled) or context(query, key, value) is not None or capturing():
        return None
    _begin(place)
    if not _torch_decides():
        return None
    bucket = sum(max(shape[2], keys[2]) > most for most in BUCKETS)
    widths = shape[3], values[3]
    kind = Kind(gpu(place), software(), dtype, *widths, bool(causal), dropout, grad, bool(gqa), bucket)
    names = [name for name, on in zip(NUMBERS, enabled, strict=True) if on]
    row = backend_times.row(kind, names, place)
    if row is None:
        return None
    order = _ranking(row, names, get_order())
    if order is not None and order[0] == NUMBERS["cudnn"] and not _may_plan(kind, (shape, keys, values)):
        order = _ranking(row, [name for name in names if name != "cudnn"], get_order()) or order
    return _remember(call, order)


def _remember(call: tuple, order: list[int] | None) -> list[int] | None:
    if len(_known) >= MOST:
        _known.clear()  # orders are found again; the shapes chosen for cuDNN stay known
    _known[call] = order
    return order


@functools.cache
def _begin(place: int) -> None:
    """torch fixes its own order at the first query. This must happen before another order is set."""
    tiny = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=torch.device("cuda", place))
    torch._fused_sdp_choice(tiny, tiny, tiny)


def _ranking(row: dict, names: list[str], torchs: list[int]) -> list[int] | None:
    """Backends by their times, the fastest first and those without a time last; None if none has a time.

    Among those about as fast as the fastest, the first in torch's own order comes first. So noise does not change the
    choice between processes.
    """
    times = {name: row[name] for name in names if row.get(name) is not None}
    if not times:
        return None
    equals = [name for name, us in times.items() if us <= NOISE * min(times.values())]
    lead = min(equals, key=lambda name: torchs.index(NUMBERS[name]))
    numbers = [NUMBERS[name] for name in (lead, *sorted(times.keys() - {lead}, key=times.get))]
    return numbers + [number for number in torchs if number not in numbers]


def _may_plan(kind: Kind, shapes: tuple) -> bool:
    """Whether cuDNN already has a plan for the shapes, or may make one."""
    planned = _planned.setdefault(kind, set())
    if shapes not in planned and len(planned) < PLANS:
        planned.add(shapes)
    return shapes in planned


@functools.cache
def gpu(place: int) -> str:
    """The name of a device."""
    return torch.cuda.get_device_name(place)


@functools.cache
def software() -> str:
    """The software versions that the times depend on."""
    return f"torch {torch.__version__} cudnn {torch.backends.cudnn.version()}"


# For the commands


def warm(dtypes, widths=(64, 128), place: int = 0) -> int:
    """Measure the most common kinds of call in training, if not done yet; returns how many kinds have times."""
    names = [name for name, on in zip(NUMBERS, (_cudnn(), _flash(), _efficient()), strict=True) if on]
    _begin(place)
    found = 0
    for dtype in dtypes:
        for width in widths:
            for causal in (True, False):
                for bucket in range(len(MEASURED)):
                    kind = Kind(gpu(place), software(), dtype, width, width, causal, False, True, False, bucket)
                    found += backend_times.row(kind, names, place) is not None
    return found


def table() -> list[tuple[str, ...]]:
    """(GPU, software, call, the fastest, cudnn, flash, efficient) of all measurements; times in microseconds."""
    found = []
    for key, row in sorted(backend_times.rows().items()):
        gpu_name, software_name, call = [*key.split(" | "), "", ""][:3]
        order = _ranking(row, list(row), _FLASH_FIRST)
        fastest = next((name for name, number in NUMBERS.items() if order and number == order[0]), "-")
        times = (f"{row[name]:.1f}" if row.get(name) is not None else "-" for name in NUMBERS)
        found.append((gpu_name, software_name, call, fastest, *times))
    return found
