"""Feed-forward networks made of rooms: tensors between their products are not kept, but rebuilt in backward.

    MLP         y = fc2(dropout(f(fc1(x))))
    GatedMLP    y = down_proj(dropout(f(gate_proj(x)) * up_proj(x)))

x and the first products are kept; with recompute="gemm" in `hfnn.convert`, only x. The modules consist of `hfnn.Linear`
and have the names of timm and Llama, so state dicts fit. Shazeer, "GLU Variants Improve Transformer",
2020. https://arxiv.org/abs/2002.05202
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hfnn.core.options import one_of
from hfnn.ops.dropout import dropout
from hfnn.ops.gated import GATES, gated
from hfnn.ops.linear import Linear
from hfnn.ops.piecewise import relu
from hfnn.ops.relu_dropout import relu_dropout
from hfnn.ops.smooth import gelu, silu

ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": lambda x, prefer: gelu(x, approximate="tanh", prefer=prefer),
    "silu": silu,
    # The next product keeps its input, which is relu's output.
    "relu": lambda x, prefer: relu(x, keep="output", prefer=prefer),
}


class _FeedForward(nn.Module):
    """Common part of both: sizes, f by name, dropout between the products; `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None,
        activation: str,
        dropout: float,
        choices: Iterable[str],
    ):
        super().__init__()
        one_of("activation", activation, choices)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout!r}: a probability, from 0 to 1")
        self.in_features, self.hidden_features = in_features, hidden_features
        self.out_features = in_features if out_features is None else out_features
        self.activation, self.dropout = activation, dropout

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout:g}"


class MLP(_FeedForward):
    """Two linear maps with an activation between them.

        y = fc2(dropout(f(fc1(x))))

    activation: "gelu" | "gelu_tanh" | "silu" | "relu"; out_features: in_features by default. Shapes: x (*, in), y
    (*, out). Raises ValueError for another activation, and for a dropout that is no probability.
    """

    _hfnn_first = ("fc1",)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, hidden_features, out_features, activation, dropout, ACTIVATIONS)
        self.fc1 = Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = Linear(hidden_features, self.out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if self.activation == "relu" and self.dropout:
            return self.fc2(relu_dropout(h, self.dropout, self.training, prefer=self.prefer))
        h = ACTIVATIONS[self.activation](h, prefer=self.prefer)
        return self.fc2(dropout(h, self.dropout, self.training, prefer=self.prefer) if self.dropout else h)


class GatedMLP(_FeedForward):
    """Three linear maps, where the first gates the second: the feed-forward network of Llama.

        y = down_proj(dropout(f(gate_proj(x)) * up_proj(x)))

    activation: "silu" | "gelu" | "gelu_tanh" | "relu" | "sigmoid" | "quick_gelu"; out_features: in_features by default.
    Shapes: x (*, in), y (*, out). Raises ValueError for another activation, and for a dropout that is no probability.
    """

    _hfnn_first = ("gate_proj", "up_proj")

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, hidden_features, out_features, activation, dropout, GATES)
        self.gate_proj = Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = Linear(hidden_features, self.out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = gated(self.gate_proj(x), self.up_proj(x), self.activation, prefer=self.prefer)
        return self.down_proj(dropout(h, self.dropout, self.training, prefer=self.prefer) if self.dropout else h)
