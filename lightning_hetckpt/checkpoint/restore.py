"""Reads a checkpoint of ours back into the dictionary that was saved, whatever world size it came from."""

from __future__ import annotations

import base64
import json
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_hetckpt.checkpoint.direct_io import read_into
from lightning_hetckpt.checkpoint.layout import META_NAME, RANKS_NAME
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest, measure
from lightning_hetckpt.checkpoint.meta import unpack_meta
from lightning_hetckpt.checkpoint.state_tree import DTYPE_OF, as_bytes
from lightning_hetckpt.checkpoint.stripe_header import header_bytes, read_header
from lightning_hetckpt.checkpoint.verify import check_files, read_manifest
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError

_THREADS = 4
_LENGTH_BYTES = 8  # of a stripe's header


def load(path: Path, weights_only: bool | None = None, map_location: Any = None) -> dict[Any, Any]:
    """The dictionary that was saved, with every hash checked on the way.

    Args:
        path: the checkpoint's folder, or `meta.pt` in it.
        weights_only: as in `torch.load`; None tries True.
        map_location: as in `torch.load`, but None is the CPU.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: names the file whose bytes are not those that were written.
        CheckpointError: it holds objects that only `weights_only=False` may load.
    """
    folder, manifest = _open(path)
    if META_NAME not in manifest.files:
        raise CorruptCheckpointError(f"{folder}: its manifest lists no {META_NAME}; use another checkpoint.")
    tensors = {
        name: torch.empty(entry.shape, dtype=DTYPE_OF[entry.dtype])
        for name, entry in manifest.tensors.items()
    }
    targets = _targets(manifest, tensors)
    for file in targets:
        _check_owner(folder / file, manifest.files[file].snapshot or manifest.snapshot_id)
    chunks = [
        (manifest.files[file], offset)
        for file in targets
        for offset in range(0, manifest.files[file].nbytes, manifest.files[file].chunk_bytes)
    ]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hetckpt-read") as readers:
        work = [readers.submit(_fill, folder, file, offset, targets[file.name]) for file, offset in chunks]
        try:
            meta = _read(folder, manifest.files[META_NAME])
            for one in work:
                one.result()
        finally:
            readers.shutdown(cancel_futures=True)
    for name, entry in manifest.tensors.items():
        if entry.complex is not None:
            tensors[name] = torch.view_as_complex(tensors[name])
    try:
        return unpack_meta(meta, tensors, weights_only, map_location)
    except CheckpointError as error:
        raise type(error)(f"{folder / META_NAME}: {error}") from error


def load_rank_states(path: Path) -> list[bytes]:
    """What each rank kept for itself, in the order of the ranks that saved.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: the file is damaged.
    """
    folder, manifest = _open(path)
    file = manifest.files.get(RANKS_NAME)
    if file is None:
        return []
    try:
        states = json.loads(_read(folder, file))["rank_states"]
        return [base64.b64decode(state, validate=True) for state in states]
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{folder / RANKS_NAME}: expected the states of {manifest.world_size} ranks ({error!r:.80})."
        ) from error


def _open(path: Path) -> tuple[Path, Manifest]:
    folder = path.parent if path.name == META_NAME else path
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return folder, manifest


def _check_owner(stripe: Path, snapshot_id: str) -> None:
    """Without checksums nothing else tells a stripe of another snapshot."""
    first = memoryview(bytearray(_LENGTH_BYTES))
    read_into(stripe, 0, first)
    head = memoryview(bytearray(header_bytes(bytes(first), stripe)))
    read_into(stripe, 0, head)
    found = read_header(bytes(head), stripe).snapshot_id
    if found != snapshot_id:
        raise CorruptCheckpointError(
            f"{stripe}: belongs to the snapshot {found}, expected {snapshot_id}. Use another checkpoint."
        )


@dataclass(frozen=True, slots=True)
class _Target:
    """Bytes [start, start + len(memory)) of a file, and where they go."""

    start: int
    memory: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


def _targets(manifest: Manifest, tensors: dict[str, Tensor]) -> dict[str, list[_Target]]:
    """By file, what is to be read from it, in the order of its bytes."""
    found: dict[str, list[_Target]] = {}
    for name, entry in manifest.tensors.items():
        memory = as_bytes(tensors[name]).numpy()
        row_bytes = measure(entry.dtype, entry.shape, name)[1]
        for piece in entry.pieces:
            rows = memory[piece.row * row_bytes : (piece.row + piece.rows) * row_bytes]
            if len(rows):
                found.setdefault(piece.file, []).append(_Target(piece.offset, rows))
    for targets in found.values():
        targets.sort(key=lambda target: target.start)
    return found


def _fill(folder: Path, file: FileEntry, offset: int, targets: Sequence[_Target]) -> None:
    """Read one chunk, check it, and copy what it holds to where it belongs."""
    chunk = np.frombuffer(_read_chunk(folder, file, offset), np.uint8)
    end = offset + len(chunk)
    first = bisect_right(targets, offset, key=lambda target: target.end)
    for target in targets[first:]:
        if target.start >= end:
            break
        start, stop = max(target.start, offset), min(target.end, end)
        np.copyto(
            target.memory[start - target.start : stop - target.start], chunk[start - offset : stop - offset]
        )


def _read(folder: Path, file: FileEntry) -> bytes:
    return b"".join(_read_chunk(folder, file, offset) for offset in range(0, file.nbytes, file.chunk_bytes))


def _read_chunk(folder: Path, file: FileEntry, offset: int) -> memoryview:
    chunk = memoryview(np.empty(min(file.chunk_bytes, file.nbytes - offset), np.uint8).data)
    read_into(folder / file.name, offset, chunk)
    if file.chunks:
        found, expected = xxhash.xxh3_64_hexdigest(chunk), file.chunks[offset // file.chunk_bytes]
        if found != expected:
            raise CorruptCheckpointError(
                f"{folder / file.name}: {len(chunk)} bytes at offset {offset} have the hash {found}, expected "
                f"{expected}; they changed since they were written. Use another checkpoint."
            )
    return chunk
