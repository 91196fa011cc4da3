"""The one file that knows Lightning's private names.

Each function says which behaviour of Lightning 2.6 it leans on, so that a new release is checked in one
place. Importing this file imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from types import ModuleType

    from lightning.pytorch import Callback

    # Lightning sets these names at run time or keeps them private, so its own types do not have them.
    Trainer = Any
    ModelCheckpoint = Any

STRATEGY_NAMES: dict[str, dict[str, Any]] = {
    "hetero_ddp": {},
    "hetero_ddp_find_unused_parameters_true": {"find_unused_parameters": True},
    "hetero_ddp_spawn": {"start_method": "spawn"},
    "hetero_ddp_fork": {"start_method": "fork"},
    "hetero_ddp_notebook": {"start_method": "fork"},
}


# ---------------------------------------------------------------- registration


def install_registration() -> None:
    """Register the strategy names now if Lightning is loaded, else in the moment it has been."""
    lightning = sys.modules.get("lightning.pytorch")
    if lightning is not None and hasattr(lightning, "Trainer"):
        _join_lightning()
    elif not any(isinstance(finder, _LightningWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LightningWatcher())


def _join_lightning() -> None:
    load_folders_too()
    from lightning.pytorch.strategies import StrategyRegistry

    for name, options in STRATEGY_NAMES.items():
        StrategyRegistry.register(
            name, _make_strategy, description="DDP for devices of unequal speed", override=True, **options
        )


def _make_strategy(**options: Any) -> Any:
    # Imported at first use: at registration `lightning_hetckpt.strategy` may itself be half imported.
    from lightning_hetckpt.strategy import HeteroDDP

    return HeteroDDP(**options)


class _LightningWatcher(importlib.abc.MetaPathFinder):
    """Waits for the first import of `lightning.pytorch`, then leaves `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "lightning.pytorch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    """Loads the module as `loader` would, then registers the names."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _join_lightning()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def refuse_other_lightning() -> None:
    """Make a `pytorch_lightning` Trainer say why it cannot use our strategy.

    It would only answer that the strategy's name is invalid, since its class tree is another one.
    """
    other = sys.modules.get("pytorch_lightning.trainer.connectors.accelerator_connector")
    connector = getattr(other, "_AcceleratorConnector", None)
    if connector is None or hasattr(connector.__init__, "_names_the_other"):
        return
    original = connector.__init__

    @wraps(original)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> None:
        from lightning_hetckpt.strategy import HeteroDDP

        if any(isinstance(value, HeteroDDP) for value in (*args, *kwargs.values())):
            raise ConfigurationError(
                "HeteroDDP was given to a `pytorch_lightning` Trainer, but it belongs to `lightning`; the two "
                "packages are separate class trees. Use `from lightning.pytorch import Trainer`."
            )
        original(self, *args, **kwargs)

    refusing._names_the_other = True  # type: ignore[attr-defined]
    connector.__init__ = refusing


# ---------------------------------------------------------------- checkpoints


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """The dictionary that `trainer.save_checkpoint` would write; to be called on all ranks."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks, in the order in which their hooks run; a copy."""
    return list(trainer.callbacks)


def saves_nothing(trainer: Trainer) -> bool:
    """Whether the user asked for a run that leaves no checkpoints."""
    return bool(trainer.fast_dev_run) or bool(trainer.barebones)


def continue_behind_batch(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Make a fit that resumes from a save of `on_train_batch_end` go on right behind that batch.

    Lightning guesses from the counters where it was stopped. After the last batch of an epoch it skips the
    validation and the end hooks of that epoch, and validation that was due is left out. Here the counters
    are moved to the end of the batch, and the first turn of the loop runs only what follows a batch
    (validation when due, plateau schedulers, loggers). A checkpoint saved elsewhere is left alone.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return
    total, current = progress["total"], progress["current"]
    if not total["ready"] == total["started"] == total["processed"] == total["completed"] + 1:
        return
    total["completed"] += 1
    current["completed"] += 1

    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit_loop.max_steps == -1 or checkpoint["global_step"] <= fit_loop.max_steps:
        if not hasattr(fit_loop, "_first_turn_due"):
            fit_loop.__class__ = _never_done_before_first_turn(type(fit_loop))
        fit_loop._first_turn_due = True

    def finish_the_batch(data_fetcher: Any) -> None:
        del epoch_loop.advance
        fit_loop._first_turn_due = False
        if not epoch_loop.restarting:  # the fit that was prepared never began; this one is fresh
            epoch_loop.advance(data_fetcher)
            return
        # From here on nothing is special: schedulers step and validation starts from its beginning.
        epoch_loop.restarting = False
        fit_loop._restarting = False  # its setter stays True for ever where `max_steps` counts

    epoch_loop.advance = finish_the_batch


def reopen_cut_epoch(checkpoint: dict[str, Any]) -> None:
    """Let an epoch that `max_steps` or `should_stop` cut short go on where it stopped.

    Lightning counts it as finished but keeps its batch counter, so the next epoch would be cut to the rest
    of this one. To be used only with loaders that know their position.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    if "epoch_progress" not in loops:
        return
    batch, epoch = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    stopped = batch["current"]["ready"] > 0 and not batch["is_last_batch"]
    if stopped and epoch["current"]["processed"] == epoch["current"]["ready"] > 0:
        for counters in (epoch["total"], epoch["current"]):
            counters["processed"] -= 1
            counters["completed"] = min(counters["completed"], counters["processed"])


def _never_done_before_first_turn(loop: type) -> type:
    """A fit loop that does not stop at `max_steps` before the resumed batch was finished."""

    def done(self: Any) -> bool:
        return False if getattr(self, "_first_turn_due", False) else bool(loop.done.fget(self))  # type: ignore[attr-defined]

    return type(loop.__name__, (loop,), {"done": property(done)})


def load_late_loader_state(trainer: Trainer) -> None:
    """Hand a saved loader state to loaders that were set up before the checkpoint was read.

    Reading `trainer.estimated_stepping_batches` in `configure_optimizers` sets the loaders up early, and
    Lightning then forgets the state (Lightning issue 20550).
    """
    loop = trainer.fit_loop
    if loop._combined_loader_states_to_load and loop._combined_loader is not None:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
        iter(loop._data_fetcher)


def find_last_snapshot_too() -> None:
    """Let `ckpt_path="last"` also consider the newest whole snapshot of a `SnapshotCallback`.

    Lightning resolves the word before any hook runs and asks only ModelCheckpoint, so its connector is
    extended once per process. Without one of our callbacks nothing changes.
    """
    from lightning.pytorch.trainer.connectors import checkpoint_connector

    connector: Any = checkpoint_connector._CheckpointConnector
    original = connector._parse_ckpt_path
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, **kwargs: Any) -> Any:
        from lightning_hetckpt.resume import newest_snapshot

        snapshot = (
            newest_snapshot(self.trainer, _last_of_stock(self.trainer)) if ckpt_path == "last" else None
        )
        return original(self, state_fn, ckpt_path, **kwargs) if snapshot is None else str(snapshot)

    connector._parse_ckpt_path = parse


def load_folders_too() -> None:
    """Let `MyModule.load_from_checkpoint` read the folders of `StripedAsyncCheckpointIO`.

    Lightning opens the path by itself there and asks no plugin, so its reader is extended once per process. Files
    go the way they always did.
    """
    from lightning.pytorch.core import saving

    original: Any = saving.pl_load
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        from lightning_hetckpt.checkpoint import restore
        from lightning_hetckpt.checkpoint.verify import is_checkpoint

        if isinstance(path_or_url, str | Path) and is_checkpoint(Path(path_or_url)):
            return restore.load(Path(path_or_url), weights_only, map_location)
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    saving.pl_load = load


def _last_of_stock(trainer: Trainer) -> float | None:
    """When ModelCheckpoint or OnExceptionCheckpoint saved last, in unix seconds."""
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    paths: set[str] = set()
    for callback in trainer.callbacks:
        if hasattr(callback, "_find_last_checkpoints"):  # a ModelCheckpoint
            paths |= callback._find_last_checkpoints(trainer)
        elif isinstance(callback, OnExceptionCheckpoint):
            paths.add(callback.ckpt_path)
    return max((Path(path).stat().st_mtime for path in paths if Path(path).exists()), default=None)


def order_model_checkpoints(
    trainer: Trainer, pending: Callable[[str], bool], wait: Callable[[str], None]
) -> None:
    """Let every ModelCheckpoint see saves that are still being written.

    A pending path counts as existing, so that version suffixes equal those of a synchronous save; and
    `save_last="link"` points to a checkpoint only when that one is durable.
    """
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_link_checkpoint") and "_link_checkpoint" not in vars(callback):
            _order_one(callback, pending, wait)


def _order_one(
    callback: ModelCheckpoint, pending: Callable[[str], bool], wait: Callable[[str], None]
) -> None:
    exists, link = callback.file_exists, callback._link_checkpoint

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        if trainer.strategy.reduce_boolean_decision(pending(str(filepath)), all=False):
            return True
        return bool(exists(filepath, trainer))

    def link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        wait(filepath)
        link(trainer, filepath, linkpath)

    callback.file_exists = file_exists
    callback._link_checkpoint = link_checkpoint


def restore_model_checkpoints(trainer: Trainer) -> None:
    """Undo `order_model_checkpoints`, so that the callbacks can be pickled and used elsewhere."""
    for callback in trainer.checkpoint_callbacks:
        vars(callback).pop("file_exists", None)
        vars(callback).pop("_link_checkpoint", None)


def add_callback(trainer: Trainer, callback: Callback) -> None:
    """Add `callback` as the last one before the Checkpoint callbacks.

    So averaging callbacks have already run when a snapshot begins.
    """
    from lightning.pytorch.callbacks import Checkpoint

    at = next((i for i, other in enumerate(trainer.callbacks) if isinstance(other, Checkpoint)), None)
    trainer.callbacks.insert(len(trainer.callbacks) if at is None else at, callback)


def add_first_callback(trainer: Trainer, callback: Callback) -> None:
    """Let `callback` run before all others, unless it is there already."""
    if callback not in trainer.callbacks:
        trainer.callbacks.insert(0, callback)


# ---------------------------------------------------------------- epochs of other lengths


def train_batches(trainer: Trainer, lengths: Sequence[int]) -> int:
    """Batches in an epoch whose train loaders have `lengths`: what Lightning would count."""
    from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES

    limited = [min(pair) for pair in zip(lengths, _limits(trainer, lengths), strict=True)]
    return int(_SUPPORTED_MODES[trainer.fit_loop._combined_loader._mode]["fn"](limited))


def _limits(trainer: Trainer, lengths: Sequence[int]) -> list[int]:
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
    from lightning.pytorch.trainer.states import RunningStage

    stage, limit = RunningStage.TRAINING, trainer.limit_train_batches
    return [int(_parse_num_batches(stage, length, limit)) for length in lengths]


def recount_train_batches(trainer: Trainer) -> None:
    """Tell Lightning how long its train loaders are from this epoch on.

    It counts when it sets the loaders up, which is before it tells them the epoch. To be called before the first
    batch of an epoch, from `on_train_epoch_start`.
    """
    loop = trainer.fit_loop
    lengths = [len(loader) for loader in loop._combined_loader.flattened]
    limits, batches = _limits(trainer, lengths), train_batches(trainer, lengths)
    if (loop._combined_loader.limits, loop.max_batches) == (limits, batches):
        return
    loop._combined_loader.limits, loop.max_batches = limits, batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))
    elif isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None:
        trainer.val_check_batch = min(trainer.val_check_interval, loop.max_batches)
    if loop.is_resuming or loop.epoch_loop.restarting:
        iter(loop._data_fetcher)  # Lightning would go on with the iterator that it made for the old length


def optimizer_steps(trainer: Trainer, batches: int) -> int:
    """Optimizer steps that Lightning makes of so many batches of an epoch; the last may be short."""
    return -(-batches // int(trainer.accumulate_grad_batches))


def pace_schedulers(trainer: Trainer, ticks: Callable[[], int]) -> None:
    """Let step-wise schedulers move `ticks()` times behind an optimizer step instead of once."""
    free_schedulers(trainer)
    module = trainer.lightning_module
    stepwise = []
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and not config.reduce_on_plateau:
            if config.frequency != 1:
                raise ConfigurationError(
                    f"found a step-wise {type(config.scheduler).__name__} with frequency={config.frequency}; with "
                    "AdaptiveBatch a step stands for a changing number of samples. Use frequency=1, or interval='epoch'."
                )
            stepwise.append(config.scheduler)
    step = module.lr_scheduler_step

    def paced(scheduler: Any, metric: Any) -> None:
        for _ in range(ticks() if any(scheduler is one for one in stepwise) else 1):
            step(scheduler, metric)

    module.lr_scheduler_step = paced


def free_schedulers(trainer: Trainer) -> None:
    """Undo `pace_schedulers`."""
    vars(trainer.lightning_module).pop("lr_scheduler_step", None)


def estimate_steps_at_base_batch() -> None:
    """Let `trainer.estimated_stepping_batches` ask a strategy for the batches of an epoch, if it wants to tell.

    It is what a user lays a schedule out for, before training and again in `configure_optimizers` of every
    resume, so it must not follow a batch size that changes meanwhile. Extended once per process.
    """
    from lightning.pytorch import Trainer

    original: Any = Trainer.estimated_stepping_batches
    if hasattr(original.fget, "__wrapped__"):
        return

    @wraps(original.fget)
    def estimated(self: Any) -> Any:
        found, base_batches = original.fget(self), getattr(self.strategy, "base_batches", None)
        if base_batches is None:
            return found
        present, self.fit_loop.max_batches = self.fit_loop.max_batches, base_batches
        try:
            return original.fget(self)
        finally:
            self.fit_loop.max_batches = present

    Trainer.estimated_stepping_batches = property(estimated, doc=original.__doc__)  # type: ignore[assignment]


# ---------------------------------------------------------------- data


def watch_train_loaders(trainer: Trainer, check: Callable[[list[Any]], None]) -> None:
    """Call `check` with the user's own train loaders, before Lightning rebuilds them.

    Lightning re-creates a loader to inject its DistributedSampler, which fails for custom batch samplers
    with advice that does not hold under HeteroDDP.
    """
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    source = trainer.fit_loop._data_source
    if "dataloader" in vars(source):
        return
    request = source.dataloader

    def dataloader() -> Any:
        loaders = request()
        combined = (
            loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        )
        check(list(combined.flattened))
        return loaders

    source.dataloader = dataloader


def watch_fetches(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around each request for a training batch, from the next epoch on.

    The loop hands these two methods of its own, meant for profilers, to whatever fetches the batches.
    """
    loop = trainer.fit_loop.epoch_loop
    begin, end = type(loop)._on_before_fetch, type(loop)._on_after_fetch

    def fetch_begins() -> None:
        begin(loop)
        before()

    def fetch_ends() -> None:
        after()
        end(loop)

    loop._on_before_fetch, loop._on_after_fetch = fetch_begins, fetch_ends


def sampler_beneath(sampler: Any) -> Any | None:
    """The user's own sampler inside Lightning's DistributedSamplerWrapper, or None for any other sampler."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    is_wrapped = isinstance(sampler, DistributedSamplerWrapper)
    wrapped: Any = sampler.dataset if is_wrapped else None
    return wrapped._sampler if is_wrapped else None


def train_stage(trainer: Trainer) -> bool:
    """Whether the loader being set up is a train loader, or the batch being run a training batch."""
    from lightning.pytorch.trainer.states import RunningStage

    return bool(trainer.state.stage == RunningStage.TRAINING)


def epoch_and_batch(trainer: Trainer) -> tuple[int, int]:
    """The epoch, as Lightning tells it to samplers, and the batch in it that is being trained."""
    loop = trainer.fit_loop
    return loop.epoch_progress.current.processed, max(loop.epoch_loop.batch_idx, 0)


def trained_batches(trainer: Trainer) -> int:
    """Batches of this epoch whose training step is finished; right inside `on_train_batch_end`, too."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def count_logged_samples(trainer: Trainer, samples: int) -> None:
    """Weigh what this batch logs for the epoch by `samples` instead of a guess from the first tensor."""
    results = trainer._results
    if results is not None:
        results.batch_size = samples


def train_loader_states(checkpoint: dict[str, Any]) -> list[Any]:
    """The saved states of the stateful train loaders, whoever wrote them."""
    states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return list(states)


@contextmanager
def as_training_step(module: Any) -> Iterator[None]:
    """Let `self.log` take what happens in here for a part of `training_step`, wherever it runs."""
    before, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before


class LoggedParts:
    """Makes the step values that `self.log` keeps those of a whole batch that ran in parts.

    Lightning keeps the value that was logged last. Means over the epoch need no help, since each part is
    counted with its own samples.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sums: dict[str, tuple[Any, Any]] = {}  # of weighed values, and of the weights

    def note(self, own: Any, together: Any) -> None:
        """A part has run, whose mean counts so much on this rank and over all ranks."""
        for key, metric in self._step_means():
            weight = together if metric.meta.sync.should else own
            total, weights = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = total + metric._forward_cache * weight, weights + weight

    def merge(self) -> None:
        """The last part has run: put the means of all parts into place."""
        for key, metric in self._step_means():
            total, weights = self._sums.get(key, (0.0, 0.0))
            if weights:  # a rank that only repeats a sample keeps what it logged last
                metric._forward_cache = total / weights
                if not metric.meta.on_epoch:
                    metric.value = metric._forward_cache

    def _step_means(self) -> Iterator[tuple[str, Any]]:
        for key, metric in (self._trainer._results or {}).items():
            if not metric.is_tensor or metric.meta.fx != "training_step" or metric._forward_cache is None:
                continue
            if metric.meta.on_step and metric.meta.is_mean_reduction:
                yield key, metric
