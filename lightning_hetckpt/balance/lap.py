"""The moments of one training step on one rank, and where its seconds went between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# In the order in which they come; FIRST and LAST are buckets of gradients that are handed over.
FETCH, FETCHED, MOVED, FORWARD, BACKWARD, FIRST, LAST, ENDED, STEP, STEPPED = range(10)

# What must have come before a moment says anything.
_NEEDS = {
    FETCHED: FETCH,
    MOVED: FETCHED,
    BACKWARD: FORWARD,
    FIRST: BACKWARD,
    LAST: FORWARD,
    ENDED: FORWARD,
    STEP: ENDED,
    STEPPED: STEP,
}


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the seconds of one step went; None where that part did not come."""

    work_s: (
        float  # load, host to device, forward, backward up to the last gradient; waiting on peers excluded
    )
    load_s: float | None  # the part of it until the batch was there, whoever made it
    backward_s: float | None  # until the last gradient; of several backward passes the last
    first_bucket_s: float | None  # from the start of that one until its first bucket was handed over
    # Of each bucket the time from when it was handed over and the one before was through, until it was through.
    hidden_s: float | None  # of all buckets but the last together
    tail_s: float | None  # of the last bucket
    optimizer_s: float | None
    step_s: float | None  # from one step to the next, on the host's clock


class Lap:
    """The moments of one step on the host's clock; of equal moments the first counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at: list[Any] = [None] * (STEPPED + 1)
        self._buckets: list[list[Any]] = []  # of the last backward pass: handed over, and reduced once it was
        self._waits: list[tuple[Any, Any]] = []  # between forward and last gradient, for other ranks
        self._step_waits: list[tuple[Any, Any]] = []  # while the optimizer steps
        self.samples = 0
        self.counts = False
        self.step_s: float | None = None

    def clear(self) -> None:
        """Make ready for the next step."""
        self._at[:] = (None,) * len(self._at)
        self._buckets = []  # a new one: another thread may still write into the old
        self._waits.clear()
        self._step_waits.clear()
        self.counts, self.step_s = False, None

    def mark(self, moment: int) -> None:
        """Note that `moment` has come, unless it had already or what it belongs to had not."""
        at = self._at
        if at[moment] is None and (moment not in _NEEDS or at[_NEEDS[moment]] is not None):
            at[moment] = self._now()

    def hand_over(self, is_last: bool) -> Callable[[], None]:
        """A bucket is handed over; returns what to call, on any thread, once it is reduced."""
        self.mark(FIRST)
        if is_last:
            self.mark(LAST)
        bucket = [self._now(), None]
        self._buckets.append(bucket)

        def reduced() -> None:
            bucket[1] = self._now()

        return reduced

    def begin_backward(self) -> None:
        """A backward pass begins; if there was one before in this step, the wait behind that is no work."""
        at = self._at
        if at[LAST] is not None and at[ENDED] is not None:
            self._waits.append((at[LAST], at[ENDED]))
        if at[ENDED] is not None:
            # The optimizer step between two backward passes is part of the work, not the end of it.
            at[BACKWARD:] = (None,) * (len(at) - BACKWARD)
            self._buckets = []
            self._step_waits.clear()
        self.mark(BACKWARD)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what happens in here."""
        at = self._at
        if at[FORWARD] is not None and at[LAST] is None and at[ENDED] is None:
            waits = self._waits
        elif at[STEP] is not None and at[STEPPED] is None:
            waits = self._step_waits
        else:
            yield
            return
        began = self._now()
        try:
            yield
        finally:
            waits.append((began, self._now()))

    def phases(self) -> Phases | None:
        """Where the seconds went; None while the step is not over (or not read back yet)."""
        at = self._at
        end = LAST if at[LAST] is not None else ENDED
        if at[end] is None or not self._reached():
            return None
        work_s = self._between(FORWARD, end) or 0.0
        work_s += self._between(FETCHED, MOVED) or 0.0
        load_s = self._between(FETCH, FETCHED)
        work_s += load_s or 0.0
        optimizer_s = self._between(STEP, STEPPED)
        if optimizer_s is not None:
            optimizer_s -= self._sum(self._step_waits)
        hidden_s, tail_s = self._exchange_s()
        return Phases(
            work_s - self._sum(self._waits),
            load_s,
            self._between(BACKWARD, end),
            self._between(BACKWARD, FIRST),
            hidden_s,
            tail_s,
            optimizer_s,
            self.step_s,
        )

    def _exchange_s(self) -> tuple[float | None, float | None]:
        """Seconds in which buckets were on their way: of all but the last, and of the last."""
        if not self._buckets or any(reduced is None for _, reduced in self._buckets):
            return None, None
        first, took_s, through_s = self._buckets[0][0], [0.0], 0.0
        for handed, reduced in self._buckets:
            begun_s = max(through_s, self._seconds(first, handed))
            through_s = max(begun_s, self._seconds(first, reduced))
            took_s.append(through_s - begun_s)
        return sum(took_s[:-1]), took_s[-1]

    def _between(self, opened: int, closed: int) -> float | None:
        began, ended = self._at[opened], self._at[closed]
        return None if began is None or ended is None else self._seconds(began, ended)

    def _sum(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self._seconds(began, ended) for began, ended in spans)

    def _now(self) -> Any:
        return self._clock()

    def _seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began)

    def _reached(self) -> bool:
        return True


class CudaLap(Lap):
    """The same moments as events in the device's present stream: nobody waits for them.

    The host's clock would measure how fast kernels are launched. The all-reduce runs in a stream of its own,
    which the compute stream joins after the last gradient only, so no waiting falls into the work. Loading
    counts as far as the device had run dry meanwhile, which is as far as it costs time.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        super().__init__(clock)
        self._device = device
        self._spare: list[Any] = []  # events are made once and used again

    def clear(self) -> None:
        """Make ready for the next step."""
        pairs = (*self._waits, *self._step_waits)
        # A bucket's events may still be recorded by another thread, so they are not used again.
        used = {id(event): event for event in (*self._at, *(event for pair in pairs for event in pair))}
        self._spare.extend(event for event in used.values() if event is not None)
        super().clear()

    def _now(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1000

    def _reached(self) -> bool:
        ends = (*self._at, *(reduced for _, reduced in self._buckets))
        return all(event.query() for event in ends if event is not None)
