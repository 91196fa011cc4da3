"""The smallest parts of a stripe that an incremental checkpoint writes or leaves, and their hashes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_hetckpt.checkpoint.chunk_plan import ChunkPlan
from lightning_hetckpt.checkpoint.shard_plan import StripePlan

Hashes = NDArray[np.uint64]

_UNIT_BYTES = 64 * 1024  # of large tensors: a hash costs less than a thousandth of the copy
_SMALL_UNIT_BYTES = 4096  # where many tensors share a unit, one that moves should not take all others along
_LEAST_ROW_BYTES = 64  # shorter rows go together: every hash takes 8 bytes of memory
_BLOCK_BYTES = 2**20  # that is mixed at once, in the CPU's cache

_KEYS = np.random.default_rng(0x5EED).integers(1, 2**63, 8192, dtype=np.uint64)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # Stafford's "Mix13", as in splitmix64


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of one buffer that are cut into units of one size, the last of which may be shorter."""

    at: int
    nbytes: int
    unit_bytes: int

    @property
    def units(self) -> int:
        """How many there are."""
        return -(-self.nbytes // self.unit_bytes)


def segments(
    stripe: StripePlan, chunk: ChunkPlan, sparse: Mapping[str, int], unit_bytes: int = _UNIT_BYTES
) -> tuple[Segment, ...]:
    """How a buffer is cut: by rows where rows change one by one, else by size, and never across a large tensor's border.

    Args:
        sparse: name of each tensor whose rows change one by one, and the bytes of a row.
        unit_bytes: of all others.
    """
    found: list[Segment] = []
    end = 0
    large = chunk.large
    for number, start, at, nbytes in zip(large.pieces, large.starts, large.ats, large.sizes, strict=True):
        if at > end:
            found.append(Segment(end, at - end, _SMALL_UNIT_BYTES))
        row_bytes = sparse.get(stripe.pieces[number].name)
        if row_bytes is None:
            found.append(Segment(at, nbytes, unit_bytes))
        else:
            found += _rows(start, at, nbytes, row_bytes)
        end = at + nbytes
    if end < chunk.nbytes:
        found.append(Segment(end, chunk.nbytes - end, _SMALL_UNIT_BYTES))
    return tuple(found)


def _rows(start: int, at: int, nbytes: int, row_bytes: int) -> Iterator[Segment]:
    """Whole rows in between what a buffer's borders cut off."""
    unit_bytes = math.lcm(row_bytes * -(-_LEAST_ROW_BYTES // row_bytes), 8)
    head = min(-start % unit_bytes, nbytes)
    tail = (nbytes - head) % unit_bytes
    middle = nbytes - head - tail
    for offset, size, unit in ((0, head, head), (head, middle, unit_bytes), (head + middle, tail, tail)):
        if size:
            yield Segment(at + offset, size, unit)


def hashes(view: memoryview, cut: tuple[Segment, ...]) -> Hashes:
    """One hash of 64 bits for each unit, in order."""
    found = [np.empty(0, np.uint64)]
    for segment in cut:
        part = view[segment.at : segment.at + segment.nbytes]
        size = segment.unit_bytes
        if size < _SMALL_UNIT_BYTES and size % 8 == 0 and segment.nbytes % size == 0:
            found.append(_mixed(part, size))
        else:
            digests = [xxhash.xxh3_64_intdigest(part[at : at + size]) for at in range(0, len(part), size)]
            found.append(np.array(digests, np.uint64))
    return np.concatenate(found)


def _mixed(part: memoryview, unit_bytes: int) -> Hashes:
    """Hashes of short rows, many at once: a call for each would take longer than the rows do.

    Every word is mixed with a key of its column, so that no two columns cancel each other, and the sum once more.
    """
    words = np.frombuffer(part, np.uint64).reshape(-1, unit_bytes // 8)
    keys = _KEYS[: words.shape[1]]
    found = np.empty(len(words), np.uint64)
    rows = max(1, _BLOCK_BYTES // unit_bytes)
    for first in range(0, len(words), rows):
        block = _mix(words[first : first + rows] + keys)
        found[first : first + rows] = _mix(block.sum(axis=1, dtype=np.uint64))
    return found


def _mix(words: Hashes) -> Hashes:
    words ^= words >> np.uint64(30)
    words *= _A
    words ^= words >> np.uint64(27)
    words *= _B
    words ^= words >> np.uint64(31)
    return words


def runs(changed: NDArray[np.bool_], cut: tuple[Segment, ...]) -> list[tuple[int, int]]:
    """(first byte, bytes) of the units that changed, neighbours together."""
    found: list[tuple[int, int]] = []
    first = 0
    for segment in cut:
        marks = changed[first : first + segment.units]
        first += segment.units
        edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]]).astype(np.int8)))
        for start, stop in edges.reshape(-1, 2).tolist():
            at = segment.at + start * segment.unit_bytes
            end = min(segment.at + stop * segment.unit_bytes, segment.at + segment.nbytes)
            if found and sum(found[-1]) == at:
                found[-1] = found[-1][0], end - found[-1][0]
            else:
                found.append((at, end - at))
    return found
