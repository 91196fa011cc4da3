"""Two checkpoints of one state hold the same stripes: hard links, where the file system has them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from lightning_hetckpt.checkpoint.direct_io import DirectFile, fsync_folder, read_into
from lightning_hetckpt.checkpoint.folders import open_folder
from lightning_hetckpt.checkpoint.layout import HIDDEN_PREFIX, new_id, padded
from lightning_hetckpt.checkpoint.ledger import Record
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.verify import says_id
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError

_log = logging.getLogger("lightning_hetckpt")
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def share(lent: Sequence[FileEntry], lender: Record, borrower: Record) -> tuple[list[FileEntry], bool]:
    """Let stripes of the committed checkpoint `lender` be stripes of `borrower` too, durably, bytes and names.

    Each checkpoint may be removed without the other: the bytes go with the last of their names. Where the file
    system refuses a link the bytes are copied, and checked on the way.

    Args:
        lent: what this rank wrote of `lender`.

    Returns:
        The files of `borrower`, and whether all of them are links.

    Raises:
        CheckpointError: another checkpoint, or none, lies where `lender` did.
        CorruptCheckpointError: bytes that had to be copied are not those that were written.
    """
    all_links = True
    for entry in lent:
        folder = _folder(borrower, entry.name)
        open_folder(folder, borrower.build, borrower.snapshot_id, borrower.path)
        all_links &= _link_or_copy(_place(lender, entry.name), folder / entry.name, entry)
    # Behind the links: what lies there now lay there all along, since no two snapshots have one id.
    if any(_folder(lender, entry.name) == lender.build for entry in lent) and not says_id(
        lender.path, lender.snapshot_id
    ):
        raise CheckpointError(
            f"{lender.path}: the checkpoint {lender.snapshot_id}, whose stripes were to be shared, does not lie there any "
            "more; the next save is a full one"
        )
    for folder in {_folder(borrower, entry.name) for entry in lent}:
        fsync_folder(folder)
    files = [replace(entry, snapshot=entry.snapshot or lender.snapshot_id, write_s=0.0) for entry in lent]
    return files, all_links


def _place(lender: Record, name: str) -> Path:
    folder = _folder(lender, name)
    return (lender.path if folder == lender.build else folder) / name


def _folder(record: Record, name: str) -> Path:
    folder = record.folder_of(name)
    if folder is None:
        raise CheckpointError(
            f"{record.path}: no stripe is called {name}, expected one of {[*record.stripes]}"
        )
    return folder


def can_link(folder: Path) -> bool:
    """Whether files in `folder`, which is made, can have a second name."""
    one, other = folder / f"{HIDDEN_PREFIX}{new_id()}", folder / f"{HIDDEN_PREFIX}{new_id()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        one.touch()
        os.link(one, other)
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            one.unlink(missing_ok=True)
            other.unlink(missing_ok=True)


def _link_or_copy(source: Path, target: Path, entry: FileEntry) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
        return True
    except OSError as refusal:
        if refusal.errno not in _NO_LINKS:
            raise
        _log.warning(
            "%s: no hard links here (%s); checkpoints of one step are written twice",
            target.parent,
            refusal.strerror,
        )
    _copy(source, target, entry)
    return False


def _copy(source: Path, target: Path, entry: FileEntry) -> None:
    buffer = memoryview(bytearray(padded(min(entry.chunk_bytes, entry.nbytes))))
    with DirectFile(target, entry.nbytes, direct=False) as file:
        for index, offset in enumerate(range(0, entry.nbytes, entry.chunk_bytes)):
            used_bytes = min(entry.chunk_bytes, entry.nbytes - offset)
            read_into(source, offset, buffer[:used_bytes])
            if entry.chunks and xxhash.xxh3_64_hexdigest(buffer[:used_bytes]) != entry.chunks[index]:
                raise CorruptCheckpointError(
                    f"{source}: {used_bytes} bytes at offset {offset} have changed since they were written a moment ago"
                )
            file.write(buffer[: padded(used_bytes)], offset)
