"""The split of a global batch with which the slowest device finishes as early as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_hetckpt.balance.optperf import (
    DeviceModel,
    Fleet,
    OptPerf,
    Samples,
    Seconds,
    SyncModel,
    device_s,
    step_s,
)
from lightning_hetckpt.errors import PlanError

__all__ = [
    "DeviceModel",
    "OptPerf",
    "SyncModel",
    "device_s",
    "optimise",
    "optperf_over",
    "share_by_speed",
    "solve",
    "step_s",
]

# Each halving gives one bit of the deadline, and a double has 53.
_HALVINGS = 60


def solve(
    models: Sequence[DeviceModel],
    total: int,
    min_samples: Sequence[int],
    max_samples: Sequence[int | None],
    multiple_of: int = 1,
    sync: SyncModel | None = None,
) -> tuple[int, ...]:
    """The shares of `optimise` alone."""
    return optimise(models, total, min_samples, max_samples, multiple_of, sync).shares


def optimise(
    models: Sequence[DeviceModel],
    total: int,
    min_samples: Sequence[int],
    max_samples: Sequence[int | None],
    multiple_of: int = 1,
    sync: SyncModel | None = None,
) -> OptPerf:
    """Whole numbers `b_i` that sum to `total` and make the step as short as it can be.

    Ties go to the faster device, then to the lower rank: the same numbers give the same split everywhere, and
    of two devices with equal bounds that both hold a multiple one that is faster in all ways never gets less.
    (DESIGN §5.2; OptPerf of Cannikin, arXiv 2402.05302.)

    Args:
        models: the time function of each device.
        total: samples in the global batch.
        min_samples: the fewest that each device may get, at least 1.
        max_samples: the most that each device may get; None for no limit.
        multiple_of: all devices but one hold a multiple of it; that one takes the rest.
        sync: the all-reduce; None minimises the compute time of the slowest device.

    Raises:
        PlanError: no split keeps to the bounds.
    """
    (best,) = optperf_over(models, [total], min_samples, max_samples, multiple_of, sync)
    if best is None:
        raise _impossible(total, min_samples, max_samples, multiple_of)
    return best


def optperf_over(
    models: Sequence[DeviceModel],
    totals: Sequence[int],
    min_samples: Sequence[int],
    max_samples: Sequence[int | None],
    multiple_of: int = 1,
    sync: SyncModel | None = None,
) -> tuple[OptPerf | None, ...]:
    """`optimise` for many global batches at once; None for each that the bounds do not allow.

    Water-filling finds a deadline by which too few samples are done, but hardly; the samples that are left go to
    the devices that then reach their next rung first.
    """
    low = np.array(min_samples, dtype=np.float64)
    caps = np.array([math.inf if most is None else most for most in max_samples])
    if not len(models) == len(low) == len(caps) or low.size == 0 or low.min() < 1 or multiple_of < 1:
        return (None,) * len(totals)
    fleet = Fleet(models, sync)
    # One row for each total, one column for each device.
    whole = np.array(totals, dtype=np.float64).reshape(-1, 1)
    ladder, allowed = _choose_ladder(fleet, low, np.minimum(caps, whole), whole, multiple_of)
    ladder, whole = ladder.rows(allowed), whole[allowed]
    shares = _fill(fleet, ladder, whole) if len(whole) else whole
    seconds = fleet.step_s(shares).max(axis=1) if len(whole) else whole
    results = iter(zip(shares, seconds, strict=True))
    return tuple(_optperf(fleet, caps, *next(results)) if fits else None for fits in allowed)


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


class _Ladder:
    """The sizes that each device may take: from `first` to `last` in strides of `multiple_of`."""

    def __init__(self, first: Samples, last: Samples, multiple_of: int) -> None:
        self.first = first
        self.last = last
        self.stride = multiple_of

    @classmethod
    def between(cls, low: Samples, high: Samples, multiple_of: int, rest: Samples) -> _Ladder:
        """All sizes within bounds that leave `rest` when divided by `multiple_of`."""
        first = low + (rest - low) % multiple_of
        return cls(np.broadcast_to(first, high.shape).copy(), high - (high - rest) % multiple_of, multiple_of)

    def rows(self, chosen: NDArray[np.bool_]) -> _Ladder:
        """The ladders of some of the totals only."""
        return _Ladder(self.first[chosen], self.last[chosen], self.stride)

    def below(self, samples: Samples) -> Samples:
        """The highest rung of each device that is at most `samples`, and at least the first one."""
        above: Samples = np.maximum(np.minimum(samples, self.last) - self.first, 0)
        rungs: Samples = self.first + np.floor(above / self.stride) * self.stride
        return rungs


def _narrow(
    in_time: Callable[[Seconds], NDArray[np.bool_]], slowest_s: Seconds, width_s: float = 0.0
) -> tuple[Seconds, Seconds]:
    """The last deadlines that are too early and the first that are not, at most `width_s` apart.

    Zero means equal to the last bits. Starts from twice the slowest step: the inverse may round down, and even
    the top rungs must fit.
    """
    early_s, late_s = np.zeros_like(slowest_s), 2 * slowest_s
    for _ in range(_HALVINGS):
        if (late_s - early_s).max(initial=0.0) <= width_s:
            break
        middle_s = (early_s + late_s) / 2
        enough = in_time(middle_s)
        early_s, late_s = np.where(enough, early_s, middle_s), np.where(enough, middle_s, late_s)
    return early_s, late_s


def _fill(fleet: Fleet, ladder: _Ladder, whole: Samples) -> Samples:
    """The shares of each total, by rungs of `ladder`."""

    def done(deadline_s: Seconds) -> Samples:
        return ladder.below(fleet.samples_within(deadline_s))

    # So narrow that no device has two rungs in between: then one look at the next ones tells who gets them.
    early_s, _ = _narrow(
        lambda deadline_s: done(deadline_s).sum(axis=1, keepdims=True) >= whole,
        fleet.step_s(ladder.last).max(axis=1, keepdims=True),
        width_s=fleet.least_slope_s * ladder.stride / 2,
    )
    shares = done(early_s)
    place = np.empty(shares.shape[1], dtype=np.int64)
    place[fleet.fastest_first()] = np.arange(shares.shape[1])
    ties = np.broadcast_to(place, shares.shape)
    while (left := (whole - shares.sum(axis=1, keepdims=True)) / ladder.stride).any():
        open_ = shares < ladder.last
        next_s = np.where(open_, fleet.step_s(shares + ladder.stride), np.inf)
        queue = np.argsort(np.lexsort((ties, next_s), axis=1), axis=1)
        shares = shares + ladder.stride * (open_ & (queue < left))
    return shares


def _choose_ladder(
    fleet: Fleet, low: Samples, high: Samples, whole: Samples, multiple_of: int
) -> tuple[_Ladder, NDArray[np.bool_]]:
    """Multiples for all devices but the one that should take the rest; and which totals have a split at all."""
    even = _Ladder.between(low, high, multiple_of, np.zeros_like(whole))
    odd = _Ladder.between(low, high, multiple_of, whole % multiple_of)
    closed = even.first > even.last
    fewest = even.first.sum(axis=1, keepdims=True) - even.first + odd.first
    most = even.last.sum(axis=1, keepdims=True) - even.last + odd.last
    others_open = np.count_nonzero(closed, axis=1, keepdims=True) - closed == 0
    fits = others_open & (odd.first <= odd.last) & (fewest <= whole) & (whole <= most)
    allowed = fits.any(axis=1)
    if not (whole[allowed] % multiple_of).any():
        return even, allowed

    # With this device off the multiples, nothing ends before the first rungs of all are done.
    rows, devices = np.arange(len(whole)), low.size
    first_s = fleet.step_s(even.first)
    others_s = np.repeat(first_s.max(axis=1, keepdims=True), devices, axis=1)
    second_s = np.partition(first_s, -2, axis=1)[:, -2] if devices > 1 else 0.0
    others_s[rows, first_s.argmax(axis=1)] = second_s
    earliest_s = np.where(fits, np.maximum(others_s, fleet.step_s(odd.first)), np.inf)

    def reach(deadline_s: Seconds) -> Samples:
        samples = fleet.samples_within(deadline_s)
        rungs = even.below(samples)
        more = np.where(earliest_s <= deadline_s, odd.below(samples) - rungs, -np.inf)
        done: Samples = more + rungs.sum(axis=1, keepdims=True)
        return done

    top_s = np.maximum(fleet.step_s(even.last), fleet.step_s(odd.last)).max(axis=1, keepdims=True)
    _, in_time_s = _narrow(lambda deadline_s: reach(deadline_s).max(axis=1, keepdims=True) >= whole, top_s)
    by_speed = fleet.fastest_first()
    absorber = by_speed[reach(in_time_s)[:, by_speed].argmax(axis=1)]
    even.first[rows, absorber] = odd.first[rows, absorber]
    even.last[rows, absorber] = odd.last[rows, absorber]
    return even, allowed


def _optperf(fleet: Fleet, caps: Samples, shares: Samples, seconds: float) -> OptPerf:
    which, slope = fleet.binding(shares)
    return OptPerf(
        shares=tuple(shares.astype(np.int64).tolist()),
        step_s=float(seconds),
        bound=tuple("communication" if line else "compute" for line in which.tolist()),
        marginal_s=tuple(np.where(shares < caps, slope, np.inf).tolist()),
    )


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
