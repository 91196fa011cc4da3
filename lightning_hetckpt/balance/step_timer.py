"""How long this rank itself works on a batch, waiting on peers left out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch

from lightning_hetckpt.balance.throughput import WindowStats

# The moments of a batch, in pairs: an even one opens a span, the odd one after it closes the span.
_DRAWN, _LOADED, _FORWARD, _GRADIENT = range(4)

# The first steps of a run pay for caches, allocators and DDP's new buckets, the first step of another
# batch size for some of that again.
_FIRST_STEPS, _FIRST_OF_SIZE = 3, 1
_FEWEST_STEPS = 3  # a median of fewer says nothing
_MOST_STEPS = 512  # where nobody asks for windows the oldest steps fall out
_OUTLIER = 5.0  # robust standard deviations from the median
_MAD_TO_SIGMA = 1.4826  # of normal values
# The host may run this many steps ahead of a GPU before a step's events are read, or lost.
_STEPS_AHEAD = 4


class _Lap:
    """The moments of one batch on the host's clock; of equal moments the first counts."""

    samples = 0
    counts = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = [0.0] * 4
        self._passed = [False] * 4
        self._waits: list[tuple[Any, Any]] = []  # between forward and last gradient, for other ranks

    def clear(self) -> None:
        """Make ready for the next batch."""
        self._passed[:] = (False,) * 4
        self.counts = False
        self._waits.clear()

    def mark(self, moment: int) -> None:
        """Note that `moment` has come, unless it had already or its span was never opened."""
        passed = self._passed
        if not passed[moment] and (moment % 2 == 0 or passed[moment - 1]):
            passed[moment] = True
            self._note(moment)

    def compute_s(self) -> float | None:
        """Seconds in both spans together; None while the step is not over (or not read back yet)."""
        if not self._passed[_GRADIENT] or not self._reached():
            return None
        load_s = self._between(_DRAWN, _LOADED) if self._passed[_LOADED] else 0.0
        waited_s = sum(self._span(began, ended) for began, ended in self._waits)
        return load_s + self._between(_FORWARD, _GRADIENT) - waited_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what happens in here, if it lies between forward and last gradient."""
        if not self._passed[_FORWARD] or self._passed[_GRADIENT]:
            yield
            return
        began = self._now()
        try:
            yield
        finally:
            self._waits.append((began, self._now()))

    def _now(self) -> Any:
        return self._clock()

    def _span(self, began: Any, ended: Any) -> float:
        return float(ended - began)

    def _note(self, moment: int) -> None:
        self._at[moment] = self._clock()

    def _reached(self) -> bool:
        return True

    def _between(self, opened: int, closed: int) -> float:
        return self._at[closed] - self._at[opened]


class _CudaLap(_Lap):
    """The same moments as events in the device's compute stream: nobody waits for them.

    The host's clock would measure how fast kernels are launched. The all-reduce runs in a stream of its own,
    which the compute stream joins after the last gradient only, so no waiting falls into a span. Loading
    counts as far as the device had run dry meanwhile, which is as far as it costs time.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        super().__init__(clock)
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in self._at]  # type: ignore[no-untyped-call]

    def _note(self, moment: int) -> None:
        self._events[moment].record(torch.cuda.current_stream(self._device))

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _span(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1000

    def _reached(self) -> bool:
        return bool(self._events[_GRADIENT].query())  # type: ignore[no-untyped-call]

    def _between(self, opened: int, closed: int) -> float:
        return float(self._events[opened].elapsed_time(self._events[closed])) / 1000


class StepTimer:
    """Measures the seconds that this rank computes per training batch, on its own clock.

    A batch counts from `forward_started` to `last_gradient`, plus from `batch_drawn` to `batch_loaded` where
    this process loads its data itself. What lies between these spans is other people's time: callbacks,
    exchanges between ranks, the wait for a snapshot, the all-reduce.

    Args:
        device: where the model computes; on CUDA the moments are events, read some steps later.
        clock: seconds on the host, for every other device.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda":
            self._laps: list[_Lap] = [_CudaLap(clock, device) for _ in range(_STEPS_AHEAD)]
        else:
            self._laps = [_Lap(clock)]
        self._turn = 0
        self._lap = self._laps[0]
        self._opened = False  # the present lap belongs to a batch that was drawn and has not started
        self._seconds: deque[float] = deque(maxlen=_MOST_STEPS)
        self._samples = 0
        self._to_leave_out = _FIRST_STEPS

    def batch_drawn(self) -> None:
        """The loader begins to make the next batch in this process; not to be called where workers do it."""
        self._open()
        self._lap.mark(_DRAWN)

    def batch_loaded(self) -> None:
        """The batch is there. Without this mark loading ends with `batch_started`."""
        if self._opened:
            self._lap.mark(_LOADED)

    def batch_started(self, samples: int, whole: bool = True) -> None:
        """Training of a batch begins, `samples` of which are this rank's.

        The remainder of an epoch (`whole=False`) is left out.
        """
        if not self._opened:
            self._open()
        self._opened = False
        self._lap.mark(_LOADED)
        self._lap.samples, self._lap.counts = samples, whole

    def forward_started(self) -> None:
        """The forward pass begins; where there are several in a batch the first counts."""
        self._lap.mark(_FORWARD)

    def waiting(self) -> AbstractContextManager[None]:
        """Around an exchange with other ranks inside of `training_step`, such as `self.log(sync_dist=True)`."""
        return self._lap.waiting()

    def last_gradient(self) -> None:
        """The last gradient of this rank is there, and the wait for the other ranks begins."""
        self._lap.mark(_GRADIENT)

    def backward_ended(self) -> None:
        """The backward pass is over; counts in a batch without all-reduce (accumulation)."""
        self._lap.mark(_GRADIENT)

    def step_skipped(self) -> None:
        """The present step was no ordinary one; leave it out."""
        self._lap.counts = False

    def window(self) -> WindowStats | None:
        """The median over the steps at the present batch size since the last window, and forget them.

        None, and nothing is forgotten, while there are fewer than three.
        """
        oldest_first = self._laps[self._turn + 1 :] + self._laps[: self._turn + 1]
        for lap in oldest_first:
            self._collect(lap)
        if len(self._seconds) < _FEWEST_STEPS:
            return None
        middle_s = median(self._seconds)
        spread_s = _MAD_TO_SIGMA * median(abs(seconds - middle_s) for seconds in self._seconds)
        usual = [seconds for seconds in self._seconds if abs(seconds - middle_s) <= _OUTLIER * spread_s]
        self._seconds.clear()
        return WindowStats(self._samples, median(usual or [middle_s]), max(1, len(usual)), spread_s)

    def _open(self) -> None:
        """Go on to the next lap, and take in what it still holds from an earlier batch."""
        self._turn = (self._turn + 1) % len(self._laps)
        self._lap = self._laps[self._turn]
        self._collect(self._lap)
        self._lap.clear()
        self._opened = True

    def _collect(self, lap: _Lap) -> None:
        if not lap.counts or (compute_s := lap.compute_s()) is None:
            return
        lap.clear()
        if lap.samples != self._samples:
            self._samples = lap.samples
            self._seconds.clear()
            self._to_leave_out = max(self._to_leave_out, _FIRST_OF_SIZE)
        if self._to_leave_out > 0:
            self._to_leave_out -= 1
        else:
            self._seconds.append(compute_s)
