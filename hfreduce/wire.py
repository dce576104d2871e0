"""All-reduce with a narrower format on the wire than in memory: bfloat16, or float8_e4m3fn with a scale per block.

    wire.all_reduce_(gradient, "avg", dtype=torch.float8_e4m3fn)              # 1.008 bytes per element instead of 4
    wire.all_reduce_(gradient, "avg", dtype=torch.float8_e4m3fn, error=kept)  # kept: float32, zeros at first

For any process group of c10d and any device. A tensor is split into n slices, one per rank:

    encode    | each rank encodes the slices of the others
    exchange  | one all_to_all: each rank has its slice from all
    reduce    | each rank adds them in rank order, in float32, its own slice unrounded, and encodes the result
    exchange  | one all_gather
    decode    | all ranks decode the same bytes, so results are bitwise equal on all ranks and in every run

Every number is rounded twice, for any n: before the sum (except a rank's own slice) and after it. If hosts have several
ranks each, `hosts` does this to the sums of each host, between the ranks with the same local rank.

float8_e4m3fn: each block of 128 numbers is divided by a power of two, the smallest one that brings the block into the
format's range. So only the precision beyond 3 bits of mantissa is lost. The exponent is sent as a byte. After Rouhani
et al., "Microscaling Data Formats for Deep Learning", arXiv 2310.10537. There is no inf: a value that is not finite on
some rank is nan in the result; no other value is. With bfloat16, inf stays inf.

Error feedback: the rounding errors of an input and of the result are kept in `error` and added to the next input. So
nothing is lost over many calls. A rank keeps one number per element, not two:

    sum over ranks of (x + error before) = result of the sum + sum over ranks of error after   (up to float32 rounding)

The error of a result is kept by the rank that computed it, in the place of its own slice, which it did not round. After
Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014; for both roundings, as in Tang et al., "1-bit Adam", ICML 2021, arXiv 2102.02888.
"""

import functools
import logging
import sys

import torch
import torch.distributed as dist

FORMATS = (torch.bfloat16, torch.float8_e4m3fn)
BLOCK = 128  # elements that share a scale
OPS = ("sum", "avg")
_PART = 1 << 21  # elements sent at a time
_PIECE = 1 << 17  # elements that torch's operations process at a time: intermediates stay in the cache
_log = logging.getLogger("hfreduce")


def all_reduce_(x, op="sum", group=None, *, dtype=torch.bfloat16, error=None, hosts=None):
    """x = op over the x of all ranks, in place, sent as `dtype`. Returns x.

    x: [*shape], floating-point with at least 16 bits, any strides, on any device that `group` (the default group if
    None) supports. op: "sum" or "avg". dtype: one of FORMATS. error: float32, contiguous, with x's number of elements,
    on x's device; zeros before the first call, the rounding errors after each. Elements that are not finite have an
    error of 0. A group of one rank sends nothing, so it rounds nothing.

    hosts: two groups instead of `group`: the ranks of this host, and the ranks with this local rank on all hosts. Then
    x is added in float32 inside a host, and sent as `dtype` between hosts only: a host sends as much as one rank.
    Raises ValueError.
    """
    _check(x, op, error)
    flat, line = x.detach().resolve_neg().contiguous().view(-1), Wire(group, dtype, hosts)
    parts = flat.split(_PART)  # while one is sent, the next is encoded
    errors = [None] * len(parts) if error is None else error.view(-1).split(_PART)
    begun = [line.begin(part, op, left) for part, left in zip(parts, errors, strict=True)]
    line.flush()
    for reduction in begun:
        reduction.wait()
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))
    return x


class Reduction:
    """A running all-reduce of a contiguous tensor of one dimension: several collectives in sequence.

    `advance()` waits for one and begins the next; it returns False if there is none. `wait()` finishes all. All ranks
    call them in the same order for all their reductions, except wait() after the last advance(). stream: the CUDA
    stream of everything except the end; the current one if None.
    """

    def __init__(self, x, op, group, dtype, error, stream=None, hosts=None):
        self.inside, self.group = hosts or (None, _group(group))
        self.x, self.op, self.dtype, self.stream = x, op, dtype, stream
        self.ranks = self.group.size() * (1 if self.inside is None else self.inside.size())
        self.work, self.left = None, 0
        if self.ranks > 1 and x.numel():
            self.left = 1 if self.inside is None else 2  # collectives after the first
            self.steps = self._run(error)
            with torch.cuda.stream(stream):
                self.work = next(self.steps)

    def advance(self):
        if not self.left:
            return False
        self.left -= 1
        with torch.cuda.stream(self.stream):
            self.work.wait()
            self.work = next(self.steps)
        return True

    def wait(self):
        while self.advance():
            pass
        if self.work is not None:
            self.work.wait()
            self.work = next(self.steps, None)

    def _run(self, error):
        """Begins a collective and yields it; continues when it is done."""
        if self.inside is None:
            yield from self._between(self.x, error)
            return
        n, me = len(self.x), self.inside.rank()
        total, piece = self._sums_inside(error)
        mine = slice(me * len(piece), min((me + 1) * len(piece), n))
        own = piece[: max(0, mine.stop - mine.start)]
        yield from self._between(own, None if error is None else error[mine])
        yield dist.all_gather_into_tensor(total, piece, group=self.inside, async_op=True)
        self._adopt(total, piece)
        self.x.copy_(total[:n])

    def _sums_inside(self, error):
        """A buffer for all sums of this host, in equal pieces, and this rank's piece of the sums."""
        n, local = len(self.x), self.inside.size()
        length = -(-n // (local * BLOCK)) * BLOCK
        total = torch.zeros(local * length, device=self.x.device)
        total[:n] = self.x
        if error is not None:
            total[:n] += error
            error.zero_()  # it is now in the sums, at the owner of each piece
        piece = torch.empty(length, device=self.x.device)
        dist.reduce_scatter_tensor(piece, total, group=self.inside)
        return total, piece

    def _between(self, x, error):
        me, size, kernels = self.group.rank(), self.group.size(), _kernels(x)
        length = max(1, -(-len(x) // (size * BLOCK))) * BLOCK  # a piece of a small tensor may be empty
        sent = self._rows(size, length)
        kernels.encode(x, error, sent, me, length)
        rows = torch.empty_like(sent)
        yield dist.all_to_all_single(_bytes(rows), _bytes(sent), group=self.group, async_op=True)
        row = self._rows(1, length)
        kernels.reduce(x, error, rows, row, me, length, self.ranks if self.op == "avg" else 1)
        yield dist.all_gather_into_tensor(_bytes(rows), _bytes(row), group=self.group, async_op=True)
        self._adopt(rows, row)
        kernels.decode(rows, x, length)

    def _rows(self, count, length):
        """Buffers of slices as sent: codes, then the exponents of scales, padded to a multiple of 16 bytes."""
        if self.dtype == torch.bfloat16:
            return torch.empty(count, length, dtype=self.dtype, device=self.x.device)
        width = -(-(length + length // BLOCK) // 16) * 16
        return torch.empty(count, width, dtype=torch.uint8, device=self.x.device)

    def _adopt(self, *made):
        """The other stream's tensors are not reused before the current stream is done with them."""
        for x in made if self.stream is not None else ():
            x.record_stream(torch.cuda.current_stream(x.device))


class Wire:
    """Overlaps successive reductions, such as those of gradient buckets: while one runs its first collective, the one
    before runs its second. On a GPU they have their own stream.

    All ranks call `begin` and `flush` in the same order. group, hosts: as in `all_reduce_`.
    """

    def __init__(self, group=None, dtype=torch.float8_e4m3fn, hosts=None):
        if dtype not in FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FORMATS))}, got {dtype}")
        self.group, self.dtype, self.hosts = group, dtype, hosts
        self.under_way, self.streams = [], {}

    def begin(self, x, op="avg", error=None):
        """Begins x = op over the x of all ranks, as in `all_reduce_`. Call `wait()` of the returned reduction.

        x: [N], contiguous; error: [N].
        """
        reduction = Reduction(x, op, self.group, self.dtype, error, self._stream(x.device), self.hosts)
        self._advance()
        self.under_way.append(reduction)
        return reduction

    def flush(self):
        """Begins all remaining collectives, and waits for those before them (on a GPU, the stream waits)."""
        while self.under_way:
            self._advance()

    def _advance(self):
        self.under_way = [reduction for reduction in self.under_way if reduction.advance()]

    def _stream(self, device):
        """The stream for a device, made to wait for the work queued in the current one; None for the CPU."""
        if device.type != "cuda":
            return None
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        self.streams[device].wait_stream(torch.cuda.current_stream(device))
        return self.streams[device]


class HookState:
    """The state of `hook`: the group (the default one if None) or hosts, the format, and the errors of each bucket.

    error_feedback costs 4 bytes per element of a gradient. torch rebuilds its buckets after the first backward. If a
    bucket then has other parameters, or another order, its error is dropped.
    """

    def __init__(self, group=None, dtype=torch.float8_e4m3fn, error_feedback=True, hosts=None):
        self.wire, self.error_feedback = Wire(group, dtype, hosts), error_feedback
        self.kept, self.begun = {}, []

    def error(self, bucket):
        """The error to add to a bucket's gradients; None without error feedback."""
        if not self.error_feedback:
            return None
        parameters, buffer = bucket.parameters(), bucket.buffer()
        before, error = self.kept.get(bucket.index(), ((), None))
        if list(map(id, before)) != list(map(id, parameters)):
            error = torch.zeros_like(buffer, dtype=torch.float32)
            self.kept[bucket.index()] = parameters, error
        return error


def hook(state, bucket):
    """A communication hook that averages gradients in the state's format: `ddp.register_comm_hook(HookState(), hook)`.

    For torch.nn.parallel.DistributedDataParallel. haiscale.ddp.DDP has `wire_dtype` instead.
    """
    buffer = bucket.buffer()
    future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    state.begun.append((future, buffer, state.wire.begin(buffer, "avg", state.error(bucket))))
    if bucket.is_last():  # no computation is left to overlap with
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


def _check(x, op, error):
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"x must be of float32, bfloat16, float16 or float64, got {x.dtype}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
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
    """The module with encode, reduce and decode for x: this one, or the equivalent Triton kernels on a GPU."""
    return _triton() or sys.modules[__name__] if x.is_cuda else sys.modules[__name__]


@functools.cache
def _triton():
    try:
        from hfnn.kernels import wire
    except ImportError as error:
        _log.warning("hfreduce.wire runs torch's own operations on GPUs: %s", error)
        return None
    return wire


# In torch's operations. A row holds a slice of at most `length` elements: see Reduction._rows.


def encode(x, error, rows, me, length):
    """rows[r] = slice r of x + error, for all ranks except `me`; error = the rounding error. x, error: flat."""
    for r, row in enumerate(rows):
        if r == me:
            continue
        for lo, hi, at in _pieces(r, length, x.numel()):
            value = _wide(x, error, lo, hi)
            _put(value, row, at, length)
            if error is not None:
                error[lo:hi] = (value - _get(row, at, hi - lo, length)).nan_to_num_(0, 0, 0)


def reduce(x, error, rows, row, me, length, mean):
    """row[0] = the sum of all rows / mean. Row `me` is replaced by the unrounded slice of x + error."""
    for lo, hi, at in _pieces(me, length, x.numel()):
        total = torch.zeros(hi - lo, device=x.device)
        for r, other in enumerate(rows):
            total += _wide(x, error, lo, hi) if r == me else _get(other, at, hi - lo, length)
        _put(total * (1 / mean), row[0], at, length)
        if error is not None:
            error[lo:hi] = (total - _get(row[0], at, hi - lo, length) * mean).nan_to_num_(0, 0, 0)


def decode(rows, x, length):
    """x = all rows, concatenated."""
    for r, row in enumerate(rows):
        for lo, hi, at in _pieces(r, length, x.numel()):
            x[lo:hi] = _get(row, at, hi - lo, length)


def _wide(x, error, lo, hi):
    value = x[lo:hi].float()
    return value if error is None else value + error[lo:hi]


def _pieces(r, length, n):
    """(from, to, offset in the slice) of the pieces of slice r of n elements; none if the slice is beyond the end."""
    end = min((r + 1) * length, n)
    for lo in range(r * length, end, _PIECE):
        yield lo, min(lo + _PIECE, end), lo - r * length


def _put(value, row, at, length):
    """Encodes float32 numbers. A ragged last block is padded with zeros."""
    if row.dtype == torch.bfloat16:
        row[at : at + len(value)] = value
        return
    blocks = torch.nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
    largest = blocks.nan_to_num(0, 0, 0).abs_().amax(1)
    # 448 is 1.75 * 2**8: a mantissa above 1.75 carries over into the exponent, which has a bias of 127.
    exponents = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp_(min=1)
    codes = blocks * ((254 - exponents) << 23).view(torch.float32).unsqueeze(1)
    codes.nan_to_num_(torch.nan, torch.nan, torch.nan)  # torch casts inf to nan up to 2.12, later to 448
    row[at : at + codes.numel()] = codes.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)
    row[length + at // BLOCK :][: len(exponents)] = exponents


def _get(row, at, count, length):
    """Decodes `count` numbers to float32."""
    if row.dtype == torch.bfloat16:
        return row[at : at + count].float()
    blocks = -(-count // BLOCK)
    # A table, because torch's cast from 8 bits is several times slower.
    value = _values(row.device).index_select(0, row[at : at + blocks * BLOCK].int()).view(blocks, BLOCK)
    scales = (row[length + at // BLOCK :][:blocks].int() << 23).view(torch.float32)
    return value.mul_(scales.unsqueeze(1)).view(-1)[:count]


@functools.cache
def _values(device):
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
