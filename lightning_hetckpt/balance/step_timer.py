"""How long this rank computes in a step, on its own clock; waiting for other ranks is not work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lightning_hetckpt.balance.throughput import WindowStats

# The first steps of a fit, and of a plan, allocate memory and choose kernels.
_WARM_UP = 2
# Steps further than this many robust standard deviations from the median tell about something else.
_OUTLIER = 4.0
_MAD_TO_SIGMA = 1.4826


class StepTimer:
    """Collects the compute seconds of one batch after the other.

    The marks of a batch come in this order:
      `batch_drawn`      its indices are drawn, where this very process loads the data
      `batch_started`    it is here
      `forward_started`  the module is entered, behind DDP's exchange of buffers
      `last_gradient`    the last bucket of gradients is ready on this rank
      `backward_ended`   counts instead where no bucket was reduced
    What lies between `last_gradient` and the next draw is waiting, or belongs to everybody.

    On CUDA the marks are events in the stream of the training; they are read when the next batch starts, so
    nothing waits for the device.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._drawn_s: float | None = None
        self._load_s = 0.0
        self._begin: float | torch.cuda.Event | None = None
        self._end: float | torch.cuda.Event | None = None
        self._samples = 0
        self._steps_at_size = 0
        self._counts = False  # whether the present batch may tell something
        self._times_s: list[float] = []

    def batch_drawn(self) -> None:
        """This process begins to load a batch."""
        self._drawn_s = self._clock()

    def batch_started(self, samples: int, whole: bool) -> None:
        """A batch of `samples` is here; `whole` unless it is the short last one of an epoch."""
        self._finish()
        if whole:
            self._steps_at_size = self._steps_at_size + 1 if samples == self._samples else 1
            if samples != self._samples:
                self._times_s.clear()
            self._samples = samples
        self._counts = whole and self._steps_at_size > _WARM_UP
        self._load_s = self._clock() - self._drawn_s if self._drawn_s is not None else 0.0
        self._drawn_s = self._begin = self._end = None

    def forward_started(self) -> None:
        """The module is entered; only the first time in a batch counts."""
        if self._begin is None:
            self._begin = self._mark()

    def last_gradient(self) -> None:
        """All gradients of this rank are ready; the last such mark of a batch counts."""
        self._end = self._mark()

    def backward_ended(self) -> None:
        """A backward pass has returned; counts where nothing was reduced."""
        if self._end is None:
            self._end = self._mark()

    def window(self) -> WindowStats | None:
        """The median over the batches of the present size since the last call, or None without any."""
        times_s, self._times_s = self._times_s, []
        if not times_s:
            return None
        middle_s = statistics.median(times_s)
        sigma_s = _MAD_TO_SIGMA * statistics.median(abs(one - middle_s) for one in times_s)
        kept_s = [one for one in times_s if abs(one - middle_s) <= _OUTLIER * sigma_s] or times_s
        return WindowStats(self._samples, statistics.median(kept_s), len(kept_s), sigma_s or None)

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _finish(self) -> None:
        begin, end = self._begin, self._end
        if not self._counts or begin is None or end is None:
            return
        if isinstance(begin, float) and isinstance(end, float):
            self._times_s.append(self._load_s + end - begin)
        elif not isinstance(begin, float) and not isinstance(end, float) and end.query():
            self._times_s.append(self._load_s + begin.elapsed_time(end) / 1000)
