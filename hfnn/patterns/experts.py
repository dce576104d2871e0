"""Mixtures of experts in transformers: their gated products, and their loop over the experts.

    y[t] = sum over the experts e that token t goes to of  w[t, e] down_e (f(gate_e x[t]) * up_e x[t])

Mixtral, Qwen3-MoE, DeepSeek and similar models hold the experts' weights as two parameters, gate_up_proj (E, 2I, H) and
down_proj (E, H, I). transformers has several implementations, named by the configuration. All but "eager" call the
module's `_apply_gate`, which is replaced by ours if it is the standard one. "eager", the class's own loop, and
"grouped_mm", one product for all experts, run here with recipes: the rows of an expert are kept as indices, and the
gated product is not kept.

Recognised by these names, then proved: on a small instance, both `_apply_gate` and the loop are compared with the
formula, in float64 and in both 16-bit formats, output and gradients.
"""

import functools
import sys
import types
from dataclasses import dataclass, replace

import torch
from torch import nn

from hfnn.core.context import context, is_bare, is_plain, transformed
from hfnn.core.holder import like_of, stock_of
from hfnn.core.node import below, carries, described
from hfnn.ops.gated import GATES, gated
from hfnn.ops.linear import linear
from hfnn.patterns import probe
from hfnn.patterns.feedforward import PRODUCTS
from hfnn.patterns.kinds import function_of, likeness
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match, Proofs, bound, check, watched
from hfnn.patterns.subclass import holds
from hfnn.testing import error

EXPERTS, HIDDEN, INNER, TOKENS, TOP = 4, 16, 24, 12, 2


class MixtureOfExperts:
    """Mixin for such a module."""

    prefer, exact = "auto", False

    @staticmethod
    def methods(module) -> tuple[str, ...]:
        return ("_apply_gate",)

    _hfnn_when = "while its activation carries no hooks, which would not be called"

    def _apply_gate(self, gate_up_out):
        if not is_plain(gate_up_out) or not _open(self):
            return stock_of(self)._apply_gate(self, gate_up_out)
        return gated(gate_up_out, None, like_of(self).f, prefer=self.prefer)

    def forward(self, like, hidden_states, top_k_index, top_k_weights):
        # Older versions of transformers lack the attribute, but have the same loop.
        parallel = getattr(self, "_is_expert_parallel", False)
        compute = None if parallel else _WAYS.get(self.config._experts_implementation)
        if compute is None or not is_plain(hidden_states) or hidden_states.dim() != 2 or not _open(self):
            return stock_of(self).forward(self, hidden_states, top_k_index, top_k_weights)
        if compute is grouped and not _has_grouped(hidden_states, self.gate_up_proj):
            return stock_of(self).forward(self, hidden_states, top_k_index, top_k_weights)
        return compute(self, hidden_states, top_k_index, top_k_weights)


@dataclass(frozen=True)
class Experts(Match):
    """f: of GATES; act: the name of the activation's module."""

    f: str
    act: str = "act_fn"
    mixin = MixtureOfExperts

    @property
    def op(self):
        return PRODUCTS[self.f]

    def __str__(self) -> str:
        return f"hfnn {self.op.name} of experts"


def _open(module) -> bool:
    like = like_of(module)
    act = module._modules[like.act]
    return not transformed() and holds(module) and is_bare(act) and function_of(act) == like.f


def loop(module, x_TH, index_TK, weight_TK):
    """The sum over the experts, in their order; T tokens, each to K of E experts. Index E means no expert."""
    product = functools.partial(gated, activation=like_of(module).f, prefer=module.prefer)
    project = functools.partial(linear, prefer=module.prefer, exact=module.exact)
    y_TH = torch.zeros_like(x_TH)
    for e in torch.unique(index_TK).tolist():
        if e >= module.gate_up_proj.shape[0]:
            continue
        slot, token = torch.where(index_TK.t() == e)
        x_NH = _rows(x_TH, token, module.gate_up_proj)
        h_NH = project(product(project(x_NH, module.gate_up_proj[e])), module.down_proj[e])
        y_TH.index_add_(0, token, (h_NH * weight_TK[token, slot, None]).to(y_TH.dtype))
    return y_TH


def _has_grouped(x, weight) -> bool:
    """Whether transformers would compute these by torch's grouped product."""
    asked = getattr(sys.modules.get("transformers.integrations.moe"), "_can_use_grouped_mm", None)
    return asked is not None and x.dtype is weight.dtype and asked(x, weight, None)


def grouped(module, x_TH, index_TK, weight_TK):
    """The sum over the experts of S = T K pairs, sorted by expert; groups end at `offsets`."""
    up_EFH, (tokens, top) = module.gate_up_proj, index_TK.shape
    number_S, pair_S = torch.sort(index_TK.reshape(-1))
    # histc does not wait for the GPU; on the CPU it only accepts floats.
    counts = torch.histc(number_S.int() if x_TH.is_cuda else number_S.float(), len(up_EFH), 0, len(up_EFH) - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    h_SI = module._apply_gate(_of_groups(_rows(x_TH, pair_S // top, up_EFH), up_EFH, offsets))
    y_SH = _of_groups(h_SI, module.down_proj, offsets) * weight_TK.reshape(-1)[pair_S].unsqueeze(-1)
    place_S = torch.empty_like(pair_S)
    place_S[pair_S] = torch.arange(len(pair_S), device=pair_S.device)
    return y_SH[place_S].view(tokens, top, -1).sum(1).to(x_TH.dtype)


def _of_groups(x_SI, weight_EOI, offsets):
    """x W_e^T for the rows of each expert e; keeps the node that made x instead of x."""
    if not (torch.is_grad_enabled() and weight_EOI.requires_grad and carries(x_SI)):
        return _products((None,), x_SI, weight_EOI, offsets)
    y_SO = below(_products, (None,), x_SI, weight_EOI, offsets)
    return _OF_GROUPS(y_SO, (None,), x_SI, weight_EOI, offsets)


def _products(how, x_SI, weight_EOI, offsets):
    return nn.functional.grouped_mm(x_SI, weight_EOI.transpose(-2, -1), offs=offsets)


def _gradients_of_groups(dy_SO, needs, how, x_SI, weight_EOI, offsets):
    dy_SO = dy_SO.contiguous()
    dx = nn.functional.grouped_mm(dy_SO, weight_EOI, offs=offsets) if needs[0] else None
    dweight = nn.functional.grouped_mm(dy_SO.t(), x_SI, offs=offsets) if needs[1] else None
    return dx, dweight


_OF_GROUPS = described("_OfGroups", "xxc", _products, _gradients_of_groups, _gradients_of_groups)


_WAYS = {"eager": loop, "grouped_mm": grouped}


def _rows(x_TH, token, weight):
    """x_TH[token], for a product with `weight`, which then keeps x_TH, or the node that made it, instead."""
    kept = torch.is_grad_enabled() and x_TH.requires_grad and weight.requires_grad and context(x_TH, weight) is None
    if not kept or _ROWS is None:
        return x_TH[token]
    how = None, len(x_TH)
    return _ROWS(below(_chosen, how, x_TH, token), how, x_TH, token)


def _chosen(how, x_TH, index):
    return x_TH[index]


def _gradients_of_rows(dx_NH, needs, how, x_TH, index):
    """As torch's."""
    return (dx_NH.new_zeros(how[1], *dx_NH.shape[1:]).index_put((index,), dx_NH, accumulate=True),)


_ROWS = described("_Rows", "bc", _chosen, _gradients_of_rows, _gradients_of_rows)


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if its names differ."""
    kind = _kind(module)
    if kind is None:
        return None
    but = "it has the parameters of experts, but "
    like = _proofs.of(module, (kind,), lambda notes: _prove(module, notes, kind), but)
    if not isinstance(like, Match):
        return like
    # Values that depend on the configuration are read at each call.
    return replace(like, reads=replace(like.reads, paths=(), methods=(*like.reads.methods, "_apply_gate")))


_proofs = Proofs()


def _kind(module) -> str | None:
    """Which of GATES its activation is, if its names and shapes are those above."""
    parameters, parts = module._parameters, module._modules
    if set(parameters) != {"gate_up_proj", "down_proj"} or set(parts) != {"act_fn"} or module._buffers:
        return None
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "config"):
        return None
    up, down = (parameters[name] for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or up.dim() != 3 or up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return None
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False}
    if any(getattr(module, name, None) is not value for name, value in plain.items()):
        return None
    if getattr(module, "has_post_expert_norm", False):  # not in older versions of transformers
        return None
    return function_of(parts["act_fn"]) or likeness(parts["act_fn"])


def _prove(module, notes, f) -> Experts:
    for dtype, factor in ((torch.float64, 1.0), (torch.bfloat16, 1.0), (torch.float64, 1e3), (torch.float16, 1.0)):
        clone, x, index, weight = _small(module, notes, dtype, factor)
        setting = f"against the formula, {dtype}"
        formula = functools.partial(_formula, f)
        check(clone, (x, index, weight), formula, setting, names=("the input", "the weights"))
        packed = torch.cat([x, x * 0.5, x + 1], 1)
        gate, up = packed.double().chunk(2, -1)
        off = error(watched(type(clone)._apply_gate, clone, packed), GATES[f].reference(gate) * up).l2
        if not off <= bound(dtype):
            raise Refusal(f"its product is off by {off:.1e} in L2 norm ({dtype})")
    return Experts(f)


def _small(module, notes, dtype, factor):
    """(an instance with few and small experts, and its arguments)"""
    generator = torch.Generator("cpu").manual_seed(3)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    experts, hidden, inner = module.down_proj.shape
    sizes = {experts: EXPERTS, hidden: HIDDEN, inner: INNER, 2 * inner: 2 * INNER}
    changed = {name: sizes.get(value, value) for name, value in probe.attributes(module).items() if type(value) is int}
    changed |= {"config": types.SimpleNamespace(_experts_implementation="eager"), "_is_expert_parallel": False}
    act = module._modules["act_fn"]
    parts = {"act_fn": probe.clone(act, probe.Notes(act), act.training, {})}
    up = draw(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
    down = draw(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5).detach()
    parameters = {"gate_up_proj": nn.Parameter(up), "down_proj": nn.Parameter(down)}
    clone = probe.clone(module, notes, module.training, parameters, parts, changed)
    # One expert without tokens.
    index = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(1)[:, :TOP]
    return clone, draw(TOKENS, HIDDEN, scale=factor), index, draw(TOKENS, TOP)


def _formula(f, module, x_TH, index_TK, weight_TK):
    """Each token by each of its experts, all at once."""
    gate, up = torch.einsum("th,tkfh->tkf", x_TH, module.gate_up_proj[index_TK]).chunk(2, -1)
    product = GATES[f].reference(gate) * up
    return torch.einsum("tki,tkhi,tk->th", product, module.down_proj[index_TK], weight_TK)
