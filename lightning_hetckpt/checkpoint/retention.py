"""Which snapshots may go: a pure choice; whoever calls removes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_hetckpt.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One committed snapshot, as its manifest tells it."""

    path: Path
    commit: int
    global_step: int
    snapshot_id: str

    @property
    def age_order(self) -> tuple[int, int, str]:
        """Sorts older before newer: by commit number, which grows also after training went back to an older step."""
        return self.commit, self.global_step, self.snapshot_id


def retire(
    snapshots: Sequence[SnapshotInfo], keep_last: int, keep_every_n_steps: int | None = None
) -> list[SnapshotInfo]:
    """The snapshots to remove so that the `keep_last` newest commits stay, the oldest first.

    With `keep_every_n_steps` the first one at or behind each multiple of so many steps stays for good.

    Newest means the highest commit number, not the highest step: when training went back to step 50,
    a new snapshot of step 60 outlives the abandoned one of step 90.
    """
    if keep_last < 1:
        raise ConfigurationError(f"keep_last is {keep_last}; at least 1 snapshot must stay to resume from.")
    by_age = sorted(snapshots, key=lambda snapshot: snapshot.age_order)
    history = set() if keep_every_n_steps is None else _history(by_age, keep_every_n_steps)
    return [snapshot for snapshot in by_age[:-keep_last] if snapshot.snapshot_id not in history]


def _history(by_age: Sequence[SnapshotInfo], every_n_steps: int) -> set[str]:
    """Those that stay for good; training that went back to an older step has a history of its own from there."""
    kept: set[str] = set()
    reached = 0
    for snapshot in by_age:
        multiple = snapshot.global_step // every_n_steps
        if multiple > reached:
            kept.add(snapshot.snapshot_id)
        reached = multiple
    return kept
