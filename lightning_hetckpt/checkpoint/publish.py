"""What a folder of checkpoints shows: each appears whole, by one rename, and the newest whole one is found."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_hetckpt.checkpoint.direct_io import fsync_folder, write_durably
from lightning_hetckpt.checkpoint.folders import (
    drive_folders,
    is_replaceable,
    owner_note,
    owner_path,
    remove_drive_folder,
    remove_tree,
)
from lightning_hetckpt.checkpoint.layout import (
    DRIVE_FOLDER,
    HIDDEN_PREFIX,
    MANIFEST_NAME,
    OWNER_NAME,
    PARTIAL_NAME,
    SPARE_NAME,
    build_folder,
    new_id,
)
from lightning_hetckpt.checkpoint.manifest import Manifest
from lightning_hetckpt.checkpoint.retention import SnapshotInfo
from lightning_hetckpt.checkpoint.verify import (
    check_files,
    check_hashes,
    holds,
    read_manifest,
    verify,
)
from lightning_hetckpt.errors import CheckpointError

__all__ = [
    "check_files",
    "newest_whole",
    "only_warn",
    "publish",
    "put_in_place",
    "read_manifest",
    "remove_tree",
    "scan",
    "sweep",
    "verify",
    "write_manifest",
]

_log = logging.getLogger("lightning_hetckpt")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


def write_manifest(build: Path, manifest: Manifest, tensors: str | None = None) -> None:
    """Seal the build folder: its links and its manifest are durable. The stripes must be so already.

    Args:
        tensors: what `spell_tensors` makes of the manifest's tensors, where the caller kept it.
    """
    write_durably(build / MANIFEST_NAME, manifest.to_json(tensors))


def publish(build: Path, path: Path) -> None:
    """`put_in_place`, and remove what was at `path` before."""
    displaced = put_in_place(build, path)
    if displaced is not None:
        with only_warn(displaced):
            remove_tree(displaced)


def put_in_place(build: Path, path: Path, snapshot_id: str | None = None) -> Path | None:
    """Let the sealed folder `build` be the checkpoint `path`, durably; returns what was there before, hidden now.

    Whoever looks at `path`, also after a crash at any moment, finds the old checkpoint whole or the new
    one. Where the file system cannot exchange two names there is a moment with neither; `scan` and
    `sweep` then finish the work.

    Args:
        snapshot_id: of the build folder, where the caller knows it; None reads its manifest.

    Raises:
        CheckpointError: `path` is a folder with other things in it than a checkpoint of ours.
    """
    if snapshot_id is None:
        snapshot_id = read_manifest(build).snapshot_id
    if path.is_dir() and not path.is_symlink() and not is_replaceable(path):
        raise CheckpointError(
            f"{path}: found a folder with other files than a checkpoint's in it, expected a checkpoint or "
            "nothing; choose another path or move the folder away"
        )
    # From here on the links lead to the stripes; a crash before the rename leaves them to sweep's care.
    for drive in drive_folders(build, snapshot_id):
        (drive / PARTIAL_NAME).unlink(missing_ok=True)
    displaced = None
    if not os.path.lexists(path):
        os.replace(build, path)
    elif _exchange(build, path):
        displaced = build
    else:
        displaced = _replace_in_two_steps(build, path, snapshot_id)
    fsync_folder(path.parent)
    return displaced


def _exchange(one: Path, other: Path) -> bool:
    """Swap what two names mean in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _replace_in_two_steps(build: Path, path: Path, snapshot_id: str) -> Path:
    # Between the two renames nothing is called `path`: the note says where the build folder belongs.
    write_durably(build / OWNER_NAME, owner_note(snapshot_id, path))
    displaced = build_folder(path, new_id())
    os.replace(path, displaced)
    try:
        os.replace(build, path)
    except OSError:
        if not holds(path, snapshot_id):  # else somebody's scan has just finished the work for us
            os.replace(displaced, path)
            raise
    return displaced


def scan(folder: Path, log: Callable[[str], None] | None = None) -> list[SnapshotInfo]:
    """The committed checkpoints directly in `folder`, the newest commit first.

    Other folders and files are ignored, links too: they would show a checkpoint twice. Damaged
    manifests are skipped and named to `log`.
    """
    found = []
    _finish_interrupted(folder)
    for child in _children(folder):
        if child.name.startswith(HIDDEN_PREFIX) or child.is_symlink() or not (child / MANIFEST_NAME).exists():
            continue
        try:
            manifest = read_manifest(child)
        except CheckpointError as error:
            if log is not None:
                log(f"passed over a damaged checkpoint: {error}")
            continue
        found.append(SnapshotInfo(child, manifest.commit, manifest.global_step, manifest.snapshot_id))
    return sorted(found, key=lambda info: info.age_order, reverse=True)


def newest_whole(folder: Path, verify_hashes: bool, log: Callable[[str], None]) -> Path | None:
    """The newest commit in `folder` whose files are all there with their lengths, or None.

    Args:
        verify_hashes: also read every byte and compare the hashes.
        log: told about each checkpoint that is passed over, and why.
    """
    for info in scan(folder, log):
        try:
            manifest = read_manifest(info.path)
            check_files(info.path, manifest)
            if verify_hashes:
                check_hashes(info.path, manifest)
            return info.path
        except (CheckpointError, OSError) as error:
            log(f"passed over the checkpoint of step {info.global_step} (commit {info.commit}): {error}")
    return None


def sweep(folder: Path, drives: Sequence[Path], run: str, spare: str = "") -> list[Path]:
    """Remove what saves into `folder` left behind that never committed; returns what was removed.

    For start-up, before the first save: a save that is under way looks just like one that was killed, unless its
    id is `spare`.
    """
    committed = {info.snapshot_id for info in scan(folder)}
    removed = []
    for child in _children(folder):
        if child.name.startswith(HIDDEN_PREFIX) and not (spare and spare in child.name):
            with only_warn(child):
                remove_tree(child)
                removed.append(child)
    for drive in drives:
        for stripes in _children(drive / DRIVE_FOLDER / run):
            if stripes.name == SPARE_NAME and not stripes.is_symlink():
                with only_warn(stripes):
                    shutil.rmtree(stripes)
                    removed.append(stripes)
                continue
            partial = stripes / PARTIAL_NAME
            if stripes.is_symlink() or not partial.exists():
                continue
            with only_warn(stripes):
                if stripes.name in committed:
                    partial.unlink()
                elif remove_drive_folder(stripes):
                    removed.append(stripes)
    return removed


@contextmanager
def only_warn(leftover: Path) -> Iterator[None]:
    """Log that `leftover` could not be removed, and go on."""
    # Neither a finished save nor the start of a run should fail because of what may go; a sweep tries again.
    try:
        yield
    except OSError as error:
        _log.warning("%s: could not remove what is left of an old or a killed save: %s", leftover, error)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _finish_interrupted(folder: Path) -> None:
    """Publish what a crash inside `_replace_in_two_steps` left sealed and hidden, with nothing at its path."""
    for build in _children(folder):
        owner = owner_path(build) if build.name.startswith(HIDDEN_PREFIX) else None
        if owner is None:
            continue
        path = folder / owner.name  # the folder may have been moved, the name in it stays
        try:
            manifest = read_manifest(build)
            check_files(build, manifest)
            # A checkpoint that is being removed lies under a name that is not its own id's.
            if build == build_folder(path, manifest.snapshot_id) and not os.path.lexists(path):
                os.replace(build, path)
                fsync_folder(folder)
        except (CheckpointError, OSError) as error:
            _log.warning("%s: could not finish publishing it as %s: %s", build, path, error)
