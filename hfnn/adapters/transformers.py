"""Hugging Face transformers. Its norms and activations are recognised by structure (hfnn/patterns/lookalike.py).

A language model that gets labels returns a loss and logits. Its forward and its loss function do not change. Only the
logits are `hfnn.deferred.Deferred`: the loss is `linear_cross_entropy`, and the logits are computed only if they are
read.
"""

import functools
import inspect
import sys

from torch import nn

from hfnn import ops
from hfnn.core.context import compiling
from hfnn.core.holder import target_of
from hfnn.deferred.head import Deferring, Head, deferrable, deferring
from hfnn.deferred.product import Writes
from hfnn.ops import linear
from hfnn.ops.head import WORTH_LOGITS

# The names of their classes; MarianMTModel is BART under another name.
NAMES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "MarianMTModel")


class Conv1D:
    """GPT-2's linear map, whose weight is stored as (in, out): y = x W + b."""

    op = linear.OP
    prefer, recompute, exact = "auto", False, False

    def forward(self, x):
        y = linear.keeping_less(x, self.weight, self.bias, self.recompute, self.prefer, self.nf, self.exact)
        return type(self).forward(self, x) if y is None else y


class LanguageModel(Writes):
    """A model whose loss is `linear_cross_entropy` if it gets labels. defer: whether its logits wait to be read."""

    op = ops.linear_cross_entropy.OP
    prefer, defer = "auto", True

    @property
    def _hfnn_when(self) -> str:
        """When the op is used, for `hfnn.report`."""
        if not self.defer:
            return "never: defer=False"
        if target_of(self.get_output_embeddings()) is Head:
            return f"when labels are given, from {WORTH_LOGITS} logits on; logits are computed if they are read"
        return "never: its output embedding is not converted"

    @staticmethod
    def forward_for(cls: type):
        return _with_deferred_logits(cls)

    @staticmethod
    def methods(model) -> tuple[str, ...]:
        """transformers logs if the model's class does not name its loss, as GPT2LMHeadModel. That would end Dynamo's
        graph before the loss."""
        base, kind = sys.modules["transformers.modeling_utils"].PreTrainedModel, getattr(model, "loss_type", None)
        known = type(model).loss_function is not base.loss_function or hasattr(model, "_loss_function")
        return *Writes.methods(model), *(() if known or kind in _losses() else ("_loss_function",))

    def _loss_function(self, *args, **kwargs):
        """That of `PreTrainedModel.loss_function`, with its message outside of compiled code."""
        kind, losses = getattr(self, "loss_type", None), _losses()
        if kind not in losses and not compiling():
            sys.modules["transformers.modeling_utils"].logger.warning_once(
                f"`loss_type={kind}` was set in the config but it is unrecognized. "
                f"Using the default loss: `ForCausalLMLoss`."
            )
        return losses.get(kind, losses["ForCausalLM"])(*args, **kwargs)


def _losses() -> dict:
    return sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING


def _with_deferred_logits(original: type):
    """The forward of a language model's class, with the same signature."""
    names = list(inspect.signature(original.forward).parameters)
    place = names.index("labels") - 1 if "labels" in names else len(names)

    own, compact = original.forward, original.__name__.endswith("ForMaskedLM")

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        labels = args[place] if place < len(args) else kwargs.get("labels")
        head = None if labels is None or compiling() or not self.defer else _deferrable(self)
        if head is None:
            return own(self, *args, **kwargs)
        token = deferring.set(Deferring(head, compact, self.prefer))
        try:
            return own(self, *args, **kwargs)
        finally:
            deferring.reset(token)

    return forward


def _deferrable(model) -> nn.Module | None:
    """The head of the model if its logits may be deferred in this call."""
    head = model.get_output_embeddings()
    if target_of(head) is not Head or not deferrable(head) or vars(model).get("_is_replica"):
        return None
    return head


def rooms() -> dict[type, type]:
    found = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return {} if found is None else {found: Conv1D}


def room_of(module: nn.Module, around: list[nn.Module]) -> type | None:
    """The room for a module identified by its place, not by its class, or None."""
    if _is_language_model(module) and target_of(module) is not LanguageModel:
        return LanguageModel
    if type(module) in (nn.Linear, linear.Linear) and target_of(module) is not Head:
        for outer in around:
            if _is_language_model(outer) and outer.get_output_embeddings() is module:
                return Head
    return None


def without_hooks(copy: nn.Module) -> nn.Module:
    """transformers marks a model on which it has put hooks, in its first forward, for the requested outputs."""
    for module in copy.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
    return copy


def without_grouped_products(copy: nn.Module) -> nn.Module:
    """torch has no grouped products of float64."""
    for module in copy.modules():
        config = vars(module).get("config")
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "eager"
    return copy


def _is_language_model(module) -> bool:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return (
        base is not None
        and isinstance(module, base)
        and type(module).__name__.endswith(NAMES)
        and _is_plain(_head(module))
    )


def _is_plain(head) -> bool:
    """Whether this is a linear map on plain parameters: not quantised, not LoRA, not sharded."""
    return type(head) in (nn.Linear, linear.Linear)


def _head(module):
    try:
        return module.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # models without one raise either of these
        return None
