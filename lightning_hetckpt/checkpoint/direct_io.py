"""Files that go past the page cache where the drive allows it, and end up on the drive either way."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from pathlib import Path
from types import TracebackType

from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, HIDDEN_PREFIX, new_id, padded
from lightning_hetckpt.errors import CorruptCheckpointError, ShortWriteError

# What a file system answers that does not do direct I/O. Some say so at open, some at the first write.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # absent on macOS: every file is buffered there

_SYNC_START = 2  # SYNC_FILE_RANGE_WRITE
_SYNC_AND_WAIT = 1 | 2 | 4  # wait for what is under way, write the rest, wait for that

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_MEM_ALIGN_AT, _DIO_OFFSET_ALIGN_AT = 152, 156  # in struct statx


class DirectFile:
    """A file of `nbytes` bytes, written in whole blocks and durable after `finish`.

    Addresses, offsets and lengths of all writes are multiples of 4096, also where the file is
    buffered; the padding of the last block is cut off by `finish`. Not for use by two threads.

    A buffered file leaves at most two writes dirty: each is sent to the drive at once, and awaited and
    dropped from the page cache behind the next one.

    Args:
        direct: ask for O_DIRECT. Where the file system refuses, the file goes through the page
            cache instead and `direct` turns False.
        reuse: write over the file that lies at `path`, of whatever length, in the space that it has. Its
            first block is blanked at once, so that it is no stripe of anything until the new header is there.
    """

    def __init__(self, path: Path, nbytes: int, direct: bool, reuse: bool = False) -> None:
        self.path = path
        self.nbytes = nbytes
        self.direct = direct and _O_DIRECT != 0
        self._written_bytes = 0
        self._dirty: tuple[int, int] | None = None  # offset and length of the newest buffered write
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if reuse else os.O_CREAT | os.O_TRUNC)
        try:
            self._fd = os.open(path, flags | (_O_DIRECT if self.direct else 0), 0o644)
        except OSError as refusal:
            if not self.direct or refusal.errno not in _REFUSALS:
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o644)
        if self.direct and not fits_direct(direct_alignment(self._fd)):
            self._go_buffered()
        if reuse:
            try:
                self._blank()
            except BaseException:
                self.abort()
                raise

    def _blank(self) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as block, memoryview(block) as zeros:
            written = self._write_some(zeros, 0)
        if written != BLOCK_BYTES:
            raise ShortWriteError(f"{self.path}: blanked {written} of its first {BLOCK_BYTES} bytes")

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`, both in whole blocks; no byte past the padded length.

        Raises:
            OSError: from the kernel, with the path, the offset and the bytes in it.
            ShortWriteError: the kernel stopped taking bytes without naming an error.
        """
        whole = view.nbytes
        if offset % BLOCK_BYTES or whole % BLOCK_BYTES or offset + whole > padded(self.nbytes):
            raise ValueError(
                f"{self.path}: a write of {whole} bytes at offset {offset} does not fit a file of "
                f"{self.nbytes} bytes in blocks of {BLOCK_BYTES}"
            )
        done = 0
        while done < whole:
            taken = self._write_some(view[done:], offset + done)
            # Direct I/O cannot go on in the middle of a block: that block is written once more.
            forward = taken - taken % BLOCK_BYTES
            if forward == 0:
                raise ShortWriteError(
                    f"{self.path}: wrote {done + taken} of {whole} bytes at offset {offset}; "
                    "is the drive, the quota or the file size limit full?"
                )
            done += forward
            self._written_bytes += forward
        if not self.direct:
            self._write_back(offset, whole)

    def _write_back(self, offset: int, nbytes: int) -> None:
        """Start writing these pages to the drive, and end it for those of the write before: they leave the cache."""
        before, self._dirty = self._dirty, (offset, nbytes)
        try:
            _sync_range(self._fd, offset, nbytes, _SYNC_START)
            if before is not None:
                _sync_range(self._fd, *before, _SYNC_AND_WAIT)
                _drop(self._fd, *before)
        except OSError as error:
            # The kernel tells a failed write-back once: `finish` would find everything clean.
            raise OSError(
                error.errno,
                f"{error.strerror} (writing back up to {nbytes} bytes at offset {offset})",
                str(self.path),
            ) from error

    def _write_some(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._fd, view, offset)
        except OSError as error:
            if self.direct and self._written_bytes == 0 and error.errno in _REFUSALS:
                self._go_buffered()
                return self._write_some(view, offset)
            raise OSError(
                error.errno,
                f"{error.strerror} (writing {view.nbytes} bytes at offset {offset})",
                str(self.path),
            ) from error

    def _go_buffered(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        self.direct = False

    def finish(self) -> None:
        """Cut the padding off, wait until every byte lies on the drive, and close.

        An error of the flush is final: the kernel reports it once and then calls the pages
        clean, so nobody may try again. The name in its folder is durable after `fsync_folder`.
        """
        try:
            found = os.fstat(self._fd).st_size
            held = min(found, self._written_bytes)  # a reused file may have been longer from the start
            if held < padded(self.nbytes):
                raise ShortWriteError(f"{self.path}: holds {held} of {padded(self.nbytes)} bytes at its end")
            if found != self.nbytes:
                os.ftruncate(self._fd, self.nbytes)
            self.flush()
            if not self.direct:
                # The pages are clean now; without this they would push the data set out of memory.
                _drop(self._fd, 0, 0)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror} (finishing {self.nbytes} bytes)", str(self.path)
            ) from error
        finally:
            self.abort()

    def flush(self) -> None:
        """Wait until everything written so far lies on the drive."""
        _flush(self._fd)

    def abort(self) -> None:
        """Close without any promise about the bytes; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._fd >= 0:
            self.finish()


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """What the kernel says direct I/O on an open file wants (memory, offset and length) to be multiples of.

    (0, 0) where the file does no direct I/O at all; None where the kernel (before 6.1) or the file system does not say.
    """
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    return parse_alignment(answer.raw)


def parse_alignment(statx: bytes) -> tuple[int, int] | None:
    """The two alignments in the bytes of a `struct statx`, or None if it does not hold them."""

    def number(at: int) -> int:
        return int.from_bytes(statx[at : at + 4], sys.byteorder)

    if not number(0) & _STATX_DIOALIGN:
        return None
    return number(_DIO_MEM_ALIGN_AT), number(_DIO_OFFSET_ALIGN_AT)


def fits_direct(alignment: tuple[int, int] | None) -> bool:
    """Whether whole blocks of 4096 bytes suit a drive that wants `alignment`; unknown ones are tried."""
    return alignment is None or all(want > 0 and BLOCK_BYTES % want == 0 for want in alignment)


def supports_direct(folder: Path) -> bool:
    """Whether a block can be written into `folder` past the page cache; leaves nothing behind."""
    probe = folder / f"{HIDDEN_PREFIX}{new_id()}.probe"
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block, memoryview(block) as view:
            file = DirectFile(probe, BLOCK_BYTES, direct=True)
            try:
                file.write(view, 0)
                return file.direct
            finally:
                file.abort()
                probe.unlink(missing_ok=True)
    except OSError:
        return False


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: new, renamed and removed ones."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Put `data` at `path`: whoever looks, also after a power cut, finds the old bytes or all new ones."""
    beside = path.with_name(f"{HIDDEN_PREFIX}{new_id()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def read_into(path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` with the bytes of the file from `offset` on; an early end is `CorruptCheckpointError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < view.nbytes:
            taken = os.preadv(fd, [view[done:]], offset + done)
            if taken == 0:
                raise CorruptCheckpointError(
                    f"{path}: ends at byte {offset + done}, expected {view.nbytes} bytes from offset {offset} on; "
                    "use another checkpoint"
                )
            done += taken
    finally:
        os.close(fd)


def _sync_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
    """Write dirty pages of a range to the drive; does nothing where the system or the file system has no such call."""
    sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if sync_file_range is None:
        return
    sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if sync_file_range(fd, offset, nbytes, flags) != 0:
        code = ctypes.get_errno()
        if code not in _REFUSALS:
            raise OSError(code, os.strerror(code))


def _drop(fd: int, offset: int, nbytes: int) -> None:
    """Let go of the clean pages of a range in the page cache; 0 bytes are all up to the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _flush(fd: int) -> None:
    # fdatasync also writes the length, which is all the metadata that a reader needs. macOS has none.
    getattr(os, "fdatasync", os.fsync)(fd)
