"""Whether a checkpoint on disk is what its manifest promises. Reads only; trusts nothing that it reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import xxhash

from lightning_hetckpt.checkpoint.direct_io import read_into
from lightning_hetckpt.checkpoint.layout import INCREMENTAL_NAME, MANIFEST_NAME, META_NAME
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest
from lightning_hetckpt.checkpoint.stripe_header import header_bytes, read_header
from lightning_hetckpt.errors import CheckpointNotFoundError, CorruptCheckpointError

_MANIFEST_LIMIT_BYTES = 2**28  # a checkpoint of 10 TB has a manifest of about 30 MB


def is_checkpoint(path: Path) -> bool:
    """Whether `path` names a checkpoint of ours, damaged or not: its folder, or `meta.pt` in it."""
    folder = path.parent if path.name == META_NAME else path
    return (folder / MANIFEST_NAME).is_file()


def read_manifest(path: Path, name: str = MANIFEST_NAME) -> Manifest:
    """The manifest of the checkpoint folder `path`.

    Raises:
        CheckpointNotFoundError: no manifest lies there.
        CorruptCheckpointError: something else lies there, or one that is damaged.
    """
    return Manifest.from_json(_manifest_bytes(path, name), path / name)


def _manifest_bytes(path: Path, name: str = MANIFEST_NAME) -> bytes:
    file = path / name
    try:
        # Someone may have put a link or a pipe there: follow neither, wait for neither.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(
            f"{path}: found no {name}, expected the folder of a committed checkpoint"
        ) from None
    except OSError as error:
        raise CorruptCheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MANIFEST_LIMIT_BYTES:
            raise CorruptCheckpointError(
                f"{file}: {stat.filemode(found.st_mode)} with {found.st_size} bytes, expected a plain file "
                f"of at most {_MANIFEST_LIMIT_BYTES} bytes"
            )
        with os.fdopen(fd, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(fd)


def holds(path: Path, snapshot_id: str) -> bool:
    """Whether `path` is the sound folder of this very snapshot."""
    try:
        data = _manifest_bytes(path)
        # Mostly another snapshot lies there by now, and then nothing needs to be parsed.
        return (
            snapshot_id.encode() in data
            and Manifest.from_json(data, path / MANIFEST_NAME).snapshot_id == snapshot_id
        )
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False


def says_id(path: Path, snapshot_id: str) -> bool:
    """Whether the manifest in `path` names this very snapshot as its own; nothing else of it is checked."""
    try:
        return f'"snapshot_id":"{snapshot_id}"'.encode() in _manifest_bytes(path)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False


def check_files(path: Path, manifest: Manifest) -> None:
    """Every file of the manifest exists in `path`, or behind a link there, with its exact length.

    A stripe also says itself that it belongs to this snapshot, or to the one whose bytes the manifest says that it
    shares: a link may lead anywhere, and where hashes were not kept nothing else would tell.

    Raises:
        CorruptCheckpointError: names the first file that does not.
    """
    for entry in manifest.files.values():
        check_file(path, entry, manifest.snapshot_id)


def check_file(path: Path, entry: FileEntry, snapshot_id: str) -> None:
    """The same of one file.

    Raises:
        CorruptCheckpointError: names it.
    """
    file = path / entry.name
    try:
        found = file.stat()
    except OSError as error:
        raise CorruptCheckpointError(
            f"{file}: cannot be read ({error.strerror}), expected {entry.nbytes} bytes; is its drive mounted?"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpointError(f"{file}: {stat.filemode(found.st_mode)}, expected a plain file")
    if found.st_size != entry.nbytes:
        raise CorruptCheckpointError(f"{file}: holds {found.st_size} bytes, expected {entry.nbytes}")
    if file.suffix == ".safetensors" and file.name != INCREMENTAL_NAME:
        _check_owner(file, entry, entry.snapshot or snapshot_id)


def _check_owner(file: Path, entry: FileEntry, snapshot_id: str) -> None:
    first = memoryview(bytearray(min(8, entry.nbytes)))
    read_into(file, 0, first)
    head = memoryview(bytearray(min(header_bytes(bytes(first), file), entry.nbytes)))
    read_into(file, 0, head)
    found = read_header(bytes(head), file).snapshot_id
    if found != snapshot_id:
        raise CorruptCheckpointError(
            f"{file}: belongs to the snapshot {found}, expected {snapshot_id}; use another checkpoint"
        )


def check_hashes(path: Path, manifest: Manifest) -> None:
    """Every chunk of every file that was saved with checksums has the hash that the manifest gives.

    Raises:
        CorruptCheckpointError: names the first file and chunk that has not.
    """
    for entry in manifest.files.values():
        _check_chunks(path / entry.name, entry)


def _check_chunks(file: Path, entry: FileEntry) -> None:
    buffer = memoryview(bytearray(min(entry.chunk_bytes, entry.nbytes)))
    for index, expected in enumerate(entry.chunks):
        offset = index * entry.chunk_bytes
        chunk = buffer[: min(entry.chunk_bytes, entry.nbytes - offset)]
        read_into(file, offset, chunk)
        found = xxhash.xxh3_64_hexdigest(chunk)
        if found != expected:
            raise CorruptCheckpointError(
                f"{file}: chunk {index} ({len(chunk)} bytes at offset {offset}) has the hash {found}, expected "
                f"{expected}; its bytes have changed since it was written. Use another checkpoint."
            )


def verify(path: Path) -> None:
    """The checkpoint `path` is whole: manifest, lengths and the hash of every chunk.

    Raises:
        CheckpointNotFoundError: `path` is no committed checkpoint.
        CorruptCheckpointError: names the file, and the chunk where it is one, that is damaged.
    """
    manifest = read_manifest(path)
    check_files(path, manifest)
    check_hashes(path, manifest)
