"""A checkpoint of ours as one file that everybody reads: written through, never held in memory as a whole."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.destination import targets
from lightning_hetckpt.checkpoint.direct_io import fsync_folder
from lightning_hetckpt.checkpoint.layout import HIDDEN_PREFIX, META_NAME, new_id, padded
from lightning_hetckpt.checkpoint.manifest import DTYPE_BYTES, PieceEntry, TensorEntry
from lightning_hetckpt.checkpoint.meta import open_meta
from lightning_hetckpt.checkpoint.span_reader import Target
from lightning_hetckpt.checkpoint.state_tree import Place, as_bytes
from lightning_hetckpt.errors import CheckpointError

Edit = Callable[[dict[Any, Any]], object]  # what changes of the dictionary on its way out


def write_ckpt(
    reader: restore.Reader, out: BinaryIO, weights_only: bool | None = None, edit: Edit | None = None
) -> None:
    """Write what `torch.save` would make of the whole dictionary into the empty file `out`.

    Extra memory is the reader's buffer and, one after the other, the tensors that lie in memory in another order
    than row by row.

    Args:
        weights_only: as in `torch.load`, for what is no tensor.
        edit: changes the dictionary first; its tensors have no values then.

    Raises:
        CheckpointError: it holds objects that only `weights_only=False` may load.
        CorruptCheckpointError: names the file whose bytes are not those that were written.
    """
    skeleton = open_meta(reader.small(META_NAME), weights_only)
    entries = reader.manifest.tensors
    with FakeTensorMode():
        fakes = {
            name: skeleton.empty(name, *restore.logical(entries[name]), "cpu")
            for name in dict.fromkeys(skeleton.places.values())
        }
    names = {id(fake): name for name, fake in fakes.items()}
    tree = skeleton.fill({place: fakes[name] for place, name in skeleton.places.items()})
    if edit is not None:
        edit(tree)
    found = dict(_tensors_in(tree))
    held = {place: names[id(tensor)] for place, tensor in found.items() if id(tensor) in names}
    with skip_data(materialize_fake_tensors=True):
        torch.save(tree, out)
    out.flush()
    offsets = _offsets(out, weights_only, found)
    file = out.fileno()
    wanted: dict[str, list[Target]] = {}
    late: list[tuple[str, int]] = []
    for name, offset in {name: offsets[place] for place, name in held.items()}.items():
        entry = entries[name]
        if name in skeleton.strides or any(piece.columns for piece in entry.pieces):
            late.append((name, offset))
            continue
        for piece in entry.pieces:
            if piece.rows:
                wanted.setdefault(piece.file, []).append(_written_through(file, offset, entry, piece))
    reader.fill(wanted)
    for name, offset in late:
        real = skeleton.empty(name, *restore.logical(entries[name]), "cpu")
        parts: dict[str, list[Target]] = {}
        for stripe, target in targets(entries[name], real, reader.manifest.files):
            parts.setdefault(stripe, []).append(target)
        reader.fill(parts)
        _pwrite(file, offset, _storage_bytes(real))
    for place, tensor in found.items():
        if place not in held:  # no stripe could hold it
            _pwrite(file, offsets[place], _storage_bytes(tensor))


def write_safetensors(reader: restore.Reader, out: BinaryIO, part: str = "state_dict") -> None:
    """Write the tensors below the key `part`, by their names in there, as one safetensors file.

    Tied tensors are written once for each of their names.

    Raises:
        CheckpointError: there are none, or one of a dtype that safetensors does not know.
    """
    skeleton = open_meta(reader.small(META_NAME), None)
    held = {
        ".".join(map(str, place[1:])): name
        for place, name in skeleton.places.items()
        if place[0] == part and len(place) > 1
    }
    if not held:
        raise CheckpointError(f"{reader.folder}: holds no tensors below {part!r}.")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide numbers first, so that each tensor starts at a multiple of its item size.
    order = sorted(held, key=lambda one: (-DTYPE_BYTES[reader.manifest.tensors[held[one]].dtype], one))
    for key in order:
        entry = reader.manifest.tensors[held[key]]
        if entry.complex is not None:
            raise CheckpointError(
                f"{reader.folder}: {key} is {entry.complex}, which safetensors does not hold."
            )
        nbytes = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        header[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    body = json.dumps(header, separators=(",", ":")).encode()
    body = body.ljust(padded(len(body), 8))
    out.write(len(body).to_bytes(8, "little") + body)
    out.flush()
    out.truncate(8 + len(body) + end)
    wanted: dict[str, list[Target]] = {}
    for key in order:
        entry, start = reader.manifest.tensors[held[key]], 8 + len(body) + header[key]["data_offsets"][0]
        if any(piece.columns for piece in entry.pieces):
            real = torch.empty(entry.shape, dtype=restore.logical(entry)[1])
            parts: dict[str, list[Target]] = {}
            for stripe, target in targets(entry, real, reader.manifest.files):
                parts.setdefault(stripe, []).append(target)
            reader.fill(parts)
            _pwrite(out.fileno(), start, _storage_bytes(real))
            continue
        for piece in entry.pieces:
            if piece.rows:
                wanted.setdefault(piece.file, []).append(_written_through(out.fileno(), start, entry, piece))
    reader.fill(wanted)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path`, durable and whole, when the block ends without an error."""
    beside = path.with_name(f"{HIDDEN_PREFIX}{new_id()}.tmp")
    try:
        with beside.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def _tensors_in(node: Any, path: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Every tensor in containers, with its place; those inside of other objects are not found."""
    if isinstance(node, Tensor):
        if node.layout is torch.strided and not node.is_meta:
            yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _tensors_in(value, (*path, key))
    elif isinstance(node, list | tuple):
        for at, value in enumerate(node):
            yield from _tensors_in(value, (*path, at))


def _offsets(out: BinaryIO, weights_only: bool | None, places: Iterable[Place]) -> dict[Place, int]:
    """Where in the file the memory of the tensor at each place begins."""
    out.seek(0)
    with FakeTensorMode():
        tree = torch.load(out, weights_only=weights_only is not False)
    out.seek(0)
    found: dict[Place, int] = {}
    for place in places:
        node = tree
        for key in place:
            node = node[key]
        found[place] = node.untyped_storage()._checkpoint_offset  # noqa: SLF001 (torch's documentation names it)
    with zipfile.ZipFile(out) as archive:
        records = [name for name in archive.namelist() if "/data/" in name]
    if len(set(found.values())) != len(records):
        raise CheckpointError(
            f"the checkpoint holds {len(records) - len(set(found.values()))} tensors in objects of its own, which cannot "
            "be exported piece by piece. Load it and use torch.save."
        )
    return found


def _written_through(file: int, offset: int, entry: TensorEntry, piece: PieceEntry) -> Target:
    """The rows of `piece`, which go straight on to where the tensor begins in the other file."""
    row_bytes = math.prod(entry.shape[1:]) * DTYPE_BYTES[entry.dtype]
    start = offset + piece.row * row_bytes
    return Target(
        piece.offset, piece.rows * row_bytes, put=lambda at, data: _pwrite(file, start + at, data.data)
    )


def _storage_bytes(tensor: Tensor) -> memoryview:
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return as_bytes(storage).numpy().data


def _pwrite(file: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
