"""The memory that every byte of a snapshot passes through on its way to the drives."""

from __future__ import annotations

import contextlib
import mmap
import threading

from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet


class BufferPool:
    """Page-aligned buffers of one size, made once and lent out again and again.

    Any thread may acquire and any other release. A buffer belongs to its borrower from `acquire`
    to `release`; waiting in `acquire` for one is what holds the copy back to the drives' speed.

    Args:
        total_bytes: the memory to use; rounded down to whole buffers, but at least two, so that
            one can fill while the other drains.
        chunk_bytes: the size of a buffer, a multiple of 4096.
    """

    def __init__(self, total_bytes: int, chunk_bytes: int) -> None:
        if chunk_bytes < BLOCK_BYTES or chunk_bytes % BLOCK_BYTES:
            raise ConfigurationError(f"a buffer of {chunk_bytes} bytes is no multiple of {BLOCK_BYTES} bytes")
        self.chunk_bytes = chunk_bytes
        self.chunk_count = max(2, total_bytes // chunk_bytes)
        region = mmap.mmap(-1, self.chunk_count * chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(region)  # all buffers in a row, for whoever pins them for a GPU
        self._fault_in(region)
        self._free = [
            self.memory[start : start + chunk_bytes] for start in range(0, len(self.memory), chunk_bytes)
        ]
        self._lent: dict[int, memoryview] = {}  # by id: equal views compare byte by byte
        self._changed = threading.Condition()
        self._closed = False

    def _fault_in(self, region: mmap.mmap) -> None:
        # Huge pages are contiguous, so a direct write needs one segment where it would need 512; measured 1.5 times
        # as fast. A loader's worker must not inherit the region: the next snapshot would copy every page for it.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):  # not this system, or not this kernel
                region.madvise(getattr(mmap, advice))
        # Else the first snapshot would pay a page fault for each page, between two training steps.
        try:
            region.madvise(_MADV_POPULATE_WRITE)
        except (AttributeError, OSError):
            self.memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(self.memory), mmap.PAGESIZE)))

    @property
    def free_chunks(self) -> int:
        """How many buffers could be acquired now without waiting."""
        with self._changed:
            return len(self._free)

    def acquire(self) -> memoryview:
        """A buffer with arbitrary contents; waits until one is free.

        Raises:
            CheckpointError: the pool is closed, before or while waiting.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise CheckpointError("the buffer pool is closed: no snapshot can be taken any more")
            view = self._free.pop()  # the one released last: its pages may still be in the CPU's cache
            self._lent[id(view)] = view
            return view

    def release(self, view: memoryview) -> None:
        """Give back a buffer that `acquire` returned, the same object; also after `close`."""
        with self._changed:
            if self._lent.pop(id(view), None) is not view:
                raise ValueError("this buffer is not on loan from this pool; was it released twice?")
            self._free.append(view)
            self._changed.notify()

    def close(self) -> None:
        """Wake everybody who waits, with an error. May be called twice.

        The memory goes back when the last borrower has dropped its buffer.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
