"""The ranks of a job read a checkpoint once between them: each a part of it, which it passes on to the others."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetckpt.channel import Channel
from lightning_hetckpt.checkpoint.direct_reads import Memory
from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, META_NAME, padded
from lightning_hetckpt.checkpoint.manifest import Manifest
from lightning_hetckpt.checkpoint.redirect import redirect
from lightning_hetckpt.checkpoint.restore import sources
from lightning_hetckpt.checkpoint.span_reader import BUFFER_BYTES, Span, SpanReader, Target, aligned, spans
from lightning_hetckpt.checkpoint.verify import check_file, read_manifest
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

Broadcast: TypeAlias = Callable[[Tensor, int], None]


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Bytes [start, end) of a file: what one rank reads for all."""

    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.end - self.start


def group_broadcast(group: dist.ProcessGroup | None = None) -> Broadcast:
    """Broadcasting over a torch process group; None is the default group."""

    def broadcast(tensor: Tensor, rank: int) -> None:
        dist.broadcast(tensor, src=rank if group is None else dist.get_global_rank(group, rank), group=group)

    return broadcast


class SharedReader:
    """A checkpoint that all ranks read together; all make the same calls in the same order, on the main thread.

    Each byte is read by one rank that can see its file, and broadcast in pieces. Where a rank cannot see a file,
    such as a stripe on another node's drive, it gets all of it from the others.

    Args:
        path: the checkpoint's folder, or `meta.pt` in it; some ranks may find nothing there.
        channel: all ranks.
        broadcast: fills a tensor on every rank with that of the given rank of the channel.
        device: where `broadcast` wants its tensors.
        buffer_bytes: memory that a load may use besides what it fills.
        direct: go past the page cache where the drives allow it.

    Attributes:
        bytes_read: from drives so far, by this rank.

    Raises:
        CheckpointNotFoundError: no rank finds a committed checkpoint there; on all ranks alike, as every error.
        CorruptCheckpointError: names a file that no rank finds as the manifest promises it.
    """

    def __init__(
        self,
        path: Path,
        channel: Channel,
        broadcast: Broadcast,
        device: torch.device | str = "cpu",
        buffer_bytes: int = BUFFER_BYTES,
        direct: bool = True,
    ) -> None:
        self.folder = path.parent if path.name == META_NAME else path
        self.bytes_read = 0
        self._channel = channel
        self._broadcast = broadcast
        self._device = torch.device(device)
        self._buffer_bytes = buffer_bytes
        self.direct = direct
        self.manifest = self._agree_on_manifest()
        self._holders = self._find_holders()

    def small(self, name: str) -> bytes:
        """All bytes of the file `name`, checked."""
        data = torch.empty(self.manifest.files[name].nbytes, dtype=torch.uint8)
        self.fill({name: [Target(0, len(data), memory=data.numpy())]})
        return data.numpy().tobytes()

    def fill(self, wanted: Mapping[str, Sequence[Target]]) -> None:
        """Fill all targets, by the file in which they lie, and check every hash on the way.

        The ranks may want different parts; every rank gets all that any of them wants.
        """
        wanted_here = sources(self.folder, self.manifest, redirect(self.manifest, wanted))
        here = {
            Part(wanted_here[span.source].entry.name, span.start, span.end): span.targets
            for span in spans(wanted_here)
        }
        work = self._union(list(here))
        if not work:
            return
        readers = self._share_out(work)
        mine = [part for part, reader in zip(work, readers, strict=True) if reader == self._channel.rank]
        slot_bytes = padded(max(part.nbytes for part in work)) + BLOCK_BYTES
        inbox = torch.empty(slot_bytes, dtype=torch.uint8, device=self._device)
        failure: Exception | None = None
        with _ReadAhead(self, mine, slot_bytes, max(1, self._buffer_bytes // slot_bytes - 1)) as ahead:
            for part, source in zip(work, readers, strict=True):
                box = inbox[: part.nbytes + 1]  # the last byte says whether the others could be read
                if source == self._channel.rank:
                    slot, error = ahead.next()
                    failure = failure or error
                    slot[part.nbytes] = error is not None
                    if inbox.is_cpu:
                        box = slot[: part.nbytes + 1]
                    else:
                        box.copy_(slot[: part.nbytes + 1])
                self._broadcast(box, source)
                if int(box[-1]):
                    break  # on every rank at the same place
                if failure is None:
                    try:
                        _hand_out(part, here.get(part, ()), box)
                    except Exception as error:  # noqa: BLE001 (the others wait in the next broadcast)
                        failure = error
                if source == self._channel.rank:
                    ahead.give_back(slot)
        self.bytes_read += sum(part.nbytes for part in mine)
        self._raise_together(failure)

    def _agree_on_manifest(self) -> Manifest:
        found: Manifest | None = None
        error: CheckpointError | None = None
        try:
            found = read_manifest(self.folder)
        except CheckpointError as problem:
            error = problem
        ids = self._channel.all_gather(found.snapshot_id if found is not None else None)
        holders = [rank for rank, snapshot_id in enumerate(ids) if snapshot_id is not None]
        if len(set(ids) - {None}) > 1:
            raise CheckpointError(
                f"{self.folder}: the ranks find different snapshots there ({', '.join(map(str, ids))}), expected one. "
                "Name a path that means the same on all hosts."
            )
        if not holders or len(holders) < self._channel.size:
            self._raise_worse(error, whole=bool(holders))
            sent = self._channel.all_gather(found if holders and self._channel.rank == holders[0] else None)
            found = sent[holders[0]]
        assert found is not None
        return found

    def _raise_worse(self, error: CheckpointError | None, whole: bool) -> None:
        """Raise what is wrong with the manifest of any rank; not being there is no fault where others have it."""
        errors = self._channel.all_gather(
            None if error is None else (isinstance(error, CheckpointNotFoundError), str(error))
        )
        for absent, text in filter(None, errors):
            if not absent:
                raise CorruptCheckpointError(text)
        if not whole:
            raise CheckpointNotFoundError(next(filter(None, errors))[1])

    def _find_holders(self) -> dict[str, list[int]]:
        """By file, the ranks that can read it."""
        problems: dict[str, str] = {}
        for name, entry in self.manifest.files.items():
            try:
                check_file(self.folder, entry, self.manifest.snapshot_id)
            except CheckpointError as error:
                problems[name] = str(error)
        by_rank = self._channel.all_gather(problems)
        holders = {
            name: [rank for rank, missing in enumerate(by_rank) if name not in missing]
            for name in self.manifest.files
        }
        for name, ranks in holders.items():
            if not ranks:
                raise CorruptCheckpointError(by_rank[0][name])
        return holders

    def _union(self, parts: list[Part]) -> list[Part]:
        """What any rank wants, in one order for all."""
        digests = self._channel.all_gather(hashlib.sha256(repr(parts).encode()).digest())
        if len(set(digests)) == 1:
            return parts
        everything = dict.fromkeys(part for theirs in self._channel.all_gather(parts) for part in theirs)
        return sorted(everything)

    def _share_out(self, parts: Sequence[Part]) -> list[int]:
        """The rank that reads each part: of those that can, the one with the fewest bytes so far."""
        load = [0] * self._channel.size
        readers = []
        for part in parts:
            rank = min(self._holders[part.file], key=lambda one: (load[one], one))
            load[rank] += part.nbytes
            readers.append(rank)
        return readers

    def _raise_together(self, failure: Exception | None) -> None:
        failures = self._channel.all_gather(
            None if failure is None else (type(failure).__name__, str(failure))
        )
        if failure is not None:
            raise failure
        for rank, told in enumerate(failures):
            if told is not None:
                kind = CorruptCheckpointError if told[0] == "CorruptCheckpointError" else CheckpointError
                raise kind(f"rank {rank} could not read its part of the checkpoint: {told[1]}")


class _ReadAhead:
    """Reads this rank's parts in the background, in their order, as far as there are free slots."""

    def __init__(self, owner: SharedReader, parts: Sequence[Part], slot_bytes: int, slots: int) -> None:
        self._left = deque(parts)
        self._reading: deque[tuple[Tensor, Future[Memory] | Exception]] = deque()
        wanted = sources(
            owner.folder, owner.manifest, {part.file: [Target(0, 1)] for part in parts}
        )  # in the manifest's order; their targets are handed out by the owner
        self._number = {source.entry.name: at for at, source in enumerate(wanted)}
        self._reader: SpanReader | None = None
        self._problem: Exception | None = None
        try:
            self._reader = SpanReader(
                wanted, [self._span(part) for part in parts], slots * slot_bytes, owner.direct
            )
        except OSError as error:  # told in its turn: the others wait for this rank's parts
            self._problem = error
        for _ in range(min(slots, len(parts))):
            self.give_back(torch.from_numpy(aligned(slot_bytes)))

    def _span(self, part: Part) -> Span:
        return Span(self._number[part.file], part.start, part.end, ())

    def give_back(self, slot: Tensor) -> None:
        """Use `slot` for the next part that is not being read yet."""
        if self._left:
            span = self._span(self._left.popleft())
            found = self._problem if self._reader is None else self._reader.fetch(span, slot.numpy())
            assert found is not None
            self._reading.append((slot, found))

    def next(self) -> tuple[Tensor, Exception | None]:
        """The slot with the bytes of the next part, or with nothing and what went wrong."""
        slot, found = self._reading.popleft()
        if isinstance(found, Exception):
            return slot, found
        return slot, _error_of(found)

    def __enter__(self) -> _ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()


def _error_of(reading: Future[Memory]) -> Exception | None:
    error = reading.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _hand_out(part: Part, targets: Sequence[Target], box: Tensor) -> None:
    for target in targets:
        at, end = max(target.start, part.start), min(target.end, part.end)
        data = box[at - part.start : end - part.start]
        if target.put is not None:
            target.put(at - target.start, data)
        elif target.memory is not None:
            torch.from_numpy(target.memory[at - target.start : end - target.start]).copy_(data)
