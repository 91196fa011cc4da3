"""AdaptiveBatch: a global batch that grows as far as more samples in a step still pay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_hetckpt import host
from lightning_hetckpt.balance.goodput import BatchChoice, candidates, choose
from lightning_hetckpt.balance.gradient_norms import GradientNorms
from lightning_hetckpt.balance.lr_scaling import LrScaling, lr_factor, scheduler_ticks
from lightning_hetckpt.balance.noise_scale import NoiseAverages, noise_parts
from lightning_hetckpt.errors import ConfigurationError

# The speeds are known around the batches that were timed, so no change goes further than this at once.
_REACH = 2


class AdaptiveBatch(Callback):
    """Chooses the global batch anew between epochs, and scales the learning rate with it.

    To be given to the strategy: `HeteroDDP(adaptive_batch=AdaptiveBatch(max_global_batch_size=4096))`. A larger batch
    takes less time per sample, and says less per sample once it is beyond the gradient's noise scale; the choice is
    the batch with the most progress per second, and it changes where that gains more than 5 %.

    The batch changes **between epochs** only, since Lightning counts an epoch's batches before it begins. An epoch
    stays one pass over the data, every sample once, whatever the batch. `len(loader)`, the progress bar and
    `trainer.num_training_batches` are those of the present batch. `max_steps` and `global_step` count optimizer
    steps, large or small. `trainer.estimated_stepping_batches` is the number of steps at the starting batch, and
    step-wise schedulers move that often: several times behind a large step. A run that `max_steps` ends moves them
    once per step.

    The learning rate that you and your scheduler set is the one for the starting batch. It is multiplied between
    the backward pass and the end of the optimizer's step, and stands as it was at any other time.

    Args:
        max_global_batch_size: samples of all ranks together that a step may have at most.
        min_global_batch_size: and at least; None is the batch of the start.
        lr_scaling: `"adascale"` (for SGD), `"sqrt"` (for Adam and its kin), `"linear"` or `"none"`.
        every_n_epochs: epochs from one choice to the next.

    Raises:
        ConfigurationError: options that cannot hold.
    """

    def __init__(
        self,
        max_global_batch_size: int,
        min_global_batch_size: int | None = None,
        lr_scaling: LrScaling = "adascale",
        every_n_epochs: int = 1,
    ) -> None:
        least = 1 if min_global_batch_size is None else min_global_batch_size
        if not 1 <= least <= max_global_batch_size or every_n_epochs < 1:
            raise ConfigurationError(
                f"AdaptiveBatch(max_global_batch_size={max_global_batch_size}, min_global_batch_size="
                f"{min_global_batch_size}, every_n_epochs={every_n_epochs}): expected 1 <= min <= max, and epochs >= 1"
            )
        if lr_scaling not in get_args(LrScaling):
            raise ConfigurationError(
                f"AdaptiveBatch(lr_scaling={lr_scaling!r}): expected one of {', '.join(get_args(LrScaling))}"
            )
        self.max_global_batch_size = max_global_batch_size
        self.min_global_batch_size = min_global_batch_size
        self.lr_scaling = lr_scaling
        self.every_n_epochs = every_n_epochs
        self.norms = GradientNorms()
        self._averages = NoiseAverages()
        self._measured: list[tuple[Tensor, float]] = []  # of steps that the device may not have come to yet
        self._odd = False  # a batch of the present optimizer step was no whole one
        self._base: int | None = None
        self._total = 0
        self._lr_factor = 1.0
        self._unscaled: list[Any] | None = None

    # ------------------------------------------------------------ what is known

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples, averaged over the last 1000 steps or so; None with one rank."""
        self._settle()
        return self._averages.noise_scale

    @property
    def lr_factor(self) -> float:
        """By how much the optimizer's steps of this epoch multiply the learning rate."""
        return self._lr_factor

    @property
    def base_global_batch_size(self) -> int | None:
        """The batch that the user's learning rate was made for; None before the loaders are set up."""
        return self._base

    def begin_fit(self, wanted: int, saved: bool) -> int:
        """Take note of the batch that the user asked for, and return the one to train with.

        Args:
            wanted: by the loader or `global_batch_size`.
            saved: whether this fit goes on from a checkpoint.
        """
        if saved and self._total and wanted in (self._base, self._total):
            return self._total
        if self._base is None or not saved:
            self._averages = NoiseAverages()
        self._base = self._total = wanted
        self._lr_factor = 1.0
        if wanted > self.max_global_batch_size or wanted < (self.min_global_batch_size or 1):
            raise ConfigurationError(
                f"the global batch of the start has {wanted} samples, but AdaptiveBatch keeps to "
                f"{self.min_global_batch_size or 1} to {self.max_global_batch_size}; start within these bounds"
            )
        return wanted

    # ------------------------------------------------------------ one step

    def batch_begins(self, samples: int, total: int, weight: float) -> None:
        """A batch comes whose gradient will carry `weight` in the buckets, of `total` samples of all ranks."""
        self._settle()
        self._odd = self._odd or total != self._total
        self.norms.add_batch(samples, total, weight)

    def backward_ended(self, ranks: int, loss_scale: Tensor | float) -> None:
        """A backward pass is over; if it reduced, add up what the ranks measured: two numbers each, every step."""
        if not self.norms.complete:
            return
        squares, odd, self._odd = self.norms.take(ranks, loss_scale), self._odd, False
        # A short batch, the last of an epoch, would need another weighing; all ranks leave out the same ones.
        if odd or squares is None or ranks < 2:
            return
        samples, total, local_square, global_square = squares
        both = torch.stack(noise_parts(samples, local_square, global_square, total, ranks))
        dist.all_reduce(both)
        self._measured.append((both, total / (self._base or total)))

    def _settle(self) -> None:
        """Read what was measured; a step later that costs no waiting."""
        measured, self._measured = self._measured, []
        for both, steps in measured:
            noise, signal = both.tolist()
            self._averages.add(noise, signal, steps)

    def scale_lr(self, optimizer: Optimizer) -> None:
        """Let the step that comes next use the scaled learning rate; until `restore_lr`."""
        if self._lr_factor != 1.0 and self._unscaled is None:
            self._unscaled = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._lr_factor

    def restore_lr(self, optimizer: Optimizer) -> None:
        """Give the learning rate back as the user's scheduler left it."""
        if self._unscaled is not None:
            for group, rate in zip(optimizer.param_groups, self._unscaled, strict=True):
                group["lr"] = rate
            self._unscaled = None

    def ticks(self, trainer: Trainer, base_batches: int) -> int:
        """How often a step-wise scheduler moves behind the present optimizer step."""
        base_steps = host.optimizer_steps(trainer, base_batches)
        if trainer.max_steps != -1 and (
            trainer.max_epochs in (None, -1) or trainer.max_epochs * base_steps > trainer.max_steps
        ):
            return 1  # a schedule for this run was laid out in steps
        steps = host.optimizer_steps(trainer, int(trainer.num_training_batches))
        _, batch = host.epoch_and_batch(trainer)
        return scheduler_ticks(host.optimizer_steps(trainer, batch + 1) - 1, steps, base_steps)

    # ------------------------------------------------------------ between epochs

    def is_due(self, epoch: int) -> bool:
        """Whether a batch may be chosen before `epoch`."""
        return epoch > 0 and epoch % self.every_n_epochs == 0

    def choose(
        self, step_s: Callable[[int], float | None], least: int, most: float, multiple_of: int = 1
    ) -> BatchChoice | None:
        """The batch for the next epoch, or None to keep the present one.

        Args:
            step_s: predicted seconds of a step with so many samples; None where that is not known.
            least: samples that the ranks take together at the least.
            most: and at the most.
            multiple_of: of the shares.
        """
        self._settle()
        noise_scale = self._averages.cautious
        if self._base is None or noise_scale is None:
            return None
        low = max(least, self.min_global_batch_size or self._base, math.ceil(self._total / _REACH))
        high = int(min(most, self.max_global_batch_size, self._total * _REACH))
        if low > high:
            return None
        totals = candidates(low, high, min(max(self._total, low), high), multiple_of)
        return choose(self._total, self._base, noise_scale, totals, step_s)

    def begin_epoch(self, total: int) -> None:
        """Train the coming epoch with a global batch of `total` samples."""
        self._settle()
        self._total = total
        if self._base is not None:
            self._lr_factor = lr_factor(self.lr_scaling, total, self._base, self._averages.cautious)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be measured or scaled."""
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                f"found manual optimization in {type(pl_module).__name__}; AdaptiveBatch needs to know which backward "
                "pass belongs to which step. Use automatic optimization, or leave adaptive_batch out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an optimizer that takes its learning rate before the backward pass."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ConfigurationError(
                    "found LBFGS, which runs several backward passes in a step; AdaptiveBatch cannot scale its learning "
                    "rate. Use another optimizer, or leave adaptive_batch out."
                )

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose; this callback stands first, so that progress bars already see the new number of batches."""
        trainer.strategy.begin_epoch()  # type: ignore[attr-defined]

    @override
    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs to choose as this one would have."""
        self._settle()
        return {
            "base_global_batch_size": self._base,
            "global_batch_size": self._total,
            "lr_factor": self._lr_factor,
            "noise": self._averages.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._base = state_dict["base_global_batch_size"]
        self._total = state_dict["global_batch_size"]
        self._lr_factor = state_dict["lr_factor"]
        self._averages.load_state_dict(state_dict["noise"])


def log_choice(choice: BatchChoice, epoch: int, noise_scale: float | None) -> None:
    """One line about a change, from rank 0."""
    rank_zero_info(
        f"hetckpt: {choice.total} samples in a global batch from epoch {epoch} on, {choice.gain:.0%} more progress "
        f"per second (noise scale {noise_scale or 0:.3g} samples, {choice.step_s:.3g} s per step)"
    )
