"""Who writes what of tensors that ranks hold in shards or alike: one decision, made by one rank for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hetckpt.checkpoint.layout import stripe_name
from lightning_hetckpt.checkpoint.manifest import DTYPE_BYTES, TensorEntry
from lightning_hetckpt.checkpoint.shard_plan import Piece, StripePlan, TensorSpec, file_tensors, plan_stripes
from lightning_hetckpt.checkpoint.state_tree import spec_of
from lightning_hetckpt.checkpoint.stripe_header import build_header
from lightning_hetckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Held:
    """A shard, or all, of the tensor `name` that `rank` has; `item` is what its owner knows it by."""

    rank: int
    item: Any
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank writes: its stripes with their headers (for no snapshot yet), and where the rows come from."""

    stripes: tuple[StripePlan, ...]
    headers: dict[str, bytes]
    items: dict[tuple[str, str], tuple[Any, int]]  # (file, tensor) -> its item, and the first row of that


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """The plan of every rank, and what the manifest will say of the tensors."""

    ranks: tuple[RankPlan, ...]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of one shard, for one rank and drive."""

    held: Held
    row: int  # within the shard
    rows: int


def plan_shards(held: Sequence[Held], ranks: int, drives: int) -> ShardedLayout:
    """Divide shards over the ranks that hold them, by rows and evenly, and each rank's part over its drives.

    Raises:
        CheckpointError: a dtype that no stripe can hold, or one tensor with two shapes or dtypes.
    """
    specs = {one.name: spec_of(one.name, one.dtype, one.shape) for one in held}
    for one in held:
        same = spec_of(one.name, one.dtype, one.shape)
        if specs[one.name] != same:
            raise _differing(specs[one.name], same, one.rank)
    shards: dict[tuple[str, tuple[int, ...]], list[Held]] = {}
    for one in held:
        shards.setdefault((one.name, one.start), []).append(one)
    empty: set[str] = set()
    by_holders: dict[tuple[int, ...], list[list[Held]]] = {}
    for alike in shards.values():
        if 0 in alike[0].shape:  # nothing to divide: one rank writes that it is there
            if alike[0].name in empty:
                continue
            empty.add(alike[0].name)
            alike = [_whole(alike[0])]
        by_holders.setdefault(tuple(sorted({one.rank for one in alike})), []).append(alike)
    parts: dict[tuple[int, int], list[_Part]] = {}
    for holders, groups in sorted(by_holders.items()):
        stored = [spec_of(str(number), alike[0].dtype, alike[0].size) for number, alike in enumerate(groups)]
        for stripe in plan_stripes(stored, len(holders), [1.0] * drives):
            rank = holders[stripe.rank]
            for piece in stripe.pieces:
                own = next(one for one in groups[int(piece.name)] if one.rank == rank)
                parts.setdefault((rank, stripe.drive), []).append(_Part(own, piece.row, piece.rows))
    plans = [_rank_plan(rank, drives, parts, specs) for rank in range(ranks)]
    stripes = [stripe for plan in plans for stripe in plan.stripes]
    starts = {file: len(header) for plan in plans for file, header in plan.headers.items()}
    return ShardedLayout(tuple(plans), file_tensors(stripes, specs, starts))


def _rank_plan(
    rank: int, drives: int, parts: dict[tuple[int, int], list[_Part]], specs: dict[str, TensorSpec]
) -> RankPlan:
    stripes, items = [], {}
    for drive in range(drives):
        for volume, content in enumerate(_volumes(parts.get((rank, drive), []), specs)):
            number = drive + volume * drives
            file, offset, pieces = stripe_name(rank, number), 0, []
            for part in content:
                piece = _piece(part, specs[part.held.name], offset)
                pieces.append(piece)
                items[file, piece.name] = part.held.item, part.row
                offset += piece.nbytes
            stripes.append(StripePlan(file, rank, number, tuple(pieces), offset))
    headers = {stripe.file: build_header(stripe, specs, "0" * 16) for stripe in stripes}
    return RankPlan(tuple(stripes), headers, items)


def _volumes(parts: Sequence[_Part], specs: dict[str, TensorSpec]) -> list[list[_Part]]:
    """The parts of one drive in as many files as it takes for each to hold a tensor once; wide numbers first."""
    volumes: list[dict[str, _Part]] = []
    for part in sorted(parts, key=lambda one: -DTYPE_BYTES[specs[one.held.name].dtype]):
        free = next((one for one in volumes if part.held.name not in one), None)
        if free is None:
            free = {}
            volumes.append(free)
        free[part.held.name] = part
    return [list(one.values()) for one in volumes]


def _piece(part: _Part, spec: TensorSpec, offset: int) -> Piece:
    held, pair = part.held, ((0, 2),) if spec.complex is not None else ()
    if not held.shape:
        return Piece(held.name, part.row, part.rows, part.rows * spec.row_bytes, offset)
    columns = (*zip(held.start[1:], held.size[1:], strict=True), *pair)
    nbytes = part.rows * DTYPE_BYTES[spec.dtype]
    for _, size in columns:
        nbytes *= size
    is_whole = columns == tuple((0, size) for size in spec.shape[1:])
    return Piece(held.name, held.start[0] + part.row, part.rows, nbytes, offset, () if is_whole else columns)


def _whole(one: Held) -> Held:
    return Held(one.rank, one.item, one.name, one.dtype, one.shape, (0,) * len(one.shape), one.shape)


def _differing(one: TensorSpec, other: TensorSpec, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{one.name}: is {one.dtype} {one.shape} on one rank and {other.dtype} {other.shape} on rank {rank}; "
        "save what differs under another name on each rank."
    )
