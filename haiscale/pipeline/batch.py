"""Splits a batch into microbatches and combines their results. The first dimension is that of the batch."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def split(values: tuple, microbatches: int, what: str) -> list[tuple]:
    """For each microbatch its rows of every tensor; non-tensors and tensors without dimensions go to each unchanged.

    Sizes differ by at most one row. Raises ValueError if tensors have different numbers of rows, or too few.
    """
    rows = {x.shape[0] for x in values if _has_rows(x)}
    if len(rows) > 1:
        shapes = [tuple(x.shape) for x in values if _has_rows(x)]
        raise ValueError(f"{what} have the shapes {shapes}: the first dimension is the batch's, and must be the same")
    if rows and min(rows) < microbatches:
        raise ValueError(
            f"{what} have {min(rows)} rows, which are not enough for {microbatches} microbatches: "
            "give at least one row for each, or make the pipeline with fewer chunks"
        )
    parts = [x.tensor_split(microbatches) if _has_rows(x) else (x,) * microbatches for x in values]
    return list(zip(*parts, strict=True)) if parts else [()] * microbatches


def shares(labels: list[tuple]) -> list[float]:
    """The weight of each microbatch in the loss of the batch: proportional to its rows; equal if labels have no
    rows."""
    rows = [next((x.shape[0] for x in part if _has_rows(x)), 1) for part in labels]
    return [count / sum(rows) for count in rows]


def _has_rows(x):
    return isinstance(x, Tensor) and x.dim() > 0


def join(outputs: list):
    """Combines the results of all microbatches: tensors are concatenated, also in a tuple; others stay a list."""
    if all(_has_rows(y) for y in outputs):
        return torch.cat(outputs)
    if all(isinstance(y, tuple) and len(y) == len(outputs[0]) and all(map(_has_rows, y)) for y in outputs):
        return tuple(map(torch.cat, zip(*outputs, strict=True)))
    return outputs


def detached(y):
    """An output without its graph: tensors, also in tuples, lists, dicts and whatever else torch's pytree knows."""
    return tree_map_only(Tensor, Tensor.detach, y)
