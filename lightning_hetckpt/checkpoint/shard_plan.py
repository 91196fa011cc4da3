"""Which rank writes which rows of which tensor to which drive: the same answer on every rank, without a word.

The bytes of all tensors, laid end to end, are cut into one equal part per rank, and each part over that rank's
drives in proportion to their speed. A cut falls on a row border, so a stripe holds at most one piece of a tensor.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

from lightning_hetckpt.checkpoint.layout import owned_stripe_name, stripe_name
from lightning_hetckpt.checkpoint.manifest import DTYPE_BYTES, PieceEntry, TensorEntry
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

__all__ = [
    "DTYPE_BYTES",
    "Piece",
    "StripePlan",
    "TensorSpec",
    "file_tensors",
    "fingerprint",
    "plan_owned",
    "plan_stripes",
]


Weights: TypeAlias = Sequence[float] | Sequence[Sequence[float]]  # of each drive, for all ranks or for each


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor before its bytes: enough to plan where they go."""

    name: str
    dtype: str  # safetensors code of the stored bytes
    shape: tuple[int, ...]  # as stored: a complex tensor's real view ends in 2
    complex: str | None = None  # "complex64" or "complex128"

    @property
    def rows(self) -> int:
        """Rows along the first dimension; a tensor without dimensions is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row, row + rows) of a tensor, `offset` bytes from the start of the stripe's data section.

    `columns` is (start, size) in each further dimension where the piece holds only a part of its rows.
    """

    name: str
    row: int
    rows: int
    nbytes: int
    offset: int
    columns: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StripePlan:
    """One file: written by `rank` on its drive number `drive`, its pieces end to end."""

    file: str
    rank: int
    drive: int
    pieces: tuple[Piece, ...]
    data_bytes: int


@dataclass(frozen=True, slots=True, order=True)
class _Cut:
    """A place in the stream of all tensors: before `row` of the tensor number `tensor`."""

    tensor: int
    row: int


def plan_stripes(
    tensors: Sequence[TensorSpec], world_size: int, drive_weights: Weights
) -> tuple[StripePlan, ...]:
    """Share the tensors out over all ranks and drives; stripes that would be empty are left out.

    No rank gets more than the mean plus one row of a tensor that it is cut in. Tensors without
    elements or dimensions lie whole in one stripe.

    Args:
        tensors: in the order in which every rank knows them.
        world_size: ranks that write.
        drive_weights: the share of each drive of a rank, in any unit; 0 leaves a drive out. One such list
            holds for all ranks, a list of them has one for each rank.
    """
    stream = _stream(tensors)
    return tuple(
        _stripe(stripe_name(rank, drive), rank, drive, _between(stream, start, end))
        for rank, drive, start, end in _shares(stream, world_size, drive_weights)
    )


def plan_owned(tensors: Sequence[TensorSpec], rank: int = 0, drive: int = 0) -> StripePlan:
    """One stripe that holds all of these tensors whole, for what `rank` alone owns."""
    stream = _stream(tensors)
    return _stripe(owned_stripe_name(rank), rank, drive, ((spec, 0, spec.rows) for spec in stream))


def fingerprint(tensors: Sequence[TensorSpec], world_size: int, drive_weights: Weights) -> str:
    """16 hex digits that are equal exactly where plan and tensors (name, dtype, shape) are."""
    stream = _stream(tensors)
    specs = [(spec.name, spec.dtype, spec.shape, spec.complex) for spec in stream]
    digest = hashlib.blake2b(repr(specs).encode(), digest_size=8)
    digest.update(repr(_shares(stream, world_size, drive_weights)).encode())
    return digest.hexdigest()


def file_tensors(
    stripes: Iterable[StripePlan], specs: Mapping[str, TensorSpec], headers: Mapping[str, int]
) -> dict[str, TensorEntry]:
    """Where each tensor lies, for the manifest.

    Args:
        stripes: all stripes of a checkpoint, of every rank.
        specs: the tensors by name.
        headers: by file, the bytes before its data section (the length of its header).
    """
    pieces: dict[str, list[PieceEntry]] = {}
    for stripe in stripes:
        data_start = headers[stripe.file]
        for p in stripe.pieces:
            pieces.setdefault(p.name, []).append(
                PieceEntry(stripe.file, data_start + p.offset, p.row, p.rows, p.columns)
            )
    return {
        name: TensorEntry(
            specs[name].dtype,
            specs[name].shape,
            tuple(sorted(of, key=lambda p: (p.row, p.columns))),
            specs[name].complex,
        )
        for name, of in pieces.items()
    }


def _stream(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors in the order in which their bytes are laid end to end.

    Wide items come first: then every piece starts at a multiple of its item size in any stripe,
    as safetensors itself writes them, and can be viewed in place.
    """
    names = {spec.name for spec in tensors}
    if len(names) != len(tensors):
        raise CheckpointError(f"{len(tensors) - len(names)} tensor names stand twice, expected each once.")
    for spec in tensors:
        if spec.dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"{spec.name}: a stripe cannot hold the dtype {spec.dtype}; keep the tensor in meta.pt."
            )
    if "__metadata__" in names:
        raise CheckpointError(
            "A tensor is named __metadata__, which safetensors keeps for itself; rename it."
        )
    return sorted(tensors, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def _shares(
    stream: Sequence[TensorSpec], world_size: int, drive_weights: Weights
) -> list[tuple[int, int, _Cut, _Cut]]:
    """(rank, drive, first cut, last cut) of each share that holds a tensor."""
    if world_size < 1:
        raise ConfigurationError(f"A plan for {world_size} ranks, expected at least 1.")
    by_rank = _weights_by_rank(drive_weights, world_size)
    ends = list(accumulate(spec.nbytes for spec in stream))
    total = ends[-1] if ends else 0
    # Fractions, because every rank must find the same cut and floats may round a border past the next one.
    starts = {weights: _starts(weights) for weights in set(by_rank)}
    shares = [
        (rank, drive, rank + part) for rank, weights in enumerate(by_rank) for drive, part in starts[weights]
    ]
    cuts = [_Cut(0, 0)]
    cuts += [_snap(stream, ends, total * share / world_size) for _, _, share in shares[1:]]
    cuts.append(_Cut(len(stream), 0))
    return [
        (rank, drive, start, end)
        for (rank, drive, _), (start, end) in zip(shares, pairwise(cuts), strict=True)
        if start < end
    ]


def _weights_by_rank(drive_weights: Weights, world_size: int) -> list[tuple[float, ...]]:
    rows = [tuple(row) for row in drive_weights if isinstance(row, Sequence)]
    if not rows:
        rows = [tuple(one for one in drive_weights if not isinstance(one, Sequence))] * world_size
    for row in set(rows):
        if not 0 < sum(row) < math.inf or min(row) < 0:
            raise ConfigurationError(
                f"Drive weights {list(row)}, expected numbers from 0 up and one above 0."
            )
    if len(rows) != world_size:
        raise ConfigurationError(f"Drive weights of {len(rows)} ranks, expected those of {world_size}.")
    return rows


def _starts(weights: Sequence[float]) -> list[tuple[int, Fraction]]:
    """(drive, where in its rank's part its share begins, from 0 to 1) of every drive that gets a share."""
    exact = {drive: Fraction(weight) for drive, weight in enumerate(weights) if weight > 0}
    whole = sum(exact.values())
    return [
        (drive, before / whole)
        for drive, before in zip(exact, accumulate(exact.values(), initial=Fraction(0)), strict=False)
    ]


def _snap(stream: Sequence[TensorSpec], ends: Sequence[int], border: Fraction) -> _Cut:
    """The row border nearest to byte `border` of the stream."""
    tensor = bisect_right(ends, border)
    if tensor == len(stream):
        return _Cut(tensor, 0)
    spec = stream[tensor]
    into = border - (ends[tensor] - spec.nbytes)
    row = math.floor(into / spec.row_bytes + Fraction(1, 2))
    return _Cut(tensor, row) if row < spec.rows else _Cut(tensor + 1, 0)


def _between(stream: Sequence[TensorSpec], start: _Cut, end: _Cut) -> Iterable[tuple[TensorSpec, int, int]]:
    """(tensor, first row, row behind the last) of everything between two cuts."""
    for number in range(start.tensor, min(end.tensor + 1, len(stream))):
        first = start.row if number == start.tensor else 0
        last = end.row if number == end.tensor else stream[number].rows
        if number < end.tensor or last > first:  # a tensor without bytes has no rows to count
            yield stream[number], first, last


def _stripe(file: str, rank: int, drive: int, parts: Iterable[tuple[TensorSpec, int, int]]) -> StripePlan:
    pieces: list[Piece] = []
    offset = 0
    for spec, first, last in parts:
        nbytes = (last - first) * spec.row_bytes
        pieces.append(Piece(spec.name, first, last - first, nbytes, offset))
        offset += nbytes
    return StripePlan(file, rank, drive, tuple(pieces), offset)
