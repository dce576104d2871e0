"""Subclasses of nn.Linear that compute the product in their own way."""

import copy

import pytest
import torch
import transformers
from torch import nn

import hfnn
from hfnn.patterns.subclass import is_converted


class Product(nn.Linear):
    def forward(self, input):
        y = input @ self.weight.T
        return y if self.bias is None else (y + self.bias).to(y.dtype)


class Promoting(nn.Linear):
    """Under autocast the sum with a float32 bias is float32."""

    def forward(self, input):
        return input @ self.weight.T + self.bias


class Scaled(nn.Linear):
    def forward(self, input):
        return 0.5 * (input @ self.weight.T)


class Turned(nn.Linear):
    def forward(self, input):
        return input @ self.weight


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_a_product_keeps_its_inputs_recipe(bias, amp):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.LayerNorm(16), Product(16, 24, bias=bias))
    model = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    x, taken = torch.randn(3, 5, 16, requires_grad=True), hfnn.recipe.counter.taken
    results = []
    for each in (stock, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = each(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), list(each.parameters()))))
    assert hfnn.recipe.counter.taken == taken + 1
    torch.testing.assert_close(*results, **({"rtol": 0.02, "atol": 0.02} if amp else {}))


@pytest.mark.parametrize("cls, why", [(Promoting, "under autocast"), (Scaled, "against x W^T"), (Turned, "raises")])
def test_what_is_no_linear_map_is_left_alone(cls, why):
    model = hfnn.convert(cls(16, 16), prefer="memory")
    assert not is_converted(model) and why in hfnn.report(model).rows[0].why


def test_falcon_keeps_no_norms_output():
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    model = hfnn.convert(transformers.FalconForCausalLM(config), prefer="memory")
    left = {row.original for row in hfnn.report(model).left}
    assert "transformers.FalconLinear" not in left
    ids = torch.randint(99, (2, 16))
    taken = hfnn.recipe.counter.taken
    model(ids, labels=ids).loss.backward()
    assert hfnn.recipe.counter.taken - taken >= 3 * 2
