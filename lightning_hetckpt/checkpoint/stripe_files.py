"""Writes whole stripes at once and returns when they are durable, for saves that somebody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lightning_hetckpt.checkpoint.direct_io import DirectFile, fsync_folder, write_durably
from lightning_hetckpt.checkpoint.folders import write_owner
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, PARTIAL_NAME, drive_folder, padded
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.shard_plan import StripePlan
from lightning_hetckpt.checkpoint.sharded_plan import RankPlan
from lightning_hetckpt.checkpoint.span_reader import aligned
from lightning_hetckpt.checkpoint.state_tree import as_bytes
from lightning_hetckpt.checkpoint.stripe_header import stamp_header


class StripeFiles:
    """Writes the stripes of a plan, the drives side by side, each through one buffer of 8 MiB.

    Args:
        checksum: keep a hash of every 8 MiB.
        direct: go past the page cache where the drives allow it.
    """

    def __init__(self, checksum: bool, direct: bool) -> None:
        self._checksum = checksum
        self._direct = direct

    def folders(self, drives: Sequence[Path] | None, build: Path, run: str, snapshot_id: str) -> list[Path]:
        """The folder on each drive; without drives there is the build folder alone."""
        return [build] if drives is None else [drive_folder(one, run, snapshot_id) for one in drives]

    def write(
        self,
        plan: RankPlan,
        folders: Sequence[Path],
        build: Path,
        path: Path,
        snapshot_id: str,
        data_of: Callable[[Any], Tensor],
    ) -> list[FileEntry]:
        """Write every stripe of `plan`; durable on return.

        Args:
            folders: one per drive.
            build: where the checkpoint `path` is being built.
            data_of: the tensor of an item of the plan, asked for on this thread.
        """
        build.mkdir(parents=True, exist_ok=True)  # another rank may be faster
        for folder in folders:
            if folder != build:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / PARTIAL_NAME).touch()
                write_owner(folder, snapshot_id, path)
        tensors = {key: _rows(data_of(item), first, plan, key) for key, (item, first) in plan.items.items()}
        with ThreadPoolExecutor(len(folders), thread_name_prefix="hetckpt-stripe") as threads:
            work = [
                threads.submit(
                    self._write_one,
                    stripe,
                    folders[stripe.drive % len(folders)],
                    stamp_header(plan.headers[stripe.file], snapshot_id),
                    tensors,
                )
                for stripe in plan.stripes
            ]
            entries = [one.result() for one in work]
        for folder in folders:
            fsync_folder(folder)
            if folder != build:
                fsync_folder(folder.parent)
        return entries

    def _write_one(
        self, stripe: StripePlan, folder: Path, header: bytes, tensors: Mapping[tuple[str, str], Tensor]
    ) -> FileEntry:
        nbytes = len(header) + stripe.data_bytes
        buffer = torch.from_numpy(aligned(CHUNK_BYTES))
        hashes: list[str] = []
        parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        parts += [tensors[stripe.file, piece.name] for piece in stripe.pieces]
        with DirectFile(folder / stripe.file, nbytes, self._direct) as file:
            offset = 0
            for used in _filled(buffer, parts):
                if self._checksum:
                    hashes.append(xxhash.xxh3_64_hexdigest(buffer[:used].numpy().data))
                buffer[used : padded(used)] = 0
                file.write(buffer[: padded(used)].numpy().data, offset)
                offset += used
        return FileEntry(stripe.file, nbytes, CHUNK_BYTES, tuple(hashes))


def write_small(path: Path, data: bytes) -> FileEntry:
    """Write a small file durably; its entry for the manifest."""
    write_durably(path, data)
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return FileEntry(
        path.name, len(data), CHUNK_BYTES, tuple(xxhash.xxh3_64_hexdigest(one) for one in chunks)
    )


def _rows(data: Tensor, first: int, plan: RankPlan, key: tuple[str, str]) -> Tensor:
    """The rows of a shard that one stripe holds, as they lie there."""
    stripe = next(one for one in plan.stripes if one.file == key[0])
    piece = next(one for one in stripe.pieces if one.name == key[1])
    real = torch.view_as_real(data.resolve_conj()) if data.is_complex() else data
    rows = real.narrow(0, first, piece.rows) if real.dim() else real
    return rows.resolve_neg()


def _filled(buffer: Tensor, parts: Sequence[Tensor]) -> Iterator[int]:
    """Fill `buffer` with the bytes of the parts, end to end, again and again; how much of it each time."""
    used = 0
    for part in parts:
        # One tensor at a time: its device may need a second copy of rows that do not lie end to end.
        memory, at = as_bytes(part.contiguous()), 0
        while at < len(memory):
            taken = min(len(buffer) - used, len(memory) - at)
            buffer[used : used + taken].copy_(memory[at : at + taken])
            used, at = used + taken, at + taken
            if used == len(buffer):
                yield used
                used = 0
    if used:
        yield used
