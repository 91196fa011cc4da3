"""What the next incremental checkpoint of a folder is compared with, and when a full one is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lightning_hetckpt.checkpoint.drive_shares import HostDrives
from lightning_hetckpt.checkpoint.layout import drive_of_stripe
from lightning_hetckpt.checkpoint.ledger import Record
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.overlay import NOTHING, Overlay
from lightning_hetckpt.checkpoint.staging import Pour
from lightning_hetckpt.checkpoint.units import Hashes

# (name, address, version) of the tensors that no optimizer owns: as long as it is the same, nothing has moved them
# but what escapes the count.
Frozen: TypeAlias = tuple[tuple[str, int, int], ...]
Kind: TypeAlias = Literal["full", "incremental", "differential"]

# A chain is one full checkpoint and those that refer to it. Each has hard links to all files that it needs, so each
# stands alone, whichever of the others goes. A plan holds as long as the chain: units are places in its stripes.


@dataclass(frozen=True, slots=True)
class Base:
    """A committed checkpoint as this rank knows it: what the next one is compared with."""

    full_id: str  # of the snapshot that wrote the stripes
    plan: str
    hosts: tuple[HostDrives, ...]
    record: Record  # of the newest of the chain, which has all files
    files: tuple[FileEntry, ...]  # stripes and deltas of this rank
    overlays: Mapping[str, Overlay]  # of this rank's stripes
    hashes: Mapping[str, Sequence[Hashes]]  # of the units of this rank's stripes, buffer by buffer
    frozen: Frozen  # as they were
    length: int  # checkpoints since the full one, with it


@dataclass(slots=True)
class Link:
    """A save on its way that may become the newest of its chain.

    The thread that trains makes it, the commit thread ends it before the save's outcome is known.
    """

    kind: Kind
    base: Base | None  # None of a full one
    hosts: tuple[HostDrives, ...]
    plan: str
    pours: Sequence[Pour]
    frozen: Frozen
    ended: Base | None = None  # what the next save is compared with

    def overlays(self) -> dict[str, Overlay]:
        """What this save says of each stripe, once its files are durable."""
        if self.base is None:
            return {}
        found = {}
        for pour in self.pours:
            delta = pour.opened[0].delta if pour.opened else None
            newer = Overlay.of(pour.path.name, delta.ranges) if delta is not None else NOTHING
            before = self.base.overlays.get(pour.stripe.file, NOTHING)
            overlay = newer.over(before if self.kind == "incremental" else NOTHING)
            if len(overlay.ranges):
                found[pour.stripe.file] = overlay
        return found

    def end(self, record: Record, files: Sequence[FileEntry], overlays: Mapping[str, Overlay]) -> None:
        """The save is committed, with these files and overlays of this rank."""
        sieves = {pour.stripe.file: pour.sieve for pour in self.pours}
        if any(sieve is None for sieve in sieves.values()):
            return
        hashes = {file: sieve.after for file, sieve in sieves.items() if sieve is not None}
        needed = {name for overlay in overlays.values() for name in overlay.files}
        kept = tuple(
            replace(one, snapshot=one.snapshot or record.snapshot_id)
            for one in files
            if drive_of_stripe(one.name) is not None or one.name in needed
        )
        base = self.base
        if base is None:
            self.ended = Base(
                record.snapshot_id, self.plan, self.hosts, record, kept, {}, hashes, self.frozen, 1
            )
        elif self.kind == "incremental":
            self.ended = replace(
                base,
                record=record,
                files=kept,
                overlays=overlays,
                hashes=hashes,
                frozen=self.frozen,
                length=base.length + 1,
            )
        else:  # compared with the full one again
            self.ended = replace(
                base, record=record, frozen=self._as_in_the_full_one(base, overlays), length=base.length + 1
            )

    def _as_in_the_full_one(self, base: Base, overlays: Mapping[str, Overlay]) -> Frozen:
        """The frozen tensors but for those that this save found changed: the next one would miss that, unread."""
        names = {name for name, _, _ in base.frozen}
        moved = set()
        for pour in self.pours if names else ():
            overlay = overlays.get(pour.stripe.file, NOTHING)
            for piece in pour.stripe.pieces:
                parts = overlay.split(len(pour.header) + piece.offset, piece.nbytes)
                if piece.name in names and any(file is not None for _, _, file, _ in parts):
                    moved.add(piece.name)
        return tuple(one for one in base.frozen if one[0] not in moved)


class Chain:
    """The chain of one folder.

    Args:
        kind: of the checkpoints between full ones.
        full_every: checkpoints from one full one to the next.
    """

    def __init__(self, kind: Kind, full_every: int) -> None:
        self._kind: Kind = kind
        self._full_every = full_every
        self._base: Base | None = None
        self._link: Link | None = None

    def base(self) -> Base | None:
        """What the next save may be compared with; the save before is over."""
        if self._link is not None:
            # After a failure everybody begins anew: what the ranks know of the chain must be the same.
            self._base, self._link = self._link.ended, None
        return self._base

    def next(self, plan: str) -> Kind:
        """The kind of the next save, if its plan is this one; the same on every rank."""
        base = self.base()
        if base is None or base.plan != plan or base.length >= self._full_every:
            return "full"
        return self._kind

    def begin(self, link: Link) -> None:
        """A save has begun."""
        self._link = link
