"""Bytes of a file that newer bytes in other files stand for: what an incremental checkpoint says of each stripe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hetckpt.checkpoint.manifest import OverlayEntry

Ranges = NDArray[np.int64]  # rows of (start, nbytes, number of the file, offset in it)


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """Ranges of one file, sorted and apart from each other, and where their bytes lie instead."""

    files: tuple[str, ...]
    ranges: Ranges

    @classmethod
    def of(cls, file: str, ranges: Sequence[tuple[int, int, int]]) -> Overlay:
        """From (start, nbytes, offset in `file`), sorted by start; neighbours that lie on end to end become one."""
        if not ranges:
            return NOTHING
        table = np.array(ranges, dtype=np.int64)
        rows = np.column_stack([table[:, 0], table[:, 1], np.zeros(len(table), np.int64), table[:, 2]])
        return cls((file,), _joined(rows))

    @classmethod
    def read(cls, entry: OverlayEntry) -> Overlay:
        """From a manifest."""
        return cls(entry.files, np.frombuffer(entry.ranges, "<i8").astype(np.int64).reshape(-1, 4))

    def entry(self) -> OverlayEntry:
        """For a manifest."""
        return OverlayEntry(self.files, self.ranges.astype("<i8").tobytes())

    @property
    def nbytes(self) -> int:
        """How much it covers."""
        return int(self.ranges[:, 1].sum())

    def over(self, older: Overlay) -> Overlay:
        """This one where it says something, else `older`."""
        if not len(self.ranges) or not len(older.ranges):
            return self if len(self.ranges) else older
        files = dict.fromkeys((*older.files, *self.files))
        number = {file: at for at, file in enumerate(files)}
        old, new = _numbered(older, number), _numbered(self, number)
        # Between two neighbouring borders of either nothing begins or ends.
        borders = np.unique(np.concatenate([one[:, 0] for one in (old, new)] + [_ends(old), _ends(new)]))
        starts, sizes = borders[:-1], np.diff(borders)
        rows = _covering(new, starts, _covering(old, starts, np.zeros((len(starts), 3), np.int64)))
        kept = rows[:, 0] > 0
        table = np.column_stack([starts, sizes, rows[:, 1], rows[:, 2]])[kept]
        return _without_idle_files(tuple(files), _joined(table))

    def split(self, start: int, nbytes: int) -> Iterator[tuple[int, int, str | None, int]]:
        """(start, nbytes, file, offset in it) of the parts of a range, in order; None is the file itself."""
        end = start + nbytes
        first = int(np.searchsorted(_ends(self.ranges), start, side="right"))
        last = int(np.searchsorted(self.ranges[:, 0], end, side="left"))
        at = start
        for begin, size, file, offset in self.ranges[first:last].tolist() if nbytes else ():
            if at < begin:
                yield at, begin - at, None, at
                at = begin
            stop = min(begin + size, end)
            yield at, stop - at, self.files[file], offset + at - begin
            at = stop
        if at < end:
            yield at, end - at, None, at


NOTHING = Overlay((), np.empty((0, 4), np.int64))


def _ends(ranges: Ranges) -> NDArray[np.int64]:
    return ranges[:, 0] + ranges[:, 1]


def _numbered(overlay: Overlay, number: dict[str, int]) -> Ranges:
    table = overlay.ranges.copy()
    table[:, 2] = np.array([number[file] for file in overlay.files], np.int64)[table[:, 2]]
    return table


def _covering(ranges: Ranges, starts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """`rows` of (1, file, offset) for the places `starts`, replaced where `ranges` cover them."""
    at = np.searchsorted(ranges[:, 0], starts, side="right") - 1
    inside = (at >= 0) & (starts < _ends(ranges)[at])
    found = ranges[at]
    shifted = np.column_stack([np.ones_like(starts), found[:, 2], found[:, 3] + starts - found[:, 0]])
    return np.where(inside[:, None], shifted, rows)


def _joined(table: Ranges) -> Ranges:
    """Neighbours that are neighbours in their file, too, as one."""
    before, behind = table[:-1], table[1:]
    follows = (
        (_ends(before) == behind[:, 0])
        & (before[:, 2] == behind[:, 2])
        & (before[:, 3] + before[:, 1] == behind[:, 3])
    )
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    joined = table[first]
    joined[:, 1] = np.add.reduceat(table[:, 1], first)
    return joined


def _without_idle_files(files: tuple[str, ...], table: Ranges) -> Overlay:
    used, numbers = np.unique(table[:, 2], return_inverse=True)
    table[:, 2] = numbers
    return Overlay(tuple(files[one] for one in used.tolist()), table)
