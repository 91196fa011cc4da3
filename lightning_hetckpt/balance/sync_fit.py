"""What the all-reduce adds to a step, learnt from what all ranks saw of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from lightning_hetckpt.balance.solver import SyncModel
from lightning_hetckpt.balance.throughput import WindowStats

# Relative error of a step's overlap point, at least, and where no spread was measured.
_LEAST_ERROR, _STEP_ERROR = 0.01, 0.1
# The overlap point belongs to the model and its buckets, not to the devices: it hardly wanders.
_WANDER = 0.01
# A transfer that seems to take longer is believed by this part a window only, for it was most likely waiting.
_RISE = 0.1
_LEAST_OVERLAP = 0.01  # no bucket is ready before anything was computed


class SyncFit:
    """The overlap point and the transfer times of the whole cluster.

    The overlap point is the mean of what the ranks saw, weighted by inverse variance (Cannikin, arXiv 2402.05302).
    Of the transfer times each rank sees its own waiting on peers, too; only the one that is ready last sees
    nothing else. So the smallest over the ranks counts, and of these over the windows again the lower ones.
    """

    def __init__(self) -> None:
        self._overlap: tuple[float, float] | None = None  # and its variance
        self._hidden_s: float | None = None
        self._tail_s: float | None = None

    def observe(self, windows: Iterable[WindowStats]) -> None:
        """Learn from what the ranks measured in the same steps."""
        windows = [window for window in windows if window.is_sound]
        self._overlap = _combined([*self._prior(), *_overlaps(windows)])
        self._hidden_s = _lower(self._hidden_s, [w.hidden_s for w in windows if w.hidden_s is not None])
        self._tail_s = _lower(self._tail_s, [w.tail_s for w in windows if w.tail_s is not None])

    def model(self) -> SyncModel | None:
        """The most likely numbers; None while one of the three was never seen."""
        if self._overlap is None or self._hidden_s is None or self._tail_s is None:
            return None
        overlap = min(max(self._overlap[0], _LEAST_OVERLAP), 1.0)
        return SyncModel(overlap, self._hidden_s, self._tail_s)

    def _prior(self) -> Iterable[tuple[float, float]]:
        if self._overlap is not None:
            overlap, variance = self._overlap
            yield overlap, variance + (_WANDER * overlap) ** 2

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain JSON data."""
        return {"overlap": self._overlap, "hidden_s": self._hidden_s, "tail_s": self._tail_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._overlap = None if state["overlap"] is None else (state["overlap"][0], state["overlap"][1])
        self._hidden_s, self._tail_s = state["hidden_s"], state["tail_s"]


def _overlaps(windows: Iterable[WindowStats]) -> Iterable[tuple[float, float]]:
    """Each rank's overlap point and its variance."""
    for window in windows:
        if window.backward_s and window.first_bucket_s is not None:
            overlap = window.first_bucket_s / window.backward_s
            if 0 < overlap <= 1:
                spread = window.spread_s / window.compute_s if window.spread_s is not None else _STEP_ERROR
                yield overlap, overlap**2 * (spread**2 + _LEAST_ERROR**2) / window.count


def _combined(values: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """The mean by inverse variance, and its own variance; None of nothing."""
    values = list(values)
    certainty = sum(1 / variance for _, variance in values)
    if not certainty:
        return None
    return sum(value / variance for value, variance in values) / certainty, 1 / certainty


def _lower(known_s: float | None, seen_s: Iterable[float]) -> float | None:
    """The smallest of the seconds seen, but only a part of a rise above those known."""
    smallest_s = min((seconds for seconds in seen_s if 0 <= seconds < math.inf), default=None)
    if smallest_s is None or known_s is None:
        return known_s if smallest_s is None else smallest_s
    return smallest_s if smallest_s <= known_s else known_s + _RISE * (smallest_s - known_s)
