"""Makes a full checkpoint of an incremental one, where it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import xxhash

from lightning_hetckpt.checkpoint.direct_io import DirectFile, fsync_folder
from lightning_hetckpt.checkpoint.layout import (
    CHUNK_BYTES,
    META_NAME,
    RANKS_NAME,
    build_folder,
    is_stripe,
    new_id,
    padded,
)
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest
from lightning_hetckpt.checkpoint.publish import publish, write_manifest
from lightning_hetckpt.checkpoint.restore import SoloReader
from lightning_hetckpt.checkpoint.span_reader import Target, aligned
from lightning_hetckpt.checkpoint.stripe_header import stamp_header


def consolidate(path: Path) -> bool:
    """Let the checkpoint `path` be a full one that shares no file; False where it is one already.

    All stripes come to lie on the checkpoint's own drive. Every hash is checked on the way; a crash leaves the old
    checkpoint or the new one. Takes memory for a few chunks.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: names the file whose bytes are not those that were written.
    """
    reader = SoloReader(path)
    manifest = reader.manifest
    if not manifest.overlays and not any(file.snapshot for file in manifest.files.values()):
        return False
    snapshot_id = new_id()
    build = build_folder(path, snapshot_id)
    build.mkdir()
    kept = [name for name in manifest.files if name in (META_NAME, RANKS_NAME) or _is_whole(name, manifest)]
    files = {name: _copy(reader, name, build, snapshot_id) for name in kept}
    fsync_folder(build)
    whole = replace(manifest, snapshot_id=snapshot_id, kind="full", files=files, overlays={}, figures={})
    write_manifest(build, whole)
    publish(build, path)
    return True


def _is_whole(name: str, manifest: Manifest) -> bool:
    return is_stripe(name) and any(
        piece.file == name for entry in manifest.tensors.values() for piece in entry.pieces
    )


def _copy(reader: SoloReader, name: str, build: Path, snapshot_id: str) -> FileEntry:
    entry = reader.manifest.files[name]
    buffer = aligned(padded(min(CHUNK_BYTES, entry.nbytes)))
    hashes = []
    with DirectFile(build / name, entry.nbytes, direct=False) as file:
        for offset in range(0, entry.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, entry.nbytes - offset)
            reader.fill({name: [Target(offset, nbytes, memory=buffer[:nbytes])]})
            if offset == 0 and is_stripe(name):
                head = min(nbytes, 4096)
                buffer[:head] = bytearray(stamp_header(bytes(buffer[:head]), snapshot_id))
            buffer[nbytes:] = 0
            hashes.append(xxhash.xxh3_64_hexdigest(buffer[:nbytes].data))
            file.write(buffer[: padded(nbytes)].data, offset)
    return FileEntry(name, entry.nbytes, CHUNK_BYTES, tuple(hashes))
