"""When to share out the global batch anew, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetckpt.balance.evidence import stands_out
from lightning_hetckpt.balance.plan import BatchPlan, StepKey
from lightning_hetckpt.balance.probe import probe_shares
from lightning_hetckpt.balance.solver import (
    DeviceModel,
    OptPerf,
    SyncModel,
    device_s,
    optimise,
    optperf_over,
    step_s,
)
from lightning_hetckpt.balance.sync_fit import SyncFit
from lightning_hetckpt.balance.throughput import ThroughputModel, WindowStats
from lightning_hetckpt.errors import PlanError

# A new plan costs a little (allocator, kernel choice), so a gain below this is left alone.
_LEAST_GAIN = 0.03
# A probe waits until a plan has had this many windows to show what it is worth.
_WINDOWS_BEFORE_PROBE = 2
_STATE_VERSION = 2


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
        devices: what each rank computes on, by name; what was learnt is used again on the same ones only.
        explore: try a second batch size on every rank, even where the present split looks right, so that
            `predict` knows what other global batches would take.

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
        devices: Sequence[str] = (),
        explore: bool = False,
    ) -> None:
        self._bounds = (tuple(min_samples), tuple(max_samples), multiple_of)
        self._devices = list(devices)
        self._explore = explore
        self._ranks = [ThroughputModel() for _ in range(world_size)]
        self._sync = SyncFit()
        self._probed = False
        self._windows = 0  # since the latest plan was made
        # Bounds that can never hold are an error here, on every rank, and not at the first new plan.
        optimise([DeviceModel(1.0)] * world_size, global_batch_size, *self._bounds)

    def observe(self, stats: Sequence[WindowStats | None]) -> None:
        """Learn from one window of each rank, in the order of the ranks; None where one has nothing to tell."""
        for rank, window in zip(self._ranks, stats, strict=True):
            if window is not None:
                rank.observe(window)
        self._sync.observe([window for window in stats if window is not None])
        self._windows += 1

    def limit(self, total: int, max_samples: Sequence[int | None]) -> bool:
        """Keep further plans within these most samples of each rank; False, and no change, where `total` exceeds them.

        Args:
            total: samples of all ranks together.
            max_samples: None for no limit.
        """
        low, _, multiple_of = self._bounds
        try:
            optimise([DeviceModel(1.0)] * len(self._ranks), total, low, max_samples, multiple_of)
        except PlanError:
            return False
        self._bounds = (low, tuple(max_samples), multiple_of)
        return True

    def decide(self, current: BatchPlan, start: StepKey) -> BatchPlan | None:
        """A better plan from `start` on, or None to keep `current`.

        Keeps while a rank was never timed, while `current` has not begun, and while the predicted gain is
        below 3 % or could be mere noise. Where the speed of some rank at other batch sizes is anybody's guess
        and could be worth more than that, the sizes are moved a little to find out, once.
        """
        models = self._models()
        if models is None or start <= current.start:
            return None
        sync = self._sync_model()
        own_s = device_s(models, current.shares, sync)
        now_s = max(own_s)
        # What the way on may gain counts, for its first step alone can be too small to be worth a plan.
        aim = optimise(models, sum(current.shares), *self._bounds, sync)
        gain = 1 - aim.step_s / now_s
        errors_s = [rank.error_s(share) for rank, share in zip(self._ranks, current.shares, strict=True)]
        if gain > _LEAST_GAIN and stands_out([seconds - aim.step_s for seconds in own_s], errors_s):
            best = self._reachable(models, current.shares, sync) or aim
            if best.step_s < now_s:
                reason = f"{1 - best.step_s / now_s:.0%} faster than {now_s:.3g} s"
            elif best.step_s == now_s and self._leads_on(current.shares, best.shares):
                reason = f"on the way to {gain:.0%} faster than {now_s:.3g} s"
            else:
                return None
            self._windows = 0
            return BatchPlan(best.shares, start, reason, best.step_s)
        return self._probe(models, current, start, errors_s)

    def predict(self, total: int) -> OptPerf | None:
        """The best split of another global batch and its step time; None where that cannot be told.

        That is while a rank was never timed, outside the bounds, and where a rank would get far more
        samples than it was ever timed at.
        """
        return self.predict_over([total])[0]

    def predict_over(self, totals: Sequence[int]) -> tuple[OptPerf | None, ...]:
        """`predict` for many global batches at once."""
        models = self._models()
        if models is None:
            return (None,) * len(totals)
        reach = self._within_reach([0] * len(models))
        low, _, multiple_of = self._bounds
        return optperf_over(models, totals, low, reach, multiple_of, self._sync_model())

    def input_bound(self) -> tuple[int, ...]:
        """The ranks that wait for their input much of the time; a smaller share is no cure for that."""
        return tuple(number for number, rank in enumerate(self._ranks) if rank.input_bound)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt about each rank, as plain JSON data."""
        return {
            "version": _STATE_VERSION,
            "devices": list(self._devices),
            "models": [rank.state_dict() for rank in self._ranks],
            "sync": self._sync.state_dict(),
            "probed": self._probed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; what was learnt on other devices says nothing here."""
        same = state["version"] == _STATE_VERSION and state["devices"] == self._devices
        if same and len(state["models"]) == len(self._ranks):
            for rank, saved in zip(self._ranks, state["models"], strict=True):
                rank.load_state_dict(saved)
            self._sync.load_state_dict(state["sync"])
            self._probed = bool(state["probed"])

    def _models(self) -> list[DeviceModel] | None:
        """The lines of all ranks; None while one of them was never timed."""
        lines = [line for rank in self._ranks if (line := rank.line()) is not None]
        return lines if len(lines) == len(self._ranks) else None

    def _sync_model(self) -> SyncModel | None:
        """The all-reduce, as soon as the backward passes that it hides behind are all known."""
        return self._sync.model() if all(rank.knows_backward for rank in self._ranks) else None

    def _reachable(
        self, models: Sequence[DeviceModel], shares: Sequence[int], sync: SyncModel | None
    ) -> OptPerf | None:
        """The best split in which no rank grows far beyond what it was timed at; None where there is none.

        A first plan of the user's own may lie outside the bounds; then the way in may be far.
        """
        low, _, multiple_of = self._bounds
        (best,) = optperf_over(models, [sum(shares)], low, self._within_reach(shares), multiple_of, sync)
        return best

    def _within_reach(self, shares: Sequence[int]) -> list[int | None]:
        """The most samples of each rank for which its line can be trusted, and no fewer than it has now."""
        # Only growth is held back: with fewer samples a device surely takes no longer than it does now.
        reach = [max(share, rank.reach) for rank, share in zip(self._ranks, shares, strict=True)]
        return [
            far if most is None else min(far, most) for far, most in zip(reach, self._bounds[1], strict=True)
        ]

    def _leads_on(self, shares: Sequence[int], then: Sequence[int]) -> bool:
        """Whether a rank would get more than it ever had, after which it may get more again."""
        limits = [max(share, rank.most_timed) for share, rank in zip(shares, self._ranks, strict=True)]
        return any(share > limit for share, limit in zip(then, limits, strict=True))

    def _probe(
        self, models: Sequence[DeviceModel], current: BatchPlan, start: StepKey, errors_s: Sequence[float]
    ) -> BatchPlan | None:
        """A plan only a little off the present one, that tells about lines which are anybody's guess."""
        if self._probed or self._windows < _WINDOWS_BEFORE_PROBE:
            return None
        sync = self._sync_model()
        shares = probe_shares(
            self._ranks,
            models,
            current.shares,
            self._bounds,
            sync,
            errors_s,
            self._explore,
        )
        if shares is None:
            return None
        self._probed, self._windows = True, 0
        return BatchPlan(shares, start, "a probe at other batch sizes", step_s(models, shares, sync))
