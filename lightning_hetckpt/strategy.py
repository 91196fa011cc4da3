"""HeteroDDP: DDP in which every device gets the micro-batch that lets all finish together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_hetckpt import host, loaders, resume
from lightning_hetckpt.adaptive_batch import AdaptiveBatch
from lightning_hetckpt.balance.gradient_norms import check_hook
from lightning_hetckpt.balance.memory_meter import device_name, held_by_others
from lightning_hetckpt.balance.options import BalanceOptions, Limit
from lightning_hetckpt.balance.plan import BatchPlan
from lightning_hetckpt.balance.running_statistics import RunningStatistics
from lightning_hetckpt.balancer import Balancer
from lightning_hetckpt.callbacks import ensure_snapshots
from lightning_hetckpt.channel import Channel, GroupChannel, SoloChannel
from lightning_hetckpt.checkpoint import rng_state
from lightning_hetckpt.checkpoint.snapshotter import Snapshot
from lightning_hetckpt.checkpoint_io import StripedAsyncCheckpointIO
from lightning_hetckpt.errors import CheckpointError, ConfigurationError, HetckptError
from lightning_hetckpt.micro_batches import MicroBatches
from lightning_hetckpt.weighing import Weighing, WeightBy

log = logging.getLogger("lightning_hetckpt")


class HeteroDDP(DDPStrategy):
    """Data parallel training in which unequal devices share each global batch by their speed.

    The mathematics stays that of one process with the whole batch: one global order of samples, cut anew for
    every step, and gradients weighted by samples. What the user logs stays unweighted.

    Args:
        global_batch_size: samples of all ranks together in one training batch. `None` is the loader's
            `batch_size` times the world size; on resume the saved one.
        policy: `"live"` learns each rank's seconds per sample while training and re-plans; `"static"` keeps
            `shares`; `"even"` gives every rank the same, as stock DDP does.
        shares: one number per rank: samples of a global batch, or any relative speeds. The first plan under
            `"live"`, the only one under `"static"`.
        min_samples: least samples of a rank in a batch, one number for all or one per rank; BatchNorm needs 2.
            The last batch of an epoch keeps to it as long as it has enough for all.
        max_samples: most samples of a rank in a batch, likewise.
        multiple_of: shares are multiples of this, but for one rank that takes what is left.
        replan_every: batches from one look at the timings to the next.
        loss_reduction: how `training_step` reduces its loss over the samples of its batch.
        weight_by: maps a batch (on the device) to what its mean loss is a mean over, such as its number of
            tokens, where that is not the samples; must add up over the parts of a batch. The ranks agree on the
            sum in every step, which costs one small all-reduce.
        max_micro_batch: most samples that a device can run at once, one number for all or one per rank, None for
            no limit. A larger share is run as several micro-batches within the step, with the same result: the
            batch's tensors are cut along dimension 0.
        adaptive_batch: chooses the global batch anew between epochs; None keeps it.
        **ddp_kwargs: passed on to Lightning's `DDPStrategy` and torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: options that contradict each other or the world size.
    """

    def __init__(
        self,
        global_batch_size: int | None = None,
        policy: Literal["live", "static", "even"] = "live",
        shares: Sequence[float] | None = None,
        min_samples: Limit = 1,
        max_samples: Limit | None = None,
        multiple_of: int = 1,
        replan_every: int = 10,
        loss_reduction: Literal["mean", "sum"] = "mean",
        weight_by: WeightBy | None = None,
        max_micro_batch: Limit | Sequence[int | None] | None = None,
        adaptive_batch: AdaptiveBatch | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        _check_ddp_options(ddp_kwargs)
        super().__init__(**ddp_kwargs)
        self.options = BalanceOptions(
            global_batch_size,
            policy,
            shares,
            min_samples,
            max_samples,
            multiple_of,
            replan_every,
            max_micro_batch,
        )
        self._weighing = Weighing(loss_reduction, weight_by)
        if adaptive_batch is not None:
            _check_adaptive(policy, loss_reduction, weight_by)
        self.adaptive_batch = adaptive_batch
        self._parts = self._new_parts()
        self._statistics: RunningStatistics | None = None
        self._balancer: Balancer | None = None  # of the present fit, or of the last one
        self._channel: Channel = SoloChannel()
        self._agreed: dict[str, str] = {}  # this rank's path of the last snapshot -> rank 0's
        self._unfenced: list[Snapshot] = []
        self._hooks: list[RemovableHandle] = []
        self._in_backward = False
        self._in_training_step = False
        self._weights_move_next = False  # forward and backward are over, and the optimizer comes
        host.find_last_snapshot_too()
        host.refuse_other_lightning()
        host.estimate_steps_at_base_batch()

    @property
    def plan(self) -> BatchPlan | None:
        """The plan in force at the batch that is being trained; None before the loaders are set up."""
        return self._balancer.plan if self._balancer is not None else None

    @property
    def plan_history(self) -> list[BatchPlan]:
        """Every plan of this fit, oldest first; the last may still lie ahead."""
        return self._balancer.plan_history if self._balancer is not None else []

    # ------------------------------------------------------------ set-up

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        trainer = self._trainer()
        ensure_snapshots(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._balancer, self._unfenced = None, []
            if self.adaptive_batch is not None:
                host.add_first_callback(trainer, self.adaptive_batch)
            host.watch_train_loaders(trainer, self._expect_train_loaders)

    def _expect_train_loaders(self, given: list[Any]) -> None:
        """Lightning has asked the user for train loaders: at the start of a fit, or to replace those it had."""
        loaders.check_train_loaders(given)
        if self._balancer is not None:
            self._balancer.expect_loaders()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size > 1 and isinstance(self._channel, SoloChannel):
            # Objects travel over gloo: NCCL would need the device for a few bytes.
            gloo = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None
            self._channel = GroupChannel(gloo)
        trainer = self._trainer()
        if trainer.state.fn == TrainerFn.FITTING:
            self._balancer = Balancer(
                self.options, trainer, self._channel, self.root_device, self.adaptive_batch
            )
            self._parts = self._new_parts()
        self._agreed = resume.agree_on_last(trainer)

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        # DDP synchronises buffers before it calls the module, so a mark at the module's own entry excludes
        # that wait; the module may be called again inside `training_step`, hence only the first counts.
        self._hooks.append(model.register_forward_pre_hook(self._mark_forward))
        return super()._setup_model(model)

    def _mark_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._in_training_step and self._balancer is not None:
            self._balancer.timer.forward_started()

    @override
    def _register_ddp_hooks(self) -> None:
        if self._balancer is None or not self._balancer.is_live:
            super()._register_ddp_hooks()
            return
        # DDP takes one hook only, so the user's runs inside ours; stock Lightning would ignore it on CPU.
        user_hook: Any = self._ddp_comm_hook or allreduce_hook
        if self.adaptive_batch is not None:
            check_hook(user_hook, self._ddp_comm_state)
        if self._ddp_comm_hook is not None and self._ddp_comm_wrapper is not None:
            user_hook = self._ddp_comm_wrapper(user_hook)
        if self.adaptive_batch is not None:
            user_hook = self.adaptive_batch.wrap(user_hook)
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._ddp_comm_state, self._balancer.timing_hook(user_hook))

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._ddp_kwargs.get("static_graph") and (
            trainer.accumulate_grad_batches != 1 or self.options.max_micro_batch is not None
        ):
            raise ConfigurationError(
                "HeteroDDP(static_graph=True) with accumulate_grad_batches or max_micro_batch: torch's DDP fails where a "
                "static graph begins without an all-reduce, in stock DDP as well. Leave static_graph out."
            )
        super().setup(trainer)
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING and module is not None and not module.automatic_optimization:
            self._watch_bare_backward()
        self._statistics = None
        if trainer.state.fn == TrainerFn.FITTING and self.world_size > 1 and self._syncs_buffers():
            assert module is not None
            self._statistics = RunningStatistics(module, dist.all_reduce)
            self._hooks.extend(self._statistics.watch())

    def _syncs_buffers(self) -> bool:
        """Whether DDP was asked, as it is by default, to keep buffers alike."""
        return bool(self._ddp_kwargs.get("broadcast_buffers", True))

    def _watch_bare_backward(self) -> None:
        if self.world_size == 1 or self.options.policy == "even":
            return
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            for parameter in (
                {id(p): p for p in (parameters[0], parameters[-1])}.values() if parameters else ()
            ):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._refuse_bare_backward))

    def _refuse_bare_backward(self, parameter: Tensor) -> None:
        if not self._in_backward and self._in_training_step:
            raise HetckptError(
                "found a bare `loss.backward()` in `training_step`: the ranks have unequal shares, and a gradient that "
                "does not pass through the strategy is neither weighted nor reduced. "
                "Call `self.manual_backward(loss)` instead."
            )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer()
        if self._balancer is None or trainer.state.fn != TrainerFn.FITTING or not host.train_stage(trainer):
            return dataloader
        return self._balancer.share_out(dataloader)

    # ------------------------------------------------------------ adaptive global batch

    def begin_epoch(self) -> None:
        """Called by AdaptiveBatch on all ranks before the first batch of an epoch is drawn."""
        if self._balancer is not None:
            self._balancer.begin_epoch()

    @property
    def base_batches(self) -> int | None:
        """Batches in an epoch at the global batch of the start; None where it never changes."""
        return self._balancer.base_batches if self._balancer is not None else None

    # ------------------------------------------------------------ one batch

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._balancer is not None:
            timer = self._balancer.timer
            host.watch_fetches(self._trainer(), timer.fetch_started, timer.batch_fetched)
        host.load_late_loader_state(self._trainer())
        path = str(self._trainer().ckpt_path or "")
        resume.restore_streams(self._trainer(), self._agreed.get(path, path))

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._balancer is not None:
            self._balancer.timer.batch_moved()
        return batch

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        share = self._balancer.begin_batch() if self._balancer is not None else None
        if share is not None:
            self._parts.begin(self._trainer(), share, batch)
            if self._statistics:
                self._statistics.begin()
            if self.adaptive_batch is not None:
                # What the loss is multiplied by in all; Lightning divides it by the batches of an optimizer step.
                weight = (
                    self.world_size * share.samples / share.whole / self._trainer().accumulate_grad_batches
                )
                self.adaptive_batch.batch_begins(share.samples, share.whole, weight)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explaining_memory():
            return self._parts.first(*args, **kwargs)

    def _new_parts(self) -> MicroBatches:
        return MicroBatches(self, self._weighing, self._forward, self._forward_alone)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `training_step` through DDP."""
        self._in_training_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False

    def _forward_alone(self, *args: Any, **kwargs: Any) -> None:
        """Run the user's `training_step` only for what it exchanges with other ranks."""
        assert self.lightning_module is not None
        self._in_training_step = True
        try:
            # Not through DDP, which would wait for a backward pass.
            with torch.no_grad(), self.precision_plugin.train_step_context():
                self.lightning_module.training_step(*args, **kwargs)
        finally:
            self._in_training_step = False

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        usual = super().backward

        def reduced_backward(loss: Tensor) -> Tensor:
            if self._balancer is None:
                return usual(loss, optimizer, *args, **kwargs)
            self._balancer.timer.backward_started()
            try:
                return usual(loss, optimizer, *args, **kwargs)
            finally:
                self._balancer.timer.backward_ended()

        self._in_backward = True
        try:
            with self._explaining_memory():
                loss = self._parts.backward(closure_loss, optimizer, reduced_backward)
        finally:
            self._in_backward = False
        if self._statistics:
            self._statistics.merge(self._parts.share.samples > 0)
        if self.adaptive_batch is not None:
            self.adaptive_batch.backward_ended(self.world_size, self._loss_scale())
        return loss

    def _loss_scale(self) -> Tensor | float:
        """What mixed precision multiplies the loss by, without waiting for the device."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the ranks; a mean inside `training_step` is a mean over samples, not over ranks.

        Integer means are taken in float64: Lightning floors them (Lightning issue 21859).
        """
        if self._in_training_step:
            self._parts.exchanged = True
        if not isinstance(tensor, Tensor) or reduce_op not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        if not tensor.is_floating_point() and not tensor.is_complex():
            tensor = tensor.double()
        if self._in_training_step and group is None:
            tensor, reduce_op = tensor.mul_(self._parts.weight.logged), "sum"
        with self.waiting():
            return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather tensors of one shape, as torch does; other shapes are an error on every rank, where torch would hang.

        Raises:
            HetckptError: inside `training_step` the ranks pass tensors of different shapes.
        """
        with self.waiting():
            if self._in_training_step and group in (None, dist.group.WORLD):
                self._parts.exchanged = True
                self._check_gather(tensor, sync_grads)
            return super().all_gather(tensor, group, sync_grads)

    def _check_gather(self, tensor: Tensor, sync_grads: bool) -> None:
        if sync_grads and self._parts.any_rank_cuts:
            raise HetckptError(
                "found `self.all_gather(sync_grads=True)` in a `training_step` whose batch runs in micro-batches: a loss "
                "over all samples cannot be computed in parts. Set max_samples so that no share exceeds memory."
            )
        if self._parts.share.is_even:
            return
        shapes = self._channel.all_gather(tuple(tensor.shape))
        if len(set(shapes)) > 1:
            lines = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise HetckptError(
                f"`self.all_gather` in `training_step` found tensors of different shapes ({lines}), since the ranks have "
                'unequal shares. Gather a sum or a mean instead, pad to one length, or use HeteroDDP(policy="even").'
            )

    @contextlib.contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            device = self.root_device
            raise self._parts.out_of_memory(device_name(device), held_by_others(device)) from error

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no work of this rank, in the middle of a step.

        In an exchange the fast ranks wait for the slow ones, and would look just as slow.
        """
        return self._balancer.timer.waiting() if self._balancer is not None else contextlib.nullcontext()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def fenced() -> Any:
            # Forward and backward run inside this closure and the weights move right behind it, so this
            # is the last moment at which a pending save may still read them.
            self._weights_move_next = False
            result = closure()
            self._fence()
            if self._balancer is not None:
                self._balancer.timer.optimizer_started()
            if self.adaptive_batch is not None:
                self.adaptive_batch.scale_lr(optimizer)
            self._weights_move_next = True  # a save in `on_before_optimizer_step` comes too late to overlap
            return result

        try:
            return super().optimizer_step(optimizer, fenced, model, **kwargs)
        finally:
            self._weights_move_next = False
            if self._balancer is not None:
                self._balancer.timer.optimizer_ended()
            if self.adaptive_batch is not None:
                self.adaptive_batch.restore_lr(optimizer)

    # ------------------------------------------------------------ checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        plugin, trainer = self.checkpoint_io, self._trainer()
        self._interrupted()
        if (
            not isinstance(plugin, StripedAsyncCheckpointIO)
            or trainer.state.status == TrainerStatus.INTERRUPTED
        ):
            # After an exception other ranks may never come: rank 0 alone writes all of a replicated model.
            if isinstance(plugin, StripedAsyncCheckpointIO):
                plugin.run_failed()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        module = self.lightning_module
        assert module is not None
        resume.note_names(checkpoint, module, self.optimizers)
        frozen, sparse = (
            resume.tensors_of_note(module, self.optimizers) if plugin.save != "full" else ([], [])
        )
        snapshot = plugin.begin(
            checkpoint,
            self.broadcast(filepath),
            stable=resume.stable_tensors(module, self.optimizers),
            rank_state=rng_state.capture(),
            frozen=frozen,
            sparse=sparse,
        )
        # Overlap only where the next thing to move the weights is an optimizer step that passes through here.
        if (
            host.train_stage(trainer)
            and trainer.state.status == TrainerStatus.RUNNING
            and not trainer.is_last_batch
            and not self._weights_move_next
        ):
            self._unfenced.append(snapshot)
        else:
            snapshot.fence()
        if (
            plugin.must_be_durable(filepath)
            or trainer.state.status != TrainerStatus.RUNNING
            or _is_uploaded(trainer)
        ):
            snapshot.wait()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if isinstance(self.checkpoint_io, StripedAsyncCheckpointIO):
            if self.is_global_zero:
                self.checkpoint_io.remove_checkpoint(filepath)
        else:
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(
            self._agreed.get(str(checkpoint_path), checkpoint_path), weights_only
        )
        saved = loaders.saved_state(checkpoint)
        if self._balancer is not None:
            self._balancer.resume(saved)
        if saved is not None:
            host.reopen_cut_epoch(checkpoint)
        resume.prepare(self._trainer(), checkpoint)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        super().load_optimizer_state_dict(
            resume.fit_optimizers(checkpoint, self.lightning_module, self.optimizers)
        )

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if args == ("Trainer.save_checkpoint",) and self._trainer().state.status == TrainerStatus.INTERRUPTED:
            return  # the ranks that did not fail are elsewhere and would never arrive
        super().barrier(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(self.checkpoint_io, StripedAsyncCheckpointIO):
            self.checkpoint_io.run_failed()

    @override
    def on_validation_start(self) -> None:
        self._interrupted()
        self._fence()
        super().on_validation_start()

    @override
    def teardown(self) -> None:
        with contextlib.suppress(CheckpointError):
            self._fence()
        while self._hooks:
            self._hooks.pop().remove()
        super().teardown()

    def _interrupted(self) -> None:
        if self._balancer is not None:
            self._balancer.timer.interrupted()

    def _fence(self) -> None:
        while self._unfenced:
            self._unfenced.pop().fence()

    # ------------------------------------------------------------ small things

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _is_uploaded(trainer: Trainer) -> bool:
    """Whether a logger reads a checkpoint as soon as `save_checkpoint` returns."""
    return any(type(one).after_save_checkpoint is not Logger.after_save_checkpoint for one in trainer.loggers)


def _check_adaptive(policy: str, loss_reduction: str, weight_by: WeightBy | None) -> None:
    if policy != "live" or loss_reduction != "mean" or weight_by is not None:
        raise ConfigurationError(
            f"HeteroDDP(adaptive_batch=..., policy={policy!r}, loss_reduction={loss_reduction!r}, weight_by={weight_by!r}"
            "): the choice of a batch needs learnt speeds and gradients of a mean over samples, so expected "
            'policy="live", loss_reduction="mean" and weight_by=None'
        )


def _check_ddp_options(given: dict[str, Any]) -> None:
    known = {*signature(DDPStrategy).parameters, *signature(DistributedDataParallel).parameters}
    ours = list(signature(HeteroDDP).parameters)
    for name in sorted(given.keys() - known):
        near = get_close_matches(name, [*ours, *known], cutoff=0.5)
        raise ConfigurationError(
            f"HeteroDDP has no option {name!r}, and neither has DDP"
            + (f"; did you mean {near[0]!r}?" if near else f". Its own are: {', '.join(ours[:-1])}.")
        )
