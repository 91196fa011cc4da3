"""A file of what changed in a stripe: parts of buffers, one behind the other."""

from __future__ import annotations

from pathlib import Path

import xxhash

from lightning_hetckpt.checkpoint.direct_io import DirectFile
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, padded


class DeltaFile:
    """Takes buffers of a stripe in order and keeps the parts that changed; there is no file before there is one.

    What a buffer leaves begins at a whole block, so that it can be written past the page cache.

    Args:
        most_bytes: the length of the stripe, all buffers together.

    Attributes:
        nbytes: the length of the file so far.
        ranges: (start in the stripe, bytes, offset in the file) of what it holds.
        hashes: of each 8 MiB of the file, once `finish` has returned.
    """

    def __init__(self, path: Path, most_bytes: int, direct: bool) -> None:
        self.path = path
        self.nbytes = 0
        self.ranges: list[tuple[int, int, int]] = []
        self.hashes: list[str] = []
        self._most_bytes = most_bytes + padded(most_bytes, CHUNK_BYTES) // CHUNK_BYTES * padded(1)
        self._direct = direct
        self._file: DirectFile | None = None
        self._hash = xxhash.xxh3_64()
        self._hashed_bytes = 0

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, or would."""
        return self._direct if self._file is None else self._file.direct

    def add(self, start: int, view: memoryview, runs: list[tuple[int, int]]) -> None:
        """Keep the `runs`, as (first byte, bytes), of the buffer `view`, which begins at `start` of the stripe.

        The buffer is overwritten; it has room for whole blocks.
        """
        if not runs:
            return
        if self._file is None:
            self._file = DirectFile(self.path, self._most_bytes, self._direct)
        offset, at = padded(self.nbytes), 0
        for first, nbytes in runs:
            if first != at:
                view[at : at + nbytes] = view[first : first + nbytes]
            self.ranges.append((start + first, nbytes, offset + at))
            at += nbytes
        view[at : padded(at)] = bytes(padded(at) - at)
        self._feed(memoryview(bytes(offset - self.nbytes)))  # the padding lies inside of the file by now
        self._feed(view[:at])
        self._file.write(view[: padded(at)], offset)
        self.nbytes = offset + at

    def finish(self) -> None:
        """Make every byte durable, and close."""
        if self._file is None:
            return
        self._file.nbytes = self.nbytes
        self._file.finish()
        if self.nbytes % CHUNK_BYTES:
            self.hashes.append(self._hash.hexdigest())

    def abort(self) -> None:
        """Close without any promise about the bytes; a second call does nothing."""
        if self._file is not None:
            self._file.abort()

    def _feed(self, data: memoryview) -> None:
        while data:
            part = data[: CHUNK_BYTES - self._hashed_bytes % CHUNK_BYTES]
            self._hash.update(part)
            self._hashed_bytes += len(part)
            if self._hashed_bytes % CHUNK_BYTES == 0:
                self.hashes.append(self._hash.hexdigest())
                self._hash.reset()
            data = data[len(part) :]
