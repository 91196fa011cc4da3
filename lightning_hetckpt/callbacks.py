"""SnapshotCallback: begin after the step, fence before the next, drain at the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetckpt import host, resume
from lightning_hetckpt.checkpoint import rng_state
from lightning_hetckpt.checkpoint.cadence import Cadence, SnapshotCost
from lightning_hetckpt.checkpoint_io import StripedAsyncCheckpointIO
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from lightning_hetckpt.checkpoint.figures import Figures
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
        max_overhead: share of the training time that snapshots may take, such as 0.05. Where the measured stall
            exceeds it the interval grows, and it shrinks again, never below `every_n_steps`, as soon as the
            drives allow; each change is logged in one line. All ranks decide alike, once in 4 snapshots.
            None, the default, keeps every promised snapshot, however short the steps are.
        when_busy: if the snapshot before is not durable yet when the next one is due, "wait" for it, so that at
            most one step is ever lost, or "skip" the new one. For "skip" rank 0's view counts on all ranks,
            which costs one small broadcast where a snapshot is due.
        keep_every_n_steps: the first snapshot at or behind each multiple of so many steps stays for good, as well. With
            `save="incremental"` a history of frozen weights costs little.

    The Trainer's loggers get `hetckpt/…` for every snapshot under its own step, once it is durable and the next
    one is due: all of `Snapshot.figures`, and `dump_ms` (Lightning's and the user's own save hooks), `wait_ms`
    (for the drives, before it), `interval_steps`, and `skipped` since the one before.

    Raises:
        ConfigurationError: at `fit`, if the Trainer has no `StripedAsyncCheckpointIO`.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_steps: int = 1,
        keep_last: int = 2,
        max_overhead: float | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        keep_every_n_steps: int | None = None,
    ) -> None:
        if every_n_steps < 1 or keep_last < 1:
            raise ConfigurationError(
                f"SnapshotCallback needs every_n_steps >= 1 and keep_last >= 1, found {every_n_steps} and "
                f"{keep_last}. To take no snapshots, leave the callback out and set snapshots=False."
            )
        if max_overhead is not None and not 0 < max_overhead <= 1:
            raise ConfigurationError(
                f"SnapshotCallback(max_overhead={max_overhead}): expected a share of the training time from 0 to 1, "
                "such as 0.05 for 5 %, or None to keep the interval."
            )
        if keep_every_n_steps is not None and keep_every_n_steps < 1:
            raise ConfigurationError(
                f"SnapshotCallback(keep_every_n_steps={keep_every_n_steps}): expected at least 1, or None to keep the "
                "newest only."
            )
        if when_busy not in ("wait", "skip"):
            raise ConfigurationError(f'SnapshotCallback(when_busy={when_busy!r}): expected "wait" or "skip".')
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.keep_every_n_steps = keep_every_n_steps
        self.max_overhead = max_overhead
        self.when_busy = when_busy
        self.last_resolved: Path | None = None  # what `ckpt_path="last"` means to this rank
        self.last_stall_s = 0.0  # seconds the training thread gave to the newest snapshot: begin and fence
        self.last_snapshot: Snapshot | None = None
        self._last_step = 0
        self._cadence = Cadence(every_n_steps, max_overhead)
        self._before: _Taken | None = None  # the snapshot before the one that is due
        self._skipped = 0
        self._paused_s = 0.0  # since then, for validation
        self._pause_began = 0.0
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
        self._cadence = Cadence(self.every_n_steps, self.max_overhead)
        self._before, self._skipped = None, 0
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
        if not self._cadence.is_due(step, self._last_step) or host.saves_nothing(trainer):
            return
        self._last_step = step
        if self.when_busy == "skip" and trainer.strategy.broadcast(self._is_busy()):
            self._skipped += 1
            return
        due_s = perf_counter()
        # One at a time: whatever kills the job now, at most the step just finished is lost.
        self._await_durable()
        began_s = perf_counter()
        self._close_books(trainer, step, due_s)
        self._begin(trainer, pl_module, step, due_s, began_s)
        self.last_stall_s = perf_counter() - due_s
        if trainer.is_last_batch:
            self._fence()  # what follows is no forward pass; end-of-epoch hooks may change weights

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # The weights move next: the last byte of the last step's state must have left them.
        with getattr(trainer.strategy, "waiting", contextlib.nullcontext)():  # no work of this device
            self._fence()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Averaging callbacks swap the weights in place in `on_validation_epoch_start`.
        self._fence()
        self._pause_began = perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused_s += perf_counter() - self._pause_began

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._await_durable()
        if self._before is not None:
            _log_figures(trainer, self._before)
            self._before = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        host.restore_model_checkpoints(trainer)
        self.last_snapshot = self._before = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.last_snapshot = None
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, StripedAsyncCheckpointIO):
            plugin.run_failed()

    def _begin(
        self, trainer: Trainer, pl_module: LightningModule, step: int, due_s: float, began_s: float
    ) -> None:
        plugin, folder = _plugin(trainer), self.folder(trainer)
        checkpoint = host.dump_checkpoint(trainer)
        resume.note_names(checkpoint, pl_module, trainer.optimizers)
        figures = {
            "dump_ms": 1e3 * (perf_counter() - began_s),
            "wait_ms": 1e3 * (began_s - due_s),
            "interval_steps": float(self._cadence.interval),
            "skipped": float(self._skipped),
        }
        if self._before is not None:
            figures["period_s"] = began_s - self._before.began_s
        frozen, sparse = (
            resume.tensors_of_note(pl_module, trainer.optimizers) if plugin.save != "full" else ([], [])
        )
        self.last_snapshot = plugin.begin(
            checkpoint,
            folder / f"step={step}.ckpt",
            stable=resume.stable_tensors(pl_module, trainer.optimizers),
            rank_state=rng_state.capture(),
            figures=figures,
            frozen=frozen,
            sparse=sparse,
        )
        plugin.retire(folder, self.keep_last, self.keep_every_n_steps)
        self._before = _Taken(
            step,
            began_s,
            perf_counter() - began_s,
            self.last_snapshot.figures,
            self.last_snapshot.outcome,
            is_first=self._before is None,
        )
        self._skipped, self._paused_s = 0, 0.0

    def _is_busy(self) -> bool:
        return self.last_snapshot is not None and not self.last_snapshot.done()

    def _close_books(self, trainer: Trainer, step: int, due_s: float) -> None:
        """Log what the snapshot before cost, and fit the interval to it; on all ranks at the same step."""
        taken = self._before
        if taken is None:
            return
        _log_figures(trainer, taken)
        training_s = due_s - taken.began_s - self._paused_s
        cost = taken.cost(training_s, step, self.when_busy == "wait")
        # The first one also pays for buffers and threads, which no later one does.
        if not self._cadence.note(None if taken.is_first else cost):
            return
        agreed = _agree(trainer, self._cadence.typical())
        before = self._cadence.interval
        if self._cadence.review(agreed):
            rank_zero_info(
                f"hetckpt: from step {step} on a snapshot every {self._cadence.interval} steps instead of every "
                f"{before}: one takes {1e3 * agreed.own_s:.3g} ms of training and is durable after "
                f"{1e3 * agreed.durable_s:.3g} ms, a step takes {1e3 * agreed.step_s:.3g} ms, "
                f"max_overhead is {self.max_overhead:.3g}"
            )

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


@dataclass(frozen=True, slots=True)
class _Taken:
    """A snapshot that was begun, on this rank's clock; it holds no tensors."""

    step: int
    began_s: float
    begin_s: float  # that the training thread gave to it before it went on
    figures: Figures
    outcome: Future[None]
    is_first: bool

    @property
    def is_durable(self) -> bool:
        """Whether it became a checkpoint."""
        return self.outcome.done() and self.outcome.exception() is None

    def cost(self, training_s: float, step: int, durable_counts: bool) -> SnapshotCost | None:
        """What it cost, once durable; None where it came to nothing.

        Args:
            training_s: from its beginning to `step`.
            durable_counts: whether the next snapshot would wait for this one.
        """
        durable_ms = self.figures.get("durable_ms")
        if not self.is_durable or durable_ms is None or step == self.step:
            return None
        own_s = self.begin_s + 1e-3 * (self.figures.get("fence_ms") or 0.0)
        return SnapshotCost(
            own_s, 1e-3 * durable_ms if durable_counts else 0.0, (training_s - own_s) / (step - self.step)
        )


def _agree(trainer: Trainer, typical: SnapshotCost) -> SnapshotCost:
    """The costs of the rank that pays most, since all others wait for it; the same numbers on every rank."""
    strategy = trainer.strategy
    # In lockstep the rank that stalls longest sees the shortest rest of the step; the others wait inside it.
    numbers = torch.tensor([typical.own_s, typical.durable_s, -typical.step_s], device=strategy.root_device)
    own_s, durable_s, minus_step_s = strategy.reduce(numbers, reduce_op="max").tolist()
    return SnapshotCost(own_s, durable_s, -minus_step_s)


def _log_figures(trainer: Trainer, taken: _Taken) -> None:
    # Under its own step: what is known only afterwards is nevertheless about that snapshot.
    if trainer.is_global_zero and taken.is_durable:
        for logger in trainer.loggers:
            logger.log_metrics(taken.figures.flat("hetckpt"), step=taken.step)


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
    if isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy):
        raise ConfigurationError(
            f"SnapshotCallback takes snapshots of models that every rank holds whole, but {type(trainer.strategy).__name__} "
            "shards it. Use Trainer(strategy=StripedModelParallel(...)) of lightning_hetckpt with "
            "ModelCheckpoint(every_n_train_steps=...), whose saves are synchronous."
        )
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, StripedAsyncCheckpointIO):
        raise ConfigurationError(
            f"SnapshotCallback writes through StripedAsyncCheckpointIO, but the Trainer uses {type(plugin).__name__}. "
            "Add it: Trainer(plugins=[StripedAsyncCheckpointIO()], ...)."
        )
    return plugin
