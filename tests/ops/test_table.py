"""Functions, including those generated from rows: their names, and how they treat invalid options."""

import pickle

import pytest
import torch

import hfnn


@pytest.mark.parametrize("name", hfnn.functional.__all__)
def test_functions_are_known_by_their_names(name):
    """So that a model that holds one can be pickled."""
    fn = getattr(hfnn.functional, name)
    assert pickle.loads(pickle.dumps(fn)) is fn and fn.__name__ == name and fn.__doc__


WRONG = {
    "elu": ("alpha",), "celu": ("alpha",), "softplus": ("beta", "threshold"), "gelu": ("approximate",),
    "leaky_relu": ("negative_slope",), "hardtanh": ("min_val", "max_val"), "hardshrink": ("lambd",),
    "softshrink": ("lambd",), "clamp": ("min", "max"), "glu": ("dim",), "huber_loss": ("delta",),
    "smooth_l1_loss": ("beta",), "mse_loss": ("reduction",), "maximum": ("other",),
}  # fmt: skip


@pytest.mark.parametrize("name, option", [(name, option) for name, options in WRONG.items() for option in options])
@pytest.mark.parametrize("value", ["1", None, (1.0,), float("nan"), torch.ones(2), 10**400], ids=lambda v: str(v)[:8])
def test_wrong_options_are_torchs_to_refuse(name, option, value):
    """The result, or the error, is that of torch's own op."""
    x, target = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    args = (x, target) if name.endswith("loss") else (x,)
    found = []
    for fn, options in ((getattr(hfnn.functional, name), {"prefer": "memory"}), (hfnn.ops.OPS[name].torch, {})):
        try:
            y = fn(*args, **{option: value}, **options)
            found.append((y.dtype, round(y.detach().nan_to_num().sum().item(), 3)))
        except Exception as error:
            found.append(type(error))
    assert str(found[0]) == str(found[1])
