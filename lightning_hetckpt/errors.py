"""What can go wrong, by name. Every error of this package derives from `HetckptError`."""

from __future__ import annotations


class HetckptError(RuntimeError):
    """An error of lightning_hetckpt: says what was found, what was expected and what to do."""


class ConfigurationError(HetckptError):
    """An option, or a combination of options, that cannot work."""


class LoaderError(HetckptError):
    """A DataLoader that cannot be shared out over unequal ranks."""


class PlanError(HetckptError):
    """A split of the global batch that cannot exist."""


class DeviceMemoryError(HetckptError):
    """A device ran out of memory in a training step."""


class CheckpointError(HetckptError):
    """A checkpoint that could not be written, read or removed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing of ours, and nothing of stock Lightning, lies at the path."""


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk that differ from what the manifest promises."""


class TornSnapshotError(CheckpointError):
    """The weights moved while a snapshot still read them; it was dropped."""


class ShortWriteError(CheckpointError):
    """The kernel took fewer bytes than it was given."""


class CommitError(CheckpointError):
    """At least one rank did not finish its part, so nobody's part counts."""
