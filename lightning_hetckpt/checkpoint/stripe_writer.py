"""One thread per drive that hashes and writes the chunks of stripes, in the order in which they come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import xxhash

from lightning_hetckpt.checkpoint.delta_file import DeltaFile
from lightning_hetckpt.checkpoint.direct_io import DirectFile, fsync_folder
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, padded
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.sieve import Sieve
from lightning_hetckpt.checkpoint.spares import take
from lightning_hetckpt.errors import CheckpointError

_log = logging.getLogger("lightning_hetckpt")

# The training thread only puts into a queue; every file call happens in the drive's own thread.
# Guarantees
#   Files and chunks are handled in the order of the calls; `open`, `put` and `close` never wait.
#   A buffer belongs to the writer from `put` until its `release` has been called, which happens
#   exactly once for each put, also after an error: whoever waits for buffers never waits in vain.
#   The first error of a file is the exception of its `close`; other files are not affected by it.
# Assumes: a file is opened, put to and closed by one thread.


@dataclass(slots=True, eq=False)
class StripeFile:
    """A file on its way to a drive, as `open` gives it out; its fields belong to the drive's thread."""

    path: Path
    nbytes: int
    direct: bool
    checksum: bool
    sieve: Sieve | None = None
    delta: DeltaFile | None = None  # instead of `file`
    durable: Future[FileEntry] = field(default_factory=Future)
    file: DirectFile | None = None
    reused: bool = False  # a file of an older checkpoint is written over
    hashes: list[str] = field(default_factory=list)
    written_bytes: int = 0
    write_s: float = 0.0  # that the drive was busy with it
    error: BaseException | None = None

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Keep the first error and let go of the file: what comes later has nothing to write to."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (it travels in the future; the thread must live on)
            self.error = self.error or error
            self.give_up()

    def give_up(self) -> None:
        """Close the file without any promise about its bytes."""
        if self.file is not None:
            self.file.abort()
            self.file = None
        if self.delta is not None:
            self.delta.abort()


class StripeWriter:
    """The thread and the queue of one drive.

    A chunk is hashed beside its own write, in a second thread: one after the other, even xxh3
    would cost a fast drive an eighth of its speed.

    Args:
        name: of the drive, for the threads' names and for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._submitting = threading.RLock()  # no task may come behind the end of the queue
        self._ended = False
        self._open_files: set[StripeFile] = set()
        self._refusing_devices: set[int] = set()  # file systems without direct I/O, announced already
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix=f"hetckpt-hash-{name}")
        self._thread = threading.Thread(target=self._run, name=f"hetckpt-write-{name}", daemon=True)
        self._thread.start()

    def open(
        self,
        path: Path,
        nbytes: int,
        direct: bool,
        checksum: bool,
        prepare: Callable[[], None] | None = None,
        sieve: Sieve | None = None,
        only_changes: bool = False,
    ) -> StripeFile:
        """Begin a file of exactly `nbytes` bytes.

        Args:
            prepare: called first, in the drive's thread; its folder exists afterwards.
            sieve: is shown every chunk.
            only_changes: write what the sieve finds changed, one behind the other, and no file where nothing is;
                `nbytes` is then the length of what it is compared with.
        """
        stripe = StripeFile(path, nbytes, direct, checksum, sieve)
        if only_changes:
            stripe.delta = DeltaFile(path, nbytes, direct)
        stripe.durable.set_running_or_notify_cancel()  # a cancelled future would take no result
        self._submit(partial(self._open, stripe, prepare))
        return stripe

    def put(
        self,
        stripe: StripeFile,
        offset: int,
        view: memoryview,
        used_bytes: int,
        ready: Callable[[], None] | None,
        release: Callable[[], None],
    ) -> None:
        """Write the next chunk: the first `used_bytes` of the buffer `view`, at `offset`.

        Chunks come in order and without gaps; all but the last of a file are `CHUNK_BYTES` long.
        The buffer has room for the last block's padding, which is filled with zeros here.

        Args:
            ready: returns once the buffer is filled (a CUDA event); called in the drive's thread.
            release: called once, in the drive's thread, when the buffer is no longer needed.

        Raises:
            CheckpointError: the writer is shut down; the buffer stays the caller's.
        """
        self._submit(partial(self._put, stripe, offset, view, used_bytes, ready, release))

    def close(self, stripe: StripeFile) -> Future[FileEntry]:
        """The file's entry for the manifest, once its bytes and its name are durable."""
        self._submit(partial(self._close, stripe))
        return stripe.durable

    def shutdown(self) -> None:
        """Finish what is queued and end the thread; files that nobody closed are given up.

        May be called twice. Whatever is asked for afterwards is an error.
        """
        with self._submitting:
            if not self._ended:
                self._ended = True
                self._tasks.put(None)
        self._thread.join()
        self._hasher.shutdown()

    def _submit(self, task: Callable[[], None]) -> None:
        with self._submitting:
            if self._ended:
                raise CheckpointError(f"the writer of {self.name} is shut down; it writes nothing any more")
            self._tasks.put(task)

    # --- From here on, in the drive's thread. It outlives every error, or the queue would never empty. ---

    def _run(self) -> None:
        for task in iter(self._tasks.get, None):
            task()
            del task  # it holds the caller's buffer, and this thread may wait long for the next one
        for stripe in self._open_files:
            stripe.give_up()

    def _open(self, stripe: StripeFile, prepare: Callable[[], None] | None) -> None:
        with stripe.keeping_errors():
            if prepare is not None:
                prepare()
            if stripe.delta is not None:
                self._open_files.add(stripe)
                return
            refused = stripe.path.parent.stat().st_dev in self._refusing_devices
            # Without hashes nothing would tell old bytes from new ones.
            stripe.reused = stripe.checksum and take(stripe.path)
            stripe.file = DirectFile(stripe.path, stripe.nbytes, stripe.direct and not refused, stripe.reused)
            self._open_files.add(stripe)

    def _put(
        self,
        stripe: StripeFile,
        offset: int,
        view: memoryview,
        used_bytes: int,
        ready: Callable[[], None] | None,
        release: Callable[[], None],
    ) -> None:
        with stripe.keeping_errors():
            if ready is not None:
                ready()  # also after an error: the buffer may go back only when nothing fills it any more
            if stripe.delta is not None and stripe.sieve is not None:
                if stripe.error is None:
                    began_s = time.perf_counter()
                    changed = stripe.sieve.changed(offset // CHUNK_BYTES, view[:used_bytes])
                    stripe.delta.add(offset, view, changed)
                    stripe.write_s += time.perf_counter() - began_s
            elif stripe.file is not None:
                if stripe.sieve is not None:
                    stripe.sieve.changed(offset // CHUNK_BYTES, view[:used_bytes])
                self._write(stripe, stripe.file, offset, view, used_bytes)
        with stripe.keeping_errors():
            release()

    def _write(
        self, stripe: StripeFile, file: DirectFile, offset: int, view: memoryview, used_bytes: int
    ) -> None:
        expected = min(CHUNK_BYTES, stripe.nbytes - stripe.written_bytes)
        if (offset, used_bytes) != (stripe.written_bytes, expected) or not used_bytes:
            raise CheckpointError(
                f"{stripe.path}: found a chunk of {used_bytes} bytes at offset {offset}, expected "
                f"{expected} bytes at offset {stripe.written_bytes} in a file of {stripe.nbytes} bytes"
            )
        blocks = view[: padded(used_bytes)]
        blocks[used_bytes:] = bytes(len(blocks) - used_bytes)
        began_s = time.perf_counter()
        if stripe.checksum:
            digest = self._hasher.submit(xxhash.xxh3_64_hexdigest, view[:used_bytes])
            try:
                file.write(blocks, offset)
            finally:
                # Also after an error: the buffer must not be filled anew while it is being hashed.
                stripe.hashes.append(digest.result())
        else:
            file.write(blocks, offset)
        stripe.written_bytes += used_bytes
        stripe.write_s += time.perf_counter() - began_s

    def _close(self, stripe: StripeFile) -> None:
        self._open_files.discard(stripe)
        with stripe.keeping_errors():
            if stripe.file is not None:
                self._finish(stripe, stripe.file)
            elif stripe.delta is not None and stripe.error is None:
                stripe.delta.finish()
                if stripe.delta.nbytes:
                    fsync_folder(stripe.path.parent)
        if stripe.error is not None:
            stripe.durable.set_exception(stripe.error)
        elif stripe.delta is not None:
            hashes = tuple(stripe.delta.hashes)
            stripe.durable.set_result(
                FileEntry(stripe.path.name, stripe.delta.nbytes, CHUNK_BYTES, hashes, stripe.write_s)
            )
        else:
            entry = FileEntry(
                stripe.path.name, stripe.nbytes, CHUNK_BYTES, tuple(stripe.hashes), stripe.write_s
            )
            stripe.durable.set_result(entry)

    def _finish(self, stripe: StripeFile, file: DirectFile) -> None:
        if stripe.written_bytes != stripe.nbytes:
            raise CheckpointError(
                f"{stripe.path}: closed after {stripe.written_bytes} of {stripe.nbytes} bytes"
            )
        began_s = time.perf_counter()
        file.finish()
        stripe.write_s += time.perf_counter() - began_s
        if not stripe.reused:  # else its name was durable before its first byte
            fsync_folder(stripe.path.parent)
        device = stripe.path.parent.stat().st_dev
        if stripe.direct and not file.direct and device not in self._refusing_devices:
            self._refusing_devices.add(device)
            _log.warning("%s: no direct I/O on this file system; using the page cache", stripe.path.parent)
