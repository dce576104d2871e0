"""Models that are a list of layers, which can be split without knowing the model.

    SequentialModel(embedding, Stash("skip"), down, middle, Pop("skip", up), head)

Each layer is called with the result of the previous one; a tuple becomes several arguments. A *skip tensor* skips
layers: `Stash(name)` keeps its input under a name, and `Pop(name, layer)` calls its layer with it as an additional
argument. If a model is split between the two, the tensor is sent with the activations, from stage to stage.
"""

from typing import Any

from torch import Tensor, nn


class Stash(nn.Module):
    """Keeps its only input for the `Pop` of the same name, and returns it.

    Args:
        name: Of the skip tensor.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Calls `layer(*inputs, kept)` with the tensor that a `Stash` keeps.

    Args:
        name: Of the Stash.
        layer: Any module.
    """

    def __init__(self, name: str, layer: nn.Module):
        super().__init__()
        self.name, self.layer = name, layer

    def forward(self, *inputs: Tensor) -> Any:
        """The layer's result; the last input is the kept tensor."""
        return self.layer(*inputs)

    def extra_repr(self) -> str:
        return repr(self.name)


class SequentialModel(nn.Sequential):
    """`torch.nn.Sequential` whose layers may have several inputs and skip tensors; its state dict is Sequential's.

    Args:
        layers: Modules.

    Raises:
        ValueError: A `Stash` does not have exactly one later `Pop`.
    """

    arriving: tuple[str, ...] = ()  # skip tensors that arrive after the inputs, in this order
    leaving: tuple[str, ...] = ()  # and those that follow the outputs

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        open_at(self, len(self))

    def forward(self, *inputs: Any) -> Any:
        """The last layer's result, a tensor or a tuple."""
        count = len(inputs) - len(self.arriving)
        kept = dict(zip(self.arriving, inputs[count:], strict=True))
        inputs = inputs[:count]
        for layer in self:
            if isinstance(layer, Pop):
                inputs = (*inputs, kept.pop(layer.name))
            output = layer(*inputs)
            if isinstance(layer, Stash):
                kept[layer.name] = output
            inputs = output if isinstance(output, tuple) else (output,)
        outputs = (*inputs, *(kept[name] for name in self.leaving))
        return outputs if len(outputs) > 1 else outputs[0]


class SequentialSlice(nn.Sequential):
    """Some layers of a `torch.nn.Sequential`, where a tuple is one argument of the next layer."""

    def forward(self, *inputs):
        return super().forward(inputs if len(inputs) > 1 else inputs[0])


def cut(model: nn.Sequential, start: int, stop: int) -> nn.Sequential:
    """Layers `start` to `stop` (excluded) as a module: the layers themselves, under their names in the model."""
    multi = isinstance(model, SequentialModel)
    part = SequentialModel() if multi else SequentialSlice()
    for name, layer in list(model.named_children())[start:stop]:
        part.add_module(name, layer)
    if multi:
        part.arriving, part.leaving = open_at(model, start), open_at(model, stop)
    part.training = model.training
    return part


def open_at(model: nn.Sequential, position: int) -> tuple[str, ...]:
    """Names stashed before the layer at `position` and not popped before it; all are checked, to the model's end."""
    held, found = [], ()
    for number, layer in enumerate(model):
        if number == position:
            found = tuple(held)
        if isinstance(layer, Stash):
            if layer.name in held:
                raise ValueError(f"layer {number} stashes {layer.name!r} a second time before it is popped: rename one")
            held.append(layer.name)
        elif isinstance(layer, Pop):
            if layer.name not in held:
                raise ValueError(f"layer {number} pops {layer.name!r}, which no Stash before it keeps: add one")
            held.remove(layer.name)
    if held:
        raise ValueError(f"nothing pops {', '.join(map(repr, held))}: add a Pop for each Stash")
    return found
