"""One training batch of one rank, run in as many micro-batches as its memory asks for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetckpt import host
from lightning_hetckpt.balance.parts import cut
from lightning_hetckpt.errors import ConfigurationError, DeviceMemoryError
from lightning_hetckpt.weighing import Share, Weighing, Weight

Forward = Callable[..., Any]
Backward = Callable[[Tensor], Tensor]


class MicroBatches:
    """Runs the parts of a batch so that their gradients sum to those of the batch in one piece.

    Lightning calls `training_step`, then clears the gradients, then calls `backward`. So the first part's
    forward belongs to the first of these, and its backward and every further part to the last one. Only
    the backward pass of the last part is reduced over the ranks.

    Ranks may have different numbers of parts. Where `training_step` exchanges something with the other ranks
    (`self.log(sync_dist=True)`), a rank that has no part left goes along with a forward pass of one sample, whose
    result nobody sees.

    Args:
        strategy: whose DDP model and precision are used.
        weighing: of the losses.
        forward: runs `training_step` through DDP.
        forward_alone: runs it without DDP and without gradients.
    """

    def __init__(
        self, strategy: DDPStrategy, weighing: Weighing, forward: Forward, forward_alone: Forward
    ) -> None:
        self._strategy = strategy
        self._weighing = weighing
        self._forward = forward
        self._forward_alone = forward_alone
        self._batches: list[Any] = []
        self._weights: list[Weight] = [Weight(1.0, 1.0, 1.0)]
        self._share = Share(1, 1, (1,), (1,), is_even=True)
        self._model_fits = False
        self._at = 0  # the part that runs
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (
            (),
            {},
        )  # of training_step, behind the batch
        self._logged: host.LoggedParts | None = None
        self.exchanged = False  # something with the other ranks, in the present batch's training_step

    @property
    def share(self) -> Share:
        """What this rank takes of the present batch."""
        return self._share

    @property
    def weight(self) -> Weight:
        """Of the part that runs."""
        return self._weights[self._at]

    @property
    def any_rank_cuts(self) -> bool:
        """Whether some rank runs the present batch in several parts."""
        return len(self._share.together) > 1

    def begin(self, trainer: Trainer, share: Share, batch: Any) -> None:
        """A batch begins; cut it, and weigh the parts.

        Raises:
            ConfigurationError: some rank must cut its batch and the model cannot be trained in parts.
            LoaderError: this rank must, and the batch cannot be cut.
        """
        self._share, self._at, self.exchanged = share, 0, False
        if self.any_rank_cuts and not self._model_fits:
            self._check_model(share)
            self._model_fits = True
        self._weights = self._weighing.weights(share, _pieces(batch, share), self._strategy.root_device)
        host.count_logged_samples(trainer, share.parts[0])

    def first(self, *args: Any, **kwargs: Any) -> Any:
        """What `training_step` returns for the first part.

        Args:
            *args: the arguments that Lightning passed, the batch first.
        """
        if not self.any_rank_cuts:
            return self._forward(*args, **kwargs)
        module = self._strategy.lightning_module
        assert module is not None
        self._at, self._logged = 0, host.LoggedParts(module.trainer)
        self._batches, self._arguments = _pieces(args[0], self._share), (args[1:], kwargs)
        with self._strategy.block_backward_sync() if len(self._batches) > 1 else nullcontext():
            output = self._forward(self._batches[0], *args[1:], **kwargs)
        self._note_logged()
        return output

    def backward(self, loss: Tensor, optimizer: Optimizer | None, last_backward: Backward) -> Tensor:
        """Backward of the first part, and all of every further part.

        Args:
            loss: of the first part, as Lightning divides it for accumulation.
            last_backward: the usual backward of a strategy, which is reduced.
        """
        if not self.any_rank_cuts:
            return last_backward(self._weighed(loss))
        last = len(self._batches) - 1
        while self._at < last:
            with self._strategy.block_backward_sync():
                self._add_gradients(self._weighed(loss), optimizer)
            self._at += 1
            with self._strategy.block_backward_sync() if self._at < last else nullcontext():
                loss = self._next_loss()
        self._go_along()
        self._batches, self._arguments = [], ((), {})  # they hold memory of the device
        return last_backward(self._weighed(loss))

    def out_of_memory(self, device: str, others_bytes: int | None) -> DeviceMemoryError:
        """The error for a device that could not hold the part that ran.

        Args:
            device: its name.
            others_bytes: what other processes hold of its memory, where known.
        """
        share, rank = self._share, self._strategy.global_rank
        at_once = max(share.parts)
        pieces = (
            f" in {len(share.parts)} micro-batches of up to {at_once}" if len(share.parts) > 1 else " at once"
        )
        caps = ["None"] * self._strategy.world_size
        caps[rank] = str(max(at_once // 2, 1))
        advice = (
            f"Set HeteroDDP(max_micro_batch=[{', '.join(caps)}]), which gives the same result in smaller pieces, or "
            f"max_samples to give rank {rank} less"
            if at_once > 1
            else "A single sample does not fit: use a smaller model, bf16-mixed precision or activation checkpointing"
        )
        return DeviceMemoryError(
            f"rank {rank} ({device}) ran out of memory: it ran {share.samples} of the batch's {share.whole} samples"
            f"{pieces}. {advice}."
            + (
                f" Other processes hold {others_bytes / 2**30:.1f} GiB of this device."
                if others_bytes
                else ""
            )
        )

    def _weighed(self, loss: Tensor) -> Tensor:
        # W·b_i/B on the loss, not on the reduced gradient: only so are collectives inside the backward pass
        # (SyncBatchNorm) right, too. DDP then divides by W. A rank without samples has weight 0.
        factor = self.weight.loss * self._strategy.world_size
        if isinstance(factor, Tensor):
            return loss * factor.to(loss.dtype)
        return loss if factor == 1.0 else loss * factor

    def _add_gradients(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """A backward pass without Lightning's hooks around it: those belong to the batch, and run with its last part."""
        precision, module = self._strategy.precision_plugin, self._strategy.lightning_module
        assert module is not None
        scaler = getattr(precision, "scaler", None)
        loss = scaler.scale(loss) if scaler is not None else loss
        precision.backward(loss, module, optimizer)

    def _next_loss(self) -> Tensor:
        module = self._strategy.lightning_module
        assert module is not None
        args, kwargs = self._arguments
        host.count_logged_samples(module.trainer, self._share.parts[self._at])
        with host.as_training_step(module):
            output = self._forward(self._batches[self._at], *args, **kwargs)
        self._note_logged()
        loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
        return loss / module.trainer.accumulate_grad_batches

    def _go_along(self) -> None:
        """Meet the ranks that have more parts, wherever they exchange something."""
        module, logged = self._strategy.lightning_module, self._logged
        assert module is not None and logged is not None
        args, kwargs = self._arguments
        own = len(self._batches)
        if self.exchanged and own < len(self._share.together):
            samples = max(self._share.parts[-1], 1)
            one = cut(self._batches[-1], (1, samples - 1) if samples > 1 else (1,))[0]
            host.count_logged_samples(module.trainer, 0)
            for at in range(own, len(self._share.together)):
                self._at = at
                with host.as_training_step(module):
                    self._forward_alone(one, *args, **kwargs)
                self._note_logged()
            self._at = own - 1
        logged.merge()

    def _note_logged(self) -> None:
        assert self._logged is not None
        self._logged.note(self.weight.own, self.weight.together)

    def _check_model(self, share: Share) -> None:
        module = self._strategy.lightning_module
        assert module is not None
        if (why := why_in_one_piece(module)) is not None:
            raise ConfigurationError(
                f"a rank's share exceeds what fits into its memory at once: the batch of {share.whole} samples would "
                f"run in up to {len(share.together)} micro-batches, and {why}. Lower global_batch_size, raise "
                "max_micro_batch, or set max_samples so that no share exceeds it."
            )


def why_in_one_piece(module: LightningModule) -> str | None:
    """Why no batch of this model can be run in parts; None where it can."""
    if not module.automatic_optimization:
        return "under manual optimization the step is the user's own code"
    if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
        return "SyncBatchNorm takes its statistics over the whole batch"
    return None


def _pieces(batch: Any, share: Share) -> list[Any]:
    return [batch] if len(share.parts) == 1 else cut(batch, share.parts)
