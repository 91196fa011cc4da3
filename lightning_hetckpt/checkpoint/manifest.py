"""What a checkpoint promises: every file with its hashes, and where each tensor lies in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from lightning_hetckpt.checkpoint.layout import FORMAT_VERSION, MANIFEST_NAME, is_stripe, stripe_of_delta
from lightning_hetckpt.errors import CorruptCheckpointError

T = TypeVar("T")

# The safetensors codes that a stripe may hold: what both the safetensors library and the reader of
# torch.distributed.checkpoint make a tensor of. Other dtypes stay in meta.pt.
DTYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
COMPLEX_PARTS = {"complex64": "F32", "complex128": "F64"}

MAX_NUMBER = 2**63 - 1
MAX_UNIX_S = 2**53  # up to here a float holds every whole second
MAX_FIGURE = 10**18  # likewise for whole numbers that were rounded
MAX_DIMENSIONS = 64
MAX_BOXES = 2**12  # of one tensor: each may have to be compared with every other
MAX_CHUNK_BYTES = 2**30  # a reader may hold one chunk in memory

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
ID_PATTERN = re.compile(r"[0-9a-f]{16}")
_RANGE = struct.Struct("<4q")
_HASH = re.compile(r"[0-9a-f]{16}")

# The file starts with its own checksum, which is the sha256 of every byte behind those 64 digits:
# whoever checks it needs neither a JSON parser nor a rule for how numbers are spelled.
_OPENING = b'{"checksum":"'
_SIGNED_FROM = len(_OPENING) + 64


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint; `chunks` is empty where the save made no checksums."""

    name: str
    nbytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]  # xxh3-64 of each chunk_bytes of the file, 16 hex digits
    write_s: float = field(default=0.0, compare=False)  # that its drive was busy with it; not in the manifest
    snapshot: str | None = None  # id of another snapshot that wrote it and shares it


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """Rows [row, row + rows) of a tensor, `offset` bytes from the start of `file`.

    `columns` is (start, size) in each further dimension, for a shard that holds only a part of its rows.
    """

    file: str
    offset: int
    row: int
    rows: int
    columns: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class OverlayEntry:
    """Newer bytes of a stripe: `ranges` holds (start, nbytes, number of the file, offset in it) as 8-byte integers.

    They are little-endian, sorted by start, and apart from each other.
    """

    files: tuple[str, ...]
    ranges: bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor; its pieces are in order and cover it exactly once."""

    dtype: str  # safetensors code of the stored bytes
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]
    complex: str | None = None  # "complex64" or "complex128": stored as real numbers with a trailing 2


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit point of one checkpoint: it exists only once every byte that it names is durable."""

    snapshot_id: str
    run: str
    parent: str | None  # id of the snapshot that training came from
    commit: int  # grows with every commit of a snapshot folder, also when the step goes back
    kind: Literal["full", "incremental", "differential"]
    global_step: int
    epoch: int
    world_size: int
    created_unix_s: float
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]  # name -> name of the tensor whose storage it shares
    figures: dict[str, float | dict[str, float]] = field(default_factory=dict)  # what the save cost
    overlays: dict[str, OverlayEntry] = field(default_factory=dict)  # by stripe; none in a full snapshot

    def to_json(self, tensors: str | None = None) -> bytes:
        """The manifest's bytes: the same for equal manifests, signed against damage (not against forgery).

        Args:
            tensors: what `spell_tensors` makes of the tensors, where the caller kept it.
        """
        plain = {
            "format_version": FORMAT_VERSION,
            "snapshot_id": self.snapshot_id,
            "run": self.run,
            "parent": self.parent,
            "commit": self.commit,
            "kind": self.kind,
            "global_step": self.global_step,
            "epoch": self.epoch,
            "created_unix_s": self.created_unix_s,
            "files": {
                name: {"nbytes": f.nbytes, "chunk_bytes": f.chunk_bytes, "chunks": f.chunks}
                | ({} if f.snapshot is None else {"snapshot": f.snapshot})
                for name, f in self.files.items()
            },
            "aliases": self.aliases,
            **({"figures": self.figures} if self.figures else {}),
            **({"overlays": spell_overlays(self.overlays)} if self.overlays else {}),
        }
        # In the order of their names the tensors come last but one; they stay the same from save to save.
        text = (
            f'{_spell(plain)[:-1]},"tensors":{spell_tensors(self.tensors) if tensors is None else tensors},'
            f"{_spell({'world_size': self.world_size})[1:]}"
        )
        signed = b'",' + text[1:].encode()
        return _OPENING + hashlib.sha256(signed).hexdigest().encode() + signed

    @classmethod
    def from_json(cls, data: bytes, path: Path) -> Manifest:
        """Read a manifest that anybody may have written.

        Args:
            data: the bytes of the file.
            path: where they came from, for the error.

        Raises:
            CorruptCheckpointError: anything in it is not as FORMAT.md says.
        """
        try:
            return _manifest(data)
        except (DamageError, RecursionError) as damage:
            # Nesting just shallow enough to be parsed may be too deep to be quoted in the error.
            raise CorruptCheckpointError(
                f"{path}: not a sound manifest: {damage}. Resume from another snapshot."
            ) from None


def spell_overlays(overlays: Mapping[str, OverlayEntry]) -> dict[str, Any]:
    """Plain JSON data of them."""
    return {
        name: {"files": one.files, "ranges": base64.b64encode(one.ranges).decode()}
        for name, one in overlays.items()
    }


def read_overlays(plain: Any) -> dict[str, OverlayEntry]:
    """What `spell_overlays` spelled; raises DamageError where anybody else did."""
    return _each(plain, "overlays", _overlay)


def _overlay(name: str, value: Any) -> OverlayEntry:
    get = fields(value, f"overlay of {name!r}", {"files", "ranges"})
    files = tuple(
        text(one, f"a file of the overlay of {name!r}")
        for one in array(get["files"], f"files of the overlay of {name!r}")
    )
    try:
        ranges = base64.b64decode(text(get["ranges"], f"ranges of {name!r}"), validate=True)
    except ValueError as error:
        raise DamageError(f"ranges of the overlay of {name!r}: {error}") from None
    if len(ranges) % _RANGE.size or not ranges:
        raise DamageError(f"overlay of {name!r}: {len(ranges)} bytes, expected a multiple of {_RANGE.size}")
    return OverlayEntry(files, ranges)


def _check_overlays(manifest: Manifest) -> None:
    if bool(manifest.overlays) and manifest.kind == "full":
        raise DamageError("a full snapshot with overlays, expected none")
    for name, overlay in manifest.overlays.items():
        if name not in manifest.files or not is_stripe(name) or not {*overlay.files} <= manifest.files.keys():
            raise DamageError(f"overlay of {name!r} with {overlay.files}, expected listed files")
        end = 0
        for start, nbytes, number, offset in _RANGE.iter_unpack(overlay.ranges):
            if start < end or nbytes < 1 or start + nbytes > manifest.files[name].nbytes:
                raise DamageError(f"overlay of {name!r}: {nbytes} bytes at {start}, behind byte {end}")
            if not 0 <= number < len(overlay.files) or not (
                0 <= offset <= manifest.files[overlay.files[number]].nbytes - nbytes
            ):
                raise DamageError(
                    f"overlay of {name!r}: {nbytes} bytes at {offset} of file {number}, which is shorter"
                )
            end = start + nbytes


def spell_tensors(tensors: Mapping[str, TensorEntry]) -> str:
    """What `Manifest.to_json` says of these tensors: good for every save of one plan."""
    return _spell(
        {
            name: {
                "dtype": t.dtype,
                "shape": t.shape,
                "complex": t.complex,
                "pieces": [
                    {"file": p.file, "offset": p.offset, "row": p.row, "rows": p.rows}
                    | ({"columns": p.columns} if p.columns else {})
                    for p in t.pieces
                ],
            }
            for name, t in tensors.items()
        }
    )


def _spell(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _manifest(data: bytes) -> Manifest:
    if not data.startswith(_OPENING):
        raise DamageError(f"it starts with {data[:16]!r}, expected {_OPENING!r}")
    found = hashlib.sha256(data[_SIGNED_FROM:]).hexdigest()
    stated = data[len(_OPENING) : _SIGNED_FROM].decode("ascii", "replace")
    if found != stated:
        raise DamageError(f"its {len(data)} bytes have the checksum {found}, expected {stated!r}")
    plain = decode_json(data)
    version = plain.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise DamageError(
            f"format version {version!r:.40}, this version of lightning_hetckpt reads {FORMAT_VERSION}"
        )
    figures, overlays = plain.pop("figures", {}), plain.pop("overlays", {})
    get = fields(
        plain, "the manifest", {"checksum", "format_version", *Manifest.__slots__} - {"figures", "overlays"}
    )
    kind = get["kind"]
    if kind not in ("full", "incremental", "differential"):
        raise DamageError(f"kind {kind!r:.40}, expected 'full', 'incremental' or 'differential'")
    manifest = Manifest(
        snapshot_id=matching(ID_PATTERN, get["snapshot_id"], "snapshot_id"),
        run=matching(ID_PATTERN, get["run"], "run"),
        parent=None if get["parent"] is None else matching(ID_PATTERN, get["parent"], "parent"),
        commit=whole(get["commit"], "commit"),
        kind=kind,
        global_step=whole(get["global_step"], "global_step"),
        epoch=whole(get["epoch"], "epoch"),
        world_size=whole(get["world_size"], "world_size", at_least=1),
        created_unix_s=_time(get["created_unix_s"]),
        files=_each(get["files"], "files", _file),
        tensors=_each(get["tensors"], "tensors", _tensor),
        aliases=_each(get["aliases"], "aliases", lambda name, to: text(to, f"alias {name!r}")),
        figures=_each(figures, "figures", _figure),
        overlays=read_overlays(overlays),
    )
    if any(file.snapshot == manifest.snapshot_id for file in manifest.files.values()):
        raise DamageError("a file is said to be another snapshot's, and that is this one")
    _check_pieces(manifest)
    _check_overlays(manifest)
    for name, target in manifest.aliases.items():
        if name in manifest.tensors or target not in manifest.tensors:
            raise DamageError(f"alias {name!r} of {target!r}: expected a new name for a listed tensor")
    return manifest


def _file(name: str, value: Any) -> FileEntry:
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise DamageError(f"file name {name!r}, expected a plain name without a folder")
    is_shared = type(value) is dict and "snapshot" in value
    get = fields(
        value, f"file {name!r}", {"nbytes", "chunk_bytes", "chunks"} | ({"snapshot"} if is_shared else set())
    )
    if is_shared and not is_stripe(name) and stripe_of_delta(name) is None:
        raise DamageError(
            f"{name!r} is said to be another snapshot's, expected that of stripes and deltas only"
        )
    snapshot = matching(ID_PATTERN, get["snapshot"], f"snapshot of {name!r}") if is_shared else None
    nbytes = whole(get["nbytes"], f"nbytes of {name!r}")
    chunk_bytes = whole(get["chunk_bytes"], f"chunk_bytes of {name!r}", 1, MAX_CHUNK_BYTES)
    chunks = tuple(
        matching(_HASH, c, f"a chunk of {name!r}") for c in array(get["chunks"], f"chunks of {name!r}")
    )
    if chunks and len(chunks) != -(-nbytes // chunk_bytes):
        raise DamageError(f"{name!r} has {len(chunks)} hashes for {nbytes} bytes in chunks of {chunk_bytes}")
    return FileEntry(name, nbytes, chunk_bytes, chunks, snapshot=snapshot)


def _tensor(name: str, value: Any) -> TensorEntry:
    get = fields(value, f"tensor {name!r}", {"dtype", "shape", "complex", "pieces"})
    dtype, shape = get["dtype"], read_shape(get["shape"], name)
    rows = measure(dtype, shape, name)[0]
    parts = get["complex"]
    if parts is not None and (
        text(parts, f"complex of {name!r}") not in COMPLEX_PARTS
        or COMPLEX_PARTS[parts] != dtype
        or shape[-1:] != (2,)
    ):
        raise DamageError(f"tensor {name!r} is {parts!r} stored as {dtype} {shape}, expected its real view")
    pieces = tuple(_piece(name, piece) for piece in array(get["pieces"], f"pieces of {name!r}"))
    if any(piece.columns for piece in pieces):
        _check_boxes(name, shape, pieces)
        return TensorEntry(dtype, shape, pieces, parts)
    row = 0
    for piece in pieces:
        if piece.row != row or (piece.rows == 0 and rows > 0):
            raise DamageError(
                f"tensor {name!r}: rows {piece.row}+{piece.rows} follow row {row}, expected no gap or overlap"
            )
        row += piece.rows
    if row != rows or not pieces or (rows == 0 and len(pieces) > 1):
        raise DamageError(f"tensor {name!r}: {len(pieces)} pieces hold {row} rows, expected {rows}")
    return TensorEntry(dtype, shape, pieces, parts)


def _piece(name: str, value: Any) -> PieceEntry:
    names = {"file", "offset", "row", "rows"}
    is_box = type(value) is dict and "columns" in value
    get = fields(value, f"a piece of {name!r}", names | {"columns"} if is_box else names)
    row, rows, offset = (whole(get[key], f"{key} of {name!r}") for key in ("row", "rows", "offset"))
    columns = []
    for column in array(get["columns"], f"columns of {name!r}") if is_box else []:
        numbers = [whole(number, f"columns of {name!r}") for number in array(column, f"columns of {name!r}")]
        if len(numbers) != 2:
            raise DamageError(f"columns of {name!r} hold {len(numbers)} numbers, expected start and size")
        columns.append((numbers[0], numbers[1]))
    return PieceEntry(text(get["file"], f"file of {name!r}"), offset, row, rows, tuple(columns))


def box(shape: tuple[int, ...], piece: PieceEntry) -> tuple[tuple[int, int], ...]:
    """(start, size) of a piece in every dimension of its tensor."""
    if not shape:
        return ()
    return (piece.row, piece.rows), *(piece.columns or ((0, size) for size in shape[1:]))


def piece_bytes(entry: TensorEntry, piece: PieceEntry) -> int:
    """How many bytes of its file a piece takes."""
    return math.prod(size for _, size in box(entry.shape, piece)) * DTYPE_BYTES[entry.dtype]


def _check_boxes(name: str, shape: tuple[int, ...], pieces: tuple[PieceEntry, ...]) -> None:
    """Boxes within the tensor, of which no two overlap, that have as many numbers as it has: they cover it once."""
    if len(pieces) > MAX_BOXES:
        raise DamageError(f"tensor {name!r} has {len(pieces)} pieces, expected at most {MAX_BOXES} boxes")
    boxes = [box(shape, piece) for piece in pieces]
    for one in boxes:
        if len(one) != len(shape) or any(
            size < 1 or start + size > whole for (start, size), whole in zip(one, shape, strict=True)
        ):
            raise DamageError(f"tensor {name!r} of shape {shape} has a piece at {one}")
    if sum(math.prod(size for _, size in one) for one in boxes) != math.prod(shape):
        raise DamageError(f"tensor {name!r}: its {len(pieces)} pieces do not hold shape {shape}")
    beside: list[tuple[tuple[int, int], ...]] = []  # that may reach into the rows of the next ones
    for one in sorted(boxes):
        beside = [other for other in beside if sum(other[0]) > one[0][0]]
        for other in beside:
            if all(a < b + m and b < a + n for (a, n), (b, m) in zip(one, other, strict=True)):
                raise DamageError(f"tensor {name!r}: pieces at {one} and {other} overlap")
        beside.append(one)


def _check_pieces(manifest: Manifest) -> None:
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            spans[piece.file].append((piece.offset, piece.offset + piece_bytes(tensor, piece), name))
    for file, taken in spans.items():
        if file not in manifest.files:
            raise DamageError(f"tensor {taken[0][2]!r} lies in {file!r}, which is not a listed file")
        free_from = 0
        for start, end, name in sorted(taken):
            if end > manifest.files[file].nbytes:
                raise DamageError(
                    f"tensor {name!r} ends at byte {end} of {file!r}, which has {manifest.files[file].nbytes}"
                )
            if start < free_from and end > start:
                raise DamageError(
                    f"tensor {name!r} starts at byte {start} of {file!r}, which is taken up to {free_from}"
                )
            free_from = max(free_from, end)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_UNIX_S:
        raise DamageError(f"created_unix_s is {value!r:.40}, expected seconds since 1970")
    return float(value)


def _figure(name: str, value: Any) -> float | dict[str, float]:
    if type(value) is dict:
        return _each(value, f"figure {name!r}", _number)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_FIGURE:
        raise DamageError(f"figure {name!r} is {value!r:.40}, expected a number from 0 to {MAX_FIGURE}")
    return float(value)


def _each(value: Any, what: str, read: Callable[[str, Any], T]) -> dict[str, T]:
    if type(value) is not dict:
        raise DamageError(f"{what} is {value!r:.40}, expected an object")
    return {text(name, what): read(name, entry) for name, entry in value.items()}


# --- Strict reading of JSON that anybody may have written; `stripe_header` reads with the same words. ---


class DamageError(ValueError):
    """What is wrong with the bytes; whoever knows their path turns it into a CorruptCheckpointError."""


def decode_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`: UTF-8, finite numbers, no key twice."""
    try:
        plain = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except DamageError:
        raise
    except (ValueError, RecursionError) as error:
        raise DamageError(f"bad JSON ({error!s:.80})") from None
    if type(plain) is not dict:
        raise DamageError(f"JSON {plain!r:.40}, expected an object")
    return plain


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise DamageError(f"a name stands twice among {[name for name, _ in pairs]!r:.80}")
    return plain


def _refuse_constant(name: str) -> NoReturn:
    raise DamageError(f"the number {name}")


def fields(value: Any, what: str, names: set[str]) -> dict[str, Any]:
    """`value`, an object with exactly these fields: a new field would need a new format version."""
    if type(value) is not dict or value.keys() != names:
        raise DamageError(f"{what} is {value!r:.80}, expected an object with {sorted(names)}")
    return value


def array(value: Any, what: str) -> list[Any]:
    """`value`, an array."""
    if type(value) is not list:
        raise DamageError(f"{what} is {value!r:.40}, expected an array")
    return value


def text(value: Any, what: str) -> str:
    """`value`, a string that UTF-8 can spell."""
    if type(value) is not str or not _utf8(value):
        raise DamageError(f"{what} is {value!r:.40}, expected text")
    return value


def _utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def matching(pattern: re.Pattern[str], value: Any, what: str) -> str:
    """`value`, a string that `pattern` describes whole."""
    if type(value) is not str or not pattern.fullmatch(value):
        raise DamageError(f"{what} is {value!r:.40}, expected {pattern.pattern}")
    return value


def whole(value: Any, what: str, at_least: int = 0, at_most: int = MAX_NUMBER) -> int:
    """`value`, a whole number within the bounds."""
    # A bool is an int in Python, and 1.0 equals 1: both would pass a laxer test.
    if type(value) is not int or not at_least <= value <= at_most:
        raise DamageError(f"{what} is {value!r:.40}, expected a whole number from {at_least} to {at_most}")
    return value


def read_shape(value: Any, name: str) -> tuple[int, ...]:
    """The shape of tensor `name`."""
    sizes = array(value, f"shape of {name!r}")
    if len(sizes) > MAX_DIMENSIONS:
        raise DamageError(f"tensor {name!r} has {len(sizes)} dimensions, expected at most {MAX_DIMENSIONS}")
    return tuple(whole(size, f"shape of {name!r}") for size in sizes)


def measure(dtype: Any, shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """Rows of a tensor and bytes of one row; a tensor without dimensions is one row."""
    if type(dtype) is not str or dtype not in DTYPE_BYTES:
        raise DamageError(
            f"tensor {name!r} has the dtype {dtype!r:.40}, expected one of {', '.join(DTYPE_BYTES)}"
        )
    rows, row_bytes = math.prod(shape[:1]), math.prod(shape[1:]) * DTYPE_BYTES[dtype]
    if rows * row_bytes > MAX_NUMBER or row_bytes > MAX_NUMBER:
        raise DamageError(f"tensor {name!r} of shape {shape} is larger than any file")
    return rows, row_bytes
