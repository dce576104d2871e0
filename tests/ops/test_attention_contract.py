"""The semantic contract (docs/design.md, section 4) for attention, with its features."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import testing
from hfnn.core.kernel import NoKernel
from hfnn.ops.attention.reference import reference

from .attention_cases import CUDA, DEVICE, NAMES, Case, attention, case, cotangents, keep_of, ran_ours, run

names = pytest.mark.parametrize("name", NAMES)
MANY = ("softcap", "sinks", "shared_bias", "lengths", "window", "gqa", "lse")
DIVERSE = [MANY, ("causal", "alibi", "mask", "offset"), ("varlen", "causal", "softcap", "lse"), ("bias", "dropout")]
diverse = pytest.mark.parametrize("features", DIVERSE, ids="-".join)


@names
@diverse
def test_runs_are_bitwise_equal(features, name):
    made = case(features, torch.bfloat16, name=name)
    with hfnn.use(name):
        first, second = (run(made.cast(None), attention) for _ in range(2))
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1])))


@names
@diverse
def test_nothing_is_written_to(features, name):
    made = case(features, name=name)
    mine = made.cast(None)
    others = [x for x in made.options.values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in others]
    with hfnn.use(name):
        results = mine.call(attention)
        kept, versions = [y.detach().clone() for y in results], [y._version for y in results]
        given = cotangents(results)
        copies = [dy.clone() for dy in given]
        leaves = list(mine.inputs.values())
        first = torch.autograd.grad(results, leaves, given, retain_graph=True)
        second = torch.autograd.grad(results, leaves, given)
    assert all(map(torch.equal, first, second)), "the second backward of a retained graph differs"
    assert all(map(torch.equal, results, kept)) and [y._version for y in results] == versions
    assert all(map(torch.equal, given, copies)) and all(map(torch.equal, others, before))
    assert all(map(torch.equal, leaves, made.inputs.values())) and all(x._version == 0 for x in leaves)


@names
@pytest.mark.parametrize("features", DIVERSE[:3], ids="-".join)
def test_backward_frees_masks_and_lengths(features, name):
    """The result and its node, which users may hold for long, keep none of the call's other tensors after backward."""
    made = case(features, name=name).cast(None)
    made.options = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in made.options.items()}
    held = [
        weakref.ref(x) for given in made.options.values() for x in (given if type(given) is tuple else (given,))
        if isinstance(x, torch.Tensor)
    ]  # fmt: skip
    with hfnn.use(name):
        results = made.call(attention)
    made.options.clear()
    sum(y.where(y.isfinite(), 0).sum() for y in results).backward()
    gc.collect()
    assert held and results[0].grad_fn is not None
    assert not any(x() is not None for x in held)


@names
@diverse
def test_each_gradient_on_its_own(features, name):
    made = case(features, name=name)
    with hfnn.use(name):
        results, together = run(made.cast(None), attention)
        given = cotangents(results)
        for wanted, right in zip(made.inputs, together, strict=True):
            mine = made.cast(None)
            for what, x in mine.inputs.items():
                x.requires_grad_(what == wanted)
            torch.manual_seed(7)
            (grad,) = torch.autograd.grad(mine.call(attention), mine.inputs[wanted], given)
            assert torch.equal(grad, right), wanted


@names
def test_each_result_on_its_own(name):
    """The gradients of the output alone and of the log-sum-exp alone add up to that of both."""
    made = case(("causal", "sinks", "lse"), name=name)
    with hfnn.use(name):
        mine = made.cast(None)
        results, leaves = mine.call(attention), list(mine.inputs.values())
        given = cotangents(results)
        both = torch.autograd.grad(results, leaves, given, retain_graph=True)
        parts = [
            torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True, materialize_grads=True)
            for y, dy in zip(results, given, strict=True)
        ]
    for whole, a, b in zip(both, *parts, strict=True):
        assert testing.error(a + b, whole.double()).l2 <= 1e-5
    assert not parts[1][2].any(), "the log-sum-exp does not depend on the values"


@names
def test_without_gradients_the_same_result(name):
    made = case(MANY, name=name)
    with hfnn.use(name):
        want = made.cast(None).call(attention)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found = Case(made.inputs, made.options).call(attention)
            assert all(map(torch.equal, found, want)) and not found[0].requires_grad


@names
@pytest.mark.parametrize("features", [f for f in DIVERSE if "dropout" not in f], ids="-".join)
def test_double_backward(features, name):
    made = case(features, size=(1 if "varlen" in features else 2, 2, 9, 13, 8), name=name)

    def second(case, function):
        torch.manual_seed(7)
        results, leaves = case.call(function), list(case.inputs.values())
        given = cotangents(results)
        first = torch.autograd.grad(
            sum((y.where(y.isfinite(), 0).square() * dy).sum() for y, dy in zip(results, given, strict=True)),
            leaves,
            create_graph=True,
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    with hfnn.use(name):
        got = second(made.cast(None), attention)
    wide, own = second(made.cast(torch.float64), reference), second(made.cast(None), reference)
    for what, g, w, o in zip(made.inputs, got, wide, own, strict=True):
        testing.assert_close(g, w, o, 2 * testing.GRADIENTS, f"second gradient of {what}")


@names
def test_double_backward_of_one_tensor_in_all_places(name):
    """Each use contributes its own gradient once."""

    def second(x, function):
        y = function(query=x, key=x, value=torch.sin(x), softcap=2.0)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    x = torch.randn(1, 2, 9, 8, device=DEVICE)
    with hfnn.use(name):
        found = second(x.clone().requires_grad_(), attention)
    for got, want in zip(found, second(x.double().requires_grad_(), reference), strict=True):
        assert testing.error(got, want).l2 <= 1e-5


def test_no_second_derivative_with_dropout():
    made = case(("dropout", "softcap"), size=(1, 2, 9, 13, 8)).cast(None)
    with hfnn.use(NAMES[0]):
        (y,) = made.call(attention)
    assert torch.autograd.grad(y.sum(), made.inputs["query"], retain_graph=True)[0].any()
    with pytest.raises(RuntimeError, match="dropout_p=0"):
        torch.autograd.grad(y.square().sum(), made.inputs["query"], create_graph=True)


@pytest.mark.skipif("cpp" not in NAMES, reason="the kernel of the CPU takes float64")
@pytest.mark.parametrize("features", [*DIVERSE, ("row_bias", "alibi", "mqa", "widths")], ids="-".join)
def test_gradcheck(features):
    made = case(features, torch.float64, size=(1 if "varlen" in features else 2, 2, 4, 6, 3))
    if "attn_mask" in made.inputs:  # a number that absorbs the scores has no difference quotient
        made.inputs["attn_mask"].clamp_(min=-5)
    made = made.cast(None)
    if features == MANY:
        made.options["sinks"] = (
            made.inputs.pop("sinks").detach().float()
        )  # float32, as in kernels, so gradcheck leaves them out
        # A log-sum-exp of -inf has no difference quotient.
        made.options["lengths"] = torch.tensor([[0, 5], [1, 6]], dtype=torch.int32)
        made.options["window"] = 5, 4
    elif "varlen" in features:
        made.options["cu_seqlens"] = torch.tensor([0, 2, 2, 4]), torch.tensor([0, 3, 3, 6])

    def function(*inputs):
        torch.manual_seed(7)
        return Case(dict(zip(made.inputs, inputs, strict=True)), made.options).call(attention)

    with hfnn.use("cpp"):
        assert ran_ours(function(*made.inputs.values())[0])
        assert torch.autograd.gradcheck(function, tuple(made.inputs.values()))
        if "dropout" not in features:
            assert torch.autograd.gradgradcheck(function, tuple(made.inputs.values()))


@names
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("features", [MANY, ("dropout", "causal")], ids="-".join)
def test_checkpoints_give_the_same_gradients(features, reentrant, name):
    """Recomputation draws the same dropout mask, because torch's generator is restored."""
    made = case(features, name=name)
    with hfnn.use(name):
        _, want = run(made.cast(None), attention)
        mine = made.cast(None)
        torch.manual_seed(7)
        call = lambda *x: Case(dict(zip(mine.inputs, x, strict=True)), mine.options).call(attention)  # noqa: E731
        results = checkpoint(call, *mine.inputs.values(), use_reentrant=reentrant)
        grads = torch.autograd.grad if not reentrant else _accumulated
        found = grads(results, list(mine.inputs.values()), cotangents(results))
    assert all(map(torch.equal, found, want))


def _accumulated(results, leaves, given):
    """A reentrant checkpoint does not support torch.autograd.grad."""
    torch.autograd.backward(results, given)
    return [x.grad for x in leaves]


@names
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, low, name):
    """The dtype of torch's own op, the values of a call on casts, and gradients in the leaves' dtypes."""
    made = case(("softcap", "shared_bias", "sinks", "lse"), dtype, name=name)
    with hfnn.use(name), torch.autocast(DEVICE, dtype=low):
        mine = made.cast(None)
        results, grads = run(mine, attention)
        own = torch.nn.functional.scaled_dot_product_attention(*list(mine.inputs.values())[:3])
    assert results[0].dtype is own.dtype and results[1].dtype is torch.float32
    assert all(g.dtype is x.dtype for g, x in zip(grads, mine.inputs.values(), strict=True))
    inputs = {what: x.to(own.dtype) if x.dim() == 4 and what != "attn_mask" else x for what, x in made.inputs.items()}
    with hfnn.use(name):
        want, _ = run(Case(inputs, made.options).cast(None), attention)
    assert all(testing.error(a, b.double()).l2 <= 1e-2 for a, b in zip(results, want, strict=True))


# Refusals


@pytest.mark.parametrize("name", ["cpp", "cuda", "triton"])
@pytest.mark.parametrize("features", [("plain",), ("causal", "softcap"), ("mask",), ("dropout",)], ids="-".join)
def test_forced_kernels_never_fall_back(features, name):
    made = case(features, size=(1, 2, 9, 13, 8), name=name, device="cpu")
    for what in ("query", "key", "value"):
        made.inputs[what] = made.inputs[what].to(torch.complex64)
    with hfnn.use(name), pytest.raises(NoKernel, match=f"scaled_dot_product_attention: `{name}` was asked for"):
        made.call(attention)


def test_forced_kernels_refuse_what_only_the_formula_can():
    """Trainable slopes; p = 1."""
    made = case(("alibi",), size=(1, 2, 9, 13, 8))
    made.options["alibi"].requires_grad_()
    dropped = case(("dropout",), size=(1, 2, 9, 13, 8))
    dropped.options["dropout_p"] = 1.0
    for call in (made, dropped):
        with hfnn.use(NAMES[0]), pytest.raises(NoKernel):
            call.call(attention)
    want = made.call(reference)[0]
    assert torch.equal(made.call(attention)[0], want)
    (slopes,) = torch.autograd.grad(made.call(attention)[0].square().sum(), made.options["alibi"])
    assert slopes.any()
    assert not dropped.call(attention)[0].any()


@names
@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"window": (-1, 0)}, "window"),
        ({"window": (1,)}, "window"),
        ({"window": 5}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -3.0}, "softcap"),
        ({"sinks": (3,)}, "sinks"),
        ({"alibi": (3,)}, "alibi"),
        ({"lengths": (3,)}, "lengths"),
        ({"lengths": (2, 3)}, "lengths"),
        ({"dropout_p": 1.5, "softcap": 1.0}, "dropout"),
        ({"dropout_p": -0.5, "softcap": 1.0}, "dropout"),
        ({"cu_seqlens": (3,)}, "cu_seqlens"),
        ({"softcap": 1.0, "attn_mask": (2, 2, 9, 12)}, "attn_mask"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(options, wanted, name):
    made = case((), size=(2, 2, 9, 13, 8), name=name)
    integers = ("lengths", "cu_seqlens")
    for what, value in options.items():
        is_shape = what in (*integers, "sinks", "alibi", "attn_mask")
        made.options[what] = torch.ones(value, dtype=torch.int32 if what in integers else None) if is_shape else value
    for forced in (name, "torch"):
        with hfnn.use(forced), pytest.raises(ValueError, match=wanted):
            made.call(attention)


@names
def test_key_heads_need_to_be_asked_for(name):
    made = case(("gqa", "softcap"), name=name)
    made.options["enable_gqa"] = False
    with hfnn.use(name), pytest.raises(ValueError, match="enable_gqa=True"):
        made.call(attention)


def test_without_a_kernel_the_formula_runs():
    made = case(MANY, size=(2, 4, 9, 13, 8))
    with hfnn.use("torch"):
        results, grads = run(made.cast(None), attention)
    assert not ran_ours(results[0])
    want, want_grads = run(made.cast(None), reference)
    assert all(map(torch.equal, (*results, *grads), (*want, *want_grads)))


def test_functorch_runs_the_formula():
    q = torch.randn(3, 2, 4, 5, 8, device=DEVICE)
    mapped = torch.vmap(lambda q: attention(query=q, key=q, value=q, window=(2, 1), softcap=3.0))(q)
    for x, y in zip(q, mapped, strict=True):
        assert testing.error(y, reference(x, x, x, window=(2, 1), softcap=3.0).double()).l2 < 1e-5


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@diverse
def test_cuda_graph(features):
    """A replay reads the current inputs, masks included, and draws new random numbers."""
    made = case(features, torch.bfloat16, name="triton")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        mine = made.cast(None)
    leaves = list(mine.inputs.values())

    def step():
        results = mine.call(attention)
        return results, torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])

    torch.use_deterministic_algorithms(False)  # no NaN filling inside a captured graph
    with hfnn.use("triton"):
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results, grads = step()
        with torch.no_grad():
            mine.inputs["query"].mul_(0.5)
            if "mask" in features:
                mine.options["attn_mask"].logical_not_()
        graph.replay()
        torch.cuda.synchronize()
        first = [x.clone() for x in (*results, *grads)]
        if "dropout" in features:
            graph.replay()
            torch.cuda.synchronize()
            assert not torch.equal(results[0], first[0])
            return
        want = step()
    assert all(map(torch.equal, first, (*want[0], *want[1])))


@names
def test_gradients_of_dropout_are_those_of_the_drawn_mask(name):
    """Checked with the definition: another mask would give far larger errors."""
    made = case(("dropout",), name=name)
    with hfnn.use(name):
        _, grads = run(made.cast(None), attention)
    _, want = run(made.cast(None), reference, **keep_of(made))
    assert all(testing.error(a, b.double()).l2 < 1e-5 for a, b in zip(grads, want, strict=True))
    wrong = {"keep": ~keep_of(made)["keep"]}
    _, other = run(made.cast(None), reference, **wrong)
    assert all(testing.error(a, b.double()).l2 > 0.1 for a, b in zip(other, want, strict=True))
