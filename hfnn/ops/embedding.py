"""Rows of a table by their ids, which are kept in 32 bits.

    y_i = weight[id_i],    dweight[v] = sum of dy_i over the i with id_i = v

The look-up and its gradient are torch's own. Only what is kept differs: torch keeps the given ids, 8 bytes per token.
Position ids, shifted targets and similar tensors are made in the forward and would be freed after it. Here a copy with
4 bytes per id is kept, one per call, because a buffer of ids may be refilled in between without a new version. Ids that
take less memory than the copy (int32, or a row expanded over a batch) are kept as they are. If the caller keeps the
batch anyway, the copy is additional memory. So prefer="auto" makes it only for megabytes of ids, and prefer="memory"
always.
"""

import torch
from torch import Tensor, nn

from hfnn.core.context import compiling, context, is_plain
from hfnn.core.kernel import WORTH_ELEMENTS, Op, forced
from hfnn.core.node import Function

_embedding_of_torch = nn.functional.embedding


def reference(input, weight, padding_idx=None):
    """The definition, in the dtype of weight; the row at padding_idx gets no gradient."""
    rows = weight[input]
    return rows if padding_idx is None else torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)


def sample(case, dtype, device, generator=None):
    """Arguments of `embedding` for ids of shape `case[:-2]` into a table of shape `case[-2:]`."""
    *shape, rows, width = case
    weight = torch.randn(rows, width, generator=generator).to(dtype).to(device)
    return (torch.randint(0, rows, shape, generator=generator).to(device), weight), {}


# No own kernels: look-up and gradient are torch's.
OP = Op(
    "embedding",
    reference,
    _embedding_of_torch,
    kernels=(),
    sample=sample,
    cases=((3, 5, 64, 32), (0, 7, 4)),
    recipe=False,
)

# By preference: the number of ids from which the copy is worthwhile.
FLOORS = {"auto": WORTH_ELEMENTS, "memory": 0, "speed": float("inf")}


class _Embedding(Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx, scale_grad_by_freq):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(narrow(ids))
        ctx.how = weight.shape[0], -1 if padding_idx is None else padding_idx % weight.shape[0], scale_grad_by_freq
        return _embedding_of_torch(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(dy, ids, *ctx.how), None, None


def narrow(ids: torch.Tensor) -> torch.Tensor:
    """ids in 32 bits, or ids itself if it takes no more memory."""
    if ids.dtype is not torch.int64 or ids.untyped_storage().nbytes() <= 4 * ids.numel():
        return ids
    return ids.to(torch.int32, memory_format=torch.contiguous_format)


def _takes(input, weight) -> bool:
    if forced() == "torch" or not (torch.is_grad_enabled() and weight.requires_grad):
        return False
    if input.is_inference() or weight.dim() != 2 or not 0 < weight.shape[0] < 1 << 31:
        return False
    return input.get_device() == weight.get_device() and context(input, weight) is None


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.embedding`, which keeps the ids in 32 bits for backward. Raises what torch raises.

    Args:
        input: Row numbers, int64 or int32, of any shape.
        weight: (rows, width); the result is (*, width).
        padding_idx: A row that gets no gradient, or None.
        max_norm: With it torch's own op runs.
        norm_type: For max_norm.
        scale_grad_by_freq: Whether a row's gradient is divided by how often it occurs.
        sparse: With it torch's own op runs.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.embedding(torch.tensor([1, 1]), torch.tensor([[0.0], [2.0]]))
    tensor([[2.],
            [2.]])
    """
    # This check is the whole cost of hfnn in a small call.
    if compiling() or sparse or max_norm is not None or not is_plain(input) or input.numel() < FLOORS[prefer]:
        return _embedding_of_torch(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if not _takes(input, weight):
        return _embedding_of_torch(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _Embedding.apply(input, weight, padding_idx, scale_grad_by_freq)


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`: the same arguments, defaults and state dict. `prefer` is set by `hfnn.convert`.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Width of a row.
        padding_idx: A row that gets no gradient, or None.
        max_norm: With it torch's own op runs.
        norm_type: For max_norm.
        scale_grad_by_freq: Whether a row's gradient is divided by how often it occurs.
        sparse: With it torch's own op runs.
        _weight: As in torch.
        _freeze: As in torch.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer = "auto"

    @property
    def _hfnn_when(self) -> str:
        """When ids are kept in 32 bits, for `hfnn.report`."""
        if self.sparse or self.max_norm is not None or self.prefer == "speed":
            return "never: keeps its ids as torch does"
        floor = FLOORS[self.prefer]
        return "keeps its ids in 32 bits" + (f", from {floor} ids on" if floor else "")

    def forward(self, input: Tensor) -> Tensor:
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            prefer=self.prefer,
        )


OP.modules[nn.Embedding] = Embedding
