"""All-reduce in a narrower format on the wire than in memory: bfloat16, or float8_e4m3fn with a scale for each block.

    wire.all_reduce_(gradient, "avg", dtype=torch.float8_e4m3fn)              # 1.008 bytes an element instead of 4
    wire.all_reduce_(gradient, "avg", dtype=torch.float8_e4m3fn, error=kept)  # kept: float32, zeros at first

On any process group of c10d and any device. A tensor is cut in n slices, one for each of n ranks:

    encode    | each rank brings the slices of the others into the format
    travel    | one all_to_all: each rank has its slice from all
    reduce    | it adds them up in the order of ranks, in float32, its own as it is, and encodes the result
    travel    | one all_gather
    decode    | every rank, from the same bytes: so results are equal to the bit on all ranks, and from run to run

Every number is rounded twice, whatever n is: before the sum (but what a rank keeps for itself) and after it.

float8_e4m3fn: each block of 128 numbers is divided by a power of two, the smallest that brings it into the format's
range, so that nothing but the 3 bits of mantissa is lost; its exponent travels as a byte. After Rouhani et al.,
"Microscaling Data Formats for Deep Learning", arXiv 2310.10537. There is no inf: what is not finite on some rank is nan
in the result, and nothing else is. In bfloat16 inf stays inf.

Error feedback: what rounding took from an input, and what the rounded result lacks, is kept in `error` and added to the
next input, so that over many calls nothing is lost, and a rank keeps one number for each element, not two:

    sum over ranks of (x + error before) = result of the sum + sum over ranks of error after     (but for float32's own)

The error of a result is kept by the rank that made it, in the place of the slice that it did not have to round. After
Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014; of both roundings as in Tang et al., "1-bit Adam", ICML 2021, arXiv 2102.02888.
"""

import functools
import logging
import sys

import torch
import torch.distributed as dist

FORMATS = (torch.bfloat16, torch.float8_e4m3fn)
BLOCK = 128  # elements that share a scale
OPS = ("sum", "avg")
_PIECE = 1 << 17  # elements that torch's operations take at a time: all that is between them stays in the cache
_log = logging.getLogger("hfreduce")


def all_reduce_(x, op="sum", group=None, *, dtype=torch.bfloat16, error=None):
    """x = op of the x of all ranks, in place, rounded to `dtype` on the way. Returns x.

    x: [*shape], of a floating-point dtype of at least 16 bits, of any strides, on any device that `group` takes (the
    default group if None). op: "sum" or "avg". dtype: one of FORMATS. error: float32, contiguous, x's number of
    elements, of x's device; zeros before the first call, what rounding has left out after each. Where something is
    not finite its error is 0. A group of one rank sends nothing, so it rounds nothing. Raises ValueError.
    """
    Reduction(x, op, group, dtype, error).wait()
    return x


class Reduction:
    """An `all_reduce_` that has begun. `halfway()` waits for its first half and begins its second; `wait()` ends it.

    All ranks call halfway(), or wait(), of several reductions in the same order. Both may be called again. stream: of
    CUDA, on which all but the end runs; the current one if None.
    """

    def __init__(self, x, op, group, dtype, error, stream=None):
        _check(x, op, dtype, error)
        self.group, self.x, self.op, self.dtype = _group(group), x.detach(), op, dtype
        self.stream, self.work, self.gathered = stream, None, None
        size = self.group.size()
        if size == 1 or not x.numel():
            return
        self.me, self.length = self.group.rank(), -(-x.numel() // (size * BLOCK)) * BLOCK
        with torch.cuda.stream(stream):
            self.flat = self.x.contiguous().view(-1)  # x itself, or a copy that `wait` brings back
            self.error = None if error is None else error.view(-1)
            rows = self._rows(size)
            _kernels(x).encode(self.flat, self.error, rows, self.me, self.length)
            self.rows = torch.empty_like(rows)
            self.work = dist.all_to_all_single(_bytes(self.rows), _bytes(rows), group=self.group, async_op=True)

    def _rows(self, count):
        """Slices as they travel: codes, then the exponents of scales, to whole vectors of 16 bytes."""
        if self.dtype == torch.bfloat16:
            return torch.empty(count, self.length, dtype=self.dtype, device=self.x.device)
        width = -(-(self.length + self.length // BLOCK) // 16) * 16
        return torch.empty(count, width, dtype=torch.uint8, device=self.x.device)

    def halfway(self):
        if self.work is None or self.gathered is not None:
            return
        with torch.cuda.stream(self.stream):
            self.work.wait()
            row, size = self._rows(1), len(self.rows)
            mean = size if self.op == "avg" else 1
            _kernels(self.x).reduce(self.flat, self.error, self.rows, row, self.me, self.length, mean)
            self.gathered = torch.empty_like(self.rows)
            self.work = dist.all_gather_into_tensor(_bytes(self.gathered), _bytes(row), group=self.group, async_op=True)

    def wait(self):
        self.halfway()
        if self.work is None:
            return
        if self.stream is not None:  # whose allocator may not reuse what the current one still reads
            for made in (self.gathered, self.flat):
                made.record_stream(torch.cuda.current_stream(made.device))
        self.work.wait()
        _kernels(self.x).decode(self.gathered, self.flat, self.length)
        if self.flat.data_ptr() != self.x.data_ptr():
            self.x.copy_(self.flat.view(self.x.shape))
        self.work = self.rows = self.gathered = self.flat = None


class Wire:
    """Reductions one after another, such as those of gradient buckets: while one is in its first half, the one before
    is in its second. On a GPU they run on a stream of their own.

    All ranks call `begin` and `flush` in the same order.
    """

    def __init__(self, group=None, dtype=torch.float8_e4m3fn):
        self.group, self.dtype = group, dtype
        self.last, self.streams = None, {}

    def begin(self, x, op="avg", error=None):
        """x = op of the x of all ranks, as by `all_reduce_`, once `wait()` of what this returns was called."""
        reduction = Reduction(x, op, self.group, self.dtype, error, self._stream(x.device))
        self.flush()
        self.last = reduction
        return reduction

    def flush(self):
        """Begins the second half of what was begun last; its first half is waited for (on a GPU, by the stream)."""
        if self.last is not None:
            self.last.halfway()
        self.last = None

    def _stream(self, device):
        """The one for a device, after what the current one has been given so far; None for the CPU."""
        if device.type != "cuda":
            return None
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        self.streams[device].wait_stream(torch.cuda.current_stream(device))
        return self.streams[device]


class HookState:
    """The state of `hook`: the group (the default one if None), the format, and what it keeps for each bucket.

    With error_feedback, 4 bytes for each element of a gradient. Torch makes its buckets anew after the first backward;
    where other parameters are in a bucket then, or in another order, what was kept for it is dropped.
    """

    def __init__(self, group=None, dtype=torch.float8_e4m3fn, error_feedback=True):
        self.wire, self.error_feedback = Wire(group, dtype), error_feedback
        self.kept, self.begun = {}, []

    def error(self, bucket):
        """What to add to a bucket's gradients; None without error feedback."""
        if not self.error_feedback:
            return None
        parameters, buffer = bucket.parameters(), bucket.buffer()
        before, error = self.kept.get(bucket.index(), ((), None))
        if list(map(id, before)) != list(map(id, parameters)):
            error = torch.zeros_like(buffer, dtype=torch.float32)
            self.kept[bucket.index()] = parameters, error
        return error


def hook(state, bucket):
    """A communication hook: gradients are averaged in the state's format. `ddp.register_comm_hook(HookState(), hook)`

    For torch.nn.parallel.DistributedDataParallel; haiscale.ddp.DDP has `wire_dtype` instead.
    """
    buffer = bucket.buffer()
    future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    state.begun.append((future, buffer, state.wire.begin(buffer, "avg", state.error(bucket))))
    if bucket.is_last():  # of all ranks' backwards: nothing is left to do meanwhile
        state.wire.flush()
        begun, state.begun = state.begun, []
        for waiting, result, reduction in begun:
            reduction.wait()
            waiting.set_result(result)
    return future


def _group(group):
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    return group


def _check(x, op, dtype, error):
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"x must be of float32, bfloat16, float16 or float64, got {x.dtype}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if dtype not in FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FORMATS))}, got {dtype}")
    if error is None:
        return
    given = error.dtype, error.numel(), error.device, error.is_contiguous()
    if given != (torch.float32, x.numel(), x.device, True):
        raise ValueError(
            f"error must be contiguous, of torch.float32, with x's {x.numel()} elements, on {x.device}; got "
            f"{error.dtype}{list(error.shape)} on {error.device}, strides {error.stride()}"
        )


def _bytes(rows):
    return rows.view(torch.uint8).view(-1)


def _kernels(x):
    """What has encode, reduce and decode for x: this module, or on a GPU kernels that do the same."""
    return _triton() or sys.modules[__name__] if x.is_cuda else sys.modules[__name__]


@functools.cache
def _triton():
    try:
        from hfnn.kernels import wire
    except ImportError as error:
        _log.warning("hfreduce.wire runs torch's own operations on GPUs: %s", error)
        return None
    return wire


# In torch's operations. A row holds a slice, of `length` elements at most: see Reduction._rows.


def encode(x, error, rows, me, length):
    """rows[r] = slice r of x + error, for all ranks but `me`; error = what that leaves out. x, error: flat."""
    for r, row in enumerate(rows):
        if r == me:
            continue
        for lo, hi, at in _pieces(r, length, x.numel()):
            value = x[lo:hi].float() if error is None else x[lo:hi] + error[lo:hi]
            _put(value, row, at, length)
            if error is not None:
                error[lo:hi] = (value - _get(row, at, hi - lo, length)).nan_to_num_(0, 0, 0)


def reduce(x, error, rows, row, me, length, mean):
    """row[0] = the sum of all rows / mean, with the slice of x + error itself in the place of row `me`."""
    for lo, hi, at in _pieces(me, length, x.numel()):
        total = torch.zeros(hi - lo, device=x.device)
        mine = x[lo:hi] if error is None else x[lo:hi] + error[lo:hi]
        for r, other in enumerate(rows):
            total += mine if r == me else _get(other, at, hi - lo, length)
        _put(total * (1 / mean), row[0], at, length)
        if error is not None:
            error[lo:hi] = (total - _get(row[0], at, hi - lo, length) * mean).nan_to_num_(0, 0, 0)


def decode(rows, x, length):
    """x = all rows, one after another."""
    for r, row in enumerate(rows):
        for lo, hi, at in _pieces(r, length, x.numel()):
            x[lo:hi] = _get(row, at, hi - lo, length)


def _pieces(r, length, n):
    """(from, to, offset in the slice) of the pieces of slice r of n elements; none where it is beyond them."""
    end = min((r + 1) * length, n)
    for lo in range(r * length, end, _PIECE):
        yield lo, min(lo + _PIECE, end), lo - r * length


def _put(value, row, at, length):
    """Encodes float32 numbers. The last block may be ragged; it is filled up with zeros."""
    if row.dtype == torch.bfloat16:
        row[at : at + len(value)] = value
        return
    blocks = torch.nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
    largest = blocks.nan_to_num(0, 0, 0).abs_().amax(1)
    # 448 is 1.75 * 2**8: a mantissa above 1.75 carries over into the exponent, which has a bias of 127.
    exponents = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp_(min=1)
    codes = blocks * ((254 - exponents) << 23).view(torch.float32).unsqueeze(1)
    codes.nan_to_num_(torch.nan, torch.nan, torch.nan)  # torch's cast of inf is nan up to 2.12, and 448 from then on
    row[at : at + codes.numel()] = codes.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)
    row[length + at // BLOCK :][: len(exponents)] = exponents


def _get(row, at, count, length):
    """`count` numbers as they are after a journey, in float32."""
    if row.dtype == torch.bfloat16:
        return row[at : at + count].float()
    blocks = -(-count // BLOCK)
    # A table, for torch's cast from 8 bits is several times slower.
    value = _values(row.device).index_select(0, row[at : at + blocks * BLOCK].int()).view(blocks, BLOCK)
    scales = (row[length + at // BLOCK :][:blocks].int() << 23).view(torch.float32)
    return value.mul_(scales.unsqueeze(1)).view(-1)[:count]


@functools.cache
def _values(device):
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
