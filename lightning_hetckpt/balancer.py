"""Live planning: times this rank, agrees with the others on plans, and says who takes what in a batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_hetckpt import host, loaders
from lightning_hetckpt.adaptive_batch import AdaptiveBatch
from lightning_hetckpt.balance.controller import Controller
from lightning_hetckpt.balance.memory import MemoryLines
from lightning_hetckpt.balance.memory_meter import MemoryMeter, device_name
from lightning_hetckpt.balance.options import BalanceOptions
from lightning_hetckpt.balance.parts import part_sizes
from lightning_hetckpt.balance.plan import BatchPlan, PlanBook, StepKey
from lightning_hetckpt.balance.sampler import PlannedBatchSampler
from lightning_hetckpt.balance.step_timer import StepTimer
from lightning_hetckpt.channel import Channel
from lightning_hetckpt.errors import LoaderError
from lightning_hetckpt.micro_batches import why_in_one_piece
from lightning_hetckpt.weighing import Share


class Balancer:
    """The plans of one fit, the same on every rank.

    All ranks must make the same calls in the same order: some of them exchange small objects.

    Args:
        options: what the user asked for.
        trainer: the fit that is balanced.
        channel: to all ranks of the job.
        device: where this rank computes.
        adaptive: chooses the global batch between epochs; None keeps it.
    """

    def __init__(
        self,
        options: BalanceOptions,
        trainer: Trainer,
        channel: Channel,
        device: torch.device,
        adaptive: AdaptiveBatch | None = None,
    ) -> None:
        self._options = options
        self._adaptive = adaptive
        self._trainer = trainer
        self._channel = channel
        self._saved: dict[str, Any] | None = None
        self._wanted = 0  # the global batch that the train loaders ask for
        self._book: PlanBook | None = None
        self._controller: Controller | None = None
        self._samplers: list[PlannedBatchSampler] = []
        self._batches_seen = 0
        self._caps = options.caps(channel.size)  # of each rank, how many samples it can run at once
        self._bounds = options.bounds(channel.size)
        self._device = device
        self._devices: list[str] = []
        self._memory = MemoryLines(channel.size)
        self._meter = MemoryMeter(device, trainer.num_devices)
        self._learnt: dict[str, Any] = {}  # as it goes into a checkpoint
        self._input_bound: tuple[int, ...] = ()
        self.timer = StepTimer(device)

    # ------------------------------------------------------------ plans

    @property
    def plan(self) -> BatchPlan | None:
        """The plan in force at the batch that is being trained; None before the loaders are set up."""
        return self._book.at(self._step_key()) if self._book is not None else None

    @property
    def plan_history(self) -> list[BatchPlan]:
        """Every plan of this fit, oldest first; the last may still lie ahead."""
        return self._book.history if self._book is not None else []

    @property
    def is_live(self) -> bool:
        """Whether plans follow the timings."""
        return self._options.policy == "live" and self._channel.size > 1

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Go on from the loader state of a checkpoint, once the loaders are set up."""
        self._saved = saved

    def begin_batch(self) -> Share | None:
        """Look at the timings if that is due, and tell this rank's part of the batch that begins.

        None where no train loader passed through `share_out`.
        """
        if self._book is None:
            return None
        self._batches_seen += 1
        if self.is_live and self._batches_seen % self._options.replan_every == 0:
            self._replan(self._book)
        key = self._step_key()
        # Of several loaders the shorter ones may have come to their end, or begun again.
        whole = max(sampler.batch_samples(key.batch) for sampler in self._samplers)
        shares = self._book.split(key, whole)
        samples = shares[self._channel.rank]
        self.timer.batch_started(samples, whole == self._book.global_batch_size(key.epoch))
        share = self._in_parts(shares, whole)
        if self.is_live:
            self._meter.batch_started(max(share.parts))
        return share

    def _in_parts(self, shares: tuple[int, ...], whole: int) -> Share:
        """This rank's share, cut so that no micro-batch of any rank exceeds its memory."""
        own = shares[self._channel.rank]
        if not any(
            most is not None and most < samples for most, samples in zip(self._caps, shares, strict=True)
        ):
            return Share(own, whole, (own,), (whole,), len(set(shares)) == 1)
        parts = [part_sizes(samples, most) for samples, most in zip(shares, self._caps, strict=True)]
        together = tuple(sum(column) for column in zip_longest(*parts, fillvalue=0))
        return Share(own, whole, parts[self._channel.rank], together, len(set(parts)) == 1)

    def _replan(self, book: PlanBook) -> None:
        """Exchange measurements; rank 0 decides, every rank notes the same plan from the same batch on."""
        controller = self._controller
        assert controller is not None
        issued = max((sampler.issued for sampler in self._samplers), default=self._step_key())
        gathered = self._channel.all_gather((self.timer.window(), self._meter.window(), issued))
        furthest = max(key for _, _, key in gathered)
        start = StepKey(furthest.epoch, furthest.batch + 1)
        # All ranks learn the same, for each of them may have to write it down; but one decides.
        controller.observe([stats for stats, _, _ in gathered])
        self._memory.observe([stats for _, stats, _ in gathered])
        plan: BatchPlan | None = None
        caps = self._memory_caps()
        if self._channel.rank == 0:
            total, most = book.latest.global_batch_size, self._bounds[1]
            # Where a batch does not fit in one piece anyway, shares go by speed and run in micro-batches.
            if not controller.limit(total, _smaller(most, caps)):
                controller.limit(total, most)
            plan = controller.decide(book.latest, start)
        plan, caps = self._channel.broadcast((plan, caps))
        self._take_up_caps(caps)
        self._note_learnt(controller)
        if plan is not None:
            self._take_up(book, plan)
        if controller.input_bound() != self._input_bound:
            self._input_bound = controller.input_bound()
            _report_input_bound(self._input_bound, self._devices)

    def _memory_caps(self) -> list[int | None]:
        """The most samples that fit at once, of each rank for which the user says nothing."""
        given = self._options.caps(self._channel.size)
        return [cap if own is None else None for own, cap in zip(given, self._memory.caps(), strict=True)]

    def _take_up_caps(self, caps: list[int | None]) -> None:
        module = self._trainer.lightning_module
        if why_in_one_piece(module) is None:  # else what was learnt here would end a run that may well go on
            self._caps = _smaller(self._options.caps(self._channel.size), caps)

    def _note_learnt(self, controller: Controller) -> None:
        self._learnt = {"controller": controller.state_dict(), "memory": self._memory.state_dict()}

    def _go_on_learning(self, controller: Controller) -> None:
        """Take over what the saved run had learnt, if it ran on these devices."""
        learnt = self._saved.get("learnt") if self._saved is not None else None
        if learnt and self._are_same_devices():
            controller.load_state_dict(learnt["controller"])
            self._memory.load_state_dict(learnt["memory"])
            rank_zero_info("hetckpt: the speeds of the saved run's devices go on, these are the same")
        elif learnt:
            rank_zero_info(
                f"hetckpt: the saved run learnt on {', '.join(learnt['controller']['devices'])}; here are "
                f"{', '.join(self._devices)}, so speeds are learnt anew"
            )
        self._note_learnt(controller)

    def _are_same_devices(self) -> bool:
        """Whether the saved run had these; a checkpoint that does not say so is believed to."""
        learnt = (self._saved or {}).get("learnt")
        return not learnt or learnt["controller"]["devices"] == self._devices

    def _take_up(self, book: PlanBook, plan: BatchPlan) -> None:
        book.add(plan)
        rank_zero_info(
            f"hetckpt: {'/'.join(map(str, plan.shares))} samples from epoch {plan.start.epoch}, batch "
            f"{plan.start.batch} ({plan.reason})"
        )

    def begin_epoch(self) -> None:
        """Let AdaptiveBatch choose the global batch of the epoch that begins, before anything of it is drawn."""
        adaptive, book, controller = self._adaptive, self._book, self._controller
        assert adaptive is not None and book is not None and controller is not None
        epoch, _ = self._step_key()
        plan: BatchPlan | None = None
        if self._channel.rank == 0 and adaptive.is_due(epoch):
            least, most, multiple_of = self._bounds
            samples = min(sampler.samples for sampler in self._samplers)
            most_together = sum(samples if own is None else own for own in most)
            plan = adaptive.choose(
                controller.predict_over,
                epoch,
                sum(least),
                min(samples, most_together),
                multiple_of,
            )
        # The ranks' averages may differ in the last bit, and learning rates must not.
        plan, noise_scale = self._channel.broadcast((plan, adaptive.cautious_noise_scale))
        if plan is not None:
            self._take_up(book, plan)
        host.recount_train_batches(self._trainer)  # also where loaders were replaced before this epoch
        adaptive.begin_epoch(book.global_batch_size(epoch), noise_scale)

    @property
    def base_batches(self) -> int | None:
        """Batches in an epoch at the global batch of the start; None where it never changes."""
        base = self._adaptive.base_global_batch_size if self._adaptive is not None else None
        if base is None or not self._samplers:
            return None
        return host.train_batches(self._trainer, [sampler.batches_of(base) for sampler in self._samplers])

    # ------------------------------------------------------------ loaders

    def expect_loaders(self) -> None:
        """The user's train loaders are about to come, at the start of a fit or to replace those there were."""
        self._samplers = []

    def share_out(self, dataloader: object) -> DataLoader[Any]:
        """A loader that yields this rank's part of each global batch of `dataloader`.

        Raises:
            LoaderError: `dataloader` cannot be shared out, or is not the same on all ranks.
            PlanError: no split keeps to the bounds.
        """
        if not isinstance(dataloader, DataLoader):
            raise loaders.not_a_dataloader(dataloader)
        order = loaders.global_order(dataloader)
        wanted = self._wanted_batch(dataloader)
        self._agree_on_loader(len(order), wanted)
        if self._book is None:
            self._devices = self._channel.all_gather(device_name(self._device))
            self._wanted = wanted
            if self._adaptive is not None:
                is_explicit = self._options.global_batch_size is not None
                wanted = self._adaptive.begin_fit(wanted, self._saved is not None, is_explicit)
            saved = (self._saved or {}).get("shares", []) if self._are_same_devices() else []
            first = self._options.first_plan(self._channel.size, wanted, saved)
            self._book = PlanBook(first, self._bounds[0])
            self._controller = Controller(
                self._channel.size, wanted, *self._bounds, self._devices, explore=self._adaptive is not None
            )
            if self.is_live:
                self._go_on_learning(self._controller)
        elif wanted != self._wanted:
            raise LoaderError(
                f"found train loaders with global batches of {self._wanted} and {wanted} samples; "
                "HeteroDDP weighs both by one plan, so give all train loaders the same batch_size."
            )
        trainer = self._trainer
        sampler = PlannedBatchSampler(
            order,
            self._book,
            self._channel.rank,
            drop_last=bool(dataloader.drop_last),
            trained_batches=lambda: host.trained_batches(trainer),
        )
        self._samplers.append(sampler)
        return loaders.with_batch_sampler(dataloader, sampler, lambda: {"learnt": self._learnt})

    def _wanted_batch(self, dataloader: DataLoader[Any]) -> int:
        saved = self._saved["global_batch_size"] if self._saved is not None else None
        if self._options.global_batch_size is not None:
            return self._options.global_batch_size
        own = int(dataloader.batch_size or 0) * self._channel.size
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

    # ------------------------------------------------------------ measuring

    def timing_hook(self, user_hook: Any) -> Callable[[object, Any], torch.futures.Future[Tensor]]:
        """A DDP communication hook that times the buckets and reduces them by `user_hook` (None: the mean)."""
        timer = self.timer
        reduce: Any = user_hook or allreduce_hook

        def reduce_bucket(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
            reduced = timer.bucket_ready(bucket.is_last())

            def pass_on(done: torch.futures.Future[Tensor]) -> Tensor:
                reduced()
                return done.value()

            future: torch.futures.Future[Tensor] = reduce(state, bucket).then(pass_on)
            return future

        # torch compares annotations with its own classes, and ours are strings (PEP 563).
        reduce_bucket.__annotations__.clear()
        return reduce_bucket

    def _step_key(self) -> StepKey:
        return StepKey(*host.epoch_and_batch(self._trainer))


def _smaller(first: list[int | None], second: list[int | None]) -> list[int | None]:
    """The smaller limit of each rank, where there is one."""
    return [
        min((limit for limit in pair if limit is not None), default=None)
        for pair in zip(first, second, strict=True)
    ]


def _report_input_bound(ranks: tuple[int, ...], devices: list[str]) -> None:
    if ranks:
        named = ", ".join(f"rank {rank} ({devices[rank]})" for rank in ranks)
        rank_zero_warn(
            f"hetckpt: {named} waits for its input in a good part of its steps, so its device is not what holds it up. "
            "Raise num_workers, or move work out of the dataset there; a smaller share is no cure."
        )
    else:
        rank_zero_info("hetckpt: no rank waits for its input any more")
