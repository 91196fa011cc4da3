"""Units cover a buffer once, and whatever byte changes is found in its unit and in no other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.chunk_plan import SMALL_BYTES, plan_chunks
from lightning_hetckpt.checkpoint.shard_plan import Piece, StripePlan
from lightning_hetckpt.checkpoint.units import Segment, hashes, runs, segments

CHUNK = 512 * 1024


def stripe_of(*shapes: tuple[int, int]) -> StripePlan:
    """One piece of (rows, bytes of a row) each, named by its number."""
    pieces, offset = [], 0
    for number, (rows, row_bytes) in enumerate(shapes):
        pieces.append(Piece(str(number), 0, rows, rows * row_bytes, offset))
        offset += rows * row_bytes
    return StripePlan("s", 0, 0, tuple(pieces), offset)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.sampled_from([4, 6, 40, 256, 5000])), min_size=1, max_size=5),
    st.sets(st.integers(0, 4)),
    st.integers(0, 2**32),
)
def test_every_byte_is_in_one_unit_and_a_change_shows_there(
    shapes: list[tuple[int, int]], by_row: set[int], seed: int
) -> None:
    stripe = stripe_of(*shapes)
    sparse = {str(number): shapes[number][1] for number in by_row if number < len(shapes)}
    rng = random.Random(seed)
    for chunk in plan_chunks(stripe, 4096, CHUNK):
        cut = segments(stripe, chunk, sparse)
        assert [0, *(one.at + one.nbytes for one in cut)] == [*(one.at for one in cut), chunk.nbytes]
        data = bytearray(rng.randbytes(chunk.nbytes))
        before = hashes(memoryview(data), cut)
        assert len(before) == sum(one.units for one in cut)
        place = rng.randrange(chunk.nbytes)
        data[place] ^= 1 << rng.randrange(8)
        ((start, nbytes),) = runs(hashes(memoryview(data), cut) != before, cut)
        assert start <= place < start + nbytes
        assert nbytes <= 64 * 1024


def test_one_row_that_changes_takes_no_other_along() -> None:
    stripe = stripe_of((10_000, 256))
    found = 0
    for chunk in plan_chunks(stripe, 4096 + 100, CHUNK):  # rows lie across the borders of buffers
        cut = segments(stripe, chunk, {"0": 256})
        zeros = bytearray(chunk.nbytes)
        before = hashes(memoryview(zeros), cut)
        for row in (0, 2047, 5000, 9999):
            place = 4096 + 100 + row * 256 - chunk.offset
            zeros[max(place, 0) : max(place + 256, 0)] = b"\1" * len(
                zeros[max(place, 0) : max(place + 256, 0)]
            )
        found += sum(nbytes for _, nbytes in runs(hashes(memoryview(zeros), cut) != before, cut))
    assert found == 4 * 256


@pytest.mark.parametrize("row_bytes", [8, 64, 256])
def test_rows_that_differ_have_different_hashes(row_bytes: int) -> None:
    rng = np.random.default_rng(1)
    rows = 200_000
    patterns = [
        rng.integers(0, 2, (rows, row_bytes // 4)).astype(np.float32),  # few bits, mostly the same
        np.eye(row_bytes // 4, dtype=np.float32)[rng.integers(0, row_bytes // 4, rows)],
        -np.float32(0) * rng.integers(-1, 2, (rows, row_bytes // 4)).astype(np.float32),  # signs of zero only
        np.repeat(np.arange(rows, dtype=np.float32)[:, None], row_bytes // 4, 1),
    ]
    for table in patterns:
        data = np.ascontiguousarray(table, np.float32)
        found = hashes(memoryview(data.view(np.uint8).reshape(-1)), (Segment(0, data.nbytes, row_bytes),))
        assert len(np.unique(found)) == len(np.unique(data.view(f"V{row_bytes}")))


def test_small_tensors_share_small_units() -> None:
    stripe = stripe_of((100, 4), (1, SMALL_BYTES + 8))
    (chunk,) = plan_chunks(stripe, 4096, CHUNK)
    assert segments(stripe, chunk, {}) == (
        Segment(0, 4096 + 400, 4096),
        Segment(4096 + 400, SMALL_BYTES + 8, 64 * 1024),
    )
