"""One save on its way from live tensors to the drives: when the weights may move, and when it is durable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.figures import Figures
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.step_guard import Versions
from lightning_hetckpt.errors import CheckpointError, TornSnapshotError

# The life of a snapshot. `sealed` is the border: before it live tensors are read, and `mark_torn` drops the
# snapshot; behind it the bytes are ours alone, and only then may this rank report it as written.
# It is sealed by the first of
#   `fence`     the training thread waited until every copy was issued;
#   `copied`    the last copy ended while no optimizer step was under way. A step under way (`hold`) may have
#               moved weights before that copy ended, so then only a fence tells;
#   `mark_torn`, an error of the copy.


class Snapshot:
    """One save that was begun. Made by `Snapshotter.begin`.

    Args:
        path: of the checkpoint that it becomes.
        stable: the live tensors that are still read, by name.
        told: called when the caller has learnt of the failure, so that nobody tells it again.
        figures: of the save, made when it began.
    """

    def __init__(
        self,
        path: Path,
        stable: Mapping[str, Tensor],
        told: Callable[[Snapshot], None],
        figures: Figures | None = None,
    ) -> None:
        self.path = path
        self.figures = Figures() if figures is None else figures
        self.outcome: Future[None] = Future()  # set by the commit thread
        # Set by the stager before `issued`.
        self.sample: Mapping[torch.device, Tensor] = {}  # how the live tensors looked
        self.borrows_from: str | None = None  # id of the save before, whose stripes this one shares
        self._told = told
        self._versions: Versions | None = Versions(stable)
        self._files: Future[list[Future[FileEntry]]] = Future()
        self._copies: dict[torch.device, torch.cuda.Event] = {}
        self._state = threading.RLock()  # a save in a signal handler may come in between
        self._sealed = threading.Event()
        self._held = False
        self._torn: str | None = None

    @property
    def versions(self) -> Sequence[int] | None:
        """How often each live tensor had been changed in place; None where one keeps no count, or once sealed."""
        return None if self._versions is None else self._versions.seen

    @property
    def fenced(self) -> bool:
        """Whether nothing more is read from the live tensors."""
        return self._sealed.is_set()

    def fence(self) -> None:
        """Return once the live tensors may move; a second call costs nothing.

        On a GPU it is the present stream that waits for the copies, not this thread.

        Raises:
            TornSnapshotError: they have moved already.
            CheckpointError: the copy failed.
        """
        self.settle()
        error = self.torn_error() if self._torn is not None else self._files.exception()
        if error is not None:
            self._told(self)
            raise error

    def wait(self) -> None:
        """Return once the checkpoint is durable and published, or raise what prevented it.

        Raises:
            TornSnapshotError: the weights moved while they were read, on any rank.
            CheckpointError: some rank could not write its part.
        """
        self.settle()
        error = self.outcome.exception()
        if error is not None:
            self._told(self)
            raise error

    def done(self) -> bool:
        """Whether the outcome is known: `wait` would return or raise at once."""
        return self.outcome.done()

    def mark_torn(self, reason: str) -> bool:
        """Drop the save, on every rank, because live tensors moved; False if nothing read them any more."""
        with self._state:
            if self._sealed.is_set():
                return False
            self._torn = reason
            self._seal()
            return True

    # --- For the engine ---

    def settle(self) -> None:
        """`fence`, but errors wait for `fence` or `wait`."""
        if self._sealed.is_set():
            return
        began_s = time.perf_counter()
        if self._files.exception() is None:
            for device, copied in self._copies.items():
                torch.cuda.current_stream(device).wait_event(copied)
        self.figures.add("fence_ms", 1e3 * (time.perf_counter() - began_s))
        with self._state:
            self._check_and_seal()

    def hold(self) -> None:
        """An optimizer step is under way: the end of the copy alone proves nothing any more."""
        with self._state:
            self._held = True

    def issued(self, files: list[Future[FileEntry]], copies: dict[torch.device, torch.cuda.Event]) -> None:
        """Every copy is on its way; `copies` are done when a GPU's are."""
        self._copies = copies
        self._files.set_result(files)

    def copied(self) -> None:
        """Every copy has ended."""
        with self._state:
            if not self._held:
                self._check_and_seal()

    def failed(self, error: BaseException) -> None:
        """The copy failed; whatever was written of it counts for nothing."""
        if not isinstance(error, CheckpointError):
            wrapped = CheckpointError(f"{self.path}: the state could not be copied: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        if not self._files.done():  # else a GPU stopped in the middle of a copy, and the file says so too
            self._files.set_exception(error)
        with self._state:
            self._seal()

    def is_read_whole(self) -> bool:
        """Whether every copy is on its way, and nothing is known to have moved before."""
        return self._torn is None and self._files.done() and self._files.exception() is None

    def files(self) -> list[FileEntry]:
        """What this rank wrote, once it is durable; waits, and raises what prevented it."""
        files = self._files.result()
        futures.wait(files)  # also of a failed save: nobody may remove a folder that is still written to
        self._sealed.wait()
        if self._torn is not None:
            raise self.torn_error()
        return [file.result() for file in files]

    def torn_error(self) -> TornSnapshotError:
        """The error that says why the snapshot was dropped."""
        return TornSnapshotError(f"{self.path}: the snapshot was dropped. {self._torn}")

    def _check_and_seal(self) -> None:
        if self._sealed.is_set():
            return
        moved = self._versions.moved() if self._versions is not None else []
        if moved and self._torn is None:
            self._torn = (
                f"{len(moved)} tensors were changed in place before the fence, such as {moved[0]}. Change weights "
                "only in optimizer steps, or call `fence()` before."
            )
        self._seal()

    def _seal(self) -> None:
        self._versions = None  # it holds every live tensor
        self._sealed.set()
