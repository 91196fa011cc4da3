"""HeteroDDP: DDP in which every device gets the micro-batch that lets all finish together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
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
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_hetckpt import host, loaders, resume
from lightning_hetckpt.balance.controller import Controller
from lightning_hetckpt.balance.plan import BatchPlan, PlanBook, StepKey
from lightning_hetckpt.balance.sampler import PlannedBatchSampler
from lightning_hetckpt.balance.solver import share_by_speed
from lightning_hetckpt.balance.step_timer import StepTimer
from lightning_hetckpt.callbacks import ensure_snapshots
from lightning_hetckpt.channel import Channel, GroupChannel, SoloChannel
from lightning_hetckpt.checkpoint import rng_state
from lightning_hetckpt.checkpoint.snapshotter import Snapshot
from lightning_hetckpt.checkpoint_io import StripedAsyncCheckpointIO
from lightning_hetckpt.errors import CheckpointError, ConfigurationError, HetckptError, LoaderError, PlanError

log = logging.getLogger("lightning_hetckpt")
Limit = int | Sequence[int]


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
        replan_every: int = 20,
        loss_reduction: Literal["mean", "sum"] = "mean",
        **ddp_kwargs: Any,
    ) -> None:
        _check_ddp_options(ddp_kwargs)
        super().__init__(**ddp_kwargs)
        _check_options(global_batch_size, policy, shares, multiple_of, replan_every, loss_reduction)
        self.global_batch_size = global_batch_size
        self.policy = policy
        self.shares = shares
        self.min_samples = min_samples
        self.max_samples = max_samples
        self.multiple_of = multiple_of
        self.replan_every = replan_every
        self.loss_reduction = loss_reduction
        self._book: PlanBook | None = None
        self._controller: Controller | None = None
        self._timer: StepTimer | None = None
        self._channel: Channel = SoloChannel()
        self._samplers: list[PlannedBatchSampler] = []
        self._saved_loader: dict[str, Any] | None = None
        self._agreed: dict[str, str] = {}  # this rank's path of the last snapshot -> rank 0's
        self._unfenced: list[Snapshot] = []
        self._hooks: list[RemovableHandle] = []
        self._batches_seen = 0
        self._in_backward = False
        self._in_training_step = False
        self._weights_move_next = False  # forward and backward are over, and the optimizer comes
        self._fraction = 1.0  # of the present batch's samples, those of this rank
        self._weight = 1.0  # of this rank's loss
        host.find_last_snapshot_too()
        host.refuse_other_lightning()

    # ------------------------------------------------------------ plans

    @property
    def plan(self) -> BatchPlan | None:
        """The plan in force at the batch that is being trained; None before the loaders are set up."""
        return self._book.at(self._step_key()) if self._book is not None else None

    @property
    def plan_history(self) -> list[BatchPlan]:
        """Every plan of this fit, oldest first; the last may still lie ahead."""
        return self._book.history if self._book is not None else []

    def _first_plan(self, global_batch_size: int) -> BatchPlan:
        world = self.world_size
        if global_batch_size < world:
            raise PlanError(
                f"the global batch of {global_batch_size} samples is smaller than the {world} ranks, and every rank "
                f"needs one sample. Set HeteroDDP(global_batch_size={world}) or more, or use fewer devices."
            )
        bounds = self._bounds()
        if self.shares is not None and len(self.shares) != world:
            raise ConfigurationError(
                f"HeteroDDP(shares={list(self.shares)}) names {len(self.shares)} ranks, but the job has {world}. "
                "Give one share per rank, in the order of the global ranks."
            )
        if self.shares is not None and self.policy != "even":
            exact = [int(share) for share in self.shares]
            if sum(self.shares) != global_batch_size or exact != list(self.shares):
                exact = list(share_by_speed(global_batch_size, self.shares, *bounds, self.multiple_of))
            return BatchPlan(tuple(exact), reason="shares")
        saved = (self._saved_loader or {}).get("shares", [])
        if self.policy == "live" and len(saved) == world and sum(saved) == global_batch_size:
            return BatchPlan(tuple(saved), reason="as saved")  # most likely the same devices go on
        even = share_by_speed(global_batch_size, [1.0] * world, *bounds, self.multiple_of)
        return BatchPlan(even, reason="even")

    def _bounds(self) -> tuple[list[Any], list[Any]]:
        """Fewest and most samples of each rank."""
        return (
            _per_rank(self.min_samples, self.world_size, "min_samples"),
            _per_rank(self.max_samples, self.world_size, "max_samples"),
        )

    def _replan(self) -> None:
        """Exchange timings; rank 0 decides, every rank notes the same plan from the same batch on."""
        assert self._book is not None and self._controller is not None and self._timer is not None
        issued = max((sampler.issued for sampler in self._samplers), default=self._step_key())
        gathered = self._channel.all_gather((self._timer.window(), issued))
        furthest = max(key for _, key in gathered)
        start = StepKey(furthest.epoch, furthest.batch + 1)
        plan: BatchPlan | None = None
        if self.global_rank == 0:
            self._controller.observe([stats for stats, _ in gathered])
            plan = self._controller.decide(self._book.latest, start)
        plan = self._channel.broadcast(plan)
        if plan is not None:
            self._book.add(plan)
            rank_zero_info(
                f"hetckpt: {'/'.join(map(str, plan.shares))} samples from epoch {start.epoch}, batch {start.batch} "
                f"({plan.reason})"
            )

    # ------------------------------------------------------------ set-up

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        trainer = self._trainer()
        ensure_snapshots(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._book = self._controller = None
            self._samplers, self._saved_loader, self._unfenced = [], None, []
            self._batches_seen = 0
            host.watch_train_loaders(trainer, self._expect_train_loaders)

    def _expect_train_loaders(self, given: list[Any]) -> None:
        """Lightning has asked the user for train loaders: at the start of a fit, or to replace those it had."""
        loaders.check_train_loaders(given)
        self._samplers = []

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size > 1 and isinstance(self._channel, SoloChannel):
            # Objects travel over gloo: NCCL would need the device for a few bytes.
            gloo = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None
            self._channel = GroupChannel(gloo)
        self._agreed = resume.agree_on_last(self._trainer())

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        # DDP synchronises buffers before it calls the module, so a mark at the module's own entry excludes
        # that wait; the module may be called again inside `training_step`, hence only the first counts.
        self._timer = StepTimer(self.root_device)
        self._hooks.append(model.register_forward_pre_hook(self._mark_forward))
        return super()._setup_model(model)

    def _mark_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._in_training_step and self._timer is not None:
            self._timer.forward_started()

    @override
    def _register_ddp_hooks(self) -> None:
        if self.policy != "live" or self.world_size == 1:
            super()._register_ddp_hooks()
            return
        # DDP takes one hook only, so the user's runs inside ours; stock Lightning would ignore it on CPU.
        user_hook: Any = self._ddp_comm_hook or allreduce_hook
        if self._ddp_comm_hook is not None and self._ddp_comm_wrapper is not None:
            user_hook = self._ddp_comm_wrapper(self._ddp_comm_hook)
        timer = self._timer
        assert timer is not None and isinstance(self.model, DistributedDataParallel)

        def reduce_bucket(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
            if bucket.is_last():
                timer.last_gradient()
            future: torch.futures.Future[Tensor] = user_hook(state, bucket)
            return future

        # torch compares annotations with its own classes, and ours are strings (PEP 563).
        reduce_bucket.__annotations__.clear()
        self.model.register_comm_hook(self._ddp_comm_state, reduce_bucket)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING and module is not None and not module.automatic_optimization:
            self._watch_bare_backward()

    def _watch_bare_backward(self) -> None:
        if self.world_size == 1 or self.policy == "even":
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
        if trainer.state.fn != TrainerFn.FITTING or not host.train_stage(trainer):
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise loaders.not_a_dataloader(dataloader)
        order = loaders.global_order(dataloader)
        wanted = self._wanted_batch(dataloader)
        self._agree_on_loader(len(order), wanted)
        if self._book is None:
            least, most = self._bounds()
            self._book = PlanBook(self._first_plan(wanted), least)
            self._controller = Controller(self.world_size, wanted, least, most, self.multiple_of)
        elif wanted != self._book.latest.global_batch_size:
            raise LoaderError(
                f"found train loaders with global batches of {self._book.latest.global_batch_size} and {wanted} samples; "
                "HeteroDDP weighs both by one plan, so give all train loaders the same batch_size."
            )
        timer = self._timer
        sampler = PlannedBatchSampler(
            order,
            self._book,
            self.global_rank,
            drop_last=bool(dataloader.drop_last),
            trained_batches=lambda: host.trained_batches(trainer),
            on_draw=timer.batch_drawn if timer is not None and dataloader.num_workers == 0 else None,
        )
        self._samplers.append(sampler)
        return loaders.with_batch_sampler(dataloader, sampler)

    def _wanted_batch(self, dataloader: DataLoader[Any]) -> int:
        saved = self._saved_loader["global_batch_size"] if self._saved_loader is not None else None
        if self.global_batch_size is not None:
            return self.global_batch_size
        own = int(dataloader.batch_size or 0) * self.world_size
        if saved is not None and saved != own:
            rank_zero_info(
                f"hetckpt: the checkpoint's global batch of {saved} samples stays; the loaders here would give {own}"
            )
        return own if saved is None else int(saved)

    def _agree_on_loader(self, length: int, global_batch_size: int) -> None:
        found = self._channel.all_gather((length, global_batch_size))
        if len(set(found)) > 1:
            lines = ", ".join(
                f"rank {rank}: {n} samples, global batch {b}" for rank, (n, b) in enumerate(found)
            )
            raise LoaderError(
                f"the ranks hold different train loaders ({lines}). HeteroDDP cuts one global order, so every rank needs "
                "the same dataset and batch_size; shard nothing by rank yourself."
            )

    # ------------------------------------------------------------ one batch

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        host.load_late_loader_state(self._trainer())
        path = str(self._trainer().ckpt_path or "")
        resume.restore_streams(self._trainer(), self._agreed.get(path, path))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._book is None:
            return
        if self._timer is not None:
            self._timer.batch_loaded()  # before the exchange below, which waits for the other ranks
        self._batches_seen += 1
        if self.policy == "live" and self.world_size > 1 and self._batches_seen % self.replan_every == 0:
            self._replan()
        key = self._step_key()
        # Of several loaders the shorter ones may have come to their end, or begun again.
        whole = max(sampler.batch_samples(key.batch) for sampler in self._samplers)
        samples = self._book.split(key, whole)[self.global_rank]
        self._fraction = samples / whole
        # DDP divides by the number of ranks; a rank that only repeats a sample counts for nothing.
        scale = float(samples > 0) if self.loss_reduction == "sum" else self._fraction
        self._weight = self.world_size * scale
        host.count_logged_samples(self._trainer(), samples)
        if self._timer is not None:
            self._timer.batch_started(samples, whole == self._book.latest.global_batch_size)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_training_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # W·b_i/B on the loss, not on the reduced gradient: only so are collectives inside the backward pass
        # (SyncBatchNorm) right, too. DDP then divides by W. A rank without samples has weight 0.
        if self._weight != 1.0:
            closure_loss = closure_loss * self._weight
        self._in_backward = True
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        finally:
            self._in_backward = False
            if self._timer is not None:
                self._timer.backward_ended()

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the ranks; a mean inside `training_step` is a mean over samples, not over ranks.

        Integer means are taken in float64: Lightning floors them (Lightning issue 21859).
        """
        if not isinstance(tensor, Tensor) or reduce_op not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        if not tensor.is_floating_point() and not tensor.is_complex():
            tensor = tensor.double()
        if self._in_training_step and self._book is not None and group is None:
            tensor, reduce_op = tensor.mul_(self._fraction), "sum"
        with self._waiting():
            return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with self._waiting():
            return super().all_gather(tensor, group, sync_grads)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around an exchange: the fast ranks wait in it for the slow ones, and would look just as slow."""
        if self._in_training_step and self._timer is not None:
            return self._timer.waiting()
        return contextlib.nullcontext()

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
            self._weights_move_next = True  # a save in `on_before_optimizer_step` comes too late to overlap
            return result

        try:
            return super().optimizer_step(optimizer, fenced, model, **kwargs)
        finally:
            self._weights_move_next = False

    # ------------------------------------------------------------ checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        plugin, trainer = self.checkpoint_io, self._trainer()
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
        self._saved_loader = loaders.saved_state(checkpoint)
        if self._saved_loader is not None:
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
        self._fence()
        super().on_validation_start()

    @override
    def teardown(self) -> None:
        with contextlib.suppress(CheckpointError):
            self._fence()
        while self._hooks:
            self._hooks.pop().remove()
        super().teardown()

    def _fence(self) -> None:
        while self._unfenced:
            self._unfenced.pop().fence()

    # ------------------------------------------------------------ small things

    def _step_key(self) -> StepKey:
        return StepKey(*host.epoch_and_batch(self._trainer()))

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _is_uploaded(trainer: Trainer) -> bool:
    """Whether a logger reads a checkpoint as soon as `save_checkpoint` returns."""
    return any(type(one).after_save_checkpoint is not Logger.after_save_checkpoint for one in trainer.loggers)


def _per_rank(limit: Any, world: int, name: str) -> list[Any]:
    if limit is None or isinstance(limit, int):
        return [limit] * world
    if len(limit) != world:
        raise ConfigurationError(
            f"HeteroDDP({name}={list(limit)}) names {len(limit)} ranks, but the job has {world}; "
            "give one number for all ranks or one per rank."
        )
    return list(limit)


def _check_ddp_options(given: dict[str, Any]) -> None:
    known = {*signature(DDPStrategy).parameters, *signature(DistributedDataParallel).parameters}
    ours = list(signature(HeteroDDP).parameters)
    for name in sorted(given.keys() - known):
        near = get_close_matches(name, [*ours, *known], cutoff=0.5)
        raise ConfigurationError(
            f"HeteroDDP has no option {name!r}, and neither has DDP"
            + (f"; did you mean {near[0]!r}?" if near else f". Its own are: {', '.join(ours[:-1])}.")
        )


def _check_options(
    global_batch_size: int | None,
    policy: str,
    shares: Sequence[float] | None,
    multiple_of: int,
    replan_every: int,
    loss_reduction: str,
) -> None:
    if policy not in ("live", "static", "even"):
        raise ConfigurationError(f'HeteroDDP(policy={policy!r}): expected "live", "static" or "even"')
    if loss_reduction not in ("mean", "sum"):
        raise ConfigurationError(f'HeteroDDP(loss_reduction={loss_reduction!r}): expected "mean" or "sum"')
    if policy == "static" and shares is None:
        raise ConfigurationError(
            'HeteroDDP(policy="static") needs shares, for example shares=[6, 2] for two ranks'
        )
    if shares is not None and (not len(shares) or min(shares) <= 0):
        raise ConfigurationError(f"HeteroDDP(shares={list(shares)}): every share must be above zero")
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("multiple_of", multiple_of),
        ("replan_every", replan_every),
    ):
        if value is not None and value < 1:
            raise ConfigurationError(f"HeteroDDP({name}={value}): expected at least 1")
