"""BatchNorm's running mean and variance as one process with the whole batch would keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle


class RunningStatistics:
    """Merges what each rank's BatchNorm layers saw of a batch.

    The layers normalise by their own rank's samples; SyncBatchNorm is there to change that. But what they keep
    for evaluation need not be rank 0's alone, as under DDP, which may be the smallest part of the batch.

    A layer of momentum m moves its running values x to (1-m)·x + m·(its batch's). With n_i values per channel
    on rank i, N of all together, the running mean of the whole batch is Σ n_i·mean_i / N; the squares between the
    ranks' means join the variance, divided by m², and n_i - 1 and N - 1 make its estimates unbiased. Exact where
    a layer runs once in a batch.

    Args:
        module: searched for layers.
        all_reduce: sums a tensor over all ranks in place.
    """

    def __init__(self, module: nn.Module, all_reduce: Callable[[Tensor], Any]) -> None:
        self._layers: list[Any] = [
            layer
            for layer in module.modules()
            if isinstance(layer, _BatchNorm)
            and not isinstance(layer, nn.SyncBatchNorm)
            and layer.running_mean is not None
        ]
        self._all_reduce = all_reduce
        self._channels = [layer.num_features for layer in self._layers]
        self._counts = [0] * len(self._layers)  # values per channel, of this rank, since the last merge
        self._variance = torch.empty(0)

    def __bool__(self) -> bool:
        """Whether there is anything to merge."""
        return bool(self._layers)

    def watch(self) -> list[RemovableHandle]:
        """Count from now on what passes through the layers."""
        return [
            layer.register_forward_pre_hook(self._counter(index)) for index, layer in enumerate(self._layers)
        ]

    def begin(self) -> None:
        """A batch begins; the layers hold the same on all ranks."""
        self._counts = [0] * len(self._layers)
        self._variance = self._joined("running_var")

    def merge(self, counts: bool) -> None:
        """The batch has run forward on all ranks, which all call this; afterwards they hold the same again.

        Args:
            counts: whether this rank had samples of its own, and did not only repeat one.
        """
        mean, variance = self._joined("running_mean"), self._joined("running_var")
        seen = self._spread([float(n) if counts else 0.0 for n in self._counts], mean.device)
        sums = torch.stack(
            [seen, seen * mean, seen * mean**2, (seen - 1).clamp_min(0) * variance, (seen > 0).double()]
        )
        self._all_reduce(sums)
        total, means, squares, within, ranks = sums
        momentum = self._spread([_momentum(layer) for layer in self._layers], mean.device)
        merged = means / total.clamp_min(1)
        between = (squares - total * merged**2).clamp_min(0) / momentum
        free = (total - 1).clamp_min(1)
        kept = (1 - momentum) * self._variance * (ranks - 1) / free
        # A layer in evaluation mode saw nothing on any rank, and keeps what it has.
        moved = total > 1
        self._put("running_mean", torch.where(moved, merged, mean))
        self._put("running_var", torch.where(moved, kept + (within + between) / free, variance))
        self.begin()

    def _counter(self, index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if layer.training:
                self._counts[index] += inputs[0].numel() // self._channels[index]

        return count

    def _joined(self, name: str) -> Tensor:
        return torch.cat([getattr(layer, name).double() for layer in self._layers])

    def _spread(self, per_layer: list[float], device: torch.device) -> Tensor:
        """One value per channel, from one per layer."""
        values = torch.tensor(per_layer, dtype=torch.float64, device=device)
        return values.repeat_interleave(
            torch.tensor(self._channels, device=device), output_size=sum(self._channels)
        )

    def _put(self, name: str, values: Tensor) -> None:
        for layer, part in zip(self._layers, torch.split(values, self._channels), strict=True):
            getattr(layer, name).copy_(part)


def _momentum(layer: Any) -> float:
    # Without one torch keeps the plain average of all batches so far.
    return (
        float(layer.momentum)
        if layer.momentum is not None
        else 1 / max(float(layer.num_batches_tracked), 1.0)
    )
