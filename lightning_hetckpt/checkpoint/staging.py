"""Copies live tensors chunk by chunk into buffers, and hands each full buffer to its drive."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import add, attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.buffer_pool import BufferPool
from lightning_hetckpt.checkpoint.chunk_plan import ChunkPlan, Cuts
from lightning_hetckpt.checkpoint.lending import Loan, sample
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.shard_plan import StripePlan
from lightning_hetckpt.checkpoint.sieve import Sieve
from lightning_hetckpt.checkpoint.snapshot import Snapshot
from lightning_hetckpt.checkpoint.state_tree import as_bytes
from lightning_hetckpt.checkpoint.stripe_writer import StripeFile, StripeWriter

# The same function of the C library. Small pieces keep the interpreter's lock, since giving it up and asking for it
# again takes longer than they do; while large ones are copied, training goes on.
_SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_small = ctypes.PYFUNCTYPE(None, *_SIGNATURE)(("memmove", ctypes.PyDLL(None)))
_copy_large = ctypes.CFUNCTYPE(None, *_SIGNATURE)(("memmove", ctypes.CDLL(None)))


@dataclass(frozen=True, slots=True)
class Pour:
    """One stripe to be written: what it holds, out of which tensors, and where it goes."""

    stripe: StripePlan
    chunks: Sequence[ChunkPlan]  # of `stripe` behind `header`
    header: bytes
    tensors: Mapping[str, Tensor]
    writer: StripeWriter
    path: Path
    direct: bool
    checksum: bool
    prepare: Callable[[], None] | None = None  # makes the folder, in the drive's thread
    sieve: Sieve | None = None
    only_changes: bool = False  # write what the sieve finds changed
    opened: list[StripeFile] = field(default_factory=list)  # the file, once it is

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
    file = one.writer.open(
        one.path, one.nbytes, one.direct, one.checksum, one.prepare, one.sieve, one.only_changes
    )
    one.opened.append(file)
    try:
        sources = _Sources([one.tensors[piece.name] for piece in one.stripe.pieces])
        for chunk in one.chunks:
            view = pool.acquire()
            give_back = _GiveBack(pool, view)
            ready = None
            try:
                header = one.header[chunk.offset : chunk.offset + chunk.header_bytes]
                view[: len(header)] = header
                ready = sources.fill(view, chunk)
                one.writer.put(file, chunk.offset, view, chunk.nbytes, ready, give_back)
            except BaseException:
                if ready is not None:
                    ready()  # else a GPU would still write into what the next snapshot fills
                give_back()
                raise
            yield (chunk.offset + chunk.nbytes) / one.nbytes
    finally:
        durable = one.writer.close(file)  # fewer bytes than promised are an error of its own
    return durable


@dataclass(frozen=True, slots=True)
class _GiveBack:
    pool: BufferPool
    view: memoryview

    def __call__(self) -> None:
        self.pool.release(self.view)


class _Sources:
    """The tensors of a stripe's pieces as memory to copy from."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._is_plain = all(map(_is_cpu, tensors)) and all(map(Tensor.is_contiguous, tensors))
        self._addresses = list(map(Tensor.data_ptr, tensors)) if self._is_plain else []

    def fill(self, view: memoryview, chunk: ChunkPlan) -> Callable[[], None] | None:
        """Copy what `chunk` holds of them; what is returned comes back when GPUs have done their part."""
        target = np.frombuffer(view, np.uint8)
        if not self._is_plain:
            return self._fill_from_anywhere(target, chunk)
        base = int(target.ctypes.data)
        for cuts, copy in ((chunk.small, _copy_small), (chunk.large, _copy_large)):
            targets = map(base.__add__, cuts.ats)
            sources = map(add, map(self._addresses.__getitem__, cuts.pieces), cuts.starts)
            deque(map(copy, targets, sources, cuts.sizes), maxlen=0)
        return None

    def _fill_from_anywhere(self, target: Any, chunk: ChunkPlan) -> Callable[[], None] | None:
        devices: set[torch.device] = set()
        try:
            for at, part in itertools.chain(self._runs(chunk.small), self._parts(chunk.large)):
                place = target[at : at + len(part)]
                if part.is_cuda:
                    devices.add(part.device)
                    # Without a host wait where the pool is pinned; the writer waits instead.
                    torch.from_numpy(place).copy_(part, non_blocking=True)
                else:
                    np.copyto(place, part.numpy())  # in one thread, without the GIL
        except BaseException:
            _await(_marks(devices))  # the buffer goes back, and nothing may write into it any more
            raise
        copies = _marks(devices)
        return partial(_await, copies) if copies else None

    def _runs(self, cuts: Cuts) -> Iterator[tuple[int, Tensor]]:
        """As `_parts`, but neighbours of one dtype on one GPU come as one: each copy from there costs microseconds."""
        run: list[Tensor] = []
        began = ended = 0
        for number, start, at, nbytes in zip(cuts.pieces, cuts.starts, cuts.ats, cuts.sizes, strict=True):
            tensor = self._tensors[number]
            joins = tensor.is_cuda and nbytes == tensor.nbytes
            if run and not (
                joins and at == ended and (tensor.dtype, tensor.device) == (run[0].dtype, run[0].device)
            ):
                yield began, as_bytes(torch.cat(run))
                run = []
            if joins:
                began = began if run else at
                run.append(tensor.reshape(-1))
                ended = at + nbytes
            else:
                yield at, _bytes_of(tensor, start, nbytes)
        if run:
            yield began, as_bytes(torch.cat(run))

    def _parts(self, cuts: Cuts) -> Iterator[tuple[int, Tensor]]:
        """(first byte in the buffer, vector of uint8 on whatever device it lies) of each cut."""
        for number, start, at, nbytes in zip(cuts.pieces, cuts.starts, cuts.ats, cuts.sizes, strict=True):
            yield at, _bytes_of(self._tensors[number], start, nbytes)


_is_cpu = attrgetter("is_cpu")


def _marks(devices: Collection[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """Events behind what is queued on the present streams; whoever waits for one leaves its core to others."""
    marks = {}
    for device in devices:
        marks[device] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        marks[device].record(torch.cuda.current_stream(device))
    return marks


def _await(marks: Mapping[torch.device, torch.cuda.Event]) -> None:
    for device, mark in marks.items():
        # A thread is on GPU 0 until told otherwise, and a call there may make a context: half a gigabyte per rank.
        with torch.cuda.device(device):
            mark.synchronize()


def _bytes_of(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """Bytes of `tensor` row by row, as a vector; of permuted rows only those that are asked for are copied."""
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        row_bytes = tensor.nbytes // len(tensor)
        first, last = start // row_bytes, -(-(start + nbytes) // row_bytes)
        tensor, start = tensor[first:last].contiguous(), start - first * row_bytes
    return as_bytes(tensor)[start : start + nbytes]


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
        devices: Collection[torch.device] = (),
        loan: Loan | None = None,
    ) -> None:
        """Begin to copy and tell `snapshot` how it goes; what is on a GPU is copied behind the work queued there.

        Args:
            also: further files of the snapshot that are under way.
            devices: on which the tensors lie.
            loan: of the save before, if nothing is known to have moved since: if nothing did, its stripes are shared
                and nothing is copied.
        """
        begun = {
            device: torch.cuda.current_stream(device).record_event()
            for device in devices
            if device.type == "cuda"
        }
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
            if device not in streams:
                streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_event(event)
            # On the device first: leaving the stream would else set this thread to GPU 0, with a context there.
            on_side_streams.enter_context(torch.cuda.device(device))
            on_side_streams.enter_context(torch.cuda.stream(streams[device]))
        job.snapshot.sample = sample(job.pours[0].tensors.values()) if job.pours else {}
        if job.loan is not None and job.loan.stands(job.snapshot.sample):
            job.snapshot.borrows_from, files = job.loan.snapshot_id, []
        else:
            files = pour(job.pours, job.pool)
        copies = _marks(job.begun)
    job.snapshot.issued([*job.also, *files], copies)
    # The job holds the tensors up to here: their memory must not be lent to others while it is read.
    _await(copies)
    job.snapshot.copied()
