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
        return super().forward(x) if y is None else y


class LanguageModel(Writes):
    """A model whose loss is `linear_cross_entropy` if it gets labels. defer: whether its logits wait to be read."""

    op = ops.linear_cross_entropy.OP
    prefer, defer = "auto", True

    @property
    def _hfnn_when(self) -> str:
        """When the op is used, for `hfnn.report`."""
        if not self.defer:
            return "never: defer=False"
        if isinstance(self.get_output_embeddings(), Head):
            return f"when labels are given, from {WORTH_LOGITS} logits on; logits are computed if they are read"
        return "never: its output embedding is not converted"

    @staticmethod
    def prepare(made: type) -> None:
        # Trainer, PEFT and generate read the signature.
        made.forward = _with_deferred_logits(made._hfnn_original)
        chosen = getattr(made._hfnn_original, "loss_function", None)
        base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if isinstance(chosen, property) and chosen is getattr(base, "loss_function", None):  # not overridden by a class
            made.loss_function = chosen.getter(_in_one_graph(chosen.fget))


def _with_deferred_logits(original: type):
    """The forward of a language model's class, with the same signature."""
    names = list(inspect.signature(original.forward).parameters)
    place = names.index("labels") - 1 if "labels" in names else len(names)

    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        labels = args[place] if place < len(args) else kwargs.get("labels")
        head = None if labels is None or compiling() or not self.defer else _deferrable(self)
        if head is None:
            return original.forward(self, *args, **kwargs)
        compact = original.__name__.endswith("ForMaskedLM")
        token = deferring.set(Deferring(head, compact, self.prefer))
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            deferring.reset(token)

    return forward


def _in_one_graph(chosen):
    """The getter of `loss_function` without its log message, which would end Dynamo's graph before the loss.

    transformers logs it if the model's class does not name its loss, as GPT2LMHeadModel.
    """

    def loss_function(self):
        losses = sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING
        if compiling() and not hasattr(self, "_loss_function") and getattr(self, "loss_type", None) not in losses:
            return losses["ForCausalLM"]
        return chosen(self)

    return loss_function


def _deferrable(model) -> nn.Module | None:
    """The head of the model if its logits may be deferred in this call."""
    head = model.get_output_embeddings()
    if not isinstance(head, Head) or not deferrable(head) or vars(model).get("_is_replica"):
        return None
    return head


def rooms() -> dict[type, type]:
    found = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return {} if found is None else {found: Conv1D}


def room_of(module: nn.Module, around: list[nn.Module]) -> tuple[type, type] | None:
    """(its original class, the room) for a module identified by its place, not by its class, or None."""
    if _is_language_model(module) and not isinstance(module, LanguageModel):
        return type(module), LanguageModel
    if type(module) in (nn.Linear, linear.Linear):
        for outer in around:
            if _is_language_model(outer) and outer.get_output_embeddings() is module:
                return nn.Linear, Head
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
    return type(head) in (nn.Linear, linear.Linear) or isinstance(head, Head)


def _head(module):
    try:
        return module.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # models without one raise either of these
        return None
