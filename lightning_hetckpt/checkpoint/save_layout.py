"""Where the tensors of a save go, planned once and then good for every save of the same names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.chunk_plan import SMALL_BYTES, ChunkPlan, plan_chunks
from lightning_hetckpt.checkpoint.drive_shares import HostDrives, drive_weights
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, new_id
from lightning_hetckpt.checkpoint.manifest import TensorEntry
from lightning_hetckpt.checkpoint.shard_plan import (
    StripePlan,
    TensorSpec,
    file_tensors,
    fingerprint,
    plan_owned,
    plan_stripes,
)
from lightning_hetckpt.checkpoint.state_tree import spec
from lightning_hetckpt.checkpoint.stripe_header import build_header, header_lengths
from lightning_hetckpt.checkpoint.units import Segment, segments

_Shapes = list[tuple[str, torch.dtype, torch.Size]]  # in order: all that a plan depends on


@dataclass(frozen=True, slots=True)
class SaveLayout:
    """A plan with everything that follows from it."""

    stripes: tuple[StripePlan, ...]  # of all ranks
    fingerprint: str
    specs: dict[str, TensorSpec]  # by name
    header_bytes: dict[str, int]  # by file
    entries: dict[str, TensorEntry]  # for the manifest
    _headers: dict[str, bytes] = field(default_factory=dict)
    _chunks: dict[str, tuple[ChunkPlan, ...]] = field(default_factory=dict)
    _cuts: dict[Hashable, tuple[tuple[Segment, ...], ...]] = field(default_factory=dict)

    def header(self, stripe: StripePlan) -> bytes:
        """What the file of one stripe begins with; `stamp_header` puts a snapshot's id in."""
        if stripe.file not in self._headers:
            self._headers[stripe.file] = build_header(stripe, self.specs, new_id())
        return self._headers[stripe.file]

    def chunks(self, stripe: StripePlan) -> tuple[ChunkPlan, ...]:
        """How the buffers of one stripe are filled; worked out for those that are asked for, once."""
        if stripe.file not in self._chunks:
            self._chunks[stripe.file] = plan_chunks(stripe, self.header_bytes[stripe.file], CHUNK_BYTES)
        return self._chunks[stripe.file]

    def cuts(self, stripe: StripePlan, sparse: Mapping[str, int]) -> tuple[tuple[Segment, ...], ...]:
        """How the buffers of one stripe are cut into units; worked out once.

        Args:
            sparse: name of each tensor whose rows change one by one, and the bytes of a row.
        """
        key = stripe.file, *sorted(sparse.items())
        if key not in self._cuts:
            self._cuts[key] = tuple(segments(stripe, one, sparse) for one in self.chunks(stripe))
        return self._cuts[key]

    def mark(self, sparse: Mapping[str, int]) -> str:
        """What is equal as long as the plan and its units are."""
        return f"{self.fingerprint} {sorted(sparse.items())}"


@dataclass(frozen=True, slots=True)
class _Known:
    likeness: object
    shapes: _Shapes
    hosts: tuple[HostDrives, ...]
    layout: SaveLayout


class LayoutBook:
    """The newest layout of each kind of save."""

    def __init__(self) -> None:
        self._known: dict[int | None, _Known] = {}  # by the number of ranks; None is what rank 0 writes alone

    def shared(
        self, tensors: Mapping[str, Tensor], hosts: Sequence[HostDrives], likeness: object = None
    ) -> SaveLayout:
        """The layout of what all ranks of `hosts` write together, over the drives there.

        Args:
            likeness: the same object again promises the same names, shapes and dtypes as last time.
        """
        ranks = sum(len(host.ranks) for host in hosts)

        def plan(specs: list[TensorSpec]) -> tuple[tuple[StripePlan, ...], str]:
            weights = drive_weights(hosts, sum(one.nbytes for one in specs))
            return plan_stripes(specs, ranks, weights), fingerprint(specs, ranks, weights)

        return self._newest(ranks, tensors, tuple(hosts), plan, likeness)

    def owned(self, tensors: Mapping[str, Tensor], likeness: object = None) -> SaveLayout:
        """The layout of what rank 0 writes alone; without tensors there is no stripe."""
        return self._newest(
            None, tensors, (), lambda specs: ((plan_owned(specs),) if specs else (), ""), likeness
        )

    def _newest(
        self,
        kind: int | None,
        tensors: Mapping[str, Tensor],
        hosts: tuple[HostDrives, ...],
        plan: Callable[[list[TensorSpec]], tuple[tuple[StripePlan, ...], str]],
        likeness: object,
    ) -> SaveLayout:
        known = self._known.get(kind)
        if known is not None and known.hosts == hosts and likeness is not None and known.likeness is likeness:
            return known.layout
        shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if known is not None and known.hosts == hosts and known.shapes == shapes:
            layout = known.layout
        else:
            # Small ones side by side: a GPU gives away a run of them in one copy.
            specs = sorted((spec(*one) for one in tensors.items()), key=lambda one: one.nbytes > SMALL_BYTES)
            layout = _derive(specs, *plan(specs))
        self._known[kind] = _Known(likeness, shapes, hosts, layout)
        return layout


def _derive(specs: list[TensorSpec], stripes: tuple[StripePlan, ...], mark: str) -> SaveLayout:
    by_name = {one.name: one for one in specs}
    lengths = header_lengths(stripes, by_name)
    return SaveLayout(stripes, mark, by_name, lengths, file_tensors(stripes, by_name, lengths))
