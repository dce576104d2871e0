"""Replaces functions of torch while haiprof measures, in a way that TorchDynamo takes for torch's own."""

import sys


class Places:
    """Replaces functions of torch, and restores them."""

    def __init__(self):
        self._places = []

    def replace(self, owner, name, wrap):
        """owner.name = wrap(owner.name)."""
        original = vars(owner)[name]
        ours = wrap(getattr(owner, name))
        ours.__name__, ours.__wrapped__, ours.__doc__ = name, original, original.__doc__
        pass_by(ours)
        self._places.append((owner, name, original, ours))
        setattr(owner, name, ours)
        _tell_dynamo(name, ours)

    def restore(self):
        """If other code has since replaced a function, ours stays and only passes calls on."""
        for owner, name, original, ours in reversed(self._places):
            if vars(owner)[name] is ours:
                setattr(owner, name, original)
                _tell_dynamo(name, original)
        self._places = []


def pass_by(function):
    """Makes TorchDynamo skip the function and compile the functions called in it, as for torch's own."""
    from torch._C._dynamo import eval_frame

    action, strategy = getattr(eval_frame, "_FrameAction", None), getattr(eval_frame, "_FrameExecStrategy", None)
    if action and strategy and hasattr(eval_frame, "set_code_exec_strategy"):
        eval_frame.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))


def _tell_dynamo(name, function):
    """TorchDynamo goes directly to a module's forward if `Module.__call__` is the one from the time of its import."""
    if name == "__call__":
        for place in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
            if hasattr(sys.modules.get(place), "unpatched_nn_module_call"):
                sys.modules[place].unpatched_nn_module_call = function
