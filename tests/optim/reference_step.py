"""An optimizer's step as csrc/optim.h defines it, in plain torch on the CPU, and the tables that kernels receive.

A list of `Row`s stands for the table. `table` writes their addresses for a kernel; `prepare` and `update` are the
definition. They change a row's tensors in place; all of a row's tensors are dense, in the same order of elements, and
here one-dimensional. The arithmetic has the dtype `work`: float32 as in the kernels, or float64 to measure their
errors.
"""

import dataclasses

import torch

F32, F64 = torch.float32, torch.float64
TILE, BLOCK, HYPER = 4096, 256, 8
FORMATS = {F32: 0, torch.bfloat16: 1, torch.float16: 2, F64: 3, "8bit": 4, "4bit": 5}
MAXIMIZE, DECOUPLED, AMSGRAD, NESTEROV = 1, 2, 4, 8
ADAM, SGD, LION = 0, 1, 2
# (rule, options, numbers): each option with one that it combines with, and each moment left out.
OPTIONS = [
    (ADAM, 0, {}),
    (ADAM, MAXIMIZE | AMSGRAD, {}),
    (ADAM, AMSGRAD | DECOUPLED, {"weight_decay": 0.0}),
    (SGD, NESTEROV, {"beta2": 0.0}),
    (SGD, MAXIMIZE | DECOUPLED, {}),
    (SGD, 0, {"beta1": 0.0}),
    (LION, MAXIMIZE, {}),
]
SIGNED = {ADAM: (True, False, False), SGD: (True,), LION: (True,)}


@dataclasses.dataclass
class Row:
    """A parameter. state_format is a key of FORMATS; states and scales have one entry per state of the rule."""

    param: torch.Tensor
    grad: torch.Tensor
    state_format: object = F32
    states: tuple = ()
    scales: tuple = ()
    remainder: torch.Tensor = None
    ema: torch.Tensor = None
    step: torch.Tensor = None
    group: int = 0
    first: bool = False

    def clone(self):
        def copy(x):
            return x.clone() if torch.is_tensor(x) else tuple(map(copy, x)) if isinstance(x, tuple) else x

        return Row(*(copy(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def to(self, device):
        def move(x):
            return x.to(device) if torch.is_tensor(x) else tuple(map(move, x)) if isinstance(x, tuple) else x

        return Row(*(move(getattr(self, field.name)) for field in dataclasses.fields(self)))


def new_row(param, grad, rule, states, state_format=F32, step=0, master=None, ema=None, first=False, group=0):
    """A row with its states (a list of float tensors, one per state) stored in state_format.

    master: float32 values of the parameter; param becomes their upper half and the remainder their lower half.
    """
    low = state_format in ("8bit", "4bit")
    bits = {"8bit": 8, "4bit": 4}.get(state_format)
    kept = [
        encode(x.float(), bits, s) if low else (x.to(state_format), None)
        for x, s in zip(states, SIGNED[rule], strict=False)
    ]
    remainder = None
    if master is not None:
        param, remainder = split(master)
    return Row(param, grad, state_format, tuple(k[0] for k in kept), tuple(k[1] for k in kept if low), remainder, ema,
               torch.tensor(float(step)), group, first)  # fmt: skip


def table(rows, tile=TILE):
    """rows (N, kColumns) int64 and owner (T,) int32 for a list of rows, whose tensors must outlive them."""
    lines, owner = [], []

    def address(x):
        return 0 if x is None else x.data_ptr()

    def three(tensors):
        return [address(x) for x in (*tensors, None, None, None)[:3]]

    for index, row in enumerate(rows):
        codes = FORMATS[row.param.dtype] | FORMATS[row.grad.dtype] << 4 | FORMATS[row.state_format] << 8
        numel = row.param.numel()
        lines.append([address(row.param), address(row.grad), *three(row.states), *three(row.scales),
                      address(row.remainder), address(row.ema), address(row.step), numel, len(owner), codes, row.group,
                      int(row.first)])  # fmt: skip
        owner += [index] * -(-numel // tile)
    device = rows[0].param.device
    written = torch.tensor(lines, dtype=torch.int64, device=device).reshape(len(rows), -1)
    return written, torch.tensor(owner, dtype=torch.int32, device=device)


def hyper(*groups):
    """hyper (G, HYPER) float64 of dicts with lr, beta1 or momentum, beta2 or dampening, eps, weight_decay, options."""
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "options")
    renamed = [{{"momentum": "beta1", "dampening": "beta2"}.get(k, k): v for k, v in g.items()} for g in groups]
    rows = [[float(g.get(name, 0.0)) for name in names] + [0.0] * (HYPER - len(names)) for g in renamed]
    return torch.tensor(rows, dtype=F64)


def control(found_inf=0.0, grad_scale=1.0, max_norm=0.0):
    return torch.tensor([found_inf, grad_scale, max_norm, 0.0])


# ---- formats


def lb(x):
    """The logarithm given by a float32's bits: exact at powers of two, linear in between."""
    fraction, exponent = torch.frexp(x)
    return exponent - 2 + 2 * fraction


def inverse_lb(x):
    return torch.where(x.isfinite(), (1 + x - x.floor()) * torch.exp2(x.floor()), 0)


def code_layout(bits, signed):
    """t, and the code of m = 0."""
    return (bits - 1, 2 ** (bits - 1) - 1) if signed else (bits, -1)


def code_values(bits, signed):
    """The value of each code, float64 (2^bits,), in the order of the codes, which is increasing."""
    top, zero = code_layout(bits, signed)
    m = torch.arange(2**bits, dtype=F64) - zero
    return torch.where(m == 0, 0, inverse_lb(3 * (lb(m.abs()) - top)).copysign(m))


def code_samples(bits, signed, scale):
    """Blocks of float32 numbers that distinguish all codes, each containing the scale: all values, midpoints and
    numbers close to these, and numbers of all magnitudes."""
    torch.manual_seed(0)
    values = code_values(bits, signed)
    between = (values[1:] + values[:-1]) / 2
    low = (values.abs()[values != 0]).min()
    spread = torch.exp2(torch.rand(2000, dtype=F64) * 30 - 30) * (torch.randn(2000, dtype=F64).sign() if signed else 1)
    x = torch.cat([values, between, between * (1 + 1e-6), between * (1 - 1e-6), spread, low[None] / 2, 0 * low[None]])
    one = torch.ones(1, dtype=F64)
    return [(torch.cat([part, one]) * scale).float() for part in x.split(BLOCK - 1)]


def blocks(x):
    """x padded with zeros to whole blocks: (ceil(numel / BLOCK), BLOCK)."""
    padded = x.new_zeros(-(-x.numel() // BLOCK) * BLOCK)
    padded[: x.numel()] = x
    return padded.reshape(-1, BLOCK)


def encode(x, bits, signed):
    """codes uint8 (numel,) or (ceil(numel / 2),) and scale float32 (ceil(numel / BLOCK),) of x (numel,)."""
    x_NB = blocks(x.float())
    top, zero = code_layout(bits, signed)
    # Of equal magnitudes the first is taken, so sort positive ones first. NaN sorts highest.
    sorted_NB = x_NB.sort(1, descending=True).values
    scale = sorted_NB.gather(1, sorted_NB.abs().argmax(1, keepdim=True))
    scale = torch.where(scale.isfinite() & x_NB.isfinite().all(1, keepdim=True), scale, torch.nan)
    scale = torch.where(scale.abs() < 2.0**-100, 0, scale)
    y_NB = torch.where(scale.abs() > 0, x_NB.abs() * (4 / scale.abs().to(F64)).float(), 0)
    m = (y_NB.view(torch.int32) // 3).view(F32).to(F64) * 2.0 ** (top + 84)
    m = torch.where((x_NB < 0) != (scale < 0), -m, m)
    # torch, too, rounds halves to even.
    code = (m + zero).round().clamp(min=0).flatten()[: x.numel()].to(torch.uint8)
    if bits == 4:
        code = torch.nn.functional.pad(code, (0, code.numel() % 2))
        code = code[::2] | code[1::2] << 4
    return code, scale[:, 0]


def decode(code, scale, numel, bits, signed):
    """float32 (numel,)."""
    if bits == 4:
        code = torch.stack([code & 15, code >> 4], 1).flatten()[:numel]
    values = code_values(bits, signed).float()[code.long()]
    return values * scale.repeat_interleave(BLOCK)[:numel]


def random_halves(seed, offset, numel, first_tile, tile=TILE):
    """The 16 random bits of each element of a row, int64 (numel,): halves of words of Philox4x32-10."""
    e = torch.arange(numel)
    c = offset + 512 * (first_tile + e // tile) + e // 8 % 512
    words, low = _philox(c, seed), 0xFFFFFFFF
    half = e % 8
    word = torch.stack(words, 1).gather(1, (half // 2)[:, None])[:, 0] & low
    return word >> 16 * (half % 2) & 0xFFFF


def _multiply(a, b):
    """High and low word of the product of two words, in int64, with intermediates of at most 48 bits."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    high += low >> 16
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def _philox(counter, seed):
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32 & mask, torch.zeros_like(counter), torch.full_like(counter, 0x68666E6E)]
    k0, k1 = seed & mask, seed >> 32 & mask
    for _ in range(10):
        (p_high, p_low), (q_high, q_low) = _multiply(c[0], 0xD2511F53), _multiply(c[2], 0xCD9E8D57)
        c = [q_high ^ c[1] ^ k0, q_low, p_high ^ c[3] ^ k1, p_low]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


def round_stochastically(x, dtype, halves):
    """x float32 rounded to bfloat16 or float16, using the random bits in halves."""
    kept = 16 if dtype == torch.bfloat16 else 13
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    bits = (bits + (halves & (1 << kept) - 1)) >> kept << kept
    rounded = bits.to(torch.int32).view(F32)
    plain = ~x.isfinite() | (x.abs() < 2**-14 if dtype == torch.float16 else False)
    return torch.where(plain, x, rounded).to(dtype)


def join(param, remainder):
    """The float32 master of a bfloat16 parameter and its remainder."""
    return ((param.view(torch.int16).int() << 16) + remainder.int()).view(F32)


def split(master):
    """Splits a float32 master into a bfloat16 parameter, rounded half up in magnitude, and its remainder."""
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    upper = bits + 0x8000 >> 16
    remainder = bits - (upper << 16)
    upper, remainder = torch.where(master.isnan(), 0x7FC0, upper), torch.where(master.isnan(), 0, remainder)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


# ---- the step


def prepare(rows, control, partials=0):
    """Counts each row's step unless infinities were found; the sum of squares of all gradients, float64 (1,)."""
    for row in rows:
        if row.step is not None and not control[0]:
            row.step += 1
    if partials:
        scale = control[1].to(F64)
        return sum((row.grad.to(F64) / scale).square().sum() for row in rows).reshape(1)
    return None


def update(rows, hyper, control, squares, rule, ema_decay=-1.0, seed=-1, offset=0, work=F32):
    clip = 1.0
    if squares is not None:
        norm = squares.sum().sqrt()
        control[3] = norm
        # Like torch's clamp: a NaN norm makes the gradients NaN.
        clip = (control[2].to(F64) / (norm + 1e-6)).clamp(max=1.0)
    if control[0]:
        return
    tile = 0
    for row in rows:
        _update(row, hyper[row.group], control[1].to(F64), clip, rule, ema_decay, seed, offset, tile, work)
        tile += -(-row.param.numel() // TILE)


def _update(row, hyper, grad_scale, clip, rule, ema_decay, seed, offset, first_tile, work):
    lr, beta1, beta2, eps, weight_decay, options = (x.item() for x in hyper[:6])
    options = int(options)
    work = F64 if row.param.dtype == F64 else work
    bits = {"8bit": 8, "4bit": 4}.get(row.state_format)
    p = (row.param if row.remainder is None else join(row.param, row.remainder)).to(work)
    g = row.grad.to(work) * torch.as_tensor(clip / grad_scale).to(work)
    if options & MAXIMIZE:
        g = -g
    s = list(row.states) if rule != SGD or beta1 else []
    if bits:
        s = [decode(c, q, p.numel(), bits, signed) for c, q, signed in zip(s, row.scales, SIGNED[rule], strict=False)]
    s = [x.to(work) for x in s]
    p = (_adam, _sgd, _lion)[rule](p, g, s, lr, beta1, beta2, eps, weight_decay, options, row)
    for i, x in enumerate(s):
        if bits:
            code, scale = encode(x.float(), bits, SIGNED[rule][i])
            row.states[i].copy_(code)
            row.scales[i].copy_(scale)
        else:
            row.states[i].copy_(x)
    _keep(row, p, ema_decay, seed, offset, first_tile)


def _keep(row, p, ema_decay, seed, offset, first_tile):
    """Writes the parameter in its storage format, and its average."""
    if row.remainder is not None:
        upper, remainder = split(p.float())
        row.param.copy_(upper)
        row.remainder.copy_(remainder)
        kept = p.float()
    elif seed >= 0 and row.param.element_size() == 2:
        halves = random_halves(seed, offset, p.numel(), first_tile)
        row.param.copy_(round_stochastically(p.float(), row.param.dtype, halves))
        kept = row.param
    else:
        row.param.copy_(p)
        kept = row.param
    if row.ema is not None and ema_decay >= 0:
        row.ema += (1 - ema_decay) * (kept.float() - row.ema)


def _adam(p, g, s, lr, beta1, beta2, eps, weight_decay, options, row):
    t = row.step.item()
    if options & DECOUPLED:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    s[0] = s[0] + (1 - beta1) * (g - s[0])
    s[1] = beta2 * s[1] + (1 - beta2) * g * g
    u = s[1]
    if options & AMSGRAD:
        u = s[2] = torch.maximum(s[2], s[1])
    return p - lr / (1 - beta1**t) * s[0] / (u.sqrt() / (1 - beta2**t) ** 0.5 + eps)


def _sgd(p, g, s, lr, momentum, dampening, _, weight_decay, options, row):
    if options & DECOUPLED:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    if momentum:
        s[0] = g if row.first else momentum * s[0] + (1 - dampening) * g
        g = g + momentum * s[0] if options & NESTEROV else s[0]
    return p - lr * g


def _lion(p, g, s, lr, beta1, beta2, _, weight_decay, __, row):
    p = p - lr * weight_decay * p
    p = p - lr * torch.sign(beta1 * s[0] + (1 - beta1) * g)
    s[0] = s[0] + (1 - beta2) * (g - s[0])
    return p
