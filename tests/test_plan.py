"""`hfnn.plan` against real steps, and its allocator against torch's rules."""

import dataclasses
import itertools

import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F

import hfnn
from hfnn.memory.peak import Live
from hfnn.plan import LARGEST, MODES, size
from hfnn.planning.allocator import Allocator, replay
from hfnn.planning.trace import PHASES

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Language(nn.Module):
    """A model with tied weights, a buffer and a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("position", torch.zeros(16, WIDTH))
        self.scale = torch.full((), 0.5)

    def forward(self, ids, targets):
        x = self.embed(ids) + self.position * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3),
            nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
        )  # fmt: skip


def of_language(model, *inputs):
    return model(*inputs)


def of_images(model, images, labels):
    return F.cross_entropy(model(images), labels)


CASES = {
    "language": (Language, of_language, lambda n: (torch.ones(n, 16).long(), torch.ones(n, 16).long())),
    "images": (Images, of_images, lambda n: (torch.ones(n, 3, 20, 20), torch.zeros(n).long())),
}
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "none": None,
}


def real(make, loss, inputs, mode, optimizer):
    """(peak above the model's own bytes, bytes kept for backward) of the second real step."""
    model = make().train()
    MODES[mode](model)
    stepper = optimizer and optimizer(model.parameters())
    with Live() as live:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            live.peak = before = live.now
            value = loss(model, *inputs)
            kept = live.now - before - value.untyped_storage().nbytes()
            value.backward()
            del value
            if stepper:
                stepper.step()
    return live.peak, kept


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_real_step(name, mode, optimizer):
    make, loss, inputs = CASES[name]
    if (name, mode) == ("images", "checkpoints"):
        found = hfnn.plan(make(), *inputs(4), loss=loss, modes=(mode,), device="cpu").row(mode)
        assert "no blocks" in found.why and not hfnn.plan(make(), *inputs(4), loss=loss).fits("1TiB", mode)
        return
    row = hfnn.plan(make(), *inputs(4), loss=loss, modes=(mode,), optimizer=OPTIMIZERS[optimizer], device="cpu").row(
        mode
    )
    peak, kept = real(make, loss, inputs(4), mode, OPTIMIZERS[optimizer])
    parameters, own = [*make().parameters()], getattr(make(), "scale", torch.empty(0))
    steps = 4 * len(parameters) * (optimizer in ("adamw", "foreach"))  # torch.tensor(0.0) is no op, so not in `peak`
    assert row.peak - row.weights - row.inputs == peak + steps
    assert row.kept_for_backward == kept
    assert row.peak <= row.upper <= 1.1 * row.peak
    assert row.weights == sum(t.nbytes for t in (*parameters, *make().buffers(), own))


def test_the_largest_batch():
    make, loss, inputs = CASES["language"]
    plan = hfnn.plan(make(), *inputs(2), loss=loss, modes=("stock", "checkpoints"), device="cpu")
    for mode in ("stock", "checkpoints"):
        needs = [
            hfnn.plan(make(), *inputs(n), loss=loss, modes=(mode,), device="cpu").rows[0].upper for n in range(1, 12)
        ]
        assert needs == sorted(needs)
        for n in (1, 2, 5, 9):
            assert plan.largest(needs[n - 1], mode) == n == plan.largest(needs[n] - 1, mode)
        assert plan.largest(needs[0] - 1, mode) == 0 and plan.fits(needs[1], mode) and not plan.fits(needs[1] - 1, mode)
    one = hfnn.plan(Language(), *inputs(2), loss=lambda m, x, y: m(x[:1], y[:1]), modes=("stock",), device="cpu")
    assert one.batch == 2
    two = hfnn.plan(Language(), *inputs(2), torch.ones(3), loss=lambda m, x, y, z: m(x, y), modes=("stock",))
    with pytest.raises(ValueError, match="no first dimension in common"):
        two.largest("1GiB")


def test_a_model_stays_as_it_is_and_may_have_no_values():
    model = Language().eval()
    before, attributes = {name: p.clone() for name, p in model.state_dict().items()}, vars(model).keys()
    state = torch.get_rng_state()
    wanted = hfnn.plan(model.train(), *CASES["language"][2](2))
    assert torch.equal(torch.get_rng_state(), state) and vars(model).keys() == attributes
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert not any(map(hfnn.is_converted, model.modules())) and all(p.grad is None for p in model.parameters())
    with torch.device("meta"):
        assert hfnn.plan(Language(), *CASES["language"][2](2)).rows == wanted.rows
    memory = wanted.row('prefer="memory"')
    assert memory.kept_for_backward < wanted.row("stock").kept_for_backward
    assert str(wanted).count("\n") > len(MODES) and "not modelled" in str(wanted)


def test_a_gpus_optimizer_takes_a_list_of_temporaries():
    """torch's default on a GPU, where it updates all parameters at once."""
    make, loss, inputs = CASES["language"]
    there, here = (
        hfnn.plan(make(), *inputs(1), loss=loss, modes=("stock",), device=d).rows[0] for d in ("cuda", "cpu")
    )
    assert there.phase == "optimizer" and there.temporaries > here.temporaries


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_example(examples, capsys):
    pytest.importorskip("transformers")
    ranks.loaded(examples / "will_it_fit.py").main("4GiB", "1")
    title, *lines = capsys.readouterr().out.splitlines()
    assert "4GiB" in title and [line.split()[0] for line in lines] == ["GPT-2", "BERT", "ViT-B/16", "own"]
    assert all(int(line.split()[-3]) > 0 < int(line.split()[-1]) for line in lines), lines


class Holds(nn.Module):
    """Tensors in a list, and a weight that is a view of another's memory."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH))
        self.half = self.packed.detach()[:, :WIDTH]
        self.masks = [torch.ones(WIDTH), {"more": torch.ones(WIDTH)}]

    def forward(self, x):
        return ((x @ self.packed)[..., :WIDTH] * self.masks[0] @ self.half.T + self.masks[1]["more"]).sum()


def test_modules_and_the_curve(tmp_path):
    make, loss, inputs = CASES["language"]
    plan = hfnn.plan(make(), *inputs(4), loss=loss, modes=("stock", "checkpoints"), device="cpu")
    for row in plan.rows:
        assert (
            sum(row.modules.values()) == row.kept_for_backward
            and max(sum(k.values()) for _, k in row.curve) == row.peak
        )
        assert [phase for phase, _ in itertools.groupby(row.curve, lambda part: part[0])] == list(PHASES)
    rows, checkpoints = 4 * 4 * 16, plan.row("checkpoints").modules
    stock = plan.row("stock").modules
    assert stock["blocks.*.mlp.*"] == 3 * rows * (4 * WIDTH + 4 * WIDTH + WIDTH)  # GELU's input and result, a mask
    assert "blocks.*.mlp.*" not in checkpoints and checkpoints["(model)"] == stock["(model)"]
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_model_holds_is_counted_once():
    row = hfnn.plan(Holds(), torch.ones(4, WIDTH, requires_grad=True), modes=("stock",), optimizer=None).rows[0]
    assert row.weights == 4 * (2 * WIDTH**2 + 2 * WIDTH)


@pytest.mark.parametrize("name", CASES)
def test_a_larger_batch_is_what_it_would_be(name):
    """With gradients of inputs, and channels last."""
    make, loss, inputs = CASES[name]
    sizes = []
    for n, of in ((3, 3), (3, 6), (6, 6)):
        x, *rest = inputs(n)
        x = x.to(memory_format=torch.channels_last).requires_grad_() if x.dim() == 4 else x
        plan = hfnn.plan(make(), x, *rest, loss=loss, modes=("converted",))
        sizes.append(plan.of_batch("converted", of))
    assert sizes[1] == sizes[2] and sizes[0].peak < sizes[1].peak


def test_autocast_keeps_what_a_real_step_keeps():
    make, loss, inputs = CASES["language"]

    def casted(model, *inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, *inputs)

    for mode in ("stock", "converted"):
        row = hfnn.plan(make(), *inputs(4), loss=loss, modes=(mode,), device="cpu", autocast=torch.bfloat16).rows[0]
        assert row.kept_for_backward == real(make, casted, inputs(4), mode, None)[1]


def test_a_converted_model_is_planned_as_it_is():
    make, loss, inputs = CASES["images"]
    stock = hfnn.plan(make(), *inputs(4), loss=loss, modes=('prefer="memory"',)).rows[0]
    ours = hfnn.plan(hfnn.convert(make(), prefer="memory"), *inputs(4), loss=loss, modes=("stock",)).rows[0]
    assert dataclasses.replace(ours, mode=stock.mode) == stock


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        return x if x.sum() > 0 else -x  # asks for a value


def test_errors():
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"1 \(Asks\) asks for one, .*test_plan.py:\d+"):
        hfnn.plan(nn.Sequential(nn.Linear(4, 4), Asks()), x)
    with pytest.raises(ValueError, match="give loss="):
        hfnn.plan(nn.Linear(4, 4), x)
    with pytest.raises(ValueError, match="device='tpu'"):
        hfnn.plan(nn.Linear(4, 4), x, device="tpu")
    with pytest.raises(ValueError, match="mode="):
        hfnn.plan(nn.Linear(4, 4), x, modes=("fast",))
    with pytest.raises(TypeError):  # the model's own
        hfnn.plan(nn.Linear(4, 4), x, x)
    with pytest.raises(ValueError, match="not an optimizer"):
        hfnn.plan(nn.Linear(4, 4), x, optimizer=torch.optim.AdamW(nn.Linear(4, 4).parameters()))
    with pytest.raises(ValueError, match="Tensor of layout"):
        hfnn.plan(nn.Linear(4, 4), x.to_sparse())
    plan = hfnn.plan(nn.Linear(4, 4), x, loss=lambda m, x: m.weight.sum(), modes=("stock",))
    assert plan.largest("1TiB") == LARGEST  # whatever the batch is
    with pytest.raises(ValueError, match="no size"):
        plan.fits("80 apples")
    with pytest.raises(ValueError, match="mode="):
        plan.fits("80GiB", "converted")
    assert [size(text) for text in ("80GiB", "1.5 kb", "7B", 5)] == [80 << 30, 1500, 7, 5]


def test_the_allocators_rules():
    """Sizes and splits of c10/cuda/CUDACachingAllocator.cpp."""
    mib = 1 << 20

    def reserved(*sizes):
        return replay(enumerate(sizes)).reserved // mib, replay(enumerate(sizes)).segments

    assert reserved(1) == reserved(mib) == reserved(mib, mib) == (2, 1)
    assert reserved(mib, mib, 1) == (4, 2) and reserved(mib + 1) == reserved(mib + 1, 9 * mib) == (20, 1)
    assert reserved(10 * mib) == (10, 1) and reserved(10 * mib + 1) == (12, 1) and reserved(11 * mib) == (12, 1)
    assert replay([(0, 1)]).allocated == 512 and replay([(0, 513)]).most == 1024
    # A block with at most 1 MiB left is not split, so it counts whole.
    assert replay([(0, 19 * mib)]).allocated == 20 * mib == replay([(0, 20 * mib)]).allocated
    # The smallest free block is taken, and neighbours are joined.
    found = replay([(0, 4 * mib), (1, 4 * mib), (2, 4 * mib), (0, 0), (1, 0), (3, 8 * mib)])
    assert (found.reserved, found.segments, found.allocated) == (20 * mib, 1, 12 * mib)
    assert replay([(0, 30 * mib), (0, 0), (1, 20 * mib), (2, 10 * mib)]).reserved == 30 * mib


def test_the_allocator_at_random():
    """Blocks do not overlap, and what is free is joined."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: int(torch.randint(n, (), generator=generator))  # noqa: E731
    allocator, alive = Allocator(), {}
    for i in range(3000):
        if alive and draw(2):
            allocator.give(*alive.pop(list(alive)[draw(len(alive))]))
        else:
            wanted = 1 + draw(1 << (5 + draw(20)))
            alive[i] = allocator.take(wanted), wanted <= 1 << 20
        taken = sorted((block.address, block.size) for block, _ in alive.values())
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken))
        assert allocator.allocated == sum(n for _, n in taken) <= allocator.reserved
    for one in alive.values():
        allocator.give(*one)
    assert sum(map(len, allocator._pools.values())) == allocator.segments and allocator.allocated == 0
