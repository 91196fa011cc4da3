"""StripedAsyncCheckpointIO: save, load and remove checkpoints through the engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from lightning_hetckpt import host, loading
from lightning_hetckpt.channel import Channel, SoloChannel, present_channel
from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.drives import find
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, META_NAME
from lightning_hetckpt.checkpoint.snapshotter import Snapshot, Snapshotter
from lightning_hetckpt.checkpoint.span_reader import BUFFER_BYTES
from lightning_hetckpt.checkpoint.together import SharedReader, group_broadcast
from lightning_hetckpt.checkpoint.verify import is_checkpoint
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

_log = logging.getLogger("lightning_hetckpt")

# A rank that failed wants its error seen; what the others have written is reported by then or never.
_PATIENCE_AFTER_FAILURE_S = 10.0


class StripedAsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints as folders of safetensors stripes, over all drives, while training goes on.

    Under `HeteroDDP`, and from `SnapshotCallback` under any replicated strategy, all ranks write together.
    Elsewhere rank 0 writes all. Loads its own checkpoints and the files of stock Lightning.

    Args:
        dirs: one folder on each drive that shares the bytes. None, or "auto", is the checkpoint's own drive and
            every other local SSD that holds no system and on which this user may make a folder.
        buffer_bytes: memory per rank that bytes pass through on their way to the drives. None is the rank's
            share of a checkpoint, at most a quarter of the host's free memory over its ranks, at least 64 MiB.
            With less than the share, training waits for the drives before the next optimizer step.
        checksum: keep a hash of every 8 MiB and check it on loading.
        direct: go past the page cache; "auto" where a drive allows it, True insists, False never.
        snapshots: let HeteroDDP add a `SnapshotCallback` where the Trainer has none.
        save: "full" writes all of every checkpoint. "incremental" writes what changed since the one before in the
            same folder, "differential" what changed since the last full one; the rest is shared with it by hard
            links, so each checkpoint still stands alone, whichever others are removed. They pay where layers are
            frozen or tables are trained sparsely; AdamW on all weights changes everything. Where a file system
            has no hard links, and from a process that saves alone, all are full.
        full_every: checkpoints of a folder from one full one to the next.
        verify_unchanged: how often, in checkpoints, frozen weights that seem untouched are compared all the same;
            writes through `.data` escape every count.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    def __init__(
        self,
        dirs: Sequence[str | Path] | Literal["auto"] | None = None,
        buffer_bytes: int | None = None,
        checksum: bool = True,
        direct: bool | Literal["auto"] = "auto",
        snapshots: bool = True,
        save: Literal["full", "incremental", "differential"] = "full",
        full_every: int = 20,
        verify_unchanged: int = 10,
    ) -> None:
        if dirs == "auto":
            dirs = None
        if isinstance(dirs, str | Path) or (dirs is not None and not dirs):
            raise ConfigurationError(
                f'dirs is {dirs!r}, expected a list of folders, one per drive, or "auto" or None.'
            )
        if dirs is not None and len({Path(drive).absolute() for drive in dirs}) != len(dirs):
            raise ConfigurationError(
                f"dirs names a folder twice: {list(map(str, dirs))}. Name each drive once."
            )
        if buffer_bytes is not None and buffer_bytes < 2 * CHUNK_BYTES:
            raise ConfigurationError(
                f"buffer_bytes is {buffer_bytes}, expected at least {2 * CHUNK_BYTES} (two chunks of 8 MiB) or None."
            )
        if direct not in (True, False, "auto"):
            raise ConfigurationError(f'direct is {direct!r}, expected True, False or "auto".')
        if save not in ("full", "incremental", "differential"):
            raise ConfigurationError(f'save is {save!r}, expected "full", "incremental" or "differential".')
        if save != "full" and not checksum:
            raise ConfigurationError(
                f"save={save!r} tells by hashes what changed, so checksum=False cannot go with it."
            )
        if full_every < 1 or verify_unchanged < 1:
            raise ConfigurationError(
                f"full_every is {full_every} and verify_unchanged is {verify_unchanged}, expected at least 1."
            )
        self.save = save
        self.full_every = full_every
        self.verify_unchanged = verify_unchanged
        self.dirs = dirs
        self.buffer_bytes = buffer_bytes
        self.checksum = checksum
        self.direct = direct
        self.snapshots = snapshots
        self.resume_from: Path | None = None  # the parent of the next checkpoint
        self.rank_states: list[bytes] | CheckpointError | None = (
            None  # of the checkpoint that a Trainer loaded last
        )
        self._run_failed = False
        self._engine: Snapshotter | None = None  # from the first save to `teardown`

    def begin(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        *,
        stable: Collection[Tensor] = (),
        rank_state: bytes = b"",
        figures: Mapping[str, float] | None = None,
        frozen: Collection[Tensor] = (),
        sparse: Collection[Tensor] = (),
    ) -> Snapshot:
        """Begin to save, on every rank of the process group; returns when everything but `stable` is copied.

        Args:
            checkpoint: the same tensors on all ranks; of everything but `stable`, rank 0's counts.
            path: of the checkpoint, the same on all ranks.
            stable: live tensors that are equal on all ranks and that nobody changes before
                `Snapshot.fence` has returned: parameters and optimizer state.
            rank_state: bytes to keep of this very rank, such as its random number generators.
            figures: what the caller measured, to stand in the manifest beside `Snapshot.figures`.
            frozen: those of `stable` that nobody trains; read only where they changed.
            sparse: those of which a step changes a few rows only.
        """
        return self._ready().begin(
            checkpoint,
            _local(path),
            stable,
            rank_state,
            figures=figures,
            frozen=frozen,
            sparse=sparse,
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save from this process alone; the caller may change everything afterwards.

        Durable soon after, where a running Trainer will wait for it in its `teardown`; else on return. A job
        that is requeued does not come so far, so its checkpoints are durable on return as well.

        Raises:
            CheckpointError: this save, or one before it that nobody has heard of yet, failed.
        """
        if storage_options is not None:
            raise TypeError(
                f"`Trainer.save_checkpoint(..., storage_options=...)` is not supported by {type(self).__name__}"
            )
        engine = self._ready()
        if self._run_failed:
            engine.abandon(_PATIENCE_AFTER_FAILURE_S)  # else this save would stand in line behind them
        else:
            engine.raise_failures()
        snapshot = engine.begin(checkpoint, _local(path), alone=True)
        snapshot.fence()
        status = _status_of_calling_trainer()
        if status != "running" or self.must_be_durable(path):
            snapshot.wait()
        if status not in (None, "running"):
            self.teardown()  # this Trainer has had its teardown, so nobody else would end the threads

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`: a folder of ours, its meta.pt, or a file of stock Lightning.

        Where a Trainer restores from a folder of ours, its ranks read each byte once between them, the model's
        tensors are filled in place where no hook wants to see the values first, and optimizer state is made on its
        final device, or not read at all outside of `fit`.

        Args:
            map_location: as in `torch.load`; None is the CPU.
            weights_only: as in `torch.load`; None is True.

        Raises:
            CheckpointNotFoundError: nothing lies there.
            CorruptCheckpointError: names the file whose bytes are not those that were written.
            CheckpointError: it holds objects that only `weights_only=False` may load.
        """
        folder = _folder_of(Path(path))
        self.wait(folder)
        self.rank_states = None
        trainer = host.restoring_trainer()
        ranks: Channel = SoloChannel() if trainer is None else present_channel()
        ours = any(ranks.all_gather(is_checkpoint(folder)))
        if not ours and not folder.is_dir() and (folder.exists() or "://" in str(path)):
            stock = TorchCheckpointIO()
            return stock.load_checkpoint(path, map_location or _stay_on_cpu, weights_only)
        if trainer is None:
            loaded = restore.load(folder, weights_only, map_location, reader=self._solo(folder))
        else:
            reader = self._solo(folder) if ranks.size == 1 else self._shared(folder, ranks, trainer)
            loaded = loading.load_for(trainer, reader, weights_only)
            self.rank_states = loading.rank_states(reader)
        self.resume_from = folder
        if self._engine is not None:
            self._engine.resumed_from(folder)
        return loaded

    def _solo(self, folder: Path) -> restore.Reader:
        return restore.SoloReader(folder, self.buffer_bytes or BUFFER_BYTES, self.direct is not False)

    def _shared(self, folder: Path, ranks: Channel, trainer: Trainer) -> restore.Reader:
        device = trainer.strategy.root_device
        over_cpu = device.type == "cpu" or "gloo" in str(dist.get_backend())
        return SharedReader(
            folder,
            ranks,
            group_broadcast(),
            "cpu" if over_cpu else device,
            self.buffer_bytes or BUFFER_BYTES,
            self.direct is not False,
        )

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove what lies at `path`, behind the saves begun so far; it stays if the last of them fails."""
        self._ready().remove(_local(path))

    def retire(self, folder: str | Path, keep_last: int, keep_every_n_steps: int | None = None) -> None:
        """Leave the newest `keep_last` snapshots (`step=N.ckpt`) in `folder`, behind the saves begun so far.

        The first at or behind each multiple of `keep_every_n_steps` steps stays for good.
        """
        self._ready().retire(_local(folder), keep_last, keep_every_n_steps=keep_every_n_steps)

    def pending(self, path: str | Path) -> bool:
        """Whether a save to `path` is under way: it will exist, but does not yet."""
        return self._engine is not None and self._engine.pending(Path(path))

    def wait(self, path: str | Path | None = None) -> None:
        """Return when everything begun, or what was begun for `path`, is durable.

        Raises:
            CheckpointError: a save failed, and nobody has been told yet.
        """
        if self._engine is not None:
            self._engine.wait(None if path is None else Path(path))

    def must_be_durable(self, path: str | Path) -> bool:
        """Whether a save to `path` may not end in the background: Lightning requeues the job right behind it."""
        return Path(path).name.startswith("hpc_ckpt_")

    def places(self, folder: str | Path) -> str:
        """Where the bytes of checkpoints in `folder` go, in words."""
        if self.dirs is not None:
            return ", ".join(map(str, self.dirs))
        return ", ".join(one or str(folder) for one in find(Path(folder), None, auto=True).folders)

    @override
    def teardown(self) -> None:
        """Finish everything and end all threads. May be called twice; the next save starts anew.

        Raises:
            CheckpointError: a save failed, and nobody has been told yet. Not after `run_failed`.
        """
        engine, self._engine = self._engine, None
        failed, self._run_failed = self._run_failed, False
        if engine is None:
            return
        engine.close(_PATIENCE_AFTER_FAILURE_S if failed else None)
        self.resume_from = engine.newest or self.resume_from
        try:
            engine.raise_failures()
        except CheckpointError as error:
            if not failed:
                raise
            _log.error("%s", error)  # raised, it would hide what stopped the run

    def run_failed(self) -> None:
        """The run has ended with an exception: other ranks may never report, so nobody waits long for them now."""
        self._run_failed = True

    def __getstate__(self) -> dict[str, Any]:
        # Launchers pickle the Trainer before they start processes; threads stay where they are.
        return {**vars(self), "_engine": None}

    def _ready(self) -> Snapshotter:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self._engine is not None and self._engine.channel.size != ranks:
            self.teardown()  # the process group came or went
        if self._engine is None:
            self._engine = Snapshotter(
                "auto" if self.dirs is None else [Path(drive) for drive in self.dirs],
                self.buffer_bytes,
                self.checksum,
                self.direct,
                present_channel(),
                save=self.save,
                full_every=self.full_every,
                verify_unchanged=self.verify_unchanged,
            )
            if self.resume_from is not None:
                self._engine.resumed_from(self.resume_from)
        return self._engine


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise ConfigurationError(
            f"{path}: checkpoints are striped over local drives, expected a local path. Use TorchCheckpointIO for "
            "remote ones."
        )
    return Path(path)


def _folder_of(path: Path) -> Path:
    return path.parent if path.name == META_NAME and is_checkpoint(path) else path


def _stay_on_cpu(storage: Any, location: str) -> Any:
    return storage


def _status_of_calling_trainer() -> str | None:
    """The status of the Trainer that called us, or None outside of any.

    CheckpointIO is told neither by an argument nor by a hook, and stock strategies keep no note, so we look
    who our callers are. A save in another thread (AsyncCheckpointIO around us) is nobody's to finish.
    """
    lightning = sys.modules.get("lightning.pytorch")
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (documented, in spite of its name)
    while lightning is not None and frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, lightning.Trainer):
            return str(caller.state.status.value)
        frame = frame.f_back
    return None
