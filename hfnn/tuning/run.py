"""The measurements."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from hfnn.capture import captured
from hfnn.core import parts
from hfnn.core.kernel import log
from hfnn.memory.peak import peak_bytes
from hfnn.tuning.agreement import DRAWS, allowed, differs, step_of
from hfnn.tuning.candidates import STOCK, Candidate, graphs
from hfnn.tuning.ranks import first, together
from hfnn.tuning.rows import TuneRow, Tuning
from hfnn.tuning.state import Dropped, Over, State, deadline, dropouts, without

BUDGET, SHARE = 300.0, 0.02  # seconds; share of stock's time for the remaining steps
WARM, STEPS = 5, 5  # captured models record at their fourth step
RECOMPILES = 1  # timed steps that may compile: one, where a second shape makes a graph dynamic
CLOSE = 1.03  # a smaller gain over stock is noise


class Run:
    """The measurements of one call of `tune`."""

    batches: list

    def __init__(self, model: nn.Module, loss: Callable, memory: int | None):
        self.model, self.loss = model, loss
        self.cuda = any(p.is_cuda for p in model.parameters())
        if memory is None and self.cuda:
            memory = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        self.memory, self.state = memory, State(model)
        self.quiet, self.dropouts = False, dropouts(model)  # quiet: compare results in eval mode
        self.stock, self.allowed = {}, {}

    def all(self, chosen: list[Candidate], steps: int, budget: float | None) -> Tuning:
        """Measures every candidate within the budget, and chooses the best."""
        rows = [self._stock(chosen[0])]
        if budget is None:
            budget = min(BUDGET, SHARE * steps * rows[0].ms / 1e3)
        end = time.monotonic() + budget
        for candidate in chosen[1:]:
            if first(time.monotonic() >= end):
                rows.append(TuneRow(candidate.name, why=f"not tried: the budget of {budget:.3g} s is spent"))
            else:
                rows.append(together(self._row(candidate, end)))
        return Tuning(rows, first(best(rows, steps)), steps)

    def again(self, kept: Tuning, chosen: list[Candidate], steps: int, budget: float | None) -> Tuning | None:
        """An earlier choice, if it still agrees with stock, else None."""
        choice = next((c for c in chosen if c.name == kept.choice), None)
        if choice is None:
            return None
        if choice.name != STOCK:
            self._stock(chosen[0], time_it=False)
            row = together(self._row(choice, time.monotonic() + (BUDGET if budget is None else budget), time_it=False))
            if row.why:
                log.warning("tune: the earlier choice, %s, is dropped: %s", choice.name, row.why)
                return None
        return replace(kept, steps=steps, kept=True)

    def _stock(self, candidate: Candidate, time_it: bool = True) -> TuneRow:
        """Stock's row, with which others are compared. An error on one rank is raised on all ranks."""
        row, raised = TuneRow(candidate.name), None
        try:
            self._set_yardstick(candidate)
            row = replace(self._timed(candidate, row), setup=0.0) if time_it else row
        except Exception as error:
            raised = error
        row = together(replace(row, why="" if raised is None else repr(raised)))
        if raised is not None:
            raise raised
        if row.why:
            raise RuntimeError(f"stock fails on another rank: {row.why}")
        return row

    def _set_yardstick(self, candidate: Candidate) -> None:
        with step_of(self.model, self.cuda) as step:
            self.stock = self._results(candidate)
        if self.state.drew():
            self.quiet = True
            self.stock = self._results(candidate)
        for name, value in self.stock.items():
            if name.startswith("loss") and not value.isfinite().all():
                raise ValueError(f"the {name} is {value.item()} as stock")
        moved = [self._results(candidate, (step[0], draw)) for draw in range(DRAWS)]
        self.allowed = allowed(self.stock, moved, step[0])

    def _row(self, candidate: Candidate, end: float, time_it: bool = True) -> TuneRow:
        row, begin = TuneRow(candidate.name), time.monotonic()
        try:
            with self._entered(candidate, end, quiet=True):
                row = self._agrees(candidate, row, begin)
                if time_it and not self.dropouts and not self.quiet:
                    return self._timed(candidate, row)
            if time_it:
                with self._entered(candidate, end):
                    return self._timed(candidate, row)
        except Dropped as why:
            return replace(row, why=str(why))
        except Over:
            return replace(row, why=f"not done in the {end - begin:.3g} s that were left of the budget")
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            return replace(row, why=f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)
        finally:
            self.state.restore(layout=True)
        return row

    @contextlib.contextmanager
    def _entered(self, candidate: Candidate, end: float, quiet: bool = False) -> Iterator[None]:
        """Runs the model as the candidate does, until `end`; quiet: without dropout."""
        with without(self.dropouts if quiet else ()):
            try:
                with deadline(end):
                    candidate.enter(self.model)
                    yield
            finally:
                candidate.leave(self.model)

    def _agrees(self, candidate: Candidate, row: TuneRow, begin: float) -> TuneRow:
        """A row with `setup`. Raises Dropped if a result differs from stock's."""
        before = graphs()
        for _ in range(WARM if candidate.capture else 1):
            results = self._results(candidate)
        row = replace(row, setup=time.monotonic() - begin)
        if candidate.backend is not None and graphs() == before:
            raise Dropped("torch.compile found nothing to compile")
        if candidate.capture and not vars(self.model)["_hfnn_capture"].counts["replayed"]:
            raise Dropped(captured.explain(self.model))
        for name in [n for n in {**self.stock, **results} if n not in self.stock or n not in results]:
            raise Dropped(f"{name}: there is {'none' if name in self.stock else 'one'}, unlike stock's")
        for name, value in results.items():
            why = differs(value, self.stock[name], *self.allowed[name])
            if why:
                raise Dropped(f"{name} {why}")
        return row

    def _step(self, batch) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"takes a loss of one number, got {given}: give tune loss=, a function of model and batch")
        loss.backward()
        return loss.detach()

    def _results(self, candidate: Candidate, by: tuple[float, int] | None = None) -> dict[str, torch.Tensor]:
        """Losses, accumulated gradients and buffers of two batches, on the CPU. by: the relative change of parameters,
        and the seed."""
        self.state.restore()
        if self.quiet:
            self.model.eval()
        with without(self.dropouts if candidate.name == STOCK else ()):
            if by is not None:
                parts.move(self.model, *by)
            found = {}
            for number, batch in enumerate(self.batches[:2], 1):
                after = f"after {number} batch" + "es" * (number > 1)
                found[f"loss {after}"] = self._step(batch).to("cpu", copy=True)
                grads = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
                found |= {f"gradient of {n} {after}": parts.numbers(g) for n, g in grads}
        found |= {f"buffer {n}": parts.numbers(b) for n, b in self.model.named_buffers()}
        return found

    def _timed(self, candidate: Candidate, row: TuneRow) -> TuneRow:
        """A row with `ms` and `peak`. Raises Dropped if it recompiles too often or needs too much memory."""
        self.state.restore()
        times, compiling, wait = [], 0, torch.cuda.synchronize if self.cuda else lambda: None
        for number, batch in zip(range(WARM + STEPS), itertools.cycle(self.batches), strict=False):
            self.model.zero_grad()
            wait()
            before, begin = graphs(), time.perf_counter()
            self._step(batch)
            wait()
            if number >= WARM:
                times.append((time.perf_counter() - begin) * 1e3)
                compiling += graphs() != before
        row = replace(row, ms=statistics.median(times))
        if compiling > RECOMPILES:
            raise Dropped(f"compiled anew in {compiling} of {STEPS} steps")
        self.model.zero_grad()
        peak = None
        if self.cuda or candidate.backend is None:  # on the CPU counting would disable the compiled code
            peak = peak_bytes(lambda: self._step(self.batches[0]), "cuda" if self.cuda else "cpu")
            peak += captured.pool_bytes(self.model, unseen=True) if self.cuda else 0
        row = replace(row, peak=peak)
        if self.memory is not None and candidate.name != STOCK:
            if peak is None:
                raise Dropped("there is a limit of memory, and the peak of what is compiled is not known on the CPU")
            if peak > self.memory:
                raise Dropped(f"needs {peak / 2**20:,.1f} MiB, {self.memory / 2**20:,.1f} MiB are allowed")
        return row


def best(rows: list[TuneRow], steps: int) -> str:
    """Chooses by the time of all steps, compilation included; stock if nothing is clearly faster."""
    total = {row.name: row.setup + steps * row.ms / 1e3 for row in rows if not row.why}
    best = min(total, key=total.get)
    return best if total[best] * CLOSE < total[STOCK] else STOCK
