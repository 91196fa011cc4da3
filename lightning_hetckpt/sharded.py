"""Lightning's sharded models (FSDP2, tensor parallel) through our stripes: each rank writes and reads its shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_hetckpt import host
from lightning_hetckpt.checkpoint.dcp import StripedStorageReader, StripedStorageWriter
from lightning_hetckpt.checkpoint.verify import is_checkpoint

_SHARDED = "state_dict", "optimizer_states"


class StripedModelParallel(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy`, whose checkpoints are ours: striped, checked, committed by a manifest.

    They load into other numbers of ranks and other ways of sharding, into HeteroDDP and back. Saves are synchronous.

    Args:
        dirs: one folder on each drive that shares the bytes; None is the checkpoint's own drive.
        checksum: keep a hash of every 8 MiB and check it on loading.
        direct: go past the page cache; "auto" where a drive allows it, False never.
        **options: of `ModelParallelStrategy`, but `save_distributed_checkpoint`.
    """

    def __init__(
        self,
        dirs: Sequence[str | Path] | None = None,
        checksum: bool = True,
        direct: bool | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        super().__init__(**options, save_distributed_checkpoint=True)
        self._writer = StripedStorageWriter(None, dirs, checksum, direct)
        self._direct = direct is not False

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} writes to local drives; storage_options are not supported."
            )
        self._writer.beside = {key: value for key, value in checkpoint.items() if key not in _SHARDED}
        state = {key: checkpoint[key] for key in _SHARDED if key in checkpoint}
        try:
            save(state, checkpoint_id=str(self.broadcast(filepath)), storage_writer=self._writer)
        finally:
            self._writer.beside = {}

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if not is_checkpoint(path):
            return super().load_checkpoint(path, weights_only)
        assert self.model is not None and self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        reader = StripedStorageReader(path, weights_only, by_name=True, direct=self._direct)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fitting:
            state["optimizer_states"] = [get_optimizer_state_dict(self.model, one) for one in self.optimizers]
        planner = DefaultLoadPlanner(allow_partial_load=not strict)
        load(state, storage_reader=reader, planner=planner)
        set_model_state_dict(self.model, state["state_dict"], options=StateDictOptions(strict=strict))
        for optimizer, held in zip(self.optimizers, state.get("optimizer_states", ()), strict=fitting):
            set_optimizer_state_dict(self.model, optimizer, held)
        rest = {key: value for key, value in reader.tree.items() if key not in _SHARDED}
        host.forget_our_loaders(rest)
        return rest
