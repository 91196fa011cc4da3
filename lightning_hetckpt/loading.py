"""What a Trainer gets when it restores: its own tensors filled in place, the rest made once where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_hetckpt import host
from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.state_tree import Place
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"


def load_for(trainer: Trainer, reader: restore.Reader, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint for a Trainer that restores itself; what it is about to copy is already in place.

    In the dictionary stand the module's own tensors, so that the `load_state_dict` that follows copies nothing.
    Where a hook may look at the values, or change what is loaded, there stand copies of them instead. Optimizer
    state is made on the strategy's device while fitting, and otherwise not read: meta tensors tell its shapes.

    Raises:
        CheckpointError: as `restore.load`; then some of the module's tensors may have been overwritten.
        ConfigurationError: the module has meta tensors for which the checkpoint holds no values.
    """
    module = trainer.lightning_module
    _materialize(module, reader, trainer.strategy.root_device)
    wanted = _Wanted(trainer, module)
    loaded: dict[str, Any] = restore.load(reader.folder, weights_only, destination=wanted, reader=reader)
    return loaded


def rank_states(reader: restore.Reader) -> list[bytes] | CheckpointError:
    """What each rank kept for itself, or what prevents reading it: without it a run goes on all the same."""
    try:
        return restore.load_rank_states(reader.folder, reader)
    except CheckpointError as error:
        return error


class _Wanted:
    """Says of each place in the checkpoint which tensor is to be filled."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        self._watched = _is_watched(trainer, module)
        self._special = tuple(_special_prefixes(module))
        self._live: dict[str, Tensor] = {} if self._watched else dict(module.state_dict(keep_vars=True))

    def __call__(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        if place[0] == _OPTIMIZERS:
            return self._of_optimizer(shape, dtype)
        if place[0] == _WEIGHTS and len(place) == 2 and not self._watched:
            return self._of_module(str(place[1]), shape, dtype)
        return None

    def _of_optimizer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        if self._fitting:
            # Counters such as `step` are left where they were saved: the optimizer knows where it wants them.
            return torch.empty(shape, dtype=dtype, device=self._device) if shape else None
        return None if self._watched else torch.empty(shape, dtype=dtype, device="meta")

    def _of_module(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        live = self._live.get(name)
        if isinstance(live, Tensor) and live.shape == shape and not name.startswith(self._special):
            return live
        # Nobody takes its values: `load_state_dict` lists its name and shape, and copies nothing.
        never_taken = not self._special and (live is None or (live.dim() > 0 and len(shape) > 0))
        return torch.empty(shape, dtype=dtype, device="meta") if never_taken else None


def _is_watched(trainer: Trainer, module: LightningModule) -> bool:
    """Whether code of the user sees the checkpoint, or decides what of it goes where."""
    return (
        type(module).on_load_checkpoint is not LightningModule.on_load_checkpoint
        or type(module).load_state_dict is not nn.Module.load_state_dict
        or type(module).state_dict is not nn.Module.state_dict
        or type(trainer.strategy).load_model_state_dict is not Strategy.load_model_state_dict
        or any(
            type(callback).on_load_checkpoint is not Callback.on_load_checkpoint
            and not type(callback).__module__.startswith("lightning_hetckpt.")
            for callback in host.callbacks_of(trainer)
        )
    )


def _special_prefixes(module: nn.Module) -> Iterator[str]:
    """The names below which a submodule of the user's has its own way of loading."""
    for name, one in module.named_modules():
        takes = type(one)._load_from_state_dict  # noqa: SLF001 (the documented way to override it)
        if one._load_state_dict_pre_hooks or not takes.__module__.startswith("torch."):  # noqa: SLF001
            yield f"{name}." if name else ""


def _materialize(module: nn.Module, reader: restore.Reader, device: torch.device) -> None:
    """Give every meta tensor that the checkpoint holds memory on `device`; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    homeless = []
    held = {*reader.manifest.tensors, *reader.manifest.aliases}
    for prefix, owner in module.named_modules():
        for group in (owner._parameters, owner._buffers):  # noqa: SLF001 (`to_empty` would untie)
            for name, tensor in group.items():
                if tensor is None or not tensor.is_meta:
                    continue
                full_name = f"{prefix}.{name}" if prefix else name
                if id(tensor) not in made:
                    # Also without values to come: Lightning moves the module to the CPU before it shows our
                    # error, and that would fail on a meta tensor.
                    new = torch.empty_like(tensor, device=device)
                    if f"{_WEIGHTS}.{full_name}" not in held:
                        homeless.append(full_name)
                    made[id(tensor)] = (
                        nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                    )
                group[name] = made[id(tensor)]
    if homeless:
        raise ConfigurationError(
            f"{reader.folder}: holds no values for {len(homeless)} meta tensors of {type(module).__name__}, such as "
            f"{homeless[0]}. Make them in `configure_model` on a real device, or save them with the model."
        )
