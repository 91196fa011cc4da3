"""Tells the units of a stripe that differ from the last time from those that do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_hetckpt.checkpoint.units import Hashes, Segment, hashes, runs


class Sieve:
    """Sees every buffer of a stripe once, in any order; for the thread of its drive.

    Args:
        cuts: how each buffer is cut into units.
        before: the hashes of the last time, buffer by buffer; None is to find everything changed.

    Attributes:
        after: the hashes of this time; those of buffers that were not shown are the old ones.
    """

    def __init__(self, cuts: Sequence[tuple[Segment, ...]], before: Sequence[Hashes] | None = None) -> None:
        self._cuts = cuts
        self._before = before
        self.after: list[Hashes] = [np.empty(0, np.uint64)] * len(cuts) if before is None else list(before)

    def changed(self, number: int, view: memoryview) -> list[tuple[int, int]]:
        """(first byte, bytes) of what is new in buffer `number`, neighbours together."""
        cut = self._cuts[number]
        found = hashes(view, cut)
        self.after[number] = found
        if self._before is None:
            return [(0, len(view))]
        return runs(found != self._before[number], cut)
