"""A second batch size on purpose, where nobody could tell how a device's time depends on it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetckpt.balance.evidence import stands_out
from lightning_hetckpt.balance.solver import DeviceModel, SyncModel, device_s, optimise, solve
from lightning_hetckpt.balance.throughput import ThroughputModel
from lightning_hetckpt.errors import PlanError

# Nothing below this gain is worth looking for.
_LEAST_GAIN = 0.03
# What the fixed part may well be is this many standard deviations more than it seems.
_HOPE = 2.0
# No share moves by more than this part of itself: enough to tell a slope, and cheap should it not pay.
_MOVE = 8


def probe_shares(
    ranks: Sequence[ThroughputModel],
    models: Sequence[DeviceModel],
    shares: Sequence[int],
    bounds: tuple[Sequence[int], Sequence[int | None], int],
    sync: SyncModel | None,
    errors_s: Sequence[float],
    explore: bool,
) -> tuple[int, ...] | None:
    """Shares at most an eighth off the present ones, or None where knowing more cannot pay.

    It can where the slowest device could hand on samples to others that may take them almost for free: then these
    get some. To learn how all devices behave at other sizes (`explore`) every second one gives some to the next.

    Args:
        ranks: what is known about each device.
        models: their most likely lines.
        shares: the split in force.
        bounds: fewest and most samples of each device, and the multiple of all shares but one.
        sync: the all-reduce.
        errors_s: one standard deviation of each device's seconds.
        explore: whether any line that is a guess is a reason to probe.
    """
    guessed = [rank.is_guess for rank in ranks]
    own_s = [model.step_s(share) for model, share in zip(models, shares, strict=True)]
    hopeful = [
        rank.turned(share, _HOPE) if guess and seconds < max(own_s) else model
        for rank, model, share, guess, seconds in zip(ranks, models, shares, guessed, own_s, strict=True)
    ]
    seen_s = device_s(models, shares, sync)
    try:
        hoped_s = optimise(hopeful, sum(shares), *bounds, sync).step_s
        # What may be gained with luck is the more easily mistaken, by twice as much.
        doubled_s = [2 * error for error in errors_s]
        if hoped_s < (1 - _LEAST_GAIN) * max(seen_s) and stands_out(
            [each - hoped_s for each in seen_s], doubled_s
        ):
            return _moved(hopeful, shares, bounds, sync)
        if explore and any(guessed):
            # As if every second device were much slower.
            uneven = [
                DeviceModel(seconds / share * (1 + number % 2))
                for number, (seconds, share) in enumerate(zip(own_s, shares, strict=True))
            ]
            return _moved(uneven, shares, bounds, None)
    except PlanError:  # a user's own first plan may lie outside the bounds
        return None
    return None


def _moved(
    models: Sequence[DeviceModel],
    shares: Sequence[int],
    bounds: tuple[Sequence[int], Sequence[int | None], int],
    sync: SyncModel | None,
) -> tuple[int, ...] | None:
    """The best split for `models` that is close to `shares`; None if that is the same one."""
    low, high, multiple_of = bounds
    step = [max(multiple_of, share // _MOVE, 1) for share in shares]
    least = [max(few, share - move) for few, share, move in zip(low, shares, step, strict=True)]
    most = [
        share + move if cap is None else min(cap, share + move)
        for cap, share, move in zip(high, shares, step, strict=True)
    ]
    moved = solve(models, sum(shares), least, most, multiple_of, sync)
    return None if moved == tuple(shares) else moved
