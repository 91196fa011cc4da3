"""When to share out the global batch anew, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetckpt.balance.plan import BatchPlan, StepKey
from lightning_hetckpt.balance.solver import DeviceModel, solve
from lightning_hetckpt.balance.throughput import ThroughputModel, WindowStats
from lightning_hetckpt.errors import PlanError

# A new plan costs a little (allocator, kernel choice), so a gain below this is left alone.
_LEAST_GAIN = 0.03
# No share grows beyond the largest batch that the device was timed at by more than this factor.
_REACH = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """A split of a global batch, and the seconds that the slowest rank should need for it."""

    shares: tuple[int, ...]
    step_s: float


class Controller:
    """Watches how long each rank computes and makes a new plan where that surely pays.

    Pure: it has no clock, knows no rank of its own and talks to nobody. The same observations give the
    same decisions.

    Args:
        world_size: number of ranks.
        global_batch_size: samples of all ranks together.
        min_samples: fewest samples of each rank.
        max_samples: most samples of each rank; None for no limit.
        multiple_of: all shares but one are multiples of it.

    Raises:
        PlanError: no split keeps to the bounds.
    """

    def __init__(
        self,
        world_size: int,
        global_batch_size: int,
        min_samples: Sequence[int],
        max_samples: Sequence[int | None],
        multiple_of: int = 1,
    ) -> None:
        self._global_batch_size = global_batch_size
        self._min_samples = tuple(min_samples)
        self._max_samples = tuple(max_samples)
        self._multiple_of = multiple_of
        self._models = [ThroughputModel() for _ in range(world_size)]
        # Bounds that can never hold are an error here, on every rank, and not at the first new plan.
        solve(
            [DeviceModel(1.0)] * world_size,
            global_batch_size,
            min_samples,
            max_samples,
            multiple_of,
        )

    def observe(self, stats: Sequence[WindowStats | None]) -> None:
        """Learn from one window of each rank, in the order of the ranks; None where one has nothing to tell."""
        for model, window in zip(self._models, stats, strict=True):
            if window is not None:
                model.observe(window)

    def decide(self, current: BatchPlan, start: StepKey) -> BatchPlan | None:
        """A better plan from `start` on, or None to keep `current`.

        Keeps while a rank was never timed, while `current` has not begun, and while the predicted gain is
        below 3 % or could be mere noise.
        """
        lines = [line for model in self._models if (line := model.line()) is not None]
        if len(lines) < len(self._models) or start <= current.start:
            return None
        shares = self._best(lines, current.shares)
        now_s, then_s = _slowest_s(lines, current.shares), _slowest_s(lines, shares)
        gain = 1 - then_s / now_s
        if gain <= max(_LEAST_GAIN, self._chance_gain(current.shares)):
            return None
        return BatchPlan(shares, start, f"{gain:.0%} faster than {now_s:.3g} s", then_s)

    def predict(self, total: int) -> Prediction | None:
        """The best split of a global batch of `total` samples; None while a rank was never timed, or if none fits."""
        lines = [line for model in self._models if (line := model.line()) is not None]
        if len(lines) < len(self._models):
            return None
        try:
            shares = solve(lines, total, self._min_samples, self._max_samples, self._multiple_of)
        except PlanError:
            return None
        return Prediction(shares, _slowest_s(lines, shares))

    def change_total(self, total: int) -> None:
        """Decide about global batches of `total` samples from now on."""
        self._global_batch_size = total

    def state_dict(self) -> dict[str, Any]:
        """What was learnt about each rank, as plain JSON data."""
        return {"version": 1, "models": [model.state_dict() for model in self._models]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; what other numbers of ranks have learnt says nothing here."""
        if state["version"] == 1 and len(state["models"]) == len(self._models):
            for model, saved in zip(self._models, state["models"], strict=True):
                model.load_state_dict(saved)

    def _best(self, lines: Sequence[DeviceModel], shares: Sequence[int]) -> tuple[int, ...]:
        """The best split in which no rank grows far beyond what it was timed at."""
        total, low = self._global_batch_size, self._min_samples
        within_reach: list[int | None] = []
        for model, share, most in zip(self._models, shares, self._max_samples, strict=True):
            # Only growth is held back: with fewer samples a device surely takes no longer than it does now.
            reach = max(share, model.most_timed * _REACH)
            within_reach.append(reach if most is None else min(reach, most))
        try:
            return solve(lines, total, low, within_reach, self._multiple_of)
        except PlanError:
            # A first plan of the user's own may lie outside the bounds; then the way in may be far.
            return solve(lines, total, low, self._max_samples, self._multiple_of)

    def _chance_gain(self, shares: Sequence[int]) -> float:
        """The gain that ranks of equal speed would seem to offer by noise alone.

        The slowest of W noisy ranks stands out by about sqrt(2 ln W) standard deviations; one and a
        half more make a mistake rare.
        """
        errors = [model.relative_error(share) for model, share in zip(self._models, shares, strict=True)]
        typical = math.sqrt(sum(error**2 for error in errors) / len(errors))
        return typical * (1.5 + math.sqrt(2 * math.log(len(errors))))


def _slowest_s(lines: Sequence[DeviceModel], shares: Sequence[int]) -> float:
    return max(line.step_s(share) for line, share in zip(lines, shares, strict=True))
