"""Reads files past the page cache where the drive allows it, straight into the memory that wants the bytes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from lightning_hetckpt.checkpoint.direct_io import direct_alignment, fits_direct
from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES
from lightning_hetckpt.errors import CorruptCheckpointError

Memory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]  # a vector of bytes

_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_MAX_VIEWS = 1024  # that the kernel takes in one call (IOV_MAX)


class DirectReads:
    """A file open for reading by any number of threads.

    Args:
        direct: ask for O_DIRECT. Where the file system refuses, `direct` turns False and reads go through the
            page cache.

    Attributes:
        block: offsets and lengths of reads are multiples of this, but for the end of the file.
        memory_align: addresses of the memory that is read into are multiples of this.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        self.direct = False
        self.block = self.memory_align = 1
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._fd = -1
        if direct and _O_DIRECT:
            try:
                self._fd = os.open(path, flags | _O_DIRECT)
            except OSError as refusal:
                if refusal.errno not in _REFUSALS:
                    raise
        if self._fd < 0:
            self._fd = os.open(path, flags)
            return
        wanted = direct_alignment(self._fd)
        if fits_direct(wanted):
            self.direct = True
            self.block = BLOCK_BYTES
            # An old kernel does not say; whole blocks suit every drive that we know.
            self.memory_align = wanted[0] if wanted is not None else BLOCK_BYTES
        else:
            self._go_buffered()

    def read(self, views: Sequence[Memory], offset: int, needed: int) -> None:
        """Fill `views`, one behind the other, with the file from `offset` on; at least `needed` bytes are there.

        Raises:
            CorruptCheckpointError: the file ends before.
            OSError: from the kernel, with path, offset and bytes in it.
        """
        left = [view for view in views if len(view)]
        done = 0
        while done < needed:
            taken = self._read_some(left[:_MAX_VIEWS], offset + done)
            if taken == 0:
                raise CorruptCheckpointError(
                    f"{self.path}: ends at byte {offset + done}, expected {needed} bytes from offset {offset} on; "
                    "use another checkpoint"
                )
            done += taken
            while left and taken >= len(left[0]):
                taken -= len(left.pop(0))
            if taken:
                left[0] = left[0][taken:]

    def _read_some(self, memory: Sequence[Memory], offset: int) -> int:
        views = [view.data for view in memory]
        try:
            return os.preadv(self._fd, views, offset)
        except OSError as error:
            if self.direct and error.errno in _REFUSALS:
                self._go_buffered()  # some file systems refuse only here; the views suit them all the same
                return os.preadv(self._fd, views, offset)
            raise OSError(
                error.errno,
                f"{error.strerror} (reading {sum(map(len, memory))} bytes at offset {offset})",
                str(self.path),
            ) from error

    def _go_buffered(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        self.direct = False

    def close(self) -> None:
        """Close; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> DirectReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
