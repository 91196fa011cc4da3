"""How often a snapshot pays: the formulas of FastPersist, and the interval that keeps the stall in bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

REVIEW_EVERY = 4  # snapshots from one look at the costs to the next
MOST_GROWTH = (
    4  # times the interval, in one review: a burst of other people's I/O must not silence us for hours
)
# A shorter interval must hold with costs this much higher. Two measurements of an unchanged job differ by less,
# so an interval is never shortened only to be lengthened again.
CAUTION = 1.3


def required_bytes_per_s(state_bytes: int, forward_backward_s: float, accumulate: int = 1) -> float:
    """The bandwidth from which on a checkpoint of every step stalls nobody: C / (g·(F+B)), FastPersist §3.

    Args:
        state_bytes: C, what all ranks write together.
        forward_backward_s: F+B, of one batch.
        accumulate: g, batches in one optimizer step: the state rests during all of them.
    """
    return state_bytes / (accumulate * forward_backward_s)


def stall_s(state_bytes: int, bytes_per_s: float, window_s: float) -> float:
    """How long the optimizer waits for a checkpoint: max(0, C/b - (F+B)), FastPersist §3.

    Args:
        bytes_per_s: b, of all drives together.
        window_s: F+B, the time in which the state rests; g·(F+B) with accumulation.
    """
    return max(0.0, state_bytes / bytes_per_s - window_s)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose the least time: sqrt(2·s·MTBF), Young 1974 and Daly 2006.

    Holds while `cost_s` is far below `mtbf_s`; where a checkpoint costs nothing, the answer is: always.

    Args:
        cost_s: s, what training loses to one checkpoint.
        mtbf_s: mean time between failures of the whole job.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """What one snapshot did to one rank, on its own clock."""

    own_s: float  # that the training thread gave to it whatever the interval: begin and fence
    durable_s: float  # from begin until it was durable; 0 where nobody would wait for that
    step_s: float  # of one optimizer step, snapshots excluded

    @property
    def is_known(self) -> bool:
        """Whether anything follows from it."""
        return 0 < self.step_s < math.inf


NOTHING_MEASURED = SnapshotCost(0.0, 0.0, math.inf)


def shortest_interval(cost: SnapshotCost, max_overhead: float) -> int:
    """The fewest steps between snapshots with which the stall stays below `max_overhead` of the time.

    With n steps between them a snapshot stalls training for `own_s + max(0, durable_s - n·step_s)`, since the
    next one waits until it is durable, and that may be `max_overhead·n·step_s` at most. Both branches of the
    maximum are linear in n.
    """
    for_own = cost.own_s / (max_overhead * cost.step_s)
    for_drives = (cost.own_s + cost.durable_s) / ((1 + max_overhead) * cost.step_s)
    return max(1, math.ceil(max(for_own, for_drives) * (1 - 1e-12)))


class Cadence:
    """The interval in force, in optimizer steps: never below `every_n_steps`, longer while snapshots cost too much.

    No clock and no rank in here: equal calls with equal numbers give equal intervals everywhere.

    Args:
        every_n_steps: the shortest interval.
        max_overhead: share of the training time that snapshots may take; None keeps the interval.
    """

    def __init__(self, every_n_steps: int, max_overhead: float | None) -> None:
        self.interval = every_n_steps
        self._shortest = every_n_steps
        self._max_overhead = max_overhead
        self._noted = 0
        self._costs: list[SnapshotCost] = []  # since the last review

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether a snapshot is due at `step`, the last one having been due at `last_step`."""
        # Grown, not divisible: two optimizers advance the step by two, and a step on which gradients were
        # only accumulated does not advance it at all.
        return step // self.interval != last_step // self.interval

    def note(self, cost: SnapshotCost | None) -> bool:
        """Remember what a snapshot cost, if that is known; whether it is time for a `review`.

        That depends on the number of calls alone, so it comes at the same snapshot on every rank.
        """
        if self._max_overhead is None:
            return False
        self._noted += 1
        if cost is not None and cost.is_known:
            self._costs.append(cost)
        return self._noted % REVIEW_EVERY == 0

    def typical(self) -> SnapshotCost:
        """The medians since the last review: one slow write or one validation says nothing about the next."""
        costs, self._costs = self._costs, []
        if not costs:
            return NOTHING_MEASURED
        return SnapshotCost(
            median(cost.own_s for cost in costs),
            median(cost.durable_s for cost in costs),
            median(cost.step_s for cost in costs),
        )

    def review(self, cost: SnapshotCost) -> bool:
        """Lengthen or shorten the interval to fit `cost`, on which all ranks agree; whether it changed."""
        if self._max_overhead is None or not cost.is_known:
            return False
        before = self.interval
        wanted = shortest_interval(cost, self._max_overhead)
        careful = SnapshotCost(CAUTION * cost.own_s, CAUTION * cost.durable_s, cost.step_s)
        if wanted > before:
            self.interval = min(wanted, MOST_GROWTH * before)
        else:
            self.interval = max(min(before, shortest_interval(careful, self._max_overhead)), self._shortest)
        return self.interval != before
