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
from itertools import accumulate
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


@dataclass(frozen=True, slots=True)
class _Stream:
    """The tensors in the order in which their bytes are laid end to end, measured once."""

    specs: list[TensorSpec]
    rows: list[int]
    row_bytes: list[int]
    ends: list[int]  # byte behind each tensor


# A cut is a place in the stream: before row `row` of tensor number `tensor`.
_Share: TypeAlias = tuple[int, int, int, int, int, int]  # rank, drive, tensor and row of first and last cut


def plan_stripes(
    tensors: Sequence[TensorSpec], world_size: int, drive_weights: Weights, rank: int | None = None
) -> tuple[StripePlan, ...]:
    """Share the tensors out over all ranks and drives; stripes that would be empty are left out.

    No rank gets more than the mean plus one row of a tensor that it is cut in. Tensors without
    elements or dimensions lie whole in one stripe.

    Args:
        tensors: in the order in which every rank knows them.
        world_size: ranks that write.
        drive_weights: the share of each drive of a rank, in any unit; 0 leaves a drive out. One such list
            holds for all ranks, a list of them has one for each rank.
        rank: whose stripes to work out; None is everybody's.
    """
    stream = _stream(tensors)
    return tuple(_stripe(stream, share) for share in _shares(stream, world_size, drive_weights, rank))


def plan_owned(tensors: Sequence[TensorSpec], rank: int = 0, drive: int = 0) -> StripePlan:
    """One stripe that holds all of these tensors whole, for what `rank` alone owns."""
    stream = _stream(tensors)
    pieces, nbytes = _pieces(stream, 0, 0, len(stream.specs), 0)
    return StripePlan(owned_stripe_name(rank), rank, drive, pieces, nbytes)


def fingerprint(tensors: Sequence[TensorSpec], world_size: int, drive_weights: Weights) -> str:
    """16 hex digits that are equal exactly where plan and tensors (name, dtype, shape) are."""
    stream = _stream(tensors)
    specs = [(spec.name, spec.dtype, spec.shape, spec.complex) for spec in stream.specs]
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


def _stream(tensors: Sequence[TensorSpec]) -> _Stream:
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
    specs = sorted(tensors, key=lambda spec: -DTYPE_BYTES[spec.dtype])
    return _Stream(
        specs,
        [spec.rows for spec in specs],
        [spec.row_bytes for spec in specs],
        list(accumulate(spec.nbytes for spec in specs)),
    )


def _shares(
    stream: _Stream, world_size: int, drive_weights: Weights, only_rank: int | None = None
) -> list[_Share]:
    """Each share that holds a tensor, in the order of the stream."""
    if world_size < 1:
        raise ConfigurationError(f"A plan for {world_size} ranks, expected at least 1.")
    by_rank = _weights_by_rank(drive_weights, world_size)
    ranks = range(world_size) if only_rank is None else range(only_rank, only_rank + 1)
    parts = {weights: _starts(weights) for weights in {by_rank[rank] for rank in ranks}}
    owners: list[tuple[int, int]] = []
    cuts: list[tuple[int, int]] = []
    for rank in ranks:
        whole, starts = parts[by_rank[rank]]
        for drive, start in starts:
            owners.append((rank, drive))
            cuts.append(_cut(stream, rank * whole + start, world_size * whole))
    if ranks.start == 0:
        cuts[0] = (0, 0)  # before the first tensor, also where that is empty
    cuts.append((len(stream.specs), 0) if ranks.stop == world_size else _cut(stream, ranks.stop, world_size))
    return [
        (*owner, *first, *last)
        for owner, first, last in zip(owners, cuts, cuts[1:], strict=False)
        if first < last
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


def _starts(weights: tuple[float, ...]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """A rank's part as a whole number of units, and (drive, units before it) of every drive that gets a share."""
    # Whole numbers, because every rank must find the same cut and floats may round a border past the next one.
    ratios = {drive: weight.as_integer_ratio() for drive, weight in enumerate(weights) if weight > 0}
    unit = math.lcm(*(below for _, below in ratios.values()))
    units = [above * (unit // below) for above, below in ratios.values()]
    return sum(units), tuple(zip(ratios, accumulate(units, initial=0), strict=False))


def _cut(stream: _Stream, part: int, of: int) -> tuple[int, int]:
    """The row border nearest to the byte that lies `part / of` of all bytes into the stream."""
    ends = stream.ends
    border = ends[-1] * part if ends else 0  # in `of`-ths of a byte
    tensor = bisect_right(ends, border // of)
    if tensor == len(ends):
        return tensor, 0
    row_parts = stream.row_bytes[tensor] * of
    into = border - (ends[tensor - 1] * of if tensor else 0)
    row = (2 * into + row_parts) // (2 * row_parts)
    return (tensor, row) if row < stream.rows[tensor] else (tensor + 1, 0)


def _stripe(stream: _Stream, share: _Share) -> StripePlan:
    rank, drive, *cuts = share
    pieces, nbytes = _pieces(stream, *cuts)
    return StripePlan(stripe_name(rank, drive), rank, drive, pieces, nbytes)


def _pieces(
    stream: _Stream, tensor: int, row: int, last_tensor: int, last_row: int
) -> tuple[tuple[Piece, ...], int]:
    """Everything between two cuts, end to end, and its bytes."""
    pieces: list[Piece] = []
    offset = 0
    while (tensor, row) < (last_tensor, last_row):
        rows = (stream.rows[tensor] if tensor < last_tensor else last_row) - row
        nbytes = rows * stream.row_bytes[tensor]
        pieces.append(Piece(stream.specs[tensor].name, row, rows, nbytes, offset))
        offset += nbytes
        tensor, row = tensor + 1, 0
    return tuple(pieces), offset
