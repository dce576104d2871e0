"""All-reduce in a narrower format on the wire than in memory: bfloat16, or float8_e4m3fn with a scale for each block.

    wire.all_reduce_(gradient, "avg", dtype=torch.float8_e4m3fn)              # 1.008 bytes an element instead of 4
    wire.all_reduce_(gradient, "avg", dtype=torch.float8_e4m3fn, error=kept)  # kept: float32, zeros at first

On any process group of c10d and any device. A tensor is cut in n slices, one for each of n ranks:

    encode    | each rank brings the slices of the others into the format
    travel    | one all_to_all: each rank has its slice from all
    reduce    | it adds them up in the order of ranks, in float32, its own as it is, and encodes the result
    travel    | one all_gather
    decode    | every rank, from the same bytes: so results are equal to the bit on all ranks, and from run to run

Every number is rounded twice, whatever n is: before the sum (but what a rank keeps for itself) and after it. Where
hosts have several ranks each, `hosts` does all this to their sums, between ranks of the same place on each host.

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
_PART = 1 << 21  # elements that travel at a time
_PIECE = 1 << 17  # elements that torch's operations take at a time: all that is between them stays in the cache
_log = logging.getLogger("hfreduce")


def all_reduce_(x, op="sum", group=None, *, dtype=torch.bfloat16, error=None, hosts=None):
    """x = op of the x of all ranks, in place, rounded to `dtype` on the way. Returns x.

    x: [*shape], of a floating-point dtype of at least 16 bits, of any strides, on any device that `group` takes (the
    default group if None). op: "sum" or "avg". dtype: one of FORMATS. error: float32, contiguous, x's number of
    elements, of x's device; zeros before the first call, what rounding has left out after each. Where something is
    not finite its error is 0. A group of one rank sends nothing, so it rounds nothing.

    hosts: instead of a group two, this rank's host and the ranks of its place on all hosts. Inside a host x is then
    added up in float32, and only between hosts it travels in `dtype`: a host sends as much as one rank, not as all.
    Raises ValueError.
    """
    _check(x, op, error)
    flat, line = x.detach().contiguous().view(-1), Wire(group, dtype, hosts)
    parts = flat.split(_PART)  # while one travels, the next is encoded
    errors = [None] * len(parts) if error is None else error.view(-1).split(_PART)
    begun = [line.begin(part, op, left) for part, left in zip(parts, errors, strict=True)]
    line.flush()
    for reduction in begun:
        reduction.wait()
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))
    return x


class Reduction:
    """An all-reduce of a contiguous tensor of one dimension that has begun: several collectives, one after the other.

    `advance()` waits for one and begins the next, False where there is none; `wait()` ends all. All ranks call them in
    the same order for all their reductions, but for wait() after the last advance(). stream: of CUDA, on which all but
    the end runs; the current one if None.
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
        """Yields each collective that it has begun, and goes on when that is done."""
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
        """Room for all sums of this host, in equal pieces, and the piece of them that is this rank's."""
        n, local = len(self.x), self.inside.size()
        length = -(-n // (local * BLOCK)) * BLOCK
        total = torch.zeros(local * length, device=self.x.device)
        total[:n] = self.x
        if error is not None:
            total[:n] += error
            error.zero_()  # it has gone to whose piece it is
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
        """Slices as they travel: codes, then the exponents of scales, to whole vectors of 16 bytes."""
        if self.dtype == torch.bfloat16:
            return torch.empty(count, length, dtype=self.dtype, device=self.x.device)
        width = -(-(length + length // BLOCK) // 16) * 16
        return torch.empty(count, width, dtype=torch.uint8, device=self.x.device)

    def _adopt(self, *made):
        """The memory of the other stream's tensors is not used anew before the current one is done with them."""
        for x in made if self.stream is not None else ():
            x.record_stream(torch.cuda.current_stream(x.device))


class Wire:
    """Reductions one after another, such as those of gradient buckets: while one is in its first collective, the one
    before is in its second. On a GPU they run on a stream of their own.

    All ranks call `begin` and `flush` in the same order. group, hosts: as of `all_reduce_`.
    """

    def __init__(self, group=None, dtype=torch.float8_e4m3fn, hosts=None):
        if dtype not in FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FORMATS))}, got {dtype}")
        self.group, self.dtype, self.hosts = group, dtype, hosts
        self.under_way, self.streams = [], {}

    def begin(self, x, op="avg", error=None):
        """x = op of the x of all ranks, as by `all_reduce_`, once `wait()` of what this returns was called.

        x: [N], contiguous; error: [N].
        """
        reduction = Reduction(x, op, self.group, self.dtype, error, self._stream(x.device), self.hosts)
        self._advance()
        self.under_way.append(reduction)
        return reduction

    def flush(self):
        """Begins all collectives that are still to come; those before them are waited for (on a GPU, by the stream)."""
        while self.under_way:
            self._advance()

    def _advance(self):
        self.under_way = [reduction for reduction in self.under_way if reduction.advance()]

    def _stream(self, device):
        """The one for a device, after what the current one has been given so far; None for the CPU."""
        if device.type != "cuda":
            return None
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        self.streams[device].wait_stream(torch.cuda.current_stream(device))
        return self.streams[device]


class HookState:
    """The state of `hook`: the group (the default one if None) or hosts, the format, and what it keeps for each bucket.

    With error_feedback, 4 bytes for each element of a gradient. Torch makes its buckets anew after the first backward;
    where other parameters are in a bucket then, or in another order, what was kept for it is dropped.
    """

    def __init__(self, group=None, dtype=torch.float8_e4m3fn, error_feedback=True, hosts=None):
        self.wire, self.error_feedback = Wire(group, dtype, hosts), error_feedback
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
            value = _wide(x, error, lo, hi)
            _put(value, row, at, length)
            if error is not None:
                error[lo:hi] = (value - _get(row, at, hi - lo, length)).nan_to_num_(0, 0, 0)


def reduce(x, error, rows, row, me, length, mean):
    """row[0] = the sum of all rows / mean, with the slice of x + error itself in the place of row `me`."""
    for lo, hi, at in _pieces(me, length, x.numel()):
        total = torch.zeros(hi - lo, device=x.device)
        for r, other in enumerate(rows):
            total += _wide(x, error, lo, hi) if r == me else _get(other, at, hi - lo, length)
        _put(total * (1 / mean), row[0], at, length)
        if error is not None:
            error[lo:hi] = (total - _get(row[0], at, hi - lo, length) * mean).nan_to_num_(0, 0, 0)


def decode(rows, x, length):
    """x = all rows, one after another."""
    for r, row in enumerate(rows):
        for lo, hi, at in _pieces(r, length, x.numel()):
            x[lo:hi] = _get(row, at, hi - lo, length)


def _wide(x, error, lo, hi):
    value = x[lo:hi].float()
    return value if error is None else value + error[lo:hi]


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
