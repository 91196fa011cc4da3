"""The thread in which a save becomes a checkpoint: what was written is reported, decided, published."""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from lightning_hetckpt.checkpoint.chain import Link
from lightning_hetckpt.checkpoint.commit import RankReport, objection
from lightning_hetckpt.checkpoint.crew import Crew
from lightning_hetckpt.checkpoint.direct_io import fsync_folder
from lightning_hetckpt.checkpoint.fleet import Fleet, Speeds
from lightning_hetckpt.checkpoint.folders import remove_drive_folder, remove_tree
from lightning_hetckpt.checkpoint.layout import PARTIAL_NAME, drive_of_stripe, stripe_of_delta
from lightning_hetckpt.checkpoint.ledger import Ledger, Record
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.overlay import Overlay
from lightning_hetckpt.checkpoint.sharing import share
from lightning_hetckpt.checkpoint.snapshot import Snapshot
from lightning_hetckpt.errors import CheckpointError, CommitError, TornSnapshotError

_log = logging.getLogger("lightning_hetckpt")
_TORN = f"{TornSnapshotError.__name__}: "  # how a report says so


@dataclass(frozen=True, slots=True)
class Save:
    """One save as one rank sees it."""

    snapshot: Snapshot
    crew: Crew
    fleet: Fleet
    serial: int
    plan: str  # fingerprint
    drive_folders: tuple[Path, ...]  # made by this rank
    rank_state: bytes
    record: Record
    link: Link | None = None  # where it may be the base of the next one


# Everything that changes what lies under a visible name happens here, in the order in which it was asked for.
# Guarantees
#   A save's outcome is the same on every rank of its crew.
#   A removal comes after every save before it, and not at all if the last of them failed: the old checkpoint
#   is then the only one.
# Assumes: no collectives in here, the main thread may be inside one.


class Committer:
    """Commits, removals and retirements, one after the other.

    Args:
        failed: told about every save that came to nothing, before its `wait` raises.
        reuse: let later saves write over the stripes of checkpoints that go.
    """

    def __init__(self, failed: Callable[[Snapshot, BaseException], None], reuse: bool = True) -> None:
        self._failed = failed
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._last_save_failed = False
        self._ledger = Ledger(reuse)
        # What this rank knows of it: its files, and what they say of each stripe.
        self._newest: tuple[Record, list[FileEntry], Mapping[str, Overlay]] | None = None
        self.makes_links = True  # False once a file system has refused
        self._durable_folders: set[Path] = set()
        self._thread = threading.Thread(target=self._run, name="hetckpt-commit", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Path | None:
        """On rank 0, the checkpoint that was committed last."""
        return self._ledger.newest

    def resumed_from(self, folder: Path) -> None:
        """The next commit descends from the checkpoint `folder`."""
        self._tasks.put(lambda: self._ledger.resumed_from(folder))

    def save(self, save: Save) -> None:
        """Commit `save` once its files are durable; its snapshot tells how it went."""
        self._tasks.put(lambda: self._conclude(save))

    def remove(self, path: Path) -> None:
        """Remove the checkpoint `path` unless the save before failed."""
        self._tasks.put(lambda: self._remove(path))

    def retire(self, folder: Path, keep_last: int, pattern: str, keep_every_n_steps: int | None) -> None:
        """Of the checkpoints of `folder` whose name fits `pattern` leave those that `retention.retire` does."""
        self._tasks.put(lambda: self._ledger.retire(folder, keep_last, pattern, keep_every_n_steps))

    def wait(self) -> None:
        """Return when everything asked for so far has happened."""
        reached = threading.Event()
        self._tasks.put(reached.set)
        reached.wait()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was asked for and end the thread; False if it has not ended in time."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- The thread ---

    def _run(self) -> None:
        for task in iter(self._tasks.get, None):
            try:
                task()
            except (CheckpointError, OSError) as error:  # of a removal; saves keep their errors for `wait`
                _log.warning("%s", error)
            except Exception:  # noqa: BLE001 (whoever waits for what comes behind must not wait in vain)
                _log.exception("the commit thread could not do what it was asked for")
            del task  # it holds a save while this thread waits for the next
        self._ledger.close()

    def _remove(self, path: Path) -> None:
        if self._last_save_failed:
            _log.warning("%s stays: the save that was to take its place failed", path)
        else:
            self._ledger.remove(path)

    def _conclude(self, save: Save) -> None:
        error: BaseException | None = None
        try:
            self._commit_or_raise(save)
        except BaseException as raised:  # noqa: BLE001 (it is what `wait` raises)
            error = raised
        self._last_save_failed = error is not None
        if error is None:
            save.snapshot.figures.mark("durable_ms")
            save.snapshot.outcome.set_result(None)
        else:
            self._failed(save.snapshot, error)
            save.snapshot.outcome.set_exception(error)
        # Behind the answer to the other ranks and to whoever waits here: unlinking gigabytes takes its time.
        self._ledger.clear_away()

    def _commit_or_raise(self, save: Save) -> None:
        own_error: BaseException | None = None
        files: list[FileEntry] = []
        overlays: Mapping[str, Overlay] = {}
        try:
            files = save.snapshot.files()
            borrowed, overlays = self._borrowed(save)
            files = [one for one in files if one.nbytes or stripe_of_delta(one.name) is None] + borrowed
            self._make_durable(save.drive_folders)
        except BaseException as raised:  # noqa: BLE001 (every rank must hear of it)
            own_error = raised
        self._newest = None
        reason, torn = self._agree(save, files, overlays, own_error)
        if reason is not None:
            # Only on a clear no: where rank 0 could not be heard it may still publish this rank's stripes.
            _discard(save)
            kind = TornSnapshotError if torn else CommitError
            raise kind(f"{save.snapshot.path}: nothing was saved, {reason}") from own_error
        self._newest = save.record, files, overlays
        if save.link is not None:
            save.link.end(save.record, files, overlays)
        for folder in save.drive_folders:  # where rank 0 could not see them
            with contextlib.suppress(OSError):  # the checkpoint stands; a sweep tries again
                (folder / PARTIAL_NAME).unlink(missing_ok=True)

    def _borrowed(self, save: Save) -> tuple[list[FileEntry], Mapping[str, Overlay]]:
        """What this rank's part shares with saves before, linked by now, and what it all says of each stripe."""
        lender_id = save.snapshot.borrows_from
        if lender_id is None:
            base = None if save.link is None else save.link.base
            if save.link is None or base is None:
                return [], {}
            overlays: Mapping[str, Overlay] = save.link.overlays()
            needed = {name for overlay in overlays.values() for name in overlay.files}
            lent = [one for one in base.files if drive_of_stripe(one.name) is not None or one.name in needed]
            return share(lent, base.record, save.record)[0], overlays
        if self._newest is None or self._newest[0].snapshot_id != lender_id:
            raise CheckpointError("it was to share the stripes of the save before, and that one failed")
        lender, entries, overlays = self._newest
        stripes = [
            entry
            for entry in entries
            if drive_of_stripe(entry.name) is not None or stripe_of_delta(entry.name) is not None
        ]
        files, all_links = share(stripes, lender, save.record)
        self.makes_links = self.makes_links and all_links
        return files, overlays

    def _agree(
        self,
        save: Save,
        files: list[FileEntry],
        overlays: Mapping[str, Overlay],
        own_error: BaseException | None,
    ) -> tuple[str | None, bool]:
        """Why the save counts for nothing, or None, and whether that is because weights moved: on every rank."""
        speeds: list[Speeds | None] = []
        try:
            return self._exchange(save, files, overlays, own_error, speeds)
        finally:
            # Whatever happened: a save that is begun later may be waiting for it.
            save.fleet.heard(save.serial, speeds[0] if speeds else None)

    def _exchange(
        self,
        save: Save,
        files: list[FileEntry],
        overlays: Mapping[str, Overlay],
        own_error: BaseException | None,
        speeds: list[Speeds | None],
    ) -> tuple[str | None, bool]:
        crew, serial = save.crew, save.serial
        crew.exchange.report(
            serial,
            RankReport(
                crew.rank,
                tuple(files),
                save.plan,
                base64.b64encode(save.rank_state).decode(),
                None if own_error is None else f"{type(own_error).__name__}: {own_error}",
                {file: overlay.entry() for file, overlay in overlays.items()},
            ),
        )
        if crew.rank != 0:
            reason, payload = crew.exchange.await_answer(serial)
            crew.acknowledge(serial)
            speeds.append(payload.get("speeds"))
            return reason, bool(payload.get("torn"))
        torn = False
        reason = "rank 0 stopped in the middle"
        try:
            reports = crew.exchange.collect(serial)
            torn = any((report.error or "").startswith(_TORN) for report in reports)
            reason = objection(reports)
            speeds.append(save.fleet.learn(reports))
            if reason is None:
                self._ledger.publish(save.record, reports, save.snapshot.figures)
        except (CheckpointError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            # Whatever happens here, nobody else is left waiting.
            crew.exchange.answer(serial, reason, {"torn": torn, "speeds": speeds[0] if speeds else None})
        return reason, torn

    def _make_durable(self, drive_folders: tuple[Path, ...]) -> None:
        for folder in drive_folders:
            run = folder.parent
            fsync_folder(run)
            if run not in self._durable_folders:
                fsync_folder(run.parent)
                fsync_folder(run.parent.parent)
                self._durable_folders.add(run)


def _discard(save: Save) -> None:
    try:
        if save.crew.rank == 0:
            remove_tree(save.record.build)
        for folder in save.drive_folders:
            remove_drive_folder(folder)
    except (
        CheckpointError,
        OSError,
    ) as error:  # another rank may still write into it; the next start sweeps it
        _log.warning("%s: could not clear away the failed save: %s", save.record.build, error)
