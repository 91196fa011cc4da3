"""Who takes how many samples, and from which step on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetckpt.errors import PlanError


class StepKey(NamedTuple):
    """A training batch, counted the same way on every rank; compares in time order."""

    epoch: int
    batch: int  # within the epoch, from 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The samples that each rank takes out of a global batch, from `start` on.

    Args:
        shares: samples per rank in a whole global batch; each at least 1.
        start: the first training batch that is cut this way.
        reason: why the plan was made, in a few words, for the log.
        predicted_step_s: the compute seconds that the slowest rank should need, where known.
    """

    shares: tuple[int, ...]
    start: StepKey = StepKey(0, 0)
    reason: str = "even"
    predicted_step_s: float | None = None

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) < 1:
            raise PlanError(
                f"a plan needs at least one sample for every rank, found {list(self.shares)}; "
                "raise the global batch size or use fewer ranks"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks together in one training batch."""
        return sum(self.shares)

    def split(self, samples: int, min_samples: Sequence[int] = ()) -> tuple[int, ...]:
        """Share out a batch of `samples`, the last of an epoch included; the parts sum to `samples`.

        A short batch is cut in proportion to the shares, never above a share and not below `min_samples` (one
        where none are given) as long as there are enough for all ranks. Where there are fewer samples than
        ranks, the first ranks take one each and the others none (they repeat a sample with weight zero).
        """
        if samples == self.global_batch_size:
            return self.shares
        world = len(self.shares)
        if samples < world:
            return tuple(1 if rank < samples else 0 for rank in range(world))
        least = [min(pair) for pair in zip(self.shares, min_samples or [1] * world, strict=True)]
        if samples < sum(least):
            least = [1] * world
        # The least for everybody; what each share has beyond that is cut down by largest remainder.
        beyond = [share - low for share, low in zip(self.shares, least, strict=True)]
        spare, whole = samples - sum(least), sum(beyond)
        parts = [low + spare * more // whole for low, more in zip(least, beyond, strict=True)]
        neediest = sorted(
            range(world),
            key=lambda rank: (-(spare * beyond[rank] % whole), -self.shares[rank], rank),
        )
        for rank in neediest[: samples - sum(parts)]:
            parts[rank] += 1
        return tuple(parts)


class PlanBook:
    """All plans of a run in the order in which they take effect.

    Every rank holds the same book, so every rank can tell every other rank's part of any
    step without asking.

    Args:
        first: the plan in force from the start.
        min_samples: fewest samples of each rank, kept to in short batches, too; none is one each.
    """

    def __init__(self, first: BatchPlan, min_samples: Sequence[int] = ()) -> None:
        self._plans = [first]
        self._min_samples = tuple(min_samples)

    @property
    def history(self) -> list[BatchPlan]:
        """Every plan so far, oldest first."""
        return list(self._plans)

    @property
    def latest(self) -> BatchPlan:
        """The plan that was added last; its start may still lie ahead."""
        return self._plans[-1]

    def add(self, plan: BatchPlan) -> None:
        """Let `plan` hold from its start on; it must start after every other plan.

        Another global batch may start with an epoch only: so within an epoch every batch has the same size, and a
        place in its order is one number.
        """
        last = self._plans[-1]
        if plan.start <= last.start or (
            plan.global_batch_size != last.global_batch_size and plan.start.batch != 0
        ):
            raise PlanError(
                f"the plan {plan.shares} from {tuple(plan.start)} cannot follow {last.shares} "
                f"from {tuple(last.start)}: it must start later, and keep the global batch size within an epoch"
            )
        self._plans.append(plan)

    def global_batch_size(self, epoch: int) -> int:
        """Samples of all ranks together in a whole batch of `epoch`."""
        return self.at(StepKey(epoch, 0)).global_batch_size

    def at(self, step: StepKey) -> BatchPlan:
        """The plan in force at `step`."""
        return self._plans[max(bisect_right(self._plans, step, key=lambda plan: plan.start) - 1, 0)]

    def split(self, step: StepKey, samples: int) -> tuple[int, ...]:
        """How the ranks share the `samples` of the batch at `step`."""
        return self.at(step).split(samples, self._min_samples)
