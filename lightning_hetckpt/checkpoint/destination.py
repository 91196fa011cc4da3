"""From stored rows to tensors: which bytes of a piece a tensor wants, and how they get into it wherever it is."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.direct_reads import Memory
from lightning_hetckpt.checkpoint.manifest import DTYPE_BYTES, FileEntry, PieceEntry, TensorEntry, box
from lightning_hetckpt.checkpoint.span_reader import Target
from lightning_hetckpt.checkpoint.state_tree import DTYPE_OF, as_bytes


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor as stored: `shape` numbers from `start` on, in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def within(self, other: Box) -> Box | None:
        """What both have in common, counted from the start of `other`; None if that is nothing."""
        start = [max(a, b) for a, b in zip(self.start, other.start, strict=True)]
        stop = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        ]
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(
            tuple(a - b for a, b in zip(start, other.start, strict=True)),
            tuple(b - a for a, b in zip(start, stop, strict=True)),
        )


def box_of(entry: TensorEntry, piece: PieceEntry) -> Box:
    """The part of the tensor that `piece` holds."""
    ranges = box(entry.shape, piece)
    return Box(tuple(start for start, _ in ranges), tuple(size for _, size in ranges))


def targets(
    entry: TensorEntry, into: Tensor, files: dict[str, FileEntry], part: Box | None = None
) -> Iterator[tuple[str, Target]]:
    """(file, target) of everything that has to be read to fill `into`.

    Args:
        into: any tensor of the part's shape, of any dtype, device and strides. A complex one is filled by its real
            view. Nothing is copied twice where it is contiguous, on the CPU and of the stored dtype.
        files: of the manifest.
        part: what of the stored tensor `into` is; None is all of it.
    """
    real = torch.view_as_real(into) if into.is_complex() else into
    whole = Box((0,) * len(entry.shape), entry.shape)
    wanted = whole if part is None else part
    if tuple(real.shape) != wanted.shape:
        raise ValueError(f"a tensor of shape {tuple(real.shape)} for a part of shape {wanted.shape}")
    for piece in entry.pieces:
        held = box_of(entry, piece)
        common = wanted.within(held)
        if common is None:
            continue
        mine = held.within(wanted)
        assert mine is not None
        inner = real
        for dim, (start, size) in enumerate(zip(mine.start, mine.shape, strict=True)):
            inner = inner.narrow(dim, start, size)
        yield piece.file, _target(entry, piece, held, common, inner, files[piece.file])


def _target(
    entry: TensorEntry, piece: PieceEntry, held: Box, common: Box, into: Tensor, file: FileEntry
) -> Target:
    """The rows of `piece` that hold `common`, which goes to `into`."""
    item_bytes, dtype = DTYPE_BYTES[entry.dtype], DTYPE_OF[entry.dtype]
    row_bytes = math.prod(held.shape[1:]) * item_bytes
    first, rows = (common.start[0], common.shape[0]) if held.shape else (0, 1)
    start, nbytes = piece.offset + first * row_bytes, rows * row_bytes
    if (
        common.shape[1:] == held.shape[1:]
        and into.is_cpu
        and into.dtype == dtype
        and into.is_contiguous()
        and not (into.is_neg() or into.is_conj())
    ):
        return Target(start, nbytes, memory=as_bytes(into.detach()).numpy())
    pour = _Pour(into.detach(), (rows, *held.shape[1:]), (0, *common.start[1:]), dtype)
    if not held.shape:
        pour = _Pour(into.detach(), (), (), dtype)
    if start % item_bytes or (file.chunks and file.chunk_bytes % item_bytes):
        return Target(start, nbytes, put=_Gather(pour, nbytes).put)  # a chunk may end inside a number
    return Target(start, nbytes, put=pour.put)


@dataclass(frozen=True, slots=True)
class _Pour:
    """Takes numbers of a block of `shape`, laid end to end, and copies those from `start` on to `into`."""

    into: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    dtype: torch.dtype

    def put(self, at: int, data: Memory | Tensor) -> None:
        numbers = torch.as_tensor(data).view(self.dtype)
        _pour(self.into, self.shape, self.start, at // self.dtype.itemsize, numbers)


def _pour(into: Tensor, shape: Sequence[int], start: Sequence[int], at: int, numbers: Tensor) -> None:
    """Copy what `numbers`, the ones from number `at` of a block of `shape` on, hold of `into`."""
    if not shape:
        into.copy_(numbers[0])
        return
    row_numbers = math.prod(shape[1:])
    while len(numbers):
        row, within = divmod(at, row_numbers)
        if within or len(numbers) < row_numbers:  # a part of one row
            taken = min(len(numbers), row_numbers - within)
            if start[0] <= row < start[0] + into.shape[0]:
                _pour(into[row - start[0]], shape[1:], start[1:], within, numbers[:taken])
        else:
            rows = len(numbers) // row_numbers
            taken = rows * row_numbers
            first, last = max(row, start[0]), min(row + rows, start[0] + into.shape[0])
            if first < last:
                block = numbers[:taken].view(rows, *shape[1:])[first - row : last - row]
                for dim in range(1, into.dim()):
                    block = block.narrow(dim, start[dim], into.shape[dim])
                into[first - start[0] : last - start[0]].copy_(block)
        at += taken
        numbers = numbers[taken:]


class _Gather:
    """Collects all bytes of a target before it pours them."""

    def __init__(self, pour: _Pour, nbytes: int) -> None:
        self._pour = pour
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self._missing = nbytes
        self._lock = threading.Lock()

    def put(self, at: int, data: Memory | Tensor) -> None:
        self._bytes[at : at + len(data)].copy_(torch.as_tensor(data))
        with self._lock:
            self._missing -= len(data)
            complete = self._missing == 0
        if complete:
            self._pour.put(0, self._bytes.numpy())
