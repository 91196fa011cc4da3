"""SnapshotCallback: begin after the step, fence before the next, drain at the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetckpt import host, resume
from lightning_hetckpt.checkpoint import rng_state
from lightning_hetckpt.checkpoint_io import StripedAsyncCheckpointIO
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from lightning_hetckpt.checkpoint.snapshotter import Snapshot

log = logging.getLogger("lightning_hetckpt")


class SnapshotCallback(Callback):
    """Takes a complete checkpoint every `every_n_steps` optimizer steps, hidden behind the next batch.

    A snapshot is `<dirpath>/step=N.ckpt`, N being the global step. All ranks write it together, under any
    strategy that replicates the model. `trainer.fit(ckpt_path="last")` finds the newest whole one.

    Args:
        dirpath: folder of the snapshots; `None` is `<default_root_dir>/snapshots`.
        every_n_steps: optimizer steps from one snapshot to the next. Where several optimizers advance
            the global step by more than one per batch, one snapshot is taken per batch at most.
        keep_last: how many of the newest snapshots stay; an older one goes only when its successor
            is durable.

    Raises:
        ConfigurationError: at `fit`, if the Trainer has no `StripedAsyncCheckpointIO`.
    """

    def __init__(self, dirpath: str | Path | None = None, every_n_steps: int = 1, keep_last: int = 2) -> None:
        if every_n_steps < 1 or keep_last < 1:
            raise ConfigurationError(
                f"SnapshotCallback needs every_n_steps >= 1 and keep_last >= 1, found {every_n_steps} and "
                f"{keep_last}. To take no snapshots, leave the callback out and set snapshots=False."
            )
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.last_resolved: Path | None = None  # what `ckpt_path="last"` means to this rank
        self.last_stall_s = 0.0  # seconds the training thread gave to the newest snapshot: begin and fence
        self.last_snapshot: Snapshot | None = None
        self._last_step = 0
        self._announced = False
        host.find_last_snapshot_too()

    def folder(self, trainer: Trainer) -> Path:
        """The absolute folder of the snapshots of `trainer`."""
        return Path(
            self.dirpath if self.dirpath is not None else Path(trainer.default_root_dir) / "snapshots"
        ).absolute()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(
                f"SnapshotCallback was given to a {type(trainer).__module__}.{type(trainer).__name__}, but it "
                "belongs to `lightning`. Use `from lightning.pytorch import Trainer`."
            )
        if stage != "fit":
            return
        plugin = _plugin(trainer)
        host.order_model_checkpoints(trainer, plugin.pending, plugin.wait)
        self._last_step = trainer.global_step

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        resume.prepare(trainer, checkpoint)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        resume.restore_streams(trainer, trainer.ckpt_path)
        if not self._announced and not host.saves_nothing(trainer):
            self._announced = True
            rank_zero_info(
                f"hetckpt: a snapshot every {self.every_n_steps} step(s) to {self.folder(trainer)}, "
                f"stripes on {_plugin(trainer).places(self.folder(trainer))}, newest {self.keep_last} kept"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Grown, not divisible: two optimizers advance the step by two, and a step on which gradients were
        # only accumulated does not advance it at all.
        if step // self.every_n_steps == self._last_step // self.every_n_steps or host.saves_nothing(trainer):
            return
        self._last_step = step
        began = perf_counter()
        # One at a time: whatever kills the job now, at most the step just finished is lost.
        self._await_durable()
        plugin = _plugin(trainer)
        folder = self.folder(trainer)
        self.last_snapshot = plugin.begin(
            host.dump_checkpoint(trainer),
            folder / f"step={step}.ckpt",
            stable=resume.stable_tensors(pl_module, trainer.optimizers),
            rank_state=rng_state.capture(),
        )
        plugin.retire(folder, self.keep_last)
        self.last_stall_s = perf_counter() - began
        if trainer.is_last_batch:
            self._fence()  # what follows is no forward pass; end-of-epoch hooks may change weights

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # The weights move next: the last byte of the last step's state must have left them.
        self._fence()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Averaging callbacks swap the weights in place in `on_validation_epoch_start`.
        self._fence()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._await_durable()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        host.restore_model_checkpoints(trainer)
        self.last_snapshot = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.last_snapshot = None
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, StripedAsyncCheckpointIO):
            plugin.run_failed()

    def _fence(self) -> None:
        snapshot = self.last_snapshot
        if snapshot is not None and not snapshot.fenced:
            began = perf_counter()
            self._finish(snapshot, snapshot.fence)
            self.last_stall_s += perf_counter() - began

    def _await_durable(self) -> None:
        snapshot, self.last_snapshot = self.last_snapshot, None
        if snapshot is not None:
            self._finish(snapshot, snapshot.wait)

    def _finish(self, snapshot: Snapshot, finish: Callable[[], None]) -> None:
        try:
            finish()
        except (CheckpointError, OSError) as error:
            # This snapshot is lost and the one before stays. Training is worth more than one snapshot.
            log.error("%s", error)
            self.last_snapshot = None
            with contextlib.suppress(CheckpointError, OSError):
                snapshot.wait()  # said once: else the engine would raise it again at the end


def ensure_snapshots(trainer: Trainer) -> None:
    """Add a default SnapshotCallback under HeteroDDP where the user gave the plugin and no callback."""
    from lightning_hetckpt.strategy import HeteroDDP

    plugin = trainer.strategy.checkpoint_io
    if (
        isinstance(trainer.strategy, HeteroDDP)
        and isinstance(plugin, StripedAsyncCheckpointIO)
        and plugin.snapshots
        and not any(isinstance(callback, SnapshotCallback) for callback in host.callbacks_of(trainer))
        and not host.saves_nothing(trainer)
    ):
        host.add_callback(trainer, SnapshotCallback())


def _plugin(trainer: Trainer) -> StripedAsyncCheckpointIO:
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, StripedAsyncCheckpointIO):
        raise ConfigurationError(
            f"SnapshotCallback writes through StripedAsyncCheckpointIO, but the Trainer uses {type(plugin).__name__}. "
            "Add it: Trainer(plugins=[StripedAsyncCheckpointIO()], ...)."
        )
    return plugin
