"""Carries bytes from files to where they belong: many at a time, every hash checked on the way, little memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from lightning_hetckpt.checkpoint.direct_reads import DirectReads, Memory
from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, CHUNK_BYTES, padded
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.errors import CorruptCheckpointError

BUFFER_BYTES = 64 * 2**20  # that a load may use besides what it fills
_STRAIGHT_BYTES = 64 * 2**10  # below this a copy costs less than one more entry in a read
_LEAST_THREADS, _MOST_THREADS, _THREADS_PER_DRIVE = 4, 16, 2

NewBuffer: TypeAlias = Callable[[int], Memory]


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes [start, start + nbytes) of a file, and where they go: into `memory`, or to whoever is `put` them.

    `put(at, data)` gets the bytes from `start + at` on as a vector of numpy or torch, in any order and from several
    threads, whole items only where the file's chunks and `start` are multiples of the item's size. It may not keep
    `data`.
    """

    start: int
    nbytes: int
    memory: Memory | None = None
    put: Callable[[int, Any], None] | None = None

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.start + self.nbytes

    def take(self, at: int, data: Memory) -> None:
        """Accept `data`, which begins `at` bytes behind `start`."""
        if self.memory is not None:
            np.copyto(self.memory[at : at + len(data)], data)
        elif self.put is not None:
            self.put(at, data)


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a checkpoint, and what is wanted of it."""

    path: Path
    entry: FileEntry
    targets: Sequence[Target]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a source that are read, checked and handed out at once."""

    source: int  # its number among the sources
    start: int
    end: int
    targets: tuple[Target, ...]  # that want something of it, by their start

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.end - self.start


def spans(sources: Sequence[Source]) -> list[Span]:
    """What has to be read: whole chunks where there are hashes to check, in turns over the files.

    A pure function of entries and targets, so that ranks with equal ones share the work without a word.
    """
    by_place: list[tuple[int, int, Span]] = []
    for number, source in enumerate(sources):
        step = source.entry.chunk_bytes if source.entry.chunks else CHUNK_BYTES
        wanted: dict[int, list[Target]] = {}
        for target in sorted(source.targets, key=lambda one: one.start):
            for index in range(target.start // step, -(-target.end // step)):
                wanted.setdefault(index, []).append(target)
        for index, targets in wanted.items():
            start, end = index * step, min((index + 1) * step, source.entry.nbytes)
            if not source.entry.chunks:  # nothing to check, so only what is wanted
                start = max(start, targets[0].start // BLOCK_BYTES * BLOCK_BYTES)
                end = min(end, max(target.end for target in targets))
            by_place.append((index, number, Span(number, start, end, tuple(targets))))
    # Neighbouring files lie on different drives: in turns, all drives have work from the start.
    return [span for _, _, span in sorted(by_place, key=lambda one: one[:2])]


def read(
    sources: Sequence[Source],
    buffer_bytes: int = BUFFER_BYTES,
    direct: bool = True,
    new_buffer: NewBuffer | None = None,
) -> int:
    """Fill every target of every source; returns the bytes that were read from drives.

    Args:
        buffer_bytes: memory for bytes that cannot go straight to their place; at least one span is needed.
        direct: go past the page cache where the drives allow it.
        new_buffer: makes page-aligned memory, where it should be pinned.

    Raises:
        CorruptCheckpointError: names the file whose bytes are not those that were written. What was filled so far
            stays filled.
    """
    work = spans(sources)
    if not work:
        return 0
    with SpanReader(sources, work, buffer_bytes, direct, new_buffer) as reader:
        for done in [reader.submit(span) for span in work]:
            done.result()
    return sum(span.nbytes for span in work)


class SpanReader:
    """Threads that read spans, each with one buffer; the files stay open until `close`."""

    def __init__(
        self,
        sources: Sequence[Source],
        work: Iterable[Span],
        buffer_bytes: int = BUFFER_BYTES,
        direct: bool = True,
        new_buffer: NewBuffer | None = None,
    ) -> None:
        self._sources = sources
        self._new_buffer = new_buffer or aligned
        self._own = threading.local()
        needed = {span.source for span in work}
        self._buffer_bytes = padded(max((span.nbytes for span in work), default=0))
        with ExitStack() as opened:
            self._files = {
                number: opened.enter_context(_open(sources[number], direct)) for number in sorted(needed)
            }
            drives = {file.path.stat().st_dev for file in self._files.values()}
            threads = max(_LEAST_THREADS, min(_MOST_THREADS, _THREADS_PER_DRIVE * len(drives)))
            threads = max(1, min(threads, buffer_bytes // max(self._buffer_bytes, 1)))
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="hetckpt-read")
            self._opened = opened.pop_all()

    def submit(self, span: Span) -> Future[None]:
        """Read `span` and hand it out, in the background."""
        return self._threads.submit(self._carry, span)

    def fetch(self, span: Span, memory: Memory) -> Future[Memory]:
        """Read `span` into `memory` in the background and check it; the result is as long as the span.

        Args:
            memory: starts at a page, and is as long as the span in whole blocks.
        """
        return self._threads.submit(self._fetch, span, memory)

    def _fetch(self, span: Span, memory: Memory) -> Memory:
        file = self._files[span.source]
        file.read([memory[: padded(span.nbytes, file.block)]], span.start, span.nbytes)
        self._check(span, [memory[: span.nbytes]])
        return memory[: span.nbytes]

    def _carry(self, span: Span) -> None:
        file, buffer = self._files[span.source], self._buffer()
        straight = _straight(span, file)
        views, at = [], span.start
        for start, memory in straight:
            views += [buffer[at - span.start : start - span.start], memory]
            at = start + len(memory)
        views.append(buffer[at - span.start : padded(span.nbytes, file.block)])
        file.read(views, span.start, span.nbytes)
        self._check(span, views)
        arrived = [(start, start + len(memory)) for start, memory in straight]
        for target in span.targets:
            _hand_out(span, target, buffer, arrived)

    def _buffer(self) -> Memory:
        # One per thread, and made by the thread: memory that nobody touches is never there.
        if not hasattr(self._own, "buffer"):
            self._own.buffer = self._new_buffer(self._buffer_bytes)
        buffer: Memory = self._own.buffer
        return buffer

    def _check(self, span: Span, views: Sequence[Memory]) -> None:
        source = self._sources[span.source]
        if not source.entry.chunks:
            return
        hashed, left = xxhash.xxh3_64(), span.nbytes
        for view in views:
            hashed.update(view[:left].data)
            left -= min(left, len(view))
        found, expected = hashed.hexdigest(), source.entry.chunks[span.start // source.entry.chunk_bytes]
        if found != expected:
            raise CorruptCheckpointError(
                f"{source.path}: {span.nbytes} bytes at offset {span.start} have the hash {found}, expected "
                f"{expected}; they changed since they were written. Use another checkpoint."
            )

    def close(self) -> None:
        """End the threads and close the files; what has not begun is never read."""
        self._threads.shutdown(cancel_futures=True)
        self._opened.close()

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _straight(span: Span, file: DirectReads) -> list[tuple[int, Memory]]:
    """(place in the file, memory) of what the drive may write to its place itself: whole blocks of large targets."""
    found: list[tuple[int, Memory]] = []
    taken_to = 0
    for target in span.targets:
        if target.start < taken_to:
            return []  # two want the same bytes: the buffer serves both
        start = padded(max(target.start, span.start), file.block)
        end = min(target.end, span.end) // file.block * file.block
        if target.memory is not None and end - start >= _STRAIGHT_BYTES:
            memory = target.memory[start - target.start : end - target.start]
            if memory.__array_interface__["data"][0] % file.memory_align == 0:
                found.append((start, memory))
        taken_to = target.end
    return found


def _hand_out(span: Span, target: Target, buffer: Memory, arrived: Sequence[tuple[int, int]]) -> None:
    """Give `target` what `buffer`, which begins where the span does, holds of it and has not `arrived` yet."""
    at, end = max(target.start, span.start), min(target.end, span.end)
    for start, stop in arrived:
        if at <= start and stop <= end:
            target.take(at - target.start, buffer[at - span.start : start - span.start])
            at = stop
    target.take(at - target.start, buffer[at - span.start : end - span.start])


def _open(source: Source, direct: bool) -> DirectReads:
    # Spans begin at multiples of the chunk size; direct reads begin at whole blocks.
    return DirectReads(source.path, direct and source.entry.chunk_bytes % BLOCK_BYTES == 0)


def aligned(nbytes: int) -> Memory:
    """New memory that starts at a page; nothing of it is there before it is touched."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
