"""Copies live tensors chunk by chunk into buffers, and hands each full buffer to its drive."""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.buffer_pool import BufferPool
from lightning_hetckpt.checkpoint.lending import Loan, sample
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.shard_plan import Piece, StripePlan
from lightning_hetckpt.checkpoint.snapshot import Snapshot
from lightning_hetckpt.checkpoint.state_tree import as_bytes
from lightning_hetckpt.checkpoint.stripe_writer import StripeFile, StripeWriter


@dataclass(frozen=True, slots=True)
class Pour:
    """One stripe to be written: what it holds, out of which tensors, and where it goes."""

    stripe: StripePlan
    header: bytes
    tensors: Mapping[str, Tensor]
    writer: StripeWriter
    path: Path
    direct: bool
    checksum: bool

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self.header) + self.stripe.data_bytes


def pour(pours: Sequence[Pour], pool: BufferPool) -> list[Future[FileEntry]]:
    """Copy everything now, waiting for buffers where there are too few; the files become durable later.

    The stripes advance evenly, so all drives have work from the first chunk on. What lies on a GPU is
    read in the order of the present stream.
    """
    files: list[Future[FileEntry]] = []
    turns: list[tuple[float, int, Generator[float, None, Future[FileEntry]]]] = [
        (0.0, number, _chunks(one, pool)) for number, one in enumerate(pours)
    ]
    try:
        while turns:
            _, number, chunks = turns[0]
            try:
                heapq.heapreplace(turns, (next(chunks), number, chunks))
            except StopIteration as end:
                heapq.heappop(turns)
                files.append(end.value)
    finally:
        for _, _, chunks in turns:  # after an error, so that no file stays open
            chunks.close()
    return files


def _chunks(one: Pour, pool: BufferPool) -> Generator[float, None, Future[FileEntry]]:
    """Hands over one chunk per turn and yields the share of the file that is done."""
    file = one.writer.open(one.path, one.nbytes, one.direct, one.checksum)
    chunk: _Chunk | None = None
    offset = 0
    try:
        for part in _parts(one):
            while part.numel():
                chunk = chunk or _Chunk(pool)
                part = part[chunk.take(part) :]
                if chunk.full:
                    offset, chunk = chunk.hand_over(one.writer, file, offset), None
                    yield offset / one.nbytes
        if chunk is not None:
            offset, chunk = chunk.hand_over(one.writer, file, offset), None
    finally:
        if chunk is not None:
            chunk.give_back()
        durable = one.writer.close(file)  # fewer bytes than promised are an error of its own
    return durable


class _Chunk:
    """A buffer of the pool while it fills."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._view = pool.acquire()
        self._used_bytes = 0
        self._devices: set[torch.device] = set()  # that copy into it

    @property
    def full(self) -> bool:
        """Whether nothing more fits in."""
        return self._used_bytes == len(self._view)

    def take(self, part: Tensor) -> int:
        """Copy as much of `part` as fits, and tell how much."""
        count = min(part.numel(), len(self._view) - self._used_bytes)
        target = self._view[self._used_bytes : self._used_bytes + count]
        if part.is_cuda:
            # Without a host wait where the pool is pinned; the writer waits instead.
            torch.frombuffer(target, dtype=torch.uint8).copy_(part[:count], non_blocking=True)
            self._devices.add(part.device)
        else:
            np.copyto(np.frombuffer(target, np.uint8), part[:count].numpy())  # in one thread, without the GIL
        self._used_bytes += count
        return count

    def hand_over(self, writer: StripeWriter, file: StripeFile, offset: int) -> int:
        """Let `writer` write it at `offset` and then return it; tells where the next chunk starts."""
        copies = [torch.cuda.current_stream(device).record_event() for device in self._devices]

        def ready() -> None:
            for copied in copies:
                copied.synchronize()

        writer.put(file, offset, self._view, self._used_bytes, ready if copies else None, self.give_back)
        return offset + self._used_bytes

    def give_back(self) -> None:
        """Return the buffer to the pool."""
        self._pool.release(self._view)


def _parts(one: Pour) -> Iterator[Tensor]:
    """The file's bytes from first to last, as vectors of uint8 on whatever device they lie."""
    yield torch.frombuffer(bytearray(one.header), dtype=torch.uint8)
    for piece in one.stripe.pieces:
        if piece.nbytes:
            yield _rows(one.tensors[piece.name], piece)


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    if tensor.dim() and piece.rows < len(tensor):
        tensor = tensor[piece.row : piece.row + piece.rows]
    return as_bytes(tensor.contiguous())  # a copy of the piece where its rows are permuted


class Stager:
    """The thread that drains stable tensors while training goes on, one snapshot after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hetckpt-stage", daemon=True)
        self._thread.start()

    def drain(
        self,
        snapshot: Snapshot,
        pours: Sequence[Pour],
        pool: BufferPool,
        also: Sequence[Future[FileEntry]] = (),
        loan: Loan | None = None,
    ) -> None:
        """Begin to copy and tell `snapshot` how it goes; what is on a GPU is copied behind the work queued there.

        Args:
            also: further files of the snapshot that are under way.
            loan: of the save before, if nothing is known to have moved since: if nothing did, its stripes are shared
                and nothing is copied.
        """
        devices = {t.device for one in pours for t in one.tensors.values() if t.is_cuda}
        begun = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._jobs.put(_Job(snapshot, pours, pool, also, begun, loan))

    def close(self) -> None:
        """Finish what was begun and end the thread. May be called twice."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for job in iter(self._jobs.get, None):
            try:
                _drain(job, streams)
            except BaseException as error:  # noqa: BLE001 (told by this snapshot; the thread serves the next)
                job.snapshot.failed(error)
            del job  # it holds live tensors while this thread waits for the next


@dataclass(frozen=True, slots=True)
class _Job:
    snapshot: Snapshot
    pours: Sequence[Pour]
    pool: BufferPool
    also: Sequence[Future[FileEntry]]
    begun: Mapping[torch.device, torch.cuda.Event]
    loan: Loan | None


def _drain(job: _Job, streams: dict[torch.device, torch.cuda.Stream]) -> None:
    with contextlib.ExitStack() as on_side_streams:
        for device, event in job.begun.items():
            side = streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            side.wait_event(event)
            on_side_streams.enter_context(torch.cuda.stream(side))
        job.snapshot.sample = sample(job.pours[0].tensors.values()) if job.pours else {}
        if job.loan is not None and job.loan.stands(job.snapshot.sample):
            job.snapshot.borrows_from, files = job.loan.snapshot_id, []
        else:
            files = pour(job.pours, job.pool)
        copies = {device: torch.cuda.current_stream(device).record_event() for device in job.begun}
    job.snapshot.issued([*job.also, *files], copies)
    # The job holds the tensors up to here: their memory must not be lent to others while it is read.
    for event in copies.values():
        event.synchronize()
    job.snapshot.copied()
