"""What rank 0 writes down: one checkpoint after the other, each with its number and its parent."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from lightning_hetckpt.checkpoint.commit import RankReport
from lightning_hetckpt.checkpoint.figures import Figures
from lightning_hetckpt.checkpoint.folders import remove_tree
from lightning_hetckpt.checkpoint.layout import INCREMENTAL_NAME, RANKS_NAME, stripe_of_delta
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest, TensorEntry, spell_tensors
from lightning_hetckpt.checkpoint.publish import only_warn, put_in_place, scan, write_manifest
from lightning_hetckpt.checkpoint.retention import SnapshotInfo, retire
from lightning_hetckpt.checkpoint.spares import Spares
from lightning_hetckpt.checkpoint.stripe_header import incremental_marker
from lightning_hetckpt.checkpoint.verify import is_checkpoint, read_manifest
from lightning_hetckpt.errors import CommitError

_log = logging.getLogger("lightning_hetckpt")


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a save before its bytes are written."""

    path: Path
    build: Path
    snapshot_id: str
    run: str
    world_size: int
    global_step: int
    epoch: int
    tensors: dict[str, TensorEntry]  # the same dictionary as long as the plan is
    aliases: dict[str, str]
    stripes: Mapping[str, Path]  # of all ranks: file name -> folder
    write: Callable[[str, bytes], Future[FileEntry]]  # a further small file into the build folder
    kind: Literal["full", "incremental", "differential"] = "full"

    def folder_of(self, file: str) -> Path | None:
        """The folder of a stripe, or of what changed in one; None of any other file."""
        return self.stripes.get(stripe_of_delta(file) or file)


class Ledger:
    """The checkpoints that this process has committed or found, for the commit thread alone.

    Args:
        reuse: keep the stripes of those that go, to be written over.
    """

    def __init__(self, reuse: bool = True) -> None:
        self._spares = Spares() if reuse else None
        self._displaced: list[tuple[Path, str | None]] = []  # hidden, with their ids
        self._resumed_ids: set[str] = set()
        self.newest: Path | None = None  # the checkpoint that was committed last
        self._parent: str | None = None
        self._commit = 0
        self._found: dict[Path, list[SnapshotInfo]] = {}  # by folder
        # Of the newest plan, which gives out the same dictionary for every save: a hundredth of a second each time.
        self._spelling: tuple[dict[str, TensorEntry], str] | None = None

    def resumed_from(self, folder: Path) -> None:
        """The next commit descends from the checkpoint `folder` and counts on from it."""
        if not is_checkpoint(folder):
            return  # somebody has removed it since
        manifest = read_manifest(folder)
        self._parent, self._commit = manifest.snapshot_id, max(self._commit, manifest.commit)
        self._resumed_ids.add(manifest.snapshot_id)

    def publish(self, record: Record, reports: Sequence[RankReport], figures: Figures) -> None:
        """Make the checkpoint visible; every file in `reports` is durable and stays as it is.

        What was written is noted in `figures`, and what they hold by now in the manifest. What lay at the path before
        goes with the next `clear_away`.

        Raises:
            CommitError: the reports do not hold every stripe once.
        """
        overlays = {file: one for report in reports for file, one in report.overlays.items()}
        kind = record.kind
        if not overlays:
            kind = "full"
        elif kind == "full":
            kind = "incremental"  # it shares the stripes of one
        ranks = {"world_size": record.world_size, "rank_states": [report.rank_state for report in reports]}
        written = [entry for report in reports for entry in report.files]
        written.append(record.write(RANKS_NAME, json.dumps(ranks).encode()).result())
        if overlays:
            marker = incremental_marker(record.snapshot_id)
            written.append(record.write(INCREMENTAL_NAME, marker).result())
        files = {entry.name: entry for entry in written}
        missing = sorted(set(record.stripes) - set(files))
        if missing or len(files) != len(written):
            raise CommitError(
                f"the ranks wrote {len(written)} files with {len(files)} names, expected every stripe once; "
                f"missing: {missing}"
            )
        figures.mark("durable_ms")
        figures.wrote(written, record.stripes)
        _link(
            record.build, {name: folder for name in files if (folder := record.folder_of(name)) is not None}
        )
        # Found before the build folder gets its manifest, and with it the looks of an interrupted publication.
        found = self._checkpoints_in(record.path.parent)
        commit = max([self._commit, *(info.commit for info in found)]) + 1
        manifest = Manifest(
            snapshot_id=record.snapshot_id,
            run=record.run,
            parent=self._parent,
            commit=commit,
            kind=kind,
            global_step=record.global_step,
            epoch=record.epoch,
            world_size=record.world_size,
            created_unix_s=time.time(),
            files=files,
            tensors=record.tensors,
            aliases=record.aliases,
            figures=figures.as_dict(),
            overlays=overlays,
        )
        write_manifest(record.build, manifest, self._spelled(record.tensors))
        displaced = put_in_place(record.build, record.path, record.snapshot_id)
        if displaced is not None:
            self._displaced.append((displaced, self._id_at(record.path)))
        self._parent, self._commit, self.newest = record.snapshot_id, commit, record.path
        self._forget(record.path)
        found.append(SnapshotInfo(record.path, commit, record.global_step, record.snapshot_id))

    def remove(self, path: Path) -> None:
        """Remove whatever lies at `path`."""
        snapshot_id = self._id_at(path)
        newest = max(self._found.get(path.parent, ()), key=lambda info: info.age_order, default=None)
        is_newest = newest is not None and newest.path == path
        self._forget(path)
        remove_tree(path, snapshot_id, None if is_newest else self._spares_for(snapshot_id))

    def clear_away(self) -> None:
        """Remove what the checkpoints since the last call have displaced. Nobody needs to wait for it."""
        while self._displaced:
            path, snapshot_id = self._displaced.pop()
            with only_warn(path):
                remove_tree(path, snapshot_id, self._spares_for(snapshot_id))

    def close(self) -> None:
        """Give back the room of stripes that wait to be written over."""
        if self._spares is not None:
            self._spares.clear()

    def retire(self, folder: Path, keep_last: int, pattern: str, keep_every_n_steps: int | None) -> None:
        """Remove the checkpoints in `folder` whose name fits `pattern`, but those that `retention.retire` leaves."""
        fitting = [info for info in self._checkpoints_in(folder) if fnmatch(info.path.name, pattern)]
        for info in retire(fitting, keep_last, keep_every_n_steps):
            self.remove(info.path)

    def _spares_for(self, snapshot_id: str | None) -> Spares | None:
        """Where the stripes of a checkpoint go; None where they are not to be written over."""
        # Whoever resumed may still load lazily from the checkpoint, and of a stranger we know nothing.
        return None if snapshot_id is None or snapshot_id in self._resumed_ids else self._spares

    def _checkpoints_in(self, folder: Path) -> list[SnapshotInfo]:
        # Read from disk once: a manifest takes milliseconds, and nobody else commits into our folders.
        if folder not in self._found:
            self._found[folder] = scan(folder, _log.warning)
        return self._found[folder]

    def _id_at(self, path: Path) -> str | None:
        """The snapshot that we know to lie at `path`."""
        at_path = (info.snapshot_id for info in self._found.get(path.parent, ()) if info.path == path)
        return next(at_path, None)

    def _spelled(self, tensors: dict[str, TensorEntry]) -> str:
        if self._spelling is None or self._spelling[0] is not tensors:
            self._spelling = tensors, spell_tensors(tensors)
        return self._spelling[1]

    def _forget(self, path: Path) -> None:
        found = self._found.get(path.parent, [])
        found[:] = [info for info in found if info.path != path]


def _link(build: Path, stripes: Mapping[str, Path]) -> None:
    """Let the checkpoint show the stripes that lie on drives; relative where both may move together."""
    home = build.resolve()
    for name, folder in stripes.items():
        if folder == build:
            continue
        target = folder.resolve()
        # A drive of another host has no folder here, but the same path there.
        same_mount = target.exists() and target.stat().st_dev == home.stat().st_dev
        (build / name).symlink_to(Path(os.path.relpath(target, home) if same_mount else target) / name)
