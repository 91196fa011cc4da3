"""AdaptiveBatch: a global batch that grows as far as more samples in a step still pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_hetckpt import host
from lightning_hetckpt.balance.goodput import candidates, choose
from lightning_hetckpt.balance.gradient_norms import CommHook, GradientNorms
from lightning_hetckpt.balance.lr_scaling import LrScaling, lr_factor, scheduler_ticks
from lightning_hetckpt.balance.noise_scale import NoiseAverages, noise_parts
from lightning_hetckpt.balance.plan import BatchPlan, StepKey
from lightning_hetckpt.balance.solver import OptPerf
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
        self._norms = GradientNorms()
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
    def cautious_noise_scale(self) -> float | None:
        """A noise scale that is rather too small than too large: what choices are made by."""
        self._settle()
        return self._averages.cautious

    @property
    def lr_factor(self) -> float:
        """By how much the optimizer's steps of this epoch multiply the learning rate."""
        return self._lr_factor

    @property
    def base_global_batch_size(self) -> int | None:
        """The batch that the user's learning rate was made for; None before the loaders are set up."""
        return self._base

    def begin_fit(self, wanted: int, is_resumed: bool, is_explicit: bool) -> int:
        """Take note of the batch that the user asked for, and return the one to train with.

        Args:
            wanted: by `global_batch_size` (`is_explicit`), else the saved one, else the loader's.
            is_resumed: whether this fit goes on from a checkpoint; then the batch chosen there stays, unless the
                user now starts from another one.
            is_explicit: whether it was `global_batch_size`.
        """
        self._norms.drop()  # what a fit that failed has left
        self._measured, self._odd, self._unscaled = [], False, None
        if is_resumed and self._base is not None and wanted == (self._base if is_explicit else self._total):
            return self._total
        if not is_resumed:
            self._averages = NoiseAverages()
        least = self.min_global_batch_size or 1
        if not least <= wanted <= self.max_global_batch_size:
            raise ConfigurationError(
                f"the global batch of the start has {wanted} samples, but AdaptiveBatch keeps to {least} to "
                f"{self.max_global_batch_size}; start within these bounds, or change them"
            )
        self._base = self._total = wanted
        self._lr_factor = 1.0
        return wanted

    # ------------------------------------------------------------ one step

    def wrap(self, hook: CommHook) -> CommHook:
        """A communication hook that reduces as `hook` does and measures the gradients on the way."""
        return self._norms.wrap(hook)

    def batch_begins(self, samples: int, total: int, weight: float) -> None:
        """A batch comes whose gradient will carry `weight` in the buckets, of `total` samples of all ranks."""
        self._settle()
        self._odd = self._odd or total != self._total
        self._norms.add_batch(samples, total, weight)

    def backward_ended(self, ranks: int, loss_scale: Tensor | float) -> None:
        """A backward pass is over; if it reduced, add up what the ranks measured: two numbers each, every step."""
        if not self._norms.complete:
            return
        squares, odd, self._odd = self._norms.take(ranks, loss_scale), self._odd, False
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

    def _ticks(self, trainer: Trainer) -> int:
        """How often a step-wise scheduler moves behind the present optimizer step."""
        base_steps = host.optimizer_steps(trainer, trainer.strategy.base_batches)  # type: ignore[attr-defined]
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
        self,
        predict_over: Callable[[Sequence[int]], Sequence[OptPerf | None]],
        epoch: int,
        least: int,
        most: int,
        multiple_of: int,
    ) -> BatchPlan | None:
        """The plan with which `epoch` gets on fastest, or None to keep the present batch.

        Args:
            predict_over: the best split of each of some global batches and its time; None where that is not known.
            least: samples that the ranks take together at the least.
            most: and at the most.
            multiple_of: what a batch should be a multiple of.
        """
        noise_scale = self.cautious_noise_scale
        if self._base is None or noise_scale is None:
            return None
        low = max(least, self.min_global_batch_size or self._base, math.ceil(self._total / _REACH))
        high = min(most, self.max_global_batch_size, self._total * _REACH)
        if low > high:
            return None
        allowed = candidates(low, high, min(max(self._total, low), high), multiple_of)
        asked = sorted({*allowed, self._total})
        best = {
            total: split for total, split in zip(asked, predict_over(asked), strict=True) if split is not None
        }

        def step_s(total: int) -> float | None:
            return best[total].step_s if total in best else None

        choice = choose(self._total, self._base, noise_scale, allowed, step_s)
        if choice is None:
            return None
        reason = f"a global batch of {choice.total}: {choice.gain:.0%} more progress per second"
        reason += f" at a noise scale of {noise_scale:.3g}"
        return BatchPlan(best[choice.total].shares, StepKey(epoch, 0), reason, choice.step_s)

    def begin_epoch(self, total: int, noise_scale: float | None) -> None:
        """Train the coming epoch with a global batch of `total` samples, at a learning rate to match."""
        self._total = total
        if self._base is not None:
            self._lr_factor = lr_factor(self.lr_scaling, total, self._base, noise_scale)

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
        """Refuse an optimizer that takes its learning rate too early, and pace the schedulers."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ConfigurationError(
                    "found LBFGS, which runs several backward passes in a step; AdaptiveBatch cannot scale its learning "
                    "rate. Use another optimizer, or leave adaptive_batch out."
                )
        host.pace_schedulers(trainer, lambda: self._ticks(trainer))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose; this callback stands first, so that progress bars already see the new number of batches."""
        trainer.strategy.begin_epoch()  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the noise scale, the batch and the learning rate's factor."""
        noise_scale = self._averages.noise_scale
        if noise_scale is not None:
            pl_module.log("hetckpt/noise_scale", noise_scale)
        pl_module.log("hetckpt/global_batch_size", float(self._total))
        pl_module.log("hetckpt/lr_factor", self._lr_factor)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module's schedulers as they were."""
        host.free_schedulers(trainer)

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
