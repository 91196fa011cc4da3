"""How much each rank's loss counts, so that all of them together are the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetckpt.errors import ConfigurationError

WeightBy = Callable[[Any], "float | Tensor"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes of one batch, and in which parts it runs it."""

    samples: int  # 0 where it only repeats a sample, since the batch has fewer than there are ranks
    whole: int  # samples of all ranks together
    parts: tuple[int, ...]  # this rank's micro-batches; they sum to `samples`
    together: tuple[int, ...]  # samples of all ranks in micro-batch 0, 1, ..., as many as any rank has
    is_even: bool  # whether all ranks take the same


@dataclass(frozen=True, slots=True)
class Weight:
    """Of one micro-batch of one rank."""

    loss: (
        float | Tensor
    )  # factor of its loss; over all parts of all ranks the products sum to the whole batch's loss
    own: float | Tensor  # what it counts: samples, or what the user counts
    together: float | Tensor  # what it counts with the same micro-batch of all other ranks; above zero

    @property
    def logged(self) -> float | Tensor:
        """Factor of a mean that all ranks log in this micro-batch."""
        return self.own / self.together


class Weighing:
    """Weighs losses by samples, or by what the user counts.

    Args:
        loss_reduction: "mean" or "sum", over the samples of a batch.
        weight_by: maps a batch to what its mean loss is a mean over, such as its number of tokens; must add up over
            the parts of a batch. None for samples.

    Raises:
        ConfigurationError: an unknown reduction, or a sum that is weighed.
    """

    def __init__(self, loss_reduction: str, weight_by: WeightBy | None) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(
                f'HeteroDDP(loss_reduction={loss_reduction!r}): expected "mean" or "sum"'
            )
        if weight_by is not None and (loss_reduction == "sum" or not callable(weight_by)):
            raise ConfigurationError(
                f"HeteroDDP(weight_by={weight_by!r}, loss_reduction={loss_reduction!r}): expected a function from a "
                'batch to the weight of its mean loss. A sum needs no weight; leave loss_reduction at "mean".'
            )
        self._is_sum = loss_reduction == "sum"
        self._weight_by = weight_by

    def weights(self, share: Share, batches: Sequence[Any], device: torch.device) -> list[Weight]:
        """The weights of micro-batch 0, 1, ..., as many as any rank has; where this rank has none they are zero.

        With `weight_by` all ranks must call this together: they exchange one number for each micro-batch.
        """
        if self._weight_by is not None:
            return self._agreed(self._weight_by, share, batches, device)
        return [
            # A rank that only repeats a sample counts for nothing.
            Weight(float(samples > 0) if self._is_sum else samples / share.whole, samples, together)
            for samples, together in zip_longest(share.parts, share.together, fillvalue=0)
        ]

    def _agreed(
        self, weight_by: WeightBy, share: Share, batches: Sequence[Any], device: torch.device
    ) -> list[Weight]:
        own = torch.zeros(len(share.together), dtype=torch.float64, device=device)
        for part, (samples, batch) in enumerate(zip(share.parts, batches, strict=True)):
            weight = torch.as_tensor(weight_by(batch), dtype=torch.float64)
            if weight.numel() != 1:
                raise ConfigurationError(
                    f"weight_by returned a tensor of shape {tuple(weight.shape)}, expected one number for the batch."
                )
            own[part] = weight.reshape(()) * (samples > 0)
        together = own.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(together)
        # Nothing to learn from in the whole batch: no gradient, and no division by zero either.
        least = torch.finfo(torch.float64).tiny
        whole, apart = together.sum().clamp_min(least), together.clamp_min(least)
        return [Weight(mine / whole, mine, all_ranks) for mine, all_ranks in zip(own, apart, strict=True)]
