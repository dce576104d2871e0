"""`Capture`, in front of a model's forward: replays a graph if there is one for the call, else calls forward.

The key of a call identifies its kind: shapes, strides and dtypes of tensors, the other arguments, grad mode, autocast,
torch's switches, and which modules are in training mode. After `WARM` uncaptured calls with one key, forward and
backward are recorded (pair.py). Calls that cannot be handled run uncaptured, and are counted with their reason for
`hfnn.report`.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import threading
import types
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from hfnn.capture import graph
from hfnn.capture.answers import Other
from hfnn.capture.outputs import Unfit
from hfnn.capture.pair import HELD, Pair, Pool
from hfnn.capture.watch import HostDraws, Snapshot, autocast_state, foreign_hooks
from hfnn.core import kernel, parts
from hfnn.core.context import compiling, context
from hfnn.core.holder import Bound, holder_of
from hfnn.core.kernel import log
from hfnn.deferred.logits import Deferred
from hfnn.memory.peak import tensors as tensors_of

WARM, SHAPES = 3, 8  # calls before a key is recorded; keys with graphs at once
IDLE = 16  # a graph may be replaced after this many calls of other keys for each of SHAPES
AGAIN, VARIANTS = 2, 4  # calls with other answers before these are recorded; sets of answers that have graphs at once
STALE = 3  # how often a key is recorded anew before it runs uncaptured
_CONSTANTS = (int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_TENSOR = object()


@dataclasses.dataclass(frozen=True)
class Template:
    """The arguments of a call, except its tensors."""

    spec: object
    leaves: tuple

    def filled(self, tensors) -> tuple[tuple, dict]:
        """(args, kwargs) with these tensors."""
        given = iter(tensors)
        return tree_unflatten([next(given) if x is _TENSOR else x for x in self.leaves], self.spec)


class Call:
    """The arguments of a call. tensors: the tensors in it; key: what identifies its kind. Raises Unfit."""

    def __init__(self, args, kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        self.tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        for x in leaves:
            if type(x) is not torch.Tensor and not isinstance(x, _CONSTANTS):
                raise Unfit(f"it is given a {type(x).__name__}")
        self.template = Template(spec, tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves))
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        self.key = (spec, self.template.leaves, tuple(map(type, self.template.leaves)), kinds)


@dataclasses.dataclass(eq=False)
class Kind:
    """What is known about calls with one key.

    template, forward, ambient: how they are made; behind: the autocast state of their backward; draws: whether they
    draw from the device's generator; writes, moved: buffers that are written to, and those of them whose version
    changes; used: the outputs that losses depended on; pairs: the graphs, one pair per set of answers, that of the last
    call first; missed: calls without a matching pair, by answers; warm: calls before recording; stale: how often the
    recording became outdated; last: the number of the last call.
    """

    template: Template
    forward: Callable
    ambient: tuple
    backend: object
    pool: Pool
    draws: bool = False
    writes: tuple = ()
    moved: tuple = ()
    behind: tuple = ()
    used: set[int] = dataclasses.field(default_factory=set)
    pairs: list[Pair] = dataclasses.field(default_factory=list)
    missed: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    refused: str | None = None
    warm: int = 0
    stale: int = 0
    last: int = 0


class Capture(Bound):
    """The owner of a captured model's forward, and what it knows about its calls. A copy, or an unpickled one, starts
    empty.

    inner: the forward that the instance had before, or None; counts: replays, and uncaptured calls by reason.
    """

    def __init__(self, model: nn.Module, inner: Callable | None = None, shapes: int = SHAPES):
        super().__init__(model)
        self.inner, self.shapes, self.counts = inner, shapes, collections.Counter()
        self._lock = threading.Lock()
        self._recorder, self._others = None, []
        self._kinds: dict[tuple, Kind] = {}
        self._pool, self._backend, self._stream, self._calls = Pool(), None, None, 0
        self._modules: list[nn.Module] | None = None

        @functools.wraps(own := type(model).forward)
        def forward(capture, *args, **kwargs):
            if not isinstance(capture, Capture):  # m.forward.__func__ was called with a module
                found = of(capture) if type(capture).forward is own else None
                return found.forward(*args, **kwargs) if found else own(capture, *args, **kwargs)
            if not capture.on or compiling():  # Dynamo cannot take the lock of a Capture
                return capture.own(capture.hfnn_module(), *args, **kwargs)
            return capture(capture.hfnn_module(), _own, args, kwargs)

        self._forward = forward

    @property
    def forward(self):
        """Replays, with the signature of the model's own."""
        return types.MethodType(self._forward, self)

    def own(self, model: nn.Module, *args, **kwargs):
        """The model's forward, uncaptured."""
        if model is None:
            raise ReferenceError("this forward's model was freed: keep the model, not only its forward")
        forward = functools.partial(type(model).forward, model) if self.inner is None else self.inner
        return forward(*args, **kwargs)

    def _how(self) -> tuple:
        return self.inner, self.shapes

    def release(self) -> None:
        """Undoes `capture`."""
        own = vars(self.hfnn_module())
        for name in self.names():
            del own[name]
        if self.inner is not None and getattr(getattr(self.inner, "__self__", None), "on", True):
            own.setdefault("forward", self.inner)
        own.pop("_hfnn_capture", None)
        self.on = False

    def __call__(self, model: nn.Module, forward, args, kwargs):
        """`forward(model, *args, **kwargs)`, replayed if possible."""
        if not self._lock.acquire(blocking=False):
            if self._recorder not in (None, threading.get_ident()):  # during recording the model holds other parameters
                with self._lock:
                    pass
            return self._beside(model, forward, args, kwargs)
        try:
            try:
                call = self._call(model, args, kwargs)
                return self._one(model, forward, call, args, kwargs)
            except Unfit as why:
                self.counts[str(why)] += 1
            return forward(model, *args, **kwargs)
        finally:
            self._lock.release()

    def _beside(self, model, forward, args, kwargs):
        """A call inside another one, or at the same time in another thread: runs uncaptured."""
        self._others.append(None)
        try:
            return forward(model, *args, **kwargs)
        finally:
            self._others.pop()

    def _call(self, model, args, kwargs) -> Call:
        """The call with its whole key. Raises Unfit if no graph can be used."""
        if self._backend is None and (first := next(model.parameters(), None)) is not None:
            self._backend = graph.backend(first.device, model)
            self._stream = self._backend and self._backend.stream()
        if self._backend is None:
            raise Unfit("it has no parameters on a GPU")
        if (why := _why_not(args, kwargs)) is not None:
            raise Unfit(why)
        call = Call(args, kwargs)
        if self._backend.recording():
            raise Unfit("it is part of a graph that other code records")
        if self._backend.stream() != self._stream:
            raise Unfit("it is called on another stream than before")
        if any(t.device != self._backend.device for t in call.tensors):
            raise Unfit("it is given tensors of another device")
        call.key = (*call.key, _switches())
        return call

    def _kind(self, model, forward, call) -> Kind:
        """The kind of a call, with graphs that match the present model, or without graphs."""
        for _ in range(2):
            if self._modules is None:
                self._modules = [*model.modules()]
            key = (*call.key, *[m.training for m in self._modules])
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._new(key, call, forward)
            if not kind.pairs or not self._stale(kind):
                break
            self._modules = None  # its modules may have changed
        return kind

    def _one(self, model, forward, call, args, kwargs):
        self._calls += 1
        kind = self._kind(model, forward, call)
        kind.last = self._calls
        if not kind.pairs:
            self._modules = None  # not checked whether they are the model's
        if kind.refused is not None:
            raise Unfit(kind.refused)
        if not kind.pairs and (why := foreign_hooks(model)):
            raise Unfit(why)
        if not kind.pairs and kind.warm < WARM:
            return self._warm(model, forward, call, kind, args, kwargs)
        if self._pool.busy():
            raise Unfit("an earlier call still waits for its backward")
        found = self._replayed(model, call, kind)
        self.counts["replayed"] += 1
        return found

    def _replayed(self, model, call, kind: Kind):
        """The outputs of the graphs for this call, which are recorded if there are none."""
        answers, tried = (), set()
        while pair := next((p for p in kind.pairs if id(p) not in tried and p.agrees(answers)), None):
            tried.add(id(pair))
            if pair is not kind.pairs[0]:
                kind.pairs.remove(pair)
                if pair.snapshot.changed():
                    continue
                kind.pairs.insert(0, pair)
            try:
                return pair.replay(call)
            except Other as other:
                answers = other.answers
        if kind.pairs:
            kind.missed[answers] += 1
            if kind.missed[answers] != AGAIN or len(kind.pairs) == VARIANTS:
                raise Unfit("what it asks of its tensors is none of what was recorded")
        if not self._pool.free():
            raise Unfit(HELD)
        self._record(model, call, kind, answers)
        return kind.pairs[0].replay(call)

    def _stale(self, kind: Kind) -> bool:
        """Whether the graphs of a kind are outdated. They are dropped then."""
        if (why := kind.pairs[0].snapshot.changed()) is not None:
            kind.pairs.clear()
            kind.warm, kind.stale = 0, kind.stale + 1
            if kind.stale >= STALE:
                kind.refused = f"{why}, again and again"
        return why is not None

    def _warm(self, model, forward, call, kind: Kind, args, kwargs):
        """An uncaptured call. Notes everything that a graph could not repeat."""
        kind.warm += 1
        self.counts["before recording"] += 1
        buffers = [(t, parts.version(t), parts.copy(t)) for t in model.buffers()]
        parameters = [(p, p._version) for p in model.parameters()]
        given = [(t, t._version) for t in call.tensors if not t.is_inference()]
        host, before, state = HostDraws(self._backend.generator), Snapshot(model), self._backend.generator.get_state()
        nest = forward(model, *args, **kwargs)
        kind.draws = not torch.equal(self._backend.generator.get_state(), state)
        seen = [(t, parts.version(t) != version, parts.equal(t, value)) for t, version, value in buffers]
        kind.moved = tuple(t for t, moved, _ in seen if moved)
        kind.writes = tuple(t for t, moved, same in seen if moved or not same)
        drawn, changed = host.moved(), before.changed()
        if any(p._version != version for p, version in parameters):
            kind.refused = "its forward writes to parameters"
        elif any(t._version != version for t, version in given):
            kind.refused = "its forward writes to its inputs"
        elif drawn is not None:
            kind.refused = f"its forward draws from {drawn}"
        elif changed is not None and kind.warm > 1:  # a first call may set up state
            kind.refused = f"by its own forward {changed}"
        _note_use(nest, kind)
        return nest

    def _record(self, model, call, kind: Kind, answers: tuple) -> None:
        if self._others:
            raise Unfit("another thread calls it meanwhile")
        self._recorder = threading.get_ident()
        try:
            _of_one_device(model, self._backend.device)
            kind.pairs.insert(0, Pair(model, kind, call.tensors, kind.used, answers))
        except Exception as error:  # something that recording does not allow, mostly a wait for the GPU
            why = str(error).partition("\n")[0] or type(error).__name__
            if not isinstance(error, Unfit):
                why = f"it could not be recorded: {why}"
                log.warning("%s is not captured: %s", type(model).__name__, why)
                log.debug("recording %s", type(model).__name__, exc_info=True)
            if not kind.pairs:
                kind.refused = why
            raise Unfit(why) from error
        finally:
            self._recorder = None

    def _new(self, key: tuple, call: Call, forward) -> Kind:
        """A new kind of call, if there is room for one."""
        if len(self._kinds) >= self.shapes:
            oldest = min(self._kinds, key=lambda key: self._kinds[key].last)
            if self._calls - self._kinds[oldest].last < IDLE * self.shapes:
                raise Unfit(f"there are {self.shapes} kinds of calls already")
            self._kinds.pop(oldest).pairs.clear()  # they hold each other
        kind = Kind(call.template, forward, autocast_state(), self._backend, self._pool)
        self._kinds[key] = kind
        return kind

    def report(self) -> str:
        """One line: kinds of calls, replays, bytes of the pool, and uncaptured calls."""
        graphs = sum(bool(kind.pairs) for kind in self._kinds.values())
        size = self._backend.pool_bytes() if self._backend is not None and graphs else 0
        parts = [f"captured: {graphs} kinds of calls, {self.counts['replayed']} replays, {size:,} bytes of graphs"]
        parts += [f"{n} as it is: {why}" for why, n in self.counts.most_common() if why != "replayed"]
        return "; ".join(parts)


def _note_use(nest, kind: Kind) -> None:
    """The differentiable outputs that get a gradient, by their index among the tensors of the nest.

    If the forward itself computes a loss from another output, that output gets a gradient, too. So if scalars are the
    only outputs with a gradient of their own, only they count.
    """
    kind.used = set()
    outputs = [(i, t) for i, t in enumerate(tensors_of(nest)) if t.requires_grad and type(t) is torch.Tensor]
    for number, t in [(i, t) for i, t in outputs if t.dim() == 0] or outputs:
        t.register_hook(functools.partial(_used, kind, number))


def _used(kind: Kind, number: int, dy) -> None:
    kind.used.add(number)
    kind.behind = autocast_state()


def _of_one_device(model, device: torch.device) -> None:
    """Raises Unfit for a model whose tensors are on another device, or sharded."""
    if any(t.device != device for t in (*model.parameters(), *model.buffers())):
        raise Unfit("its parameters are on several devices")
    if any(type(p) is not nn.Parameter for p in model.parameters()):
        raise Unfit("its parameters are sharded, or of a class of their own")


def _why_not(args, kwargs) -> str | None:
    """Why the state in which a call is made prevents capture, or None."""
    why = context(*(t for t in tensors_of((args, list(kwargs.values()))) if type(t) is not Deferred))
    if why is not None:
        return why
    if kernel.forced() is not None:
        return "it is called inside hfnn.use"
    modes = [m for m in _get_current_function_mode_stack() if type(m) is not DeviceContext]
    if modes or _get_current_dispatch_mode_stack():
        return "a mode observes torch's ops"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved tensors have hooks, as in a checkpoint or when they are offloaded"
    kinds = "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"
    if any(getattr(torch_module, f"_global_{kind}") for kind in kinds):
        return "there are hooks for all modules"
    return None


def _switches() -> tuple:
    """The part of torch's state that a graph depends on."""
    backends = torch.backends
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast_state(),
        *[mode.device for mode in _get_current_function_mode_stack()],  # of torch.set_default_device
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        backends.cudnn.benchmark,
        backends.cudnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
    )


def _own(model: nn.Module, *args, **kwargs):
    """The forward of a captured model, uncaptured: no method of its Capture, which holds this function."""
    found = of(model)
    return model.forward(*args, **kwargs) if found is None else found.own(model, *args, **kwargs)


def of(model: nn.Module) -> Capture | None:
    """The Capture of a captured model."""
    found = vars(model).get("_hfnn_capture")
    return found if isinstance(found, Capture) and found.hfnn_module() is model else None


def capture(model: nn.Module, shapes: int = SHAPES) -> None:
    """Make the model's forward replayed, if its device has graphs."""
    if all(not t.is_cuda for t in (*model.parameters(), *model.buffers())) and graph.backend is graph.of_device:
        log.warning("capture=True has no effect until %s is on a GPU: the CPU has no graphs", type(model).__name__)
    release(model)
    made = Capture(model, vars(model).get("forward"), shapes)
    made.put(("forward",) if holder_of(model) else Bound.NAMES)
    vars(model)["_hfnn_capture"] = made


def release(model: nn.Module) -> None:
    """Undo `capture` everywhere in a model."""
    for found in filter(None, map(of, model.modules())):
        found.release()


@contextlib.contextmanager
def set_aside(model: nn.Module):
    """Calls inside the `with` block run uncaptured, and are not counted."""
    found = [each for each in map(of, model.modules()) if each is not None]
    for each in found:
        each.on = False
    try:
        yield
    finally:
        for each in found:
            each.on = True


def explain(model: nn.Module) -> str | None:
    """A summary of a captured model's calls for `hfnn.report`, or None."""
    found = of(model)
    return None if found is None else found.report()


def pool_bytes(model: nn.Module, *, unseen: bool = False) -> int:
    """Bytes of memory that the graphs of a captured model use. unseen: minus those that torch counts as allocated."""
    found = of(model)
    backend = None if found is None else found._backend
    return 0 if backend is None else backend.pool_bytes() - (backend.used_bytes() if unseen else 0)
