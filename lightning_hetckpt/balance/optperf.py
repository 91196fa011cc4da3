"""How long a step takes for a given split, with the all-reduce hidden behind the backward pass or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_hetckpt.errors import PlanError

Bound = Literal["compute", "communication"]
Seconds = NDArray[np.float64]
Samples = NDArray[np.float64]  # whole numbers, in floats because the search divides them


@dataclass(frozen=True, slots=True, order=True)
class DeviceModel:
    """How long one device computes for a batch: `fixed_s + seconds_per_sample * samples`.

    Models sort by speed: at equal `fixed_s` the faster device comes first.

    Args:
        seconds_per_sample: of everything: load, forward, backward and optimizer (`q + k` of Cannikin).
        fixed_s: of everything, whatever the batch (`s + m`).
        backward_per_sample_s: the part of `seconds_per_sample` that is backward (`k`).
        backward_fixed_s: the part of `fixed_s` that is backward (`m`).
    """

    seconds_per_sample: float
    fixed_s: float = 0.0
    backward_per_sample_s: float = 0.0
    backward_fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.seconds_per_sample < math.inf and 0 <= self.fixed_s < math.inf):
            raise PlanError(
                f"a device needs a finite time above zero for each sample and a finite fixed time, found {self}"
            )
        if not (
            0 <= self.backward_per_sample_s <= self.seconds_per_sample
            and 0 <= self.backward_fixed_s <= self.fixed_s
        ):
            raise PlanError(f"the backward pass is a part of the whole step, found {self}")

    def step_s(self, samples: int) -> float:
        """Seconds that the device computes for `samples`."""
        return self.fixed_s + self.seconds_per_sample * samples

    def backward_s(self, samples: int) -> float:
        """Seconds of that in the backward pass."""
        return self.backward_fixed_s + self.backward_per_sample_s * samples


@dataclass(frozen=True, slots=True)
class SyncModel:
    """What the all-reduce adds to a step, the same for all devices (Cannikin, arXiv 2402.05302, gamma, T_o, T_u).

    Args:
        overlap_from: the share of its backward pass after which a device hands over its first bucket (gamma).
        hidden_s: transfer of all buckets but the last, which can hide behind the rest of the backward (T_o).
        tail_s: transfer of the last bucket, which nothing can hide (T_u).
        between: for each bucket between first and last, where those are known one by one, the share of the
            backward pass after which it is ready, and the seconds of its transfer and all later ones.
    """

    overlap_from: float
    hidden_s: float
    tail_s: float
    between: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        ready = [self.overlap_from, *(share for share, _ in self.between)]
        seconds = [self.hidden_s, self.tail_s, *(seconds for _, seconds in self.between)]
        if not (all(0 < share <= 1 for share in ready) and all(0 <= each < math.inf for each in seconds)):
            raise PlanError(
                f"buckets are ready after a share of the backward pass in (0, 1] and take a finite time, found {self}"
            )

    @classmethod
    def of_buckets(cls, ready: Sequence[float], transfer_s: Sequence[float]) -> SyncModel:
        """The exact form for buckets reduced one after another.

        Args:
            ready: the share of the backward pass after which each bucket is ready, rising up to 1.
            transfer_s: the seconds that its all-reduce takes once all ranks have handed it over.
        """
        if not ready or len(ready) != len(transfer_s) or list(ready) != sorted(ready) or ready[-1] != 1:
            raise PlanError(
                f"expected as many rising shares, the last one 1, as transfer times; found {list(ready)} and "
                f"{list(transfer_s)}"
            )
        between = [(share, sum(transfer_s[j:])) for j, share in enumerate(ready[1:-1], start=1)]
        return cls(ready[0], float(sum(transfer_s[:-1])), float(transfer_s[-1]), tuple(between))

    def lines(self) -> list[tuple[float, float]]:
        """For each bucket when it is ready and what is transferred from then on; the last one comes first.

        With r_j and C_j of these pairs a step takes `max_i max_j (a_i + r_j P_i + C_j)`: no transfer can start
        before all ranks are ready for it, nor before the one before it is over.
        """
        return [(1.0, self.tail_s), (self.overlap_from, self.hidden_s + self.tail_s), *self.between]


@dataclass(frozen=True, slots=True)
class OptPerf:
    """The best split of a global batch and what it promises.

    Args:
        shares: samples of each device.
        step_s: seconds from the start of the step to the end of the all-reduce; compute only where nothing is
            known about the all-reduce.
        bound: what each device's own time is bound by: its computing, or the transfers after its first bucket.
        marginal_s: seconds that one more sample adds to each device's time; infinity where it may take none.
    """

    shares: tuple[int, ...]
    step_s: float
    bound: tuple[Bound, ...]
    marginal_s: tuple[float, ...]

    @property
    def global_batch_size(self) -> int:
        """Samples of all devices together."""
        return sum(self.shares)

    @property
    def sample_s(self) -> float:
        """Seconds that one more sample in the global batch adds to the step, shared out over all devices."""
        return 1 / rate if (rate := sum(1 / each for each in self.marginal_s)) else math.inf


class Fleet:
    """The time functions of all devices side by side; nothing in the solver knows their form.

    Each is the highest of a few rising lines, one for each way in which it can be bound, the computing
    itself first. Arrays of samples and seconds have the devices in their last axis.
    """

    def __init__(self, models: Sequence[DeviceModel], sync: SyncModel | None) -> None:
        count = len(models)
        slope = np.fromiter((model.seconds_per_sample for model in models), float, count)
        fixed = np.fromiter((model.fixed_s for model in models), float, count)
        self._lines = [(slope, fixed)]
        if sync is not None:
            steep = np.fromiter((model.backward_per_sample_s for model in models), float, count)
            flat = np.fromiter((model.backward_fixed_s for model in models), float, count)
            self._lines = [
                (slope - (1 - ready) * steep, fixed - (1 - ready) * flat + after_s)
                for ready, after_s in sync.lines()
            ]

    @property
    def least_slope_s(self) -> float:
        """No device takes less for one more sample."""
        return float(min(slope.min() for slope, _ in self._lines))

    def step_s(self, samples: Samples) -> Seconds:
        """Seconds until each device's last bucket could be through, were it the slowest one."""
        seconds: Seconds = np.maximum.reduce([fixed + slope * samples for slope, fixed in self._lines])
        return seconds

    def samples_within(self, deadline_s: Seconds) -> Samples:
        """The inverse: samples with which each device keeps the deadline; below zero where none."""
        samples: Samples = np.minimum.reduce([(deadline_s - fixed) / slope for slope, fixed in self._lines])
        return samples

    def binding(self, samples: Samples) -> tuple[NDArray[np.int64], Seconds]:
        """The number of the line that binds each device (0 is its computing) and that line's slope."""
        which = np.argmax([fixed + slope * samples for slope, fixed in self._lines], axis=0)
        slopes = np.array([slope for slope, _ in self._lines])
        return which, np.take_along_axis(slopes, np.atleast_2d(which), axis=0).reshape(which.shape)

    def fastest_first(self) -> NDArray[np.int64]:
        """The ranks by speed, then by number: the order in which ties are broken."""
        return np.lexsort([each for slope, fixed in reversed(self._lines) for each in (fixed, slope)])


def device_s(
    models: Sequence[DeviceModel], shares: Sequence[int], sync: SyncModel | None = None
) -> list[float]:
    """Seconds that a step would take with each device's share, were it the slowest one."""
    seconds: list[float] = Fleet(models, sync).step_s(np.array(shares, dtype=np.float64)).tolist()
    return seconds


def step_s(models: Sequence[DeviceModel], shares: Sequence[int], sync: SyncModel | None = None) -> float:
    """Seconds that a step takes with these shares, all-reduce included where `sync` tells about it."""
    return max(device_s(models, shares, sync))
