"""How many samples fit into a device's memory at once, learnt from what its steps held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Of what a device may hold this share stays free: fragments, and batches of longer sequences.
_HEADROOM = 0.08
_MOST_SIZES = 32  # of the newest batch sizes


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What one rank held while it ran batches of one size."""

    samples: int  # at once
    peak_bytes: int  # most that was allocated
    limit_bytes: int  # that this rank may hold: what is free and what it has already


class MemoryLines:
    """What is known about the memory of every rank.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._lines = [MemoryLine() for _ in range(world_size)]

    def observe(self, stats: Sequence[MemoryStats | None]) -> None:
        """Learn from one window of each rank, in the order of the ranks; None where one has nothing to tell."""
        for line, seen in zip(self._lines, stats, strict=True):
            if seen is not None:
                line.observe(seen)

    def caps(self) -> list[int | None]:
        """The most samples that each rank can run at once; None where nothing is known."""
        return [line.cap() for line in self._lines]

    def state_dict(self) -> list[dict[str, Any]]:
        """What was learnt, as plain JSON data."""
        return [line.state_dict() for line in self._lines]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on from what `state_dict` gave."""
        for line, saved in zip(self._lines, state, strict=True):
            line.load_state_dict(saved)


class MemoryLine:
    """The line `bytes = fixed + per_sample * samples` of one device, never below a peak that was seen.

    From one batch size alone nothing is known to be fixed, so the line is proportional: that foresees too much
    for larger batches, and so never too little.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}  # samples -> most bytes; the newest sizes last
        self._limit_bytes = 0

    def observe(self, stats: MemoryStats) -> None:
        """Learn from one more window; the newest limit counts."""
        if stats.samples < 1 or stats.peak_bytes < 1:
            return
        peak_bytes = max(stats.peak_bytes, self._peaks.pop(stats.samples, 0))
        self._peaks[stats.samples] = peak_bytes
        self._limit_bytes = stats.limit_bytes
        while len(self._peaks) > _MOST_SIZES:
            del self._peaks[next(iter(self._peaks))]

    def bytes_for(self, samples: int) -> float | None:
        """What a batch of `samples` will hold at most; None before the first window."""
        if not self._peaks:
            return None
        fixed, per_sample = self._line()
        return fixed + per_sample * samples

    def cap(self) -> int | None:
        """The most samples that fit at once; None before the first window.

        At least one, and at least what has run within the limit.
        """
        if not self._peaks:
            return None
        fixed, per_sample = self._line()
        foreseen = int((self._limit_bytes * (1 - _HEADROOM) - fixed) // per_sample)
        ran = max((n for n, peak in self._peaks.items() if peak <= self._limit_bytes), default=1)
        return max(1, foreseen, ran)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain JSON data."""
        return {"peaks": [[n, peak] for n, peak in self._peaks.items()], "limit_bytes": self._limit_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._peaks = {int(n): int(peak) for n, peak in state["peaks"]}
        self._limit_bytes = int(state["limit_bytes"])

    def _line(self) -> tuple[float, float]:
        sizes = np.array(list(self._peaks), dtype=float)
        peaks = np.array(list(self._peaks.values()), dtype=float)
        spread = sizes - sizes.mean()
        largest = int(sizes.argmax())
        steepest = float(peaks[largest] / sizes[largest])
        slope = steepest
        if len(sizes) > 1:
            # No device needs a negative amount before the first sample, and each sample needs something.
            slope = float(spread @ (peaks - peaks.mean()) / (spread @ spread))
            slope = min(max(slope, 0.01 * steepest), steepest)
        return float((peaks - slope * sizes).max()), slope
