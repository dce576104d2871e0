"""The phases of a training step: data, forward, backward, optimizer, and other.

Only outer entry points of a step are intercepted: the outermost call of a module, the engine of autograd,
`Optimizer.step` and the iterators of DataLoader. `nn.Module.__call__` is replaced, as in torch.fx, instead of adding
hooks. Hooks would change behaviour: hfnn's conversion, proofs and deferred logits take another path if there are any. A
call inside another phase is passed on at once, so inner modules run as without haiprof.

A step ends with its last `Optimizer.step`: the one before the next batch is fetched, or before another step of the same
optimizer. So micro-batches of gradient accumulation are one step, and so are optimizers that take turns (GANs). Code
that runs without gradients between two steps (validation) belongs to neither.
"""

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from collections import namedtuple
from time import perf_counter

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from haiprof import loads
from haiprof.places import Places, pass_by
from haiprof.record import PHASES

DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES
LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size")
NUMBER = "_haiprof_number"  # attribute of an iterator, because ids are reused
MOST = 20000  # number of spans kept for a program that never steps
INFERENCE = "inference"  # a module's call without gradients; within a step it is part of the forward

# key: the iterator of a data span; for inference, whether it looks like validation. marks: two CUDA events.
Span = namedtuple("Span", "name start end key marks", defaults=(None, None))


class Step(namedtuple("Step", "begin end gap spans")):
    """Times in seconds of perf_counter. gap: seconds of validation between the previous step and this one."""

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; they add up to end - begin."""
        found = dict.fromkeys(PHASES, 0.0)
        for span in self.spans:
            found[FORWARD if span.name == INFERENCE else span.name] += span.end - span.start
        return {**found, "other": self.end - self.begin - sum(found.values())}

    def without_marks(self) -> "Step":
        """A copy that may be kept for long and freed in any thread."""
        return self._replace(spans=[span._replace(marks=None) for span in self.spans])

    def passes(self) -> int:
        """Number of backward passes: more than one with gradient accumulation or several losses."""
        return sum(span.name == BACKWARD for span in self.spans)


class Phases:
    """Spans of the training thread, split into steps.

    on_step(step): called in that thread once the end of a step is known, which is during the next step. mark: creates a
    CUDA event in the current stream, or None. on_fault(): called if something here raises; the training continues.
    on_begin(): called before the first phase other than data.
    """

    def __init__(self, on_step, on_fault, mark=None, on_begin=None):
        self._on_step, self._on_fault, self._mark, self._on_begin = on_step, on_fault, mark, on_begin
        self.thread = threading.main_thread().ident
        self.stopped = False
        self.inside = False  # whether new spans are part of the running phase
        self._stack = []  # (phase, key) of the running phase, after that of an optimizer around its closure
        self._since = self._begin_mark = None  # begin of the running phase
        self._step, self._closure = None, False  # the running step(): (id of its frame, code), whether it has a closure
        self.spans = []  # since the last split
        self._closed = None  # the previous step, whose end is known once the begin of this one is
        self._stepped, self._last = set(), 0  # optimizers of this step; number of spans up to the last step()
        self._within = set()  # optimizers that have stepped in the running backward pass
        self._begun = self._settled = None  # begin of this step, and its earliest possible begin
        self._gap = 0.0
        self._trained = {}  # weak references to modules called with gradients, by id
        self.steps = 0
        self.loader = None  # arguments of the loader that was iterated last
        self.collecting = 0.0  # seconds of Python's garbage collector
        self._collects = None  # since when it runs
        self._batches = {}  # by the id of a model: number of calls, sum and sum of squares of their elements

    def enter(self, name, key=None, step=None, closure=False) -> bool:
        """Whether a phase begins here: not inside another one, except inside an optimizer's closure.

        step: the frame of an optimizer's step(). closure: whether it has a closure.
        """
        if self.stopped:
            return False
        if threading.get_ident() != self.thread:
            if self.steps or self._stack or name not in (OPTIMIZER, BACKWARD):
                return False
            self.thread = threading.get_ident()  # the main thread does not train
        if self.inside:
            return False
        try:
            if self._stack and not self._stepping(step or sys._getframe()):
                self._stack.clear()  # a step() that raised never reported its end
            if self._stack and (name == OPTIMIZER or not self._closure):
                return False
            now = perf_counter()
            if self._stack:
                self._interrupt(now)
            else:
                self._arrive(name, key, now)
            self._stack.append((name, key))
            self._since, self._begin_mark = now, self._mark and self._mark()
            if name == OPTIMIZER:
                self._step, self._closure = step and (id(step), step.f_code), closure
            self.inside = name != OPTIMIZER
        except Exception:
            self._on_fault()
            return False
        return True

    def _arrive(self, name, key, now):
        """Updates the step at the begin of an outermost phase."""
        if self._on_begin is not None and name != DATA:
            begin, self._on_begin = self._on_begin, None
            begin()
        if self._stepped and (name == DATA or (name == OPTIMIZER and key in self._stepped)):
            self._cut()
        if name not in (DATA, INFERENCE) and self._begun is None:
            self._settle(now)

    def _interrupt(self, now):
        name, key = self._stack[-1]
        self.spans.append(Span(name, self._since, now, key, self._marks()))

    def _marks(self):
        return (self._begin_mark, self._mark()) if self._begin_mark else None

    def _stepping(self, frame) -> bool:
        """Whether the optimizer's step() that began last still runs: it is a caller of `frame`.

        Its frame is known by id and code, because a reference would keep its arguments alive, and ids are reused.
        """
        while (frame := frame.f_back) is not None:
            if (id(frame), frame.f_code) == self._step:
                return True
        return False

    def leave_step(self, frame):
        """Ends the phase of a step() by its frame, if it began one."""
        if self._stack and self._stack[-1][0] == OPTIMIZER and self._step == (id(frame), frame.f_code):
            self.leave()

    def leave(self, key=None, exhausted=False):
        """Ends the phase that `enter` began."""
        try:
            now = perf_counter()
            name, own = self._stack.pop()
            self.spans.append(Span(name, self._since, now, own if key is None else key, self._marks()))
            self.inside = False
            if self._stack:
                self._since, self._begin_mark = now, self._mark and self._mark()
            if name == OPTIMIZER:
                self._within.add(own)
            if self._within and not self._stack:
                self._stepped |= self._within
                self._within, self._last = set(), len(self.spans)
            if exhausted and self._begun is None and any(span.name == INFERENCE for span in self.spans):
                self._settled = now  # the data of a finished validation
            if len(self.spans) > MOST:
                del self.spans[: MOST // 2]
                self._last = max(0, self._last - MOST // 2)
        except Exception:
            self._on_fault()

    def steps_within(self, key):
        """An optimizer steps inside a backward pass, or inside another one's step()."""
        try:
            if self._stack and self._stack[-1][0] == BACKWARD and key not in self._within:
                if key in self._stepped:
                    self._cut()
                self._within.add(key)
        except Exception:
            self._on_fault()

    def inference(self, module):
        """The key of a call without gradients: whether a trained module is in eval mode, as in validation."""
        return not getattr(module, "training", True) and id(module) in self._trained

    def trains(self, module):
        known = self._trained.get(id(module))
        if known is None or known() is not module:
            self._trained[id(module)] = weakref.ref(module)

    def collects(self, what, _):
        """A callback of Python's garbage collector."""
        if threading.get_ident() != self.thread:
            return
        if what == "start":
            self._collects = perf_counter()
        elif self._collects is not None:
            self.collecting += perf_counter() - self._collects
            self._collects = None

    def takes(self, module, args, kwargs):
        """Counts the elements of a model's inputs."""
        n = 0
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor):
                n += each.numel()
            elif isinstance(each, dict):
                n += sum(own.numel() for own in each.values() if isinstance(own, torch.Tensor))
        row = self._batches.setdefault(id(module), [0, 0, 0])
        row[0], row[1], row[2] = row[0] + 1, row[1] + n, row[2] + n * n

    def batches(self) -> list[int]:
        """Calls, elements and their squares since the last call of this, of the model with most elements."""
        rows, self._batches = self._batches, {}
        return max(rows.values(), key=lambda row: row[1], default=[])

    def models(self) -> list:
        """The modules that were called with gradients from outside."""
        return [module for module in (known() for known in list(self._trained.values())) if module is not None]

    def _cut(self):
        """Ends the running step at the last optimizer step: later spans belong to the next step."""
        spans, self.spans = self.spans[: self._last], self.spans[self._last :]
        self._closed = (self._begun, spans[-1].end, self._gap, spans)
        self._stepped, self._last, self._begun, self._settled = set(), 0, None, None
        training = next((span for span in self.spans if span.name not in (DATA, INFERENCE)), None)
        if training is not None:
            self._settle(training.start)

    def _settle(self, now):
        """Finds the begin of the running step, which is known at the first phase with gradients, at `now`."""
        ended = self._closed[1] if self._closed else None
        before = [span for span in self.spans if span.end <= now]
        inference = [span for span in before if span.name == INFERENCE]
        if inference:
            self._begun = self._after_validation(before, inference, ended)
        elif before:
            self._begun = before[0].start
        else:
            self._begun = now if ended is None else ended
        kept = [span for span in self.spans if span.start >= self._begun]
        validated = ended is not None and len(kept) < len(self.spans)
        self.spans, self._last = kept, 0
        self._gap = self._begun - ended if validated else 0.0
        if self._closed:
            self._emit(ended if validated else self._begun)

    def _after_validation(self, before, inference, ended):
        """The begin of a step after calls of modules without gradients."""
        data = [span for span in before if span.name == DATA and span.start >= (self._settled or 0)]
        if data:  # the loader of the last batch is the training loader
            return next(span.start for span in data if span.key == data[-1].key)
        validation = [span.end for span in inference if span.key]
        floors = [*validation[-1:], self._settled, ended]
        return max((floor for floor in floors if floor is not None), default=before[0].start)

    def _emit(self, end):
        begin, _, gap, spans = self._closed
        self._closed = None
        self.steps += 1
        self._on_step(Step(begin, end, gap, spans))

    def finish(self):
        """Reports finished steps; called when no more will come."""
        if self._stepped and self._begun is not None:
            self._cut()
        if self._closed:
            self._emit(self._closed[1])


class Hooks:
    """The replacements in torch while phases are measured."""

    def __init__(self, phases: Phases):
        self.phases = phases
        self._places, self.loads, self._handles = Places(), loads.Loads(), []
        self._collects = phases.collects  # one object, to be found in a list

    def install(self):
        self._places.replace(torch.nn.Module, "__call__", self._module_call)
        self._places.replace(torch.autograd, "_engine_run_backward", self._engine)
        self._places.replace(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self._places.replace(dataloader.DataLoader, "__iter__", self._iter)
        self.loads.install()
        gc.callbacks.append(self._collects)
        before, after = self._optimizer()
        self._handles = [
            torch_optimizer.register_optimizer_step_pre_hook(before),
            torch_optimizer.register_optimizer_step_post_hook(after),
        ]

    def remove(self):
        self._places.restore()
        self.loads.remove()
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _module_call(self, call):
        phases, grad = self.phases, torch.is_grad_enabled

        def outermost(module, args, kwargs):
            training = grad()
            name, key = (FORWARD, None) if training else (INFERENCE, phases.inference(module))
            if not phases.enter(name, key):
                return call(module, *args, **kwargs)
            if training:
                phases.trains(module)
                phases.takes(module, args, kwargs)
            try:
                return call(module, *args, **kwargs)
            finally:
                phases.leave()

        pass_by(outermost)

        def __call__(self, *args, **kwargs):
            if phases.inside:
                return call(self, *args, **kwargs)
            return outermost(self, args, kwargs)

        return __call__

    def _engine(self, run):
        phases = self.phases

        def _engine_run_backward(*args, **kwargs):
            if not phases.enter(BACKWARD):
                return run(*args, **kwargs)
            try:
                return run(*args, **kwargs)
            finally:
                phases.leave()

        return _engine_run_backward

    def _next(self, following):
        phases = self.phases

        def __next__(self):
            if not phases.enter(DATA, vars(self).get(NUMBER)):
                return following(self)
            exhausted = False
            try:
                return following(self)
            except StopIteration:
                exhausted = True
                raise
            finally:
                phases.leave(exhausted=exhausted)

        return __next__

    def _iter(self, make):
        phases, numbers = self.phases, itertools.count(1)

        def __iter__(self):
            if not phases.enter(DATA):
                return make(self)
            key = next(numbers)
            try:
                loads.prepare()
                phases.loader = {name: getattr(self, name, None) for name in LOADER}
                made = make(self)
                with contextlib.suppress(AttributeError):  # a loader with its own kind of iterator
                    setattr(made, NUMBER, key)
                return made
            finally:
                phases.leave(key=key)

        return __iter__

    def _optimizer(self):
        phases, compiling = self.phases, torch.compiler.is_compiling

        def before(optimizer, args, kwargs):
            if compiling():
                return
            closure = len(args) > 1 or bool(kwargs)
            if not phases.enter(OPTIMIZER, id(optimizer), sys._getframe(1), closure):
                phases.steps_within(id(optimizer))

        def after(optimizer, args, kwargs):
            if not compiling():
                phases.leave_step(sys._getframe(1))

        return before, after
