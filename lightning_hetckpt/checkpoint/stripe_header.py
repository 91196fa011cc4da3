"""The head of a stripe: what makes a file of raw rows a safetensors file that stock readers open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, padded
from lightning_hetckpt.checkpoint.manifest import (
    ID_PATTERN,
    DamageError,
    array,
    decode_json,
    fields,
    matching,
    measure,
    read_shape,
    text,
    whole,
)
from lightning_hetckpt.checkpoint.shard_plan import Piece, StripePlan, TensorSpec
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones
_LENGTH_BYTES = 8
_OPENING = b'{"__metadata__":{"snapshot":"'
_ID_FROM = _LENGTH_BYTES + len(_OPENING)
_ID_DIGITS = 16


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece as a stripe's header tells it: `shape` is the piece's own, `row` its first row in the tensor."""

    dtype: str
    shape: tuple[int, ...]
    row: int
    offset: int  # from the start of the data section
    nbytes: int
    columns: tuple[int, ...] = ()  # where it starts in the further dimensions, if not at 0


@dataclass(frozen=True, slots=True)
class StripeHeader:
    """What a stripe says of itself."""

    snapshot_id: str
    data_start: int  # bytes from the start of the file
    data_bytes: int
    pieces: dict[str, HeldPiece]


def build_header(stripe: StripePlan, specs: Mapping[str, TensorSpec], snapshot_id: str) -> bytes:
    """The bytes before the data of `stripe`: a multiple of 4096, as many for every snapshot of one plan."""
    held: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    for piece in stripe.pieces:
        held[piece.name], offsets[piece.name] = _spelled(piece, specs[piece.name])
    body = _body(held, offsets, snapshot_id).encode()
    nbytes = _whole_length(len(body), stripe)
    length = nbytes - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + body.ljust(length)


def incremental_marker(snapshot_id: str) -> bytes:
    """A file beside the stripes of an incremental checkpoint that makes stock readers stop, and say why.

    They would take the stripes for all there is. It names a tensor of which `DCP_SHARDING_INFO` knows nothing.
    """
    key = "incremental snapshot: run `hetckpt consolidate`"
    about = {"snapshot": snapshot_id, "format": "pt", "DCP_SHARDING_INFO": "{}"}
    body = _compact({"__metadata__": about, key: {"dtype": "U8", "shape": (0,), "data_offsets": (0, 0)}})
    length = padded(_LENGTH_BYTES + len(body)) - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + body.encode().ljust(length)


def header_lengths(stripes: Iterable[StripePlan], specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """By file how many bytes `build_header` makes of it, counted without making them.

    The manifest needs these of every stripe of every rank, a rank only its own headers: for 10,000 ranks with
    8 drives each they would be 300 MB.
    """
    nothing = len(_body({}, {}, "0" * _ID_DIGITS))
    fixed: dict[str, int] = {}  # what each name, dtype and shape take, without the numbers of a piece
    lengths: dict[str, int] = {}
    for stripe in stripes:
        if any(piece.columns for piece in stripe.pieces):
            lengths[stripe.file] = len(build_header(stripe, specs, "0" * _ID_DIGITS))
            continue
        body_bytes = nothing - 1  # the first tensor needs no comma in the second list
        for piece in stripe.pieces:
            spec = specs[piece.name]
            if piece.name not in fixed:
                fixed[piece.name] = _fixed_bytes(spec)
            ends_at = piece.offset + piece.nbytes
            body_bytes += fixed[piece.name] + len(f"{piece.offset}{ends_at}")
            if spec.shape:
                body_bytes += len(f"{piece.rows}{piece.row}")
        lengths[stripe.file] = _whole_length(body_bytes if stripe.pieces else nothing, stripe)
    return lengths


def stamp_header(header: bytes, snapshot_id: str) -> bytes:
    """The header of the same plan for another snapshot, without going through its tensors again."""
    return header[:_ID_FROM] + snapshot_id.encode() + header[_ID_FROM + len(snapshot_id) :]


def header_bytes(first: bytes, path: Path) -> int:
    """How many bytes of a stripe to give to `read_header`, told by its first 8."""
    nbytes = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    if len(first) < _LENGTH_BYTES or nbytes > MAX_HEADER_BYTES or nbytes % BLOCK_BYTES:
        raise CorruptCheckpointError(
            f"{path}: starts with {first[:_LENGTH_BYTES].hex()}, expected the length of a header that ends at a "
            f"multiple of {BLOCK_BYTES} bytes. Resume from another snapshot."
        )
    return nbytes


def read_header(data: bytes, path: Path) -> StripeHeader:
    """Read the head of a stripe that anybody may have written.

    Args:
        data: the file's first `header_bytes`; more does no harm.
        path: the file, for the error.

    Raises:
        CorruptCheckpointError: anything in it is not as FORMAT.md says.
    """
    nbytes = header_bytes(data[:_LENGTH_BYTES], path)
    try:
        if len(data) < nbytes:
            raise DamageError(f"{len(data)} bytes, expected {nbytes}")
        return _header(decode_json(data[_LENGTH_BYTES:nbytes]), nbytes)
    except (DamageError, RecursionError) as damage:
        raise CorruptCheckpointError(f"{path}: bad header: {damage}. Resume from another snapshot.") from None


def _header(plain: dict[str, Any], nbytes: int) -> StripeHeader:
    about = fields(
        plain.pop("__metadata__", None), "__metadata__", {"snapshot", "format", "DCP_SHARDING_INFO"}
    )
    snapshot_id = matching(ID_PATTERN, about["snapshot"], "snapshot")
    sharding = decode_json(text(about["DCP_SHARDING_INFO"], "DCP_SHARDING_INFO").encode())
    fields(sharding, "DCP_SHARDING_INFO", set(plain))
    pieces = {text(name, "name"): _piece(name, held, sharding[name]) for name, held in plain.items()}
    end = 0
    for name, piece in sorted(pieces.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if piece.offset != end:
            raise DamageError(f"tensor {name!r} starts at byte {piece.offset} of the data, expected {end}")
        end += piece.nbytes
    return StripeHeader(snapshot_id, nbytes, end, pieces)


def _piece(name: str, value: Any, sharding: Any) -> HeldPiece:
    get = fields(value, f"tensor {name!r}", {"dtype", "shape", "data_offsets"})
    shape = read_shape(get["shape"], name)
    rows, row_bytes = measure(get["dtype"], shape, name)
    start, end = _whole_numbers(get["data_offsets"], 2, f"data_offsets of {name!r}")
    if end - start != rows * row_bytes:
        raise DamageError(
            f"tensor {name!r} takes {end - start} bytes, its shape and dtype {rows * row_bytes}"
        )
    saved = fields(sharding, f"DCP_SHARDING_INFO of {name!r}", {"saved_offsets"})["saved_offsets"]
    place = _whole_numbers(saved, len(shape), f"saved_offsets of {name!r}")
    columns = tuple(place[1:]) if any(place[1:]) else ()
    return HeldPiece(get["dtype"], shape, place[0] if place else 0, start, end - start, columns)


def _whole_numbers(value: Any, count: int, what: str) -> list[int]:
    numbers = [whole(number, what) for number in array(value, what)]
    if len(numbers) != count:
        raise DamageError(f"{what} holds {len(numbers)} numbers, expected {count}")
    return numbers


def _spelled(piece: Piece, spec: TensorSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two lists of a header say of a piece."""
    held = {
        "dtype": spec.dtype,
        "shape": (piece.rows, *([n for _, n in piece.columns] or spec.shape[1:])) if spec.shape else (),
        "data_offsets": (piece.offset, piece.offset + piece.nbytes),
    }
    # torch.distributed.checkpoint learns from this that the tensor is larger than the piece.
    start = piece.row, *([at for at, _ in piece.columns] or [0] * len(spec.shape[1:]))
    return held, {"saved_offsets": start if spec.shape else ()}


def _body(held: Mapping[str, Any], offsets: Mapping[str, Any], snapshot_id: str) -> str:
    about = {"snapshot": snapshot_id, "format": "pt", "DCP_SHARDING_INFO": _compact(offsets)}
    return _compact({"__metadata__": about, **held})


def _fixed_bytes(spec: TensorSpec) -> int:
    """How much longer a header is for a piece of this tensor beside others, its own numbers left out."""
    held, offsets = _spelled(Piece(spec.name, 0, 0, 0, 0), spec)
    alone = len(_body({spec.name: held}, {spec.name: offsets}, "")) - len(_body({}, {}, ""))
    digits = 4 if spec.shape else 2
    return alone - digits + 1  # and a comma in the second list


def _whole_length(body_bytes: int, stripe: StripePlan) -> int:
    """Length of the header with its padding."""
    nbytes = padded(_LENGTH_BYTES + body_bytes)
    if nbytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{stripe.file}: {len(stripe.pieces)} tensors need a header of {nbytes} bytes, safetensors allows "
            f"{MAX_HEADER_BYTES}; write with more ranks or drives."
        )
    return nbytes


def _compact(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))
