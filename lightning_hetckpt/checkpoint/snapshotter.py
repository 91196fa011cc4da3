"""Begin, fence, drain: takes a checkpoint while training goes on, and owns the threads that do it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_hetckpt.channel import Channel, SoloChannel, background_store
from lightning_hetckpt.checkpoint.chain import Base, Chain, Kind, Link
from lightning_hetckpt.checkpoint.commit import Store
from lightning_hetckpt.checkpoint.committer import Committer, Save
from lightning_hetckpt.checkpoint.crew import Crew
from lightning_hetckpt.checkpoint.direct_io import supports_direct
from lightning_hetckpt.checkpoint.drives import find
from lightning_hetckpt.checkpoint.figures import Figures
from lightning_hetckpt.checkpoint.fleet import Fleet, agree
from lightning_hetckpt.checkpoint.folders import open_folder
from lightning_hetckpt.checkpoint.layout import (
    CHUNK_BYTES,
    META_NAME,
    build_folder,
    drive_folder,
    drive_of,
    padded,
)
from lightning_hetckpt.checkpoint.ledger import Record
from lightning_hetckpt.checkpoint.lending import Lender, Standing
from lightning_hetckpt.checkpoint.manifest import FileEntry, TensorEntry
from lightning_hetckpt.checkpoint.meta import pack_meta
from lightning_hetckpt.checkpoint.publish import sweep
from lightning_hetckpt.checkpoint.save_layout import LayoutBook, SaveLayout
from lightning_hetckpt.checkpoint.shard_plan import StripePlan
from lightning_hetckpt.checkpoint.sharing import can_link
from lightning_hetckpt.checkpoint.sifting import frozen_now, rows_of, sifted, untouched_since
from lightning_hetckpt.checkpoint.snapshot import Snapshot
from lightning_hetckpt.checkpoint.staging import Pour, Stager, pour
from lightning_hetckpt.checkpoint.staging_pool import StagingPool
from lightning_hetckpt.checkpoint.step_guard import StepGuard
from lightning_hetckpt.checkpoint.stripe_header import stamp_header
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.checkpoint.survey import Surveyor
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

__all__ = ["Snapshot", "Snapshotter"]

_log = logging.getLogger("lightning_hetckpt")


class Snapshotter:
    """Takes checkpoints: begin copies what moves at once, the rest drains behind the next forward pass.

    All methods are for the thread that trains. Making one starts its threads, `close` ends them.

    Args:
        drives: folders, one per drive, that share the bytes; None is the checkpoint's own folder, and "auto"
            that with every other local SSD.
        buffer_bytes: memory that bytes pass through; None is this rank's share of a save within limits.
        checksum: keep a hash of every 8 MiB.
        direct: go past the page cache; "auto" where the drive allows it, True insists.
        channel: the ranks that save together.
        store: a connection to the job's store for the commit thread, made where there are more ranks than one.
        timeout_s: how long a rank that does not report is waited for.
        save: "incremental" and "differential" checkpoints hold what changed since the one before, or since the
            last full one, and share the rest with it by hard links.
        full_every: checkpoints of a folder from one full one to the next.
        verify_unchanged: how often, in checkpoints, tensors are compared that no optimizer owns and that seem
            untouched.
    """

    def __init__(
        self,
        drives: Sequence[Path] | Literal["auto"] | None = None,
        buffer_bytes: int | None = None,
        checksum: bool = True,
        direct: bool | Literal["auto"] = "auto",
        channel: Channel | None = None,
        store: Callable[[], Store] = background_store,
        timeout_s: float = 300.0,
        save: Kind = "full",
        full_every: int = 20,
        verify_unchanged: int = 10,
    ) -> None:
        self.channel: Channel = SoloChannel() if channel is None else channel
        self._auto = drives == "auto"
        self._drives = None if drives is None or drives == "auto" else [drive.resolve() for drive in drives]
        self._checksum = checksum
        self._direct = direct
        self._store = store
        self._timeout_s = timeout_s
        self._crews: dict[bool, tuple[Crew, Fleet]] = {}  # True: this process alone
        self._pool = StagingPool(buffer_bytes, self.channel.size)
        self._saves: list[Snapshot] = []  # whose outcome is not known yet
        self._failures: dict[Snapshot, BaseException] = {}  # that nobody has been told
        self._swept: set[Path] = set()
        self._closed = False
        self._guard = StepGuard()
        self._writers: dict[str, StripeWriter] = {}  # by physical drive
        self._surveyor = Surveyor()
        self._layouts = LayoutBook()
        self._merged: tuple[SaveLayout, SaveLayout, dict[str, TensorEntry]] | None = None
        self._stager = Stager()
        self._lender = Lender()
        self._kind: Kind = save
        self._full_every, self._verify_unchanged = full_every, max(1, verify_unchanged)
        self._chains: dict[Path, Chain] = {}  # by folder
        self._committer = Committer(self._failures.__setitem__, reuse=checksum)

    def begin(
        self,
        checkpoint: Mapping[Any, Any],
        path: Path,
        stable: Collection[Tensor] = (),
        rank_state: bytes = b"",
        *,
        alone: bool = False,
        figures: Mapping[str, float] | None = None,
        frozen: Collection[Tensor] = (),
        sparse: Collection[Tensor] = (),
    ) -> Snapshot:
        """Begin to save `checkpoint` as `path`; on every rank of the channel, in the same order.

        Whatever goes wrong from here on is told by the snapshot, on every rank alike.

        Args:
            stable: live tensors, equal on all ranks, that nobody changes before `fence`. They are split over
                all ranks and drives; everything else is copied before this returns, and written by rank 0.
            rank_state: what is this rank's own, such as the state of its random number generators.
            alone: this process saves all by itself, and every tensor is stable: fence before any changes.
            figures: what the caller measured, for the manifest of rank 0.
            frozen: those of the stable tensors that nobody trains.
            sparse: those of which a step changes a few rows only.
        """
        noted = Figures(figures)
        path = _canonical(path)
        crew, fleet = self._crew(path.parent, alone)
        chain = self._chain(path.parent, alone)
        base = None if chain is None else chain.base()
        hosts = fleet.in_force(crew.upcoming) if base is None else base.hosts
        found = self._surveyor.survey(checkpoint, None if alone else stable)
        live, owned = found.live, found.owned if crew.rank == 0 else {}
        shared = self._layouts.shared(live, hosts, found.likeness)
        rows = {} if chain is None else rows_of(live, sparse)
        kind = "full" if chain is None else chain.next(shared.mark(rows))
        if kind == "full" and base is not None:
            base, hosts = None, fleet.in_force(crew.upcoming)
            shared = self._layouts.shared(live, hosts, found.likeness)
        extra = self._layouts.owned(owned, found.likeness)
        serial, snapshot_id = crew.next_save()
        if crew.rank == 0 and path.parent not in self._swept:
            self._sweep(path.parent, crew.run, spare=snapshot_id)
        build = build_folder(path, snapshot_id)
        places = {
            folder: build if folder is None else drive_folder(folder, crew.run, snapshot_id)
            for folders in fleet.folders.values()
            for folder in folders
        }
        record = Record(
            path,
            build,
            snapshot_id,
            crew.run,
            crew.size,
            _whole_number(checkpoint.get("global_step")),
            _whole_number(checkpoint.get("epoch")),
            self._entries(shared, extra),
            found.flat.aliases,
            {
                stripe.file: places[fleet.folders[stripe.rank][stripe.drive]]
                for stripe in (*shared.stripes, *extra.stripes)
            },
            lambda name, data: self._write(fleet, build / name, data),
            kind,
        )
        mine = [stripe for stripe in shared.stripes if stripe.rank == crew.rank]
        lazy = self._pours(fleet, record, shared, mine, live)
        link = None
        if chain is not None:
            seen = frozen_now(live, frozen)
            untouched = untouched_since(base, seen, self._verify_unchanged)
            lazy = sifted(lazy, shared, rows, base, untouched, snapshot_id)
            link = Link(kind, base, tuple(hosts), shared.mark(rows), lazy, seen)
            chain.begin(link)
        now = self._pours(fleet, record, extra, extra.stripes, owned)
        folders = tuple({one.path.parent for one in (*lazy, *now)} - {build})
        earlier = [save for save in self._saves if not save.done()]
        snapshot = Snapshot(path, live, self._told, noted)
        standing = Standing.at(
            checkpoint.get("global_step"),
            self._guard.moves,
            shared.fingerprint,
            found.addresses,
            snapshot.versions,
        )
        homes = [drive_of(one.path.parent) for one in lazy]
        # In a chain all ranks must know what the next one is compared with, and who borrows decides for itself.
        may_borrow = self._committer.makes_links and link is None
        loan = self._lender.ask(standing, path, homes) if may_borrow else None
        self._saves = [*earlier, snapshot]
        if not alone:
            self._guard.watch(snapshot, found.addresses)
        files: list[Future[FileEntry]] = []
        try:
            pool = self._pool.ready(
                sum(padded(one.nbytes, CHUNK_BYTES) for one in (*lazy, *now)), lambda: _await(earlier)
            )
            files += pour(now, pool)
            if crew.rank == 0:
                files.append(
                    self._write(fleet, build / META_NAME, pack_meta(found.flat, found.places, found.parts))
                )
        except BaseException as error:
            futures.wait(files)
            snapshot.failed(error)
            self._lender.note(None, snapshot, snapshot_id, homes)
            if not isinstance(error, Exception):  # a signal is for the caller, too
                raise
        else:
            self._stager.drain(snapshot, lazy, pool, files, found.devices, loan)
            self._lender.note(standing, snapshot, snapshot_id, homes)
        finally:
            noted.mark("begin_ms")
            # Also of a save that failed here: the other ranks wait for a word about it.
            self._committer.save(
                Save(
                    snapshot, crew, fleet, serial, _plan_mark(shared, base), folders, rank_state, record, link
                )
            )
        return snapshot

    def remove(self, path: Path) -> None:
        """Remove the checkpoint `path` behind every save begun so far; it stays if the last of them fails."""
        self._lender.forget(_canonical(path))
        self._committer.remove(_canonical(path))

    def retire(
        self,
        folder: Path,
        keep_last: int,
        pattern: str = "step=*.ckpt",
        keep_every_n_steps: int | None = None,
    ) -> None:
        """Leave the newest `keep_last` checkpoints of `folder` named like `pattern`, behind every save begun so far.

        The first at or behind each multiple of `keep_every_n_steps` steps stays for good.
        """
        if self.channel.rank == 0:
            self._committer.retire(folder.resolve(), keep_last, pattern, keep_every_n_steps)

    def resumed_from(self, folder: Path) -> None:
        """Training goes on from the checkpoint `folder`: it is the parent of the next one."""
        self._committer.resumed_from(folder)

    @property
    def newest(self) -> Path | None:
        """On rank 0, the checkpoint that was committed last."""
        return self._committer.newest

    def pending(self, path: Path) -> bool:
        """Whether a save to `path` has begun whose outcome is not known yet."""
        return any(not save.done() and _is_at(save, path) for save in self._saves)

    def wait(self, path: Path | None = None) -> None:
        """Return when the saves to `path`, or all saves and removals, are done; raise what failed, once."""
        saves = [save for save in self._saves if path is None or _is_at(save, path)]
        _await(saves)
        if path is None:
            self._committer.wait()
        self.raise_failures(path)

    def raise_failures(self, path: Path | None = None) -> None:
        """Raise what made a save to `path`, or any save, fail, if nobody has been told yet."""
        failures = {
            save: error for save, error in list(self._failures.items()) if path is None or _is_at(save, path)
        }
        first, *others = failures.values() or [None]
        for save in failures:
            self._told(save)
        for error in others:
            _log.error("%s", error)
        if first is not None:
            raise first

    def abandon(self, patience_s: float) -> None:
        """Give up saves with other ranks that are not done by then; saves alone still work."""
        pending = [save.outcome for save in self._saves]
        if futures.wait(pending, patience_s).not_done:
            for crew, _ in self._crews.values():
                crew.exchange.cancel()

    def close(self, patience_s: float | None = None) -> None:
        """Finish everything and end the threads. May be called twice; `raise_failures` still tells what failed.

        Args:
            patience_s: how long other ranks are waited for; None is for as long as a save may take. What they have
                not reported by then comes to nothing.
        """
        if self._closed:
            return
        self._closed = True
        for save in self._saves:
            save.settle()
        if not self._committer.close(2 * self._timeout_s if patience_s is None else patience_s):
            for crew, _ in self._crews.values():
                crew.exchange.cancel()
            self._committer.close()
        if patience_s is None and all(save.outcome.exception() is None for save in self._saves[-1:]):
            for crew, _ in self._crews.values():
                crew.await_goodbye()
        self._stager.close()
        for writer in self._writers.values():
            writer.shutdown()
        self._guard.close()
        self._pool.close()
        self._crews.clear()

    def __enter__(self) -> Snapshotter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _crew(self, folder: Path, alone: bool) -> tuple[Crew, Fleet]:
        if self._closed:
            raise CheckpointError(f"{folder}: this Snapshotter is closed; make a new one")
        if alone not in self._crews:
            channel = SoloChannel() if alone else self.channel
            crew = Crew(channel, folder, lambda run: self._sweep(folder, run), self._store, self._timeout_s)
            fleet = agree(
                channel, folder, self._drives, self._auto, self._direct is not False, 2 * self._timeout_s
            )
            if self._direct is True:
                _insist_on_direct(Path(one or folder) for one in fleet.found.folders)
            self._crews[alone] = crew, fleet
        return self._crews[alone]

    def _sweep(self, folder: Path, run: str, spare: str = "") -> None:
        # Before the first save into a folder: a save under way looks like one that was killed. Where it is not the
        # first save at all, other ranks may have begun with this one, which is to be spared.
        drives = [] if spare else [Path(one) for one in find(folder, self._drives, self._auto).folders if one]
        removed = sweep(folder, drives, run, spare)
        if removed:
            _log.info("%s: removed %d folders of saves that were never finished", folder, len(removed))
        self._swept.add(folder)

    def _pours(
        self,
        fleet: Fleet,
        record: Record,
        layout: SaveLayout,
        stripes: Iterable[StripePlan],
        tensors: Mapping[str, Tensor],
    ) -> list[Pour]:
        return [
            Pour(
                stripe,
                layout.chunks(stripe),
                stamp_header(layout.header(stripe), record.snapshot_id),
                tensors,
                self._writer(fleet.found.disks[stripe.drive]),
                record.stripes[stripe.file] / stripe.file,
                self._direct is not False,
                self._checksum,
                partial(
                    open_folder, record.stripes[stripe.file], record.build, record.snapshot_id, record.path
                ),
            )
            for stripe in stripes
        ]

    def _chain(self, folder: Path, alone: bool) -> Chain | None:
        """The chain of the checkpoints in `folder`, all of which are concluded; None where there are full ones only."""
        if alone or self._kind == "full":
            return None
        if folder not in self._chains:
            places = [Path(one or folder) for one in self._crews[alone][1].found.folders]
            if all(self.channel.all_gather(all(map(can_link, places)))):
                self._chains[folder] = Chain(self._kind, self._full_every)
            else:
                _log.warning(
                    "%s: this file system, or that of a drive, has no hard links; every checkpoint is full",
                    folder,
                )
                self._kind = "full"
                return None
        _await(self._saves)  # the next one is compared with what became of them, on every rank alike
        return self._chains[folder]

    def _entries(self, shared: SaveLayout, extra: SaveLayout) -> dict[str, TensorEntry]:
        """Of both layouts; the same dictionary as long as they are the same."""
        known = self._merged
        if known is None or known[0] is not shared or known[1] is not extra:
            known = self._merged = shared, extra, {**shared.entries, **extra.entries}
        return known[2]

    def _writer(self, disk: str) -> StripeWriter:
        if disk not in self._writers:
            self._writers[disk] = StripeWriter(disk)
        return self._writers[disk]

    def _write(self, fleet: Fleet, path: Path, data: bytes) -> Future[FileEntry]:
        """Write a small file of the checkpoint itself, through the page cache."""
        writer = self._writer(fleet.found.home_disk)
        file = writer.open(
            path, len(data), False, self._checksum, partial(path.parent.mkdir, parents=True, exist_ok=True)
        )
        blocks = memoryview(bytearray(data.ljust(padded(len(data)), b"\0")))
        for offset in range(0, len(data), CHUNK_BYTES):
            used_bytes = min(CHUNK_BYTES, len(data) - offset)
            writer.put(file, offset, blocks[offset : offset + CHUNK_BYTES], used_bytes, None, lambda: None)
        return writer.close(file)

    def _told(self, save: Snapshot) -> None:
        self._failures.pop(save, None)


def _plan_mark(layout: SaveLayout, base: Base | None) -> str:
    """What must be equal on all ranks: the plan, and what they compare with."""
    return layout.fingerprint if base is None else f"{layout.fingerprint} {base.record.snapshot_id}"


def _await(saves: Iterable[Snapshot]) -> None:
    for save in saves:
        save.settle()
        save.outcome.exception()


def _insist_on_direct(folders: Iterable[Path]) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if not supports_direct(folder):
            raise ConfigurationError(
                f'{folder}: direct=True, but its file system refuses O_DIRECT. Use direct="auto" or another drive.'
            )


def _canonical(path: Path) -> Path:
    """One spelling for each place; a link at the place itself is not followed, since a save replaces it."""
    return path.parent.resolve() / path.name


def _is_at(save: Snapshot, path: Path) -> bool:
    return save.path in (_canonical(path), path.resolve())


def _whole_number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
