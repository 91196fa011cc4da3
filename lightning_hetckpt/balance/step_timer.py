"""How long this rank itself works on a batch, waiting on peers left out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from statistics import median

import torch

from lightning_hetckpt.balance import lap as moments
from lightning_hetckpt.balance.lap import CudaLap, Lap, Phases
from lightning_hetckpt.balance.throughput import WindowStats

# The first steps of a run pay for caches, allocators and DDP's new buckets, the first step of another
# batch size for some of that again.
_FIRST_STEPS, _FIRST_OF_SIZE = 3, 1
_FEWEST_STEPS = 3  # a median of fewer says nothing
_MOST_STEPS = 512  # where nobody asks for windows the oldest steps fall out
_OUTLIER = 5.0  # robust standard deviations from the median
_MAD_TO_SIGMA = 1.4826  # of normal values
# The host may run this many steps ahead of a GPU before a step's events are read, or lost.
_STEPS_AHEAD = 4


class StepTimer:
    """Measures what this rank does in each training step, on its own clock.

    Its work is to load (or to wait for its own workers), to move the batch to the device, forward and backward
    up to the last gradient, and the optimizer. What lies between is other people's time: callbacks, exchanges
    between ranks, the wait for a snapshot, the all-reduce.

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
        self._clock = clock
        if device.type == "cuda":
            self._laps: list[Lap] = [CudaLap(clock, device) for _ in range(_STEPS_AHEAD)]
        else:
            self._laps = [Lap(clock)]
        self._turn = 0
        self._lap = self._laps[0]
        self._opened = False  # the present lap belongs to a batch that is on its way and has not started
        self._opened_s: float | None = None
        self._leave_out_next = False
        self._steps: deque[Phases] = deque(maxlen=_MOST_STEPS)
        self._samples = 0
        self._to_leave_out = _FIRST_STEPS

    def fetch_started(self) -> None:
        """The next batch is asked for."""
        self._open()
        self._lap.mark(moments.FETCH)

    def batch_fetched(self) -> None:
        """The batch is there."""
        if self._opened:
            self._lap.mark(moments.FETCHED)

    def batch_moved(self) -> None:
        """The batch is on the device."""
        if self._opened:
            self._lap.mark(moments.MOVED)

    def batch_started(self, samples: int, whole: bool = True) -> None:
        """Training of a batch begins, `samples` of which are this rank's.

        The remainder of an epoch (`whole=False`) is left out.
        """
        if not self._opened:
            self._open()
        self._opened = False
        self._lap.samples, self._lap.counts = samples, whole and not self._leave_out_next
        self._leave_out_next = False

    def forward_started(self) -> None:
        """The forward pass begins; where there are several in a batch the first counts."""
        self._lap.mark(moments.FORWARD)

    def waiting(self) -> AbstractContextManager[None]:
        """Around an exchange with other ranks in the middle of a step, such as `self.log(sync_dist=True)`."""
        return self._lap.waiting()

    def backward_started(self) -> None:
        """The backward pass that will be reduced begins; where there are several all of them are work."""
        self._lap.begin_backward()

    def bucket_ready(self, is_last: bool) -> Callable[[], None]:
        """A bucket of gradients is handed over; to be told of its reduction by the function that this returns.

        With the last bucket the wait for the other ranks begins. The function may be called on any thread.
        """
        return self._lap.hand_over(is_last)

    def backward_ended(self) -> None:
        """The backward pass is over; ends the work of a batch without all-reduce (accumulation)."""
        self._lap.mark(moments.ENDED)

    def optimizer_started(self) -> None:
        """The optimizer begins to move the weights."""
        self._lap.mark(moments.STEP)

    def optimizer_ended(self) -> None:
        """The weights have moved."""
        self._lap.mark(moments.STEPPED)

    def step_skipped(self) -> None:
        """The present step was no ordinary one; leave it out."""
        self._lap.counts = False

    def interrupted(self) -> None:
        """Something else (validation, a checkpoint) comes between the present step and the next one.

        The step before it keeps its parts but not its length, and the one behind it is left out: caches are cold.
        Where every step is followed by such a thing every second one counts.
        """
        self._opened_s = None
        self._leave_out_next = self._lap.counts

    def window(self) -> WindowStats | None:
        """The medians over the steps at the present batch size since the last window, and forget them.

        None, and nothing is forgotten, while there are fewer than three.
        """
        oldest_first = self._laps[self._turn + 1 :] + self._laps[: self._turn + 1]
        for lap in oldest_first:
            self._collect(lap)
        if len(self._steps) < _FEWEST_STEPS:
            return None
        middle_s = median(step.work_s for step in self._steps)
        spread_s = _MAD_TO_SIGMA * median(abs(step.work_s - middle_s) for step in self._steps)
        usual = [step for step in self._steps if abs(step.work_s - middle_s) <= _OUTLIER * spread_s]
        usual = usual or list(self._steps)
        self._steps.clear()
        stepped = [step.optimizer_s for step in usual if step.optimizer_s is not None]
        # Where gradients accumulate, each batch bears its part of the optimizer's step.
        optimizer_s = median(stepped) * len(stepped) / len(usual) if stepped else 0.0
        return WindowStats(
            samples=self._samples,
            compute_s=median(step.work_s for step in usual) + optimizer_s,
            count=len(usual),
            spread_s=spread_s,
            backward_s=_median(step.backward_s for step in usual),
            first_bucket_s=_median(step.first_bucket_s for step in usual),
            hidden_s=_median(step.hidden_s for step in usual),
            tail_s=_median(step.tail_s for step in usual),
            load_s=_median(step.load_s for step in usual),
            step_s=_median(step.step_s for step in usual),
        )

    def _open(self) -> None:
        """Go on to the next lap, and take in what it still holds from an earlier batch."""
        now_s = self._clock()
        if self._opened_s is not None:
            self._lap.step_s = now_s - self._opened_s
        self._opened_s = now_s
        self._turn = (self._turn + 1) % len(self._laps)
        self._lap = self._laps[self._turn]
        self._collect(self._lap)
        self._lap.clear()
        self._opened = True

    def _collect(self, lap: Lap) -> None:
        if not lap.counts or (phases := lap.phases()) is None:
            return
        lap.clear()
        if lap.samples != self._samples:
            self._samples = lap.samples
            self._steps.clear()
            self._to_leave_out = max(self._to_leave_out, _FIRST_OF_SIZE)
        if self._to_leave_out > 0:
            self._to_leave_out -= 1
        else:
            self._steps.append(phases)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
