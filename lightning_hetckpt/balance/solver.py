"""The split of a global batch with which the slowest device finishes as early as possible."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hetckpt.errors import PlanError

_Samples = NDArray[np.int64]

# Each halving gives one bit of the deadline, and a double has 53.
_HALVINGS = 60


@dataclass(frozen=True, slots=True, order=True)
class DeviceModel:
    """How long one device computes for a batch: `fixed_s + seconds_per_sample * samples`.

    Models sort by speed: at equal `fixed_s` the faster device comes first.
    """

    seconds_per_sample: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.seconds_per_sample < math.inf and 0 <= self.fixed_s < math.inf):
            raise PlanError(
                f"a device needs a finite time above zero for each sample and a finite fixed time, found {self}"
            )

    def step_s(self, samples: int) -> float:
        """Seconds that the device computes for `samples`."""
        return self.fixed_s + self.seconds_per_sample * samples


class _Fleet:
    """The time functions of all devices side by side; nothing else in here knows their form.

    The search below asks for the inverse only, so a richer model (the maximum of several lines, one
    for each way in which communication can bind) has to change this class alone.
    """

    def __init__(self, models: Sequence[DeviceModel]) -> None:
        self._slope = np.array([model.seconds_per_sample for model in models])
        self._fixed = np.array([model.fixed_s for model in models])

    def step_s(self, samples: _Samples) -> NDArray[np.float64]:
        """Seconds that each device computes for its number of samples."""
        seconds: NDArray[np.float64] = self._fixed + self._slope * samples
        return seconds

    def samples_within(self, deadline_s: float) -> NDArray[np.float64]:
        """The inverse: samples that each device finishes within `deadline_s`; below zero where none."""
        samples: NDArray[np.float64] = (deadline_s - self._fixed) / self._slope
        return samples

    def fastest_first(self) -> NDArray[np.int64]:
        """The ranks by speed, then by number: the order in which ties are broken."""
        return np.lexsort((self._fixed, self._slope))


class _Ladder:
    """The sizes that each device may take: from `first` to `last` in strides of `multiple_of`."""

    def __init__(self, low: _Samples, high: _Samples, multiple_of: int, rest: int) -> None:
        self.first = low + (rest - low) % multiple_of
        self.last = high - (high - rest) % multiple_of
        self.stride = multiple_of

    def below(self, samples: NDArray[np.float64]) -> _Samples:
        """The highest rung of each device that is at most `samples`, and at least the first one."""
        within = np.clip(samples, self.first, self.last)
        return self.first + (within - self.first).astype(np.int64) // self.stride * self.stride


def solve(
    models: Sequence[DeviceModel],
    total: int,
    min_samples: Sequence[int],
    max_samples: Sequence[int | None],
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """Whole numbers `b_i` that sum to `total` and make `max_i step_s_i(b_i)` as small as it can be.

    Water-filling finds the common deadline; a heap hands out the samples that are left, each to the
    device that then finishes first. Ties go to the faster device, then to the lower rank: the same
    numbers give the same split everywhere, and of two devices with equal bounds that both hold a
    multiple the faster one never gets less. (DESIGN §5.2; Cannikin, arXiv 2402.05302, where the deadline is OptPerf.)

    Args:
        models: the time function of each device.
        total: samples in the global batch.
        min_samples: the fewest that each device may get, at least 1.
        max_samples: the most that each device may get; None for no limit.
        multiple_of: all devices but one hold a multiple of it; that one takes the rest.

    Raises:
        PlanError: no split keeps to the bounds.
    """
    low = np.array(min_samples, dtype=np.int64)
    high = np.array(
        [total if most is None else min(most, total) for most in max_samples],
        dtype=np.int64,
    )
    if not len(models) == len(low) == len(high) or low.size == 0 or low.min() < 1 or multiple_of < 1:
        raise _impossible(total, min_samples, max_samples, multiple_of)

    fleet = _Fleet(models)
    ladder = _choose_ladder(fleet, low, high, total, multiple_of)
    if ladder is None:
        raise _impossible(total, min_samples, max_samples, multiple_of)
    too_early_s, _ = _narrow(
        lambda deadline_s: bool(ladder.below(fleet.samples_within(deadline_s)).sum() >= total),
        slowest_s=float(fleet.step_s(ladder.last).max()),
    )
    shares = ladder.below(fleet.samples_within(too_early_s))
    return _hand_out(models, shares.tolist(), ladder.last.tolist(), total, multiple_of)


def share_by_speed(
    total: int,
    speeds: Sequence[float],
    min_samples: Sequence[int] | None = None,
    max_samples: Sequence[int | None] | None = None,
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """Split `total` samples in proportion to `speeds`: the optimum for devices without fixed time.

    Speeds are relative, so they may as well be the shares that a user asked for; shares that sum
    to `total` come back as they are.
    """
    if not all(0 < speed < math.inf for speed in speeds):
        raise PlanError(f"every share or speed must be a finite number above zero, found {list(speeds)}")
    fastest = max(speeds, default=1.0)
    models = [DeviceModel(fastest / speed) for speed in speeds]
    return solve(
        models,
        total,
        [1] * len(speeds) if min_samples is None else min_samples,
        [None] * len(speeds) if max_samples is None else max_samples,
        multiple_of,
    )


def _narrow(in_time: Callable[[float], bool], slowest_s: float) -> tuple[float, float]:
    """The last deadline that is too early and the first that is not, equal to the last bits.

    Starts from twice the slowest step: the inverse may round down, and even the top rungs must fit.
    """
    early_s, late_s = 0.0, 2 * slowest_s
    for _ in range(_HALVINGS):
        middle_s = (early_s + late_s) / 2
        if in_time(middle_s):
            late_s = middle_s
        else:
            early_s = middle_s
    return early_s, late_s


def _choose_ladder(
    fleet: _Fleet, low: _Samples, high: _Samples, total: int, multiple_of: int
) -> _Ladder | None:
    """Multiples for all devices but the one that should take the rest; None if no split is allowed."""
    even, odd = (
        _Ladder(low, high, multiple_of, 0),
        _Ladder(low, high, multiple_of, total % multiple_of),
    )
    closed = even.first > even.last
    fewest = even.first.sum() - even.first + odd.first
    most = even.last.sum() - even.last + odd.last
    others_open = np.count_nonzero(closed) - closed == 0
    fits = others_open & (odd.first <= odd.last) & (fewest <= total) & (total <= most)
    if not fits.any():
        return None
    if total % multiple_of == 0:
        return even

    # With this device off the multiples, nothing ends before the first rungs of all are done.
    first_s = fleet.step_s(even.first)
    others_s = np.full_like(first_s, first_s.max())
    others_s[first_s.argmax()] = np.delete(first_s, first_s.argmax()).max(initial=0.0)
    earliest_s = np.where(fits, np.maximum(others_s, fleet.step_s(odd.first)), np.inf)

    def reach(deadline_s: float) -> _Samples:
        samples = fleet.samples_within(deadline_s)
        rungs = even.below(samples)
        return np.where(earliest_s <= deadline_s, rungs.sum() - rungs + odd.below(samples), 0)

    top_s = np.maximum(fleet.step_s(even.last), fleet.step_s(odd.last))
    _, in_time_s = _narrow(lambda deadline_s: bool(reach(deadline_s).max() >= total), float(top_s.max()))
    by_speed = fleet.fastest_first()
    absorber = by_speed[reach(in_time_s)[by_speed].argmax()]
    even.first[absorber], even.last[absorber] = odd.first[absorber], odd.last[absorber]
    return even


def _hand_out(
    models: Sequence[DeviceModel],
    shares: list[int],
    last: list[int],
    total: int,
    stride: int,
) -> tuple[int, ...]:
    """Raise `shares` rung by rung to `total`, always where the next rung is finished first."""
    rungs = [
        (model.step_s(share + stride), model, rank)
        for rank, (model, share) in enumerate(zip(models, shares, strict=True))
        if share < last[rank]
    ]
    heapq.heapify(rungs)
    for _ in range((total - sum(shares)) // stride):
        _, model, rank = rungs[0]
        shares[rank] += stride
        if shares[rank] < last[rank]:
            heapq.heapreplace(rungs, (model.step_s(shares[rank] + stride), model, rank))
        else:
            heapq.heappop(rungs)
    return tuple(shares)


def _impossible(
    total: int,
    min_samples: Sequence[int],
    max_samples: Sequence[int | None],
    multiple_of: int,
) -> PlanError:
    most = ["no limit" if samples is None else samples for samples in max_samples]
    return PlanError(
        f"{total} samples cannot be shared out with min_samples={list(min_samples)} (at least 1 each, together at "
        f"most {total}), max_samples={most} (together at least {total}) and multiple_of={multiple_of} (for all "
        "devices but one). Change the global batch size or the bound that does not fit."
    )
