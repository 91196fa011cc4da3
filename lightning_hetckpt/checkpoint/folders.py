"""The folders that one snapshot lives in: whose they are, and how they go without taking anything else along."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from lightning_hetckpt.checkpoint.direct_io import fsync_folder, write_durably
from lightning_hetckpt.checkpoint.layout import (
    DRIVE_FOLDER,
    HIDDEN_PREFIX,
    INCREMENTAL_NAME,
    MANIFEST_NAME,
    META_NAME,
    OWNER_NAME,
    PARTIAL_NAME,
    RANKS_NAME,
    RETIRED_NAME,
    build_folder,
    is_stripe,
    new_id,
    run_file,
)
from lightning_hetckpt.checkpoint.spares import Spares
from lightning_hetckpt.checkpoint.verify import holds, read_manifest
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

_RUN = re.compile(r"[0-9a-f]{16}")
_OUR_NAME = re.compile(
    rf"stripe-.*\.safetensors|delta-.*\.bin|{re.escape(INCREMENTAL_NAME)}|{'|'.join(map(re.escape, (MANIFEST_NAME, META_NAME, RANKS_NAME, OWNER_NAME)))}"
)


def run_of(folder: Path) -> str:
    """The run id of the snapshot folder `folder`; made up the first time. For rank 0 alone."""
    file = run_file(folder)
    try:
        run = file.read_text("ascii", "replace")
    except FileNotFoundError:
        _make_folders(folder)
        run = new_id()
        write_durably(file, run.encode())
    if not _RUN.fullmatch(run):  # it becomes part of a path on every drive
        raise CorruptCheckpointError(
            f"{file}: holds {run!r:.40}, expected 16 hexadecimal digits; remove the file"
        )
    return run


def owner_note(snapshot_id: str, path: Path) -> bytes:
    """What `owner.json` says in a folder that belongs to the checkpoint `path`."""
    return json.dumps({"snapshot": snapshot_id, "checkpoint": str(path.absolute())}).encode()


def write_owner(folder: Path, snapshot_id: str, path: Path) -> None:
    """Let `folder` say which checkpoint it belongs to; not durable, since a sweep can do without."""
    (folder / OWNER_NAME).write_bytes(owner_note(snapshot_id, path))


def open_folder(folder: Path, build: Path, snapshot_id: str, path: Path) -> None:
    """Make a folder for stripes, the build folder itself or one on a drive, which is marked; not durable yet.

    Nothing happens where it is made already, by another rank or for another stripe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder != build and not (folder / OWNER_NAME).exists():
        (folder / PARTIAL_NAME).touch()
        write_owner(folder, snapshot_id, path)


def owner_path(folder: Path) -> Path | None:
    """The checkpoint that `folder` says it belongs to; None where it does not say."""
    try:
        return Path(json.loads((folder / OWNER_NAME).read_text())["checkpoint"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def drive_folders(folder: Path, snapshot_id: str | None = None) -> set[Path]:
    """The folders on drives that the links in `folder` lead to and that belong to this snapshot.

    Only folders named `…/lightning_hetckpt/<run>/<this snapshot's id>` after every link on the way is
    resolved, so that no forged link leads to anything else.

    Args:
        snapshot_id: of the checkpoint in `folder`, where the caller knows it; None reads its manifest.
    """
    targets = [folder / child.readlink() for child in folder.iterdir() if child.is_symlink()]
    if not targets:
        return set()
    if snapshot_id is None:
        snapshot_id = _id_of(folder)
    found = {Path(os.path.realpath(target.parent)) for target in targets}
    return {drive for drive in found if drive.name == snapshot_id and drive.parts[-3:-2] == (DRIVE_FOLDER,)}


def is_replaceable(path: Path) -> bool:
    """Whether the folder `path` is ours to replace or remove: a checkpoint, damaged perhaps, or empty."""
    # The names come first: a manifest of thousands of tensors takes a tenth of a second to read.
    if path.name.startswith(HIDDEN_PREFIX) or all(
        _OUR_NAME.fullmatch(child.name) for child in path.iterdir()
    ):
        return True
    try:
        read_manifest(path)
        return True
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False


def remove_tree(path: Path, snapshot_id: str | None = None, spares: Spares | None = None) -> None:
    """Remove a checkpoint with its stripes on all drives; a plain file or a link is unlinked.

    Nothing happens where nothing is. A crash in the middle leaves no half checkpoint under a visible
    name, and the next `sweep` ends the work.

    Args:
        snapshot_id: of the checkpoint at `path`, where the caller knows it.
        spares: keeps the stripes that later saves may write over.

    Raises:
        CheckpointError: `path` is a folder that holds other things than a checkpoint of ours.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not is_replaceable(path):
        raise CheckpointError(
            f"{path}: found a folder without a sound {MANIFEST_NAME} and with other files than ours in it, "
            "expected a checkpoint; remove it by hand if it may go"
        )
    if not path.name.startswith(HIDDEN_PREFIX):
        hidden = build_folder(path, new_id())
        os.replace(path, hidden)
        fsync_folder(path.parent)
        path = hidden
    drives = [drive for drive in drive_folders(path, snapshot_id) if drive.is_dir() and not _is_shown(drive)]
    if spares is not None and (path / MANIFEST_NAME).is_file():
        # Before the first stripe is written over no manifest may name it, also after a power cut. Under its other
        # name the manifest still tells a sweep whose the links are.
        os.replace(path / MANIFEST_NAME, path / RETIRED_NAME)
        fsync_folder(path)
        for folder in (*drives, path):
            for stripe in [child for child in folder.iterdir() if is_stripe(child.name)]:
                spares.keep(stripe)
    for drive in drives:
        shutil.rmtree(drive)
    # The drives came first: the manifest, which says whose the links are, must outlive what they lead to.
    for child in path.iterdir():
        _remove(child)
    path.rmdir()


def remove_drive_folder(drive: Path) -> bool:
    """Remove the stripes of one snapshot on one drive; False where a checkpoint still shows them.

    One does where what is being removed was a copy with links to the same stripes, or has such a copy beside it.
    """
    if _is_shown(drive):
        return False
    if drive.is_dir():
        shutil.rmtree(drive)
    return True


def _is_shown(drive: Path) -> bool:
    """Whether the checkpoint that the drive's folder belongs to stands, or a copy beside it links into the folder."""
    owner = owner_path(drive)
    if owner is None or not drive.is_dir():
        return False
    if holds(owner, drive.name):
        return True
    stripes = {child.name: os.path.realpath(child) for child in drive.iterdir() if is_stripe(child.name)}
    try:
        beside = [one for one in owner.parent.iterdir() if not one.name.startswith(HIDDEN_PREFIX)]
    except OSError:
        return False
    return any(
        (folder / name).is_symlink()
        and os.path.realpath(folder / name) == stripe
        and (folder / MANIFEST_NAME).exists()
        for folder in beside
        for name, stripe in stripes.items()
    )


def _id_of(folder: Path) -> str:
    for name in (MANIFEST_NAME, RETIRED_NAME):
        try:
            return read_manifest(folder, name).snapshot_id
        except (CheckpointNotFoundError, CorruptCheckpointError):
            pass
    return folder.name.removeprefix(HIDDEN_PREFIX)  # a build that never got its manifest


def _remove(child: Path) -> None:
    if child.is_dir() and not child.is_symlink():
        shutil.rmtree(child)
    else:
        child.unlink(missing_ok=True)


def _make_folders(folder: Path) -> None:
    """Make `folder` and what is missing above it, each name durable."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:  # another rank was faster
        if not folder.is_dir():
            raise
    fsync_folder(folder.parent)
