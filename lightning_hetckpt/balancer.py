"""Live planning: times this rank, agrees with the others on plans, and says who takes what in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_hetckpt import host, loaders
from lightning_hetckpt.adaptive_batch import AdaptiveBatch
from lightning_hetckpt.balance.controller import Controller
from lightning_hetckpt.balance.parts import part_sizes
from lightning_hetckpt.balance.plan import BatchPlan, PlanBook, StepKey
from lightning_hetckpt.balance.sampler import PlannedBatchSampler
from lightning_hetckpt.balance.solver import share_by_speed
from lightning_hetckpt.balance.step_timer import StepTimer
from lightning_hetckpt.channel import Channel
from lightning_hetckpt.errors import ConfigurationError, LoaderError, PlanError
from lightning_hetckpt.weighing import Share

Limit = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class BalanceOptions:
    """How the user wants the global batch shared out; `HeteroDDP` explains each.

    Raises:
        ConfigurationError: options that contradict each other.
    """

    global_batch_size: int | None
    policy: Literal["live", "static", "even"]
    shares: Sequence[float] | None
    min_samples: Limit
    max_samples: Limit | None
    multiple_of: int
    replan_every: int
    max_micro_batch: Limit | Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("live", "static", "even"):
            raise ConfigurationError(
                f'HeteroDDP(policy={self.policy!r}): expected "live", "static" or "even"'
            )
        if self.policy == "static" and self.shares is None:
            raise ConfigurationError(
                'HeteroDDP(policy="static") needs shares, for example shares=[6, 2] for two ranks'
            )
        if self.shares is not None and (not len(self.shares) or min(self.shares) <= 0):
            raise ConfigurationError(f"HeteroDDP(shares={list(self.shares)}): every share must be above zero")
        for name, value in (
            ("global_batch_size", self.global_batch_size),
            ("multiple_of", self.multiple_of),
            ("replan_every", self.replan_every),
        ):
            if value is not None and value < 1:
                raise ConfigurationError(f"HeteroDDP({name}={value}): expected at least 1")
        caps = self.max_micro_batch
        if any(most is not None and most < 1 for most in (caps if isinstance(caps, Sequence) else [caps])):
            raise ConfigurationError(
                f"HeteroDDP(max_micro_batch={caps}): expected at least 1, or None for no limit"
            )


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
        # Of each rank, how many samples it can run at once.
        self._caps: list[int | None] = per_rank(options.max_micro_batch, channel.size, "max_micro_batch")
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
        return self._in_parts(shares, whole)

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
        """Exchange timings; rank 0 decides, every rank notes the same plan from the same batch on."""
        assert self._controller is not None
        issued = max((sampler.issued for sampler in self._samplers), default=self._step_key())
        gathered = self._channel.all_gather((self.timer.window(), issued))
        furthest = max(key for _, key in gathered)
        start = StepKey(furthest.epoch, furthest.batch + 1)
        plan: BatchPlan | None = None
        if self._channel.rank == 0:
            self._controller.observe([stats for stats, _ in gathered])
            plan = self._controller.decide(book.latest, start)
        plan = self._channel.broadcast(plan)
        if plan is not None:
            self._take_up(book, plan)

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
            least, most = self._bounds()
            samples = min(sampler.samples for sampler in self._samplers)
            most_together = sum(samples if own is None else own for own in most)
            plan = adaptive.choose(
                controller.predict_over,
                epoch,
                sum(least),
                min(samples, most_together),
                self._options.multiple_of,
            )
        # The ranks' averages may differ in the last bit, and learning rates must not.
        plan, noise_scale = self._channel.broadcast((plan, adaptive.cautious_noise_scale))
        if plan is not None:
            self._take_up(book, plan)
            host.recount_train_batches(self._trainer)
        adaptive.begin_epoch(book.global_batch_size(epoch), noise_scale)

    @property
    def base_batches(self) -> int | None:
        """Batches in an epoch at the global batch of the start; None where it never changes."""
        base = self._adaptive.base_global_batch_size if self._adaptive is not None else None
        if base is None or not self._samplers:
            return None
        return host.train_batches(self._trainer, [sampler.batches_of(base) for sampler in self._samplers])

    def _first_plan(self, global_batch_size: int) -> BatchPlan:
        world, options = self._channel.size, self._options
        if global_batch_size < world:
            raise PlanError(
                f"the global batch of {global_batch_size} samples is smaller than the {world} ranks, and every rank "
                f"needs one sample. Set HeteroDDP(global_batch_size={world}) or more, or use fewer devices."
            )
        bounds, shares = self._bounds(), options.shares
        if shares is not None and len(shares) != world:
            raise ConfigurationError(
                f"HeteroDDP(shares={list(shares)}) names {len(shares)} ranks, but the job has {world}. "
                "Give one share per rank, in the order of the global ranks."
            )
        if shares is not None and options.policy != "even":
            exact = [int(share) for share in shares]
            if sum(shares) != global_batch_size or exact != list(shares):
                exact = list(share_by_speed(global_batch_size, shares, *bounds, options.multiple_of))
            return BatchPlan(tuple(exact), reason="shares")
        saved = (self._saved or {}).get("shares", [])
        if options.policy == "live" and len(saved) == world and sum(saved) == global_batch_size:
            return BatchPlan(tuple(saved), reason="as saved")  # most likely the same devices go on
        even = share_by_speed(global_batch_size, [1.0] * world, *bounds, options.multiple_of)
        return BatchPlan(even, reason="even")

    def _bounds(self) -> tuple[list[Any], list[Any]]:
        """Fewest and most samples of each rank."""
        return (
            per_rank(self._options.min_samples, self._channel.size, "min_samples"),
            per_rank(self._options.max_samples, self._channel.size, "max_samples"),
        )

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
            least, most = self._bounds()
            self._wanted = wanted
            if self._adaptive is not None:
                is_explicit = self._options.global_batch_size is not None
                wanted = self._adaptive.begin_fit(wanted, self._saved is not None, is_explicit)
            self._book = PlanBook(self._first_plan(wanted), least)
            self._controller = Controller(
                self._channel.size,
                wanted,
                least,
                most,
                self._options.multiple_of,
                explore=self._adaptive is not None,
            )
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
        return loaders.with_batch_sampler(dataloader, sampler)

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


def per_rank(limit: Any, world: int, name: str) -> list[Any]:
    """One limit for each rank, from one for all or one per rank."""
    if limit is None or isinstance(limit, int):
        return [limit] * world
    if len(limit) != world:
        raise ConfigurationError(
            f"HeteroDDP({name}={list(limit)}) names {len(limit)} ranks, but the job has {world}; "
            "give one number for all ranks or one per rank."
        )
    return list(limit)
