"""Which bytes of which tensors fill each buffer of a stripe: worked out once per plan, not once per save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_hetckpt.checkpoint.shard_plan import StripePlan

# Up to here a call per tensor costs more than its bytes do.
SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Cuts:
    """Bytes that go from tensors into one buffer; column by column, since nobody should loop over them in Python."""

    pieces: tuple[int, ...] = ()  # numbers of the stripe's pieces
    starts: tuple[int, ...] = ()  # first byte within the tensor, row by row
    ats: tuple[int, ...] = ()  # first byte within the buffer
    sizes: tuple[int, ...] = ()  # bytes


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What one buffer holds, end to end: a part of the file's header, then cuts of tensors."""

    offset: int  # in the file
    nbytes: int
    header_bytes: int  # of the file's header, from `offset` on
    small: Cuts  # of at most 64 KiB
    large: Cuts


def plan_chunks(stripe: StripePlan, header_bytes: int, chunk_bytes: int) -> tuple[ChunkPlan, ...]:
    """Cut the file of `stripe` into buffers of `chunk_bytes`; only the last one may be shorter.

    Args:
        header_bytes: length of the header that the file begins with.
    """
    chunks: list[ChunkPlan] = []
    rest: list[tuple[int, int, int, int]] = []  # the cuts of the chunk that is being filled
    offset, used = 0, 0

    def full(header: int) -> None:
        nonlocal offset, used
        small = [cut for cut in rest if cut[3] <= SMALL_BYTES]
        large = [cut for cut in rest if cut[3] > SMALL_BYTES]
        chunks.append(ChunkPlan(offset, used, header, _columns(small), _columns(large)))
        rest.clear()
        offset, used = offset + used, 0

    header = 0
    for number, start, nbytes in _sources(stripe, header_bytes):
        done = 0
        while done < nbytes:
            taken = min(nbytes - done, chunk_bytes - used)
            if number < 0:
                header = taken
            else:
                rest.append((number, start + done, used, taken))
            done, used = done + taken, used + taken
            if used == chunk_bytes:
                full(header)
                header = 0
    if used:
        full(header)
    return tuple(chunks)


def _sources(stripe: StripePlan, header_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(number of the piece, its first byte within its tensor, bytes); the header is number -1."""
    yield -1, 0, header_bytes
    for number, piece in enumerate(stripe.pieces):
        if piece.nbytes:
            yield number, piece.row * (piece.nbytes // piece.rows), piece.nbytes


def _columns(cuts: list[tuple[int, int, int, int]]) -> Cuts:
    return Cuts(*zip(*cuts, strict=True)) if cuts else Cuts()
