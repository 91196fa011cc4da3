"""What one save cost: noted where it is known, told in the manifest and to the loggers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lightning_hetckpt.checkpoint.layout import drive_of
from lightning_hetckpt.checkpoint.manifest import FileEntry

_DAY_S = 86_400

# The training thread and the commit thread note different names, each with one assignment, so neither waits.


class Figures:
    """The figures of one save as one rank measures it; making them is the moment of `begin`.

    | name | what |
    |---|---|
    | `begin_ms` | that `begin` kept the training thread, this engine alone |
    | `fence_ms` | that it then waited before the weights could move |
    | `durable_ms` | from `begin` until every file was durable on every rank |
    | `nbytes` | of all files of all ranks, without the manifest and stripes that another checkpoint shares |
    | `gb_per_s` | of each drive, 10^9 bytes per second while it was writing |
    | `bytes_per_day` | at the present rate; where `period_s`, the time since the last such save, was given |

    Args:
        given: figures that the caller knows.
        clock: seconds, only ever growing.
    """

    def __init__(
        self, given: Mapping[str, float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._began_s = clock()
        self._values: dict[str, float | dict[str, float]] = {**(given or {}), "fence_ms": 0.0}

    def add(self, name: str, milliseconds: float) -> None:
        """Note a time."""
        self._values[name] = milliseconds

    def mark(self, name: str) -> None:
        """Note how long ago `begin` was, in milliseconds."""
        self.add(name, 1e3 * (self._clock() - self._began_s))

    def wrote(self, files: Iterable[FileEntry], folders: Mapping[str, Path]) -> None:
        """Note what was written.

        Args:
            files: of all ranks.
            folders: in which the stripes among them lie.
        """
        nbytes: int = 0
        by_drive: dict[str, tuple[int, float]] = {}
        for entry in files:
            if entry.snapshot is not None:
                continue  # written with the checkpoint that shares it
            nbytes += entry.nbytes
            if entry.name in folders and entry.write_s > 0:
                drive = str(drive_of(folders[entry.name]))
                before, busy_s = by_drive.get(drive, (0, 0.0))
                # Ranks write to one drive at the same time, so the busiest of them tells how long it took.
                by_drive[drive] = before + entry.nbytes, max(busy_s, entry.write_s)
        self._values["nbytes"] = float(nbytes)
        self._values["gb_per_s"] = {drive: size / busy_s / 1e9 for drive, (size, busy_s) in by_drive.items()}
        period_s = self._values.get("period_s")
        if isinstance(period_s, float) and period_s > 0:
            self._values["bytes_per_day"] = nbytes * _DAY_S / period_s

    def get(self, name: str) -> float | None:
        """A single number, if it is known."""
        value = self._values.get(name)
        return None if isinstance(value, dict) else value

    def as_dict(self) -> dict[str, float | dict[str, float]]:
        """All that is known by now; a copy."""
        return dict(self._values)

    def flat(self, prefix: str) -> dict[str, float]:
        """All that is known by now, as loggers want it: `prefix/name`, and `prefix/gb_per_s/mnt/a` of drives."""
        found: dict[str, float] = {}
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                found |= {f"{prefix}/{name}/{part.strip('/')}": one for part, one in value.items()}
            else:
                found[f"{prefix}/{name}"] = value
        return found
