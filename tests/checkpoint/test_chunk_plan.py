"""Filling buffers by plan gives the file's bytes, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.chunk_plan import SMALL_BYTES, plan_chunks
from lightning_hetckpt.checkpoint.shard_plan import Piece, StripePlan


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 5)), max_size=6),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_the_chunks_of_a_stripe_are_its_bytes_end_to_end(
    shapes: list[tuple[int, int, int]], header_bytes: int, chunk_bytes: int
) -> None:
    pieces, tensors, offset = [], [], 0
    for number, (row, rows, row_bytes) in enumerate(shapes):
        tensors.append(bytes((number * 40 + n) % 251 for n in range((row + rows) * row_bytes)))
        pieces.append(Piece(str(number), row, rows, rows * row_bytes, offset))
        offset += rows * row_bytes
    stripe = StripePlan("s", 0, 0, tuple(pieces), offset)
    header = bytes(255 - n for n in range(header_bytes))
    truth = header + b"".join(
        tensor[piece.row * row_bytes :]
        for tensor, piece, (_, _, row_bytes) in zip(tensors, pieces, shapes, strict=True)
    )

    found = b""
    chunks = plan_chunks(stripe, header_bytes, chunk_bytes)
    for chunk in chunks:
        assert chunk.offset == len(found)
        buffer = bytearray(chunk.nbytes)
        buffer[: chunk.header_bytes] = header[chunk.offset :][: chunk.header_bytes]
        for cuts in (chunk.small, chunk.large):
            for number, start, at, size in zip(cuts.pieces, cuts.starts, cuts.ats, cuts.sizes, strict=True):
                buffer[at : at + size] = tensors[number][start : start + size]
        found += buffer
    assert found == truth
    assert {chunk.nbytes for chunk in chunks[:-1]} <= {chunk_bytes}


def test_large_cuts_are_told_from_small_ones() -> None:
    sizes = [1, SMALL_BYTES, SMALL_BYTES + 1]
    pieces = tuple(Piece(str(n), 0, 1, size, sum(sizes[:n])) for n, size in enumerate(sizes))
    (chunk,) = plan_chunks(StripePlan("s", 0, 0, pieces, sum(sizes)), 8, 2**20)
    assert chunk.small.pieces == (0, 1)
    assert chunk.large.pieces == (2,)
