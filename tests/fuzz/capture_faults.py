"""Defects planted in `hfnn.capture`; the fuzzer of captured models finds each of them."""

from engine import patched

from hfnn.capture import captured, outputs, pair, watch


def _stale_input(own):
    def replay(self, call):
        call.tensors = [*self._inputs]
        return own(self, call)

    return replay


def _forward_twice(own):
    def run_forward(self):
        own(self)
        return own(self)

    return run_forward


def _moved_all(own):
    def moved(self):
        for p, _, key in self._of:
            if p.grad is not None and pair.storage(p.grad) == key:
                p.grad.data = p.grad.detach().clone()
        return True

    return moved


def _not_moved(own):
    return lambda self: True


def _outputs_not_copied(own):
    def run_forward(self):
        self._graph.replay()
        return tuple(self._static)

    return run_forward


def _copied(own):
    def view(t, base):
        made = own(t, base)
        return lambda y: made(y) if t is base else made(y).clone()

    return view


FAULTS = {
    "inputs are those of the recording": patched(pair.Pair, "replay", _stale_input),
    "buffers advance twice": patched(pair.Pair, "run_forward", _forward_twice),
    "gradients that somebody holds are written to": patched(pair.Gradients, "moved", _not_moved),
    "gradients that something else holds are written to": patched(pair.Gradients, "moved", _moved_all),
    "outputs are not copied": patched(pair.Pair, "run_forward", _outputs_not_copied),
    "the pool is never busy": patched(pair.Pool, "busy", lambda own: lambda self: False),
    "attributes are not looked at": patched(watch.Snapshot, "changed", lambda own: lambda self: None),
    "modes are not in the key": patched(captured, "_switches", lambda own: lambda: ()),
    "generators of the host are not looked at": patched(watch.HostDraws, "moved", lambda own: lambda self: None),
    "hooks inside are not looked at": patched(captured, "foreign_hooks", lambda own: lambda model: None),
    "what a call is made in is not looked at": patched(captured, "_why_not", lambda own: lambda args, kwargs: None),
    "a second backward repeats no forward": patched(pair.Pair, "_run_again", lambda own: lambda self, ticket: None),
    "weights may change before a forward runs again": patched(pair.Ticket, "look", lambda own: lambda self: None),
    "a forward that runs again begins with the buffers of now": patched(
        pair.Pair, "_run_again", lambda own: lambda self, ticket: self._launch_unseen()
    ),
    "views are copies": patched(outputs, "_view", _copied),
}
