"""Whether a save holds the very bytes of the save before it, so that it need not write them again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.snapshot import Snapshot
from lightning_hetckpt.checkpoint.state_tree import as_bytes

_SAMPLED_TENSORS, _SAMPLED_ITEMS = 32, 16

Sample = Mapping[torch.device, Tensor]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where training stood when a save began: equal for two saves only if nothing is known to have moved between.

    No proof by itself, since fused optimizers and writes through `.data` count no version: optimizer steps are
    counted apart, and a `sample` tells most of the rest.
    """

    global_step: int
    optimizer_moves: int  # begins and ends of the optimizer steps of this process
    plan: str  # fingerprint of names, shapes, dtypes and shares
    addresses: frozenset[int]
    versions: Sequence[int]

    @classmethod
    def at(
        cls,
        global_step: object,
        moves: int,
        plan: str,
        addresses: frozenset[int],
        versions: Sequence[int] | None,
    ) -> Standing | None:
        """Of the live tensors of a save; None where it cannot be told."""
        if type(global_step) is not int or not addresses or versions is None:
            return None
        return cls(global_step, moves, plan, addresses, versions)


@dataclass(frozen=True, slots=True)
class Loan:
    """The save whose stripes another one may share."""

    snapshot: Snapshot
    snapshot_id: str

    def stands(self, sample: Sample) -> bool:
        """Whether that save was read whole, and tensors that now look like `sample` looked so then. For the stager."""
        if not self.snapshot.is_read_whole():
            return False
        seen = self.snapshot.sample
        return (
            bool(seen)
            and seen.keys() == sample.keys()
            and all(torch.equal(seen[one], sample[one]) for one in seen)
        )


class Lender:
    """Remembers the newest save. For the training thread."""

    def __init__(self) -> None:
        self._newest: tuple[Standing, Loan, tuple[Path, ...]] | None = None

    def ask(self, standing: Standing | None, path: Path, drives: Sequence[Path]) -> Loan | None:
        """The loan that a save to `path` with its stripes below `drives` may take; None is to write everything."""
        if self._newest is None or standing is None:
            return None
        seen, loan, places = self._newest
        if seen != standing or loan.snapshot.path == path or _has_failed(loan.snapshot):
            return None
        return loan if _devices(places) == _devices(drives) else None

    def note(
        self, standing: Standing | None, snapshot: Snapshot, snapshot_id: str, drives: Sequence[Path]
    ) -> None:
        """A save has begun."""
        self._newest = None if standing is None else (standing, Loan(snapshot, snapshot_id), tuple(drives))

    def forget(self, path: Path) -> None:
        """The checkpoint at `path` will be gone before a save that begins now is concluded."""
        if self._newest is not None and self._newest[1].snapshot.path == path:
            self._newest = None


def sample(tensors: Collection[Tensor]) -> Sample:
    """The first bytes of some of the tensors, by device; read behind the work queued on the present streams."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in islice(tensors, 0, None, -(-len(tensors) // _SAMPLED_TENSORS) or 1):
        if tensor.numel() and tensor.device.type in ("cpu", "cuda"):
            row = tensor.detach()[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.detach().reshape(1)
            found.setdefault(tensor.device, []).append(as_bytes(row[:_SAMPLED_ITEMS].contiguous()))
    return {device: torch.cat(rows) for device, rows in found.items()}


def _has_failed(snapshot: Snapshot) -> bool:
    return snapshot.done() and snapshot.outcome.exception() is not None


def _devices(folders: Iterable[Path]) -> list[int]:
    # A folder that no save has made yet will lie where the nearest one above it lies.
    made = (next(one for one in (folder, *folder.parents) if one.exists()) for folder in folders)
    return [folder.stat().st_dev for folder in made]
