"""The noise scale as a torchmetrics metric, for loops and loggers that speak that language."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hetckpt.balance.noise_scale import noise_parts


class NoiseScale(Metric):
    """The gradient noise scale in samples, averaged over all updates since the last reset.

    Every rank updates it with its own numbers, the batches may be unequal, and the ranks meet once, in `compute`.
    Zero where all ranks have the same gradient, infinite where the signal drowns, NaN with one rank alone.

        norms = GradientNorms()
        ddp.register_comm_hook(None, norms.wrap(allreduce_hook))
        ...
        metric.update(*norms.take(), ranks=world_size)
    """

    is_differentiable = False
    full_state_update = False
    noise: Tensor
    signal: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("noise", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("signal", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self, samples: int, total: int, local_square: Tensor, global_square: Tensor, ranks: int
    ) -> None:
        """Take in one step of this rank; one whose gradient is not finite counts for nothing.

        Args:
            samples: in this rank's batch.
            total: samples of all ranks together.
            local_square: squared norm of this rank's mean gradient over its samples.
            global_square: squared norm of the mean gradient over all of them.
            ranks: how many there are.
        """
        if ranks < 2:
            self.noise += torch.nan
            return
        noise, signal = noise_parts(samples, local_square.double(), global_square.double(), total, ranks)
        # An overflow anywhere has reached every rank through the all-reduce, so all leave out the same steps.
        finite = torch.isfinite(global_square)
        self.noise += torch.where(finite, noise, 0.0)
        self.signal += torch.where(finite, signal, 0.0)

    def compute(self) -> Tensor:
        """The ratio of the sums."""
        scale = self.noise / self.signal.clamp_min(0)  # x/0 is infinite, as it should be
        return torch.where(self.noise <= 0, torch.zeros_like(scale), scale)
