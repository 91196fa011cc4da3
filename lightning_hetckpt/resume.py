"""What a resumed run needs so that it goes on as if it had never stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetckpt import host
from lightning_hetckpt.checkpoint import parameter_names, publish, rng_state
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger("lightning_hetckpt")


def stable_tensors(module: LightningModule, optimizers: list[Optimizer]) -> list[Tensor]:
    """The tensors that only an optimizer step moves and that are equal on every rank.

    These are all parameters, frozen ones too, and all optimizer state. A sharded optimizer
    (ZeroRedundancyOptimizer) has other state on every rank, so its tensors are left out; Lightning tells it
    by the same attribute.
    """
    tensors: list[Tensor] = list(module.parameters())
    for optimizer in optimizers:
        if not hasattr(optimizer, "consolidate_state_dict"):
            for state in optimizer.state.values():
                tensors.extend(value for value in state.values() if isinstance(value, Tensor))
    return tensors


def note_names(checkpoint: dict[str, Any], module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Write down in `checkpoint` whose state each optimizer keeps, for optimizers in another order later on."""
    if "optimizer_states" in checkpoint:
        checkpoint[parameter_names.KEY] = [_names_of(module, one) for one in optimizers]


def fit_optimizers(
    checkpoint: Mapping[str, Any], module: LightningModule, optimizers: list[Optimizer]
) -> dict[str, Any]:
    """`checkpoint` with the optimizer states in the order of these optimizers."""
    states = list(checkpoint["optimizer_states"])
    for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
        names, saved = _names_of(module, optimizer), parameter_names.saved_names(checkpoint, number)
        if names and "param_groups" in state:
            sizes = parameter_names.group_sizes(optimizer)
            states[number] = parameter_names.fitted(state, saved, names.split("\n"), sizes)
    return {**checkpoint, "optimizer_states": states}


_names: WeakKeyDictionary[Optimizer, tuple[list[int], str]] = WeakKeyDictionary()  # milliseconds to collect


def _names_of(module: LightningModule, optimizer: Optimizer) -> str:
    """The names of its parameters, or nothing where it has some that are not the module's."""
    sizes = parameter_names.group_sizes(optimizer)
    known = _names.get(optimizer)
    if known is None or known[0] != sizes:
        try:
            text = parameter_names.spelled(parameter_names.parameter_names(module, optimizer))
        except CheckpointError:
            text = ""
        known = _names[optimizer] = sizes, text
    return known[1]


def tensors_of_note(
    module: LightningModule, optimizers: list[Optimizer]
) -> tuple[list[Tensor], list[Tensor]]:
    """Those that incremental checkpoints treat apart: the frozen ones, which no optimizer owns, and the sparse ones.

    Sparse are the tables of which a step changes a few rows: embeddings with `sparse=True`, and what their
    optimizer keeps in the same shape.
    """
    # By memory: what is a view of a trained weight moves with it.
    owned = {
        one.untyped_storage().data_ptr()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    }
    tables = [
        part.weight
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    ]
    states = [
        optimizer.state[table] for optimizer in optimizers for table in tables if table in optimizer.state
    ]
    return (
        [one for one in module.parameters() if one.untyped_storage().data_ptr() not in owned],
        [
            *tables,
            *(one for state in states for one in state.values() if isinstance(one, Tensor) and one.dim() > 1),
        ],
    )


def newest_snapshot(trainer: Trainer, rival_s: float | None) -> Path | None:
    """The newest whole snapshot of the Trainer's callbacks, if it is newer than `rival_s`, else None.

    Every byte is read back before a snapshot counts as whole. Under HeteroDDP only rank 0 does so; the
    others take its word in `agree_on_last`.

    Args:
        rival_s: unix seconds of the newest checkpoint that Lightning itself would choose, if any.
    """
    from lightning_hetckpt.callbacks import SnapshotCallback, ensure_snapshots
    from lightning_hetckpt.strategy import HeteroDDP

    ensure_snapshots(trainer)
    reads_back = trainer.global_rank == 0 or not isinstance(trainer.strategy, HeteroDDP)
    found: list[tuple[float, Path, SnapshotCallback]] = []
    for callback in host.callbacks_of(trainer):
        if isinstance(callback, SnapshotCallback):
            path = publish.newest_whole(callback.folder(trainer), verify_hashes=reads_back, log=log.warning)
            if path is not None:
                found.append((publish.read_manifest(path).created_unix_s, path, callback))
    if not found:
        return None
    taken_s, path, callback = max(found, key=lambda one: one[0])
    if rival_s is not None and rival_s > taken_s:
        return None
    callback.last_resolved = path
    return path


def agree_on_last(trainer: Trainer) -> dict[str, str]:
    """What `ckpt_path="last"` meant to this rank, mapped to what it means to rank 0; on all ranks at once.

    Empty where the word was not used.

    Raises:
        ConfigurationError: some ranks found a snapshot and others none; Lightning would let the first
            wait for the others for ever.
    """
    from lightning_hetckpt.callbacks import SnapshotCallback

    own: str | None = None
    for callback in host.callbacks_of(trainer):
        if isinstance(callback, SnapshotCallback) and callback.last_resolved is not None:
            own, callback.last_resolved = str(callback.last_resolved), None
    chosen: str | None = trainer.strategy.broadcast(own)
    found = trainer.strategy.reduce_boolean_decision(own is not None, all=False)
    if not found:
        return {}
    everywhere = trainer.strategy.reduce_boolean_decision(own is not None, all=True)
    if not everywhere or own is None or chosen is None:
        raise ConfigurationError(
            f'ckpt_path="last": rank {trainer.global_rank} found {own}, rank 0 found {chosen}, and at least one rank '
            "found no snapshot. Give every host the same snapshot folder, or pass the path itself."
        )
    return {own: chosen}


def prepare(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Set the loops so that the fit goes on right behind the saved batch; may be called twice."""
    if trainer.state.fn == TrainerFn.FITTING:
        host.continue_behind_batch(trainer, checkpoint)


def restore_streams(trainer: Trainer, path: str | Path | None) -> None:
    """Give each rank its random streams back, at the last moment before the first batch is drawn.

    With another world size the streams derive from (seed, step, rank), and one line says so. A checkpoint
    of stock Lightning has none: nothing happens.

    Args:
        path: the checkpoint that this fit resumed from, if any; what the ranks kept was read with it.
    """
    states = getattr(trainer.strategy.checkpoint_io, "rank_states", None)
    if not path or states is None:
        return
    try:
        if isinstance(states, CheckpointError):
            raise states
        if len(states) == trainer.world_size:
            if states[trainer.global_rank]:
                rng_state.restore(states[trainer.global_rank])
            return
    except CheckpointError as error:  # weights and optimizer are whole; only the masks will differ
        log.warning("%s: the random streams are lost: %s", path, error)
        return
    if any(states):
        rng_state.derive(int(os.environ.get("PL_GLOBAL_SEED", "0")), trainer.global_step, trainer.global_rank)
        rank_zero_info(
            f"{path} was saved by {len(states)} ranks and goes on with {trainer.world_size}: "
            "random streams (dropout) derive anew from seed, step and rank."
        )
