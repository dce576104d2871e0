"""Calls of attention for attention.py: their inputs, their float64 results, and the number of pairs that count.

Names end in their shape: B batch, H heads of queries, G heads of keys, T length, D width of a head. Inputs are (B, T,
H, D) in memory, as in models.
"""

import functools
from dataclasses import dataclass, field, replace

import check
import torch

from hfnn import testing


@dataclass(frozen=True)
class Case:
    """`options`: "causal", "left" (visible keys before the query's own), "softcap", "dropout"; with tensors: "alibi",
    "sinks", "padding" (a boolean mask), "bias" (additive, with a gradient), "varlen" (mean and maximum tokens of a
    sequence; then B is 1, T all tokens).
    """

    name: str
    shape: tuple[int, int, int, int, int]
    options: dict = field(default_factory=dict)

    def tiny(self) -> "Case":
        """The same with very few tokens and heads."""
        batch, heads, groups, _, _ = self.shape
        options = {**self.options}
        options |= {"left": 7} if "left" in options else {}
        options |= {"varlen": (12, 40)} if "varlen" in options else {}
        heads, groups = (4, 2) if heads > groups else (2, 2)
        return replace(self, shape=(min(batch, 2), heads, groups, 48, 16), options=options)


CAUSAL = {"causal": True}
CASES = {
    case.name: case
    for case in (
        Case("causal", (2, 16, 16, 8192, 128), CAUSAL),
        Case("gpt2", (16, 12, 12, 1024, 64), CAUSAL),
        Case("gqa", (4, 32, 8, 4096, 128), CAUSAL),
        Case("window", (2, 16, 16, 8192, 128), {"causal": True, "left": 1023}),
        Case("softcap", (2, 16, 8, 4096, 128), {"causal": True, "softcap": 50.0}),
        Case("alibi", (4, 16, 16, 2048, 128), {"causal": True, "alibi": True}),
        Case("sinks", (2, 64, 8, 4096, 64), {"causal": True, "sinks": True}),
        Case("dropout", (16, 12, 12, 1024, 64), {"causal": True, "dropout": 0.1}),
        Case("padding", (32, 12, 12, 512, 64), {"padding": True}),
        Case("bias", (8, 12, 12, 1024, 64), {"bias": True}),
        Case("varlen", (1, 16, 16, 65536, 128), {"causal": True, "varlen": (600, 4096)}),
    )
}


@dataclass(frozen=True)
class Problem:
    """One random call. `leaves`: query, key, value and other tensors that need a gradient, (B, H, T, D); dout is y's
    gradient."""

    case: Case
    leaves: list[torch.Tensor]
    dout: torch.Tensor
    starts: tuple[int, ...] = ()  # of varlen's sequences, and the end of the last
    lengths: torch.Tensor | None = None  # of padding
    slopes: torch.Tensor | None = None

    @property
    def options(self) -> dict:
        return self.case.options

    @property
    def device(self) -> torch.device:
        return self.dout.device

    @property
    def dtype(self) -> torch.dtype:
        return self.dout.dtype

    @functools.cached_property
    def padding(self) -> torch.Tensor:
        """(B, 1, 1, T), True where there is a key."""
        return (torch.arange(self.case.shape[3], device=self.device) < self.lengths[:, None])[:, None, None]

    @property
    def gqa(self) -> bool:
        return self.case.shape[1] != self.case.shape[2]

    @functools.cached_property
    def flops(self) -> tuple[float, float]:
        """FLOP of forward and backward: two and five products, only for the pairs that count."""
        batch, heads, _, length, width = self.case.shape
        if self.starts:
            each = torch.tensor(self.starts).diff().double()
            pairs = (each * (each + 1) / 2).sum().item()
        elif self.lengths is not None:
            pairs = length * self.lengths.sum().item()
        elif "left" in self.options:
            near = min(self.options["left"] + 1, length)
            pairs = batch * (near * (near + 1) / 2 + (length - near) * near)
        else:
            pairs = batch * (length * (length + 1) / 2 if "causal" in self.options else length**2)
        return 4.0 * width * heads * pairs, 10.0 * width * heads * pairs

    def exactly(self) -> list[torch.Tensor]:
        """Output and gradients of `part` in float64."""
        return self._formula(torch.float64)

    def roughly(self) -> list[torch.Tensor]:
        """The same formula in the dtype of the inputs: the reference for accuracy."""
        return self._formula(self.dtype)

    def _formula(self, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves, dout = self._slice([x.detach() for x in self.leaves]), self._slice([self.dout])[0]
        leaves = [x.to(dtype).requires_grad_() for x in leaves]
        y = self._attend(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dout.to(dtype))]

    def part(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The compared part of [y, dq, dk, dv, ...]: the last head of keys, of the last batch element or sequence."""
        y, *gradients = results
        return [self._slice([y.detach()])[0], *self._slice(gradients)]

    def _slice(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves of the part; those after query, key, value have heads of queries, along their last or second
        axis."""
        _, heads, groups, _, _ = self.case.shape
        of_group = slice(heads - heads // groups, None)
        summed = "bias" in self.options or "sinks" in self.options  # their gradients are sums over the batch
        batch = slice(None) if summed else slice(-1, None)
        rows = slice(self.starts[-2], self.starts[-1]) if self.starts else slice(None)
        found = []
        for i, x in enumerate(tensors):
            if i < 3:
                found.append(x[batch, slice(-1, None) if i else of_group, rows])
            else:
                found.append(x[of_group] if x.dim() == 1 else x[:, of_group])
        return found

    def _attend(self, query, key, value, extra=None) -> torch.Tensor:
        """The definition on the part, without dropout."""
        length, options = query.shape[2], self.options
        i = torch.arange(length, device=self.device)
        away = i[:, None] - i
        scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
        if "softcap" in options:
            scores = options["softcap"] * (scores / options["softcap"]).tanh()
        if "bias" in options:
            scores = scores + extra
        if self.slopes is not None:
            scores = scores - self.slopes[-query.shape[1] :, None, None].to(scores.dtype) * away.abs()
        hidden = away < 0 if "causal" in options else torch.zeros_like(away, dtype=torch.bool)
        if "left" in options:
            hidden = hidden | (away > options["left"])
        if self.lengths is not None:
            hidden = hidden | ~self.padding[-1:]
        scores = scores.masked_fill(hidden, -torch.inf)
        if "sinks" in options:
            sinks = extra[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, sinks], 3).softmax(3)[..., :-1] @ value
        return scores.softmax(3) @ value


def draw(case: Case, dtype: torch.dtype, device: str) -> Problem:
    """Standard normal tensors."""
    batch, heads, groups, length, width = case.shape

    def normal(of: int):
        return torch.randn(batch, length, of, width, device=device).to(dtype).transpose(1, 2)

    leaves, more = [normal(heads), normal(groups), normal(groups)], {}
    if "bias" in case.options:
        leaves.append(torch.randn(1, heads, length, length, device=device).to(dtype))
    if "sinks" in case.options:
        leaves.append(torch.randn(heads, device=device))
    if "alibi" in case.options:
        more["slopes"] = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    if "padding" in case.options:
        more["lengths"] = torch.randint(length // 4, length + 1, (batch,), device=device)
        more["lengths"][0] = length
    if "varlen" in case.options:
        more["starts"] = ragged(length, *case.options["varlen"])
    return Problem(case, [x.requires_grad_() for x in leaves], normal(heads), **more)


def ragged(tokens: int, mean: int, most: int, seed: int = 0) -> tuple[int, ...]:
    """The starts of sequences with log-normal lengths, as in a fine-tuning batch, and the end of the last one."""
    generator = torch.Generator().manual_seed(seed)
    starts, deviation = [0], 0.9
    while starts[-1] < tokens:
        # The mean of a log-normal variable is exp(mu + sigma^2 / 2).
        log_length = torch.randn((), generator=generator).item() * deviation - deviation**2 / 2
        length = int(min(max(mean * 2.718281828**log_length, 1), most))
        starts.append(min(starts[-1] + length, tokens))
    return tuple(starts)


def broken(results, errors, rough) -> list[str]:
    """The results that break the accuracy rule, in words; `rough`: the errors of the formula in the same dtype.

    The largest error of a part is random, also for the formula, so it counts as at least one ulp.
    """
    ulps = (torch.finfo(r.dtype).eps for r in results)
    allowed = [testing.Error(e.l2, max(e.largest, ulp)) for e, ulp in zip(rough, ulps, strict=True)]
    return check.broken(results, errors, allowed)
