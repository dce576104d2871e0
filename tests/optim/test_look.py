"""Before every step, what a table was made for is checked again: no change is missed."""

import copy

import pytest
import torch

import hfnn
from hfnn.optim import look, table

NATIVE = pytest.param(look.look, id="native")
PYTHON = pytest.param(look.look_in_python, id="python")


@pytest.fixture(params=[NATIVE, PYTHON])
def how(request, monkeypatch):
    if request.param is look.look is look.look_in_python:
        pytest.skip("hfnn._C is not built")
    monkeypatch.setattr(table, "look", request.param)
    return request.param


def no_gradient(params, optimizer):
    params[1].grad = None


def another_dtype(params, optimizer):
    params[1].grad.data = params[1].grad.to(torch.bfloat16)


def another_layout(params, optimizer):
    params[1].grad = params[1].grad.t()


def data_of_a_gradient_transposed(params, optimizer):
    params[1].grad.data = params[1].grad.data.t()


def data_elsewhere(params, optimizer):
    params[1].data = params[1].data + 1


def data_transposed(params, optimizer):
    params[1].data = params[1].data.t()


def fewer_elements(params, optimizer):
    """At the same address, with matching gradient and states."""
    params[1].data, params[1].grad = params[1].data[:2], None
    params[1].grad = torch.ones(2, 4)
    for name, value in optimizer.state[params[1]].items():
        if value.dim():
            optimizer.state[params[1]][name] = value[:2].clone()


def another_parameter(params, optimizer):
    params[1] = optimizer.param_groups[0]["params"][1] = torch.full((4, 4), 3.0, requires_grad=True)
    params[1].grad = torch.ones(4, 4)


def another_state(params, optimizer):
    """Like code that keeps states on the host between steps."""
    for name, value in optimizer.state[params[1]].items():
        optimizer.state[params[1]][name] = value.clone() * 2


def data_of_a_state(params, optimizer):
    """Like code that moves an optimizer to another device."""
    for value in optimizer.state[params[1]].values():
        value.data = value.data.clone() * 2


def storage_of_a_state(params, optimizer):
    """Like code that frees states between steps, and restores them."""
    value = optimizer.state[params[1]]["exp_avg"]
    kept = value.clone()
    value.untyped_storage().resize_(0)
    value.set_(kept)


def another_step(params, optimizer):
    optimizer.state[params[1]]["step"].data = torch.tensor(7.0)


def another_dict(params, optimizer):
    optimizer.state[params[1]] = {name: value * 2 for name, value in optimizer.state[params[1]].items()}


def no_states(params, optimizer):
    optimizer.state.clear()


def loaded(params, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"] += 1
    optimizer.load_state_dict(state)


def another_option(params, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True
    for p in params:
        optimizer.state[p]["max_exp_avg_sq"] = torch.ones(p.shape)


CHANGES = (
    no_gradient, another_dtype, another_layout, data_of_a_gradient_transposed, data_elsewhere, data_transposed,
    fewer_elements, another_parameter, another_state, data_of_a_state, storage_of_a_state, another_step, another_dict,
    no_states, loaded, another_option,
)  # fmt: skip


def step_with(change, fresh):
    """(hfnn's parameters, torch's, whether a table was rebuilt) after two steps, a change, and two more.

    fresh: whether there are new gradients before the change, and after it.
    """
    found, plans = [], []
    for module in (hfnn.optim, torch.optim):
        torch.manual_seed(0)
        params = [torch.randn(shape).requires_grad_() for shape in ((3,), (4, 4), ())]
        optimizer = module.AdamW(params, lr=0.1)
        for i in range(4):
            if i < 2 or fresh:
                for p in params:
                    p.grad = torch.randn(p.shape)
            if i == 2:
                change(params, optimizer)
            for p in params:
                if module is torch.optim and p.grad is not None:  # torch requires gradients of the parameter's dtype
                    p.grad.data = p.grad.to(p.dtype)
            optimizer.step()
            if module is hfnn.optim:
                plans.append(optimizer._plans[None])
        found.append(params)
    return *found, plans[2] is not plans[1]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_seen(change, fresh, how):
    mine, theirs, made = step_with(change, fresh)
    assert made
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def another_gradient(params, optimizer):
    params[1].grad = torch.ones(4, 4)


def data_of_a_gradient(params, optimizer):
    params[1].grad.data = torch.ones(4, 4)


def storage_of_a_gradient(params, optimizer):
    params[1].grad.set_(torch.ones(4, 4))


@pytest.mark.parametrize("change", [another_gradient, data_of_a_gradient, storage_of_a_gradient])
def test_where_gradients_went_is_seen(change, how):
    """The addresses in the rows are updated, and the table is kept."""
    mine, theirs, made = step_with(change, False)
    assert not made
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def tensors():
    base = torch.randn(64)
    found = [base[1:5], base.view(8, 8).t(), torch.randn(()), torch.empty(0, 3), base[:3].to(torch.float16)]
    return [*found, torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last), torch.nn.Parameter(base[::2])]


def test_addresses(how):
    """The addresses of the tensors, or 0 for a missing gradient; `.grad` is read, or gradients are passed."""
    params = [x.requires_grad_() for x in tensors()]
    given = [None if i % 3 == 1 else torch.empty_like(p) for i, p in enumerate(params)]
    for p, g in zip(params, given, strict=True):
        p.grad = g
    for seen in (how(params, None, [], b""), how(params, given, [], b"")):
        at, grads_at = (memoryview(numbers).cast("q").tolist() for numbers in seen[:2])
        assert at == [p.data_ptr() for p in params]
        assert grads_at == [0 if g is None else g.data_ptr() for g in given]
        assert seen == how(params, None, [], b"")


def test_each_layout_is_another_one(how):
    """All at one address: distinguished by dtype, size, strides, and from a missing one."""
    base, p = torch.zeros(16), torch.zeros(5)
    views = [
        base.view(4, 4), base.view(4, 4).t(), base[:12].view(4, 3), base.view(torch.int32).view(4, 4),
        base.view(torch.bfloat16)[:16].view(4, 4), base.as_strided((4, 4), (1, 1)), base.as_strided((4, 2), (4, 1)),
        base.as_strided((2, 4), (4, 1)), base.as_strided((2, 4), (8, 1)), None,
    ]  # fmt: skip
    there = [x for x in views if x is not None]
    found = [how([p], [x], [], b"") for x in views] + [how([x], [None], [], b"") for x in there]
    found += [how([p], [None], [{"x": x}], b"\1") for x in there] + [how([p], [None], [{"x": 1}], b"\1")]
    layouts = [seen[2] for seen in found]
    assert all(layouts[i] != layouts[j] for i in range(len(layouts)) for j in range(i))


def test_states(how):
    """Their addresses in order; the written ones; a change of any."""
    a, b, c, step = (torch.zeros(1) for _ in range(4))
    states = [{"step": step, "x": a, "n": 3, "y": b}, None, {"x": c, 1: b}]
    at, _, layouts, written = how([], [], states, bytes([1, 1, 0]))
    assert memoryview(at).cast("q").tolist() == [x.data_ptr() for x in (step, a, b, c, b)]
    assert len(written) == 2 and written[0] is a and written[1] is b
    assert how([], [], states, b"\0\0\1")[3][0] is c
    moved = torch.zeros(1)
    changes = (
        lambda: states[0].pop("y"), lambda: states[0].update(y=c), lambda: states[2].update(z=a),
        lambda: states[0].update(n=None, y=3), lambda: states.__setitem__(1, {}), lambda: states[0].update(step=moved),
        lambda: states[0].update(x=b, y=a),
    )  # fmt: skip
    before = [None if state is None else dict(state) for state in states]
    for i, change in enumerate(changes):
        change()
        now = how([], [], states, bytes([1, 1, 0]))
        assert (now[0], now[2]) != (at, layouts), i
        states[:] = [None if state is None else dict(state) for state in before]
        assert how([], [], states, bytes([1, 1, 0]))[:3] == (at, b"", layouts)


def test_what_cannot_be_read(how):
    p, sparse = torch.zeros(1), torch.zeros(2).to_sparse()
    assert how([p], [p], [], b"") is not None
    assert how([sparse], [None], [], b"") is None and how([p], [sparse], [], b"") is None
    assert how([p], [None], [{"x": sparse}], b"\0") is None
    assert how([p], [torch._neg_view(p)], [], b"") is None


def test_a_sparse_gradient(how):
    """Among dense ones: torch's own step takes it; the kernel runs the next step."""
    p = torch.zeros(4, 3, requires_grad=True)
    optimizer = hfnn.optim.SGD([p], lr=1.0)
    for grad, kernel in ((torch.ones(4, 3), "cpp"), (torch.eye(4, 3).to_sparse(), "torch"), (torch.ones(4, 3), "cpp")):
        p.grad = None
        p.grad = grad
        optimizer.step()
        assert optimizer._ran == (kernel,)
    assert torch.equal(p, -2 - torch.eye(4, 3))


def test_more_dimensions_than_kernels_read(how):
    """The table is rebuilt at every step, and is right."""
    twins = [torch.arange(4.0).view(1, 2, 1, 1, 2, 1, 1, 1, 1).clone().requires_grad_() for _ in range(2)]
    mine, theirs = hfnn.optim.AdamW([twins[0]], lr=0.1), torch.optim.AdamW([twins[1]], lr=0.1)
    for i in range(3):
        for p in twins:
            p.grad = torch.full_like(p, i - 0.5)
        mine.step(), theirs.step()
        assert mine._ran == ("cpp",)
    torch.testing.assert_close(*twins)
