"""One global order of samples, dealt out by the plan of each step; resumable at any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from lightning_hetckpt.balance.plan import PlanBook, StepKey
from lightning_hetckpt.errors import LoaderError

_VERSION = 1


class GlobalOrder:
    """The order in which one process would see the samples of an epoch; the same on every rank.

    Args:
        length: samples in an epoch.
        shuffle: permute anew in every epoch, as torch's `DistributedSampler(num_replicas=1)` does.
        seed: of the permutations.
        base: a sampler of the user's own, whose order is taken instead. It is drawn from under generators
            seeded with (seed + epoch), so that every rank, and a resumed run, draws the same.
    """

    def __init__(self, length: int, shuffle: bool, seed: int, base: Sampler[int] | None = None) -> None:
        self.length = length
        self.seed = seed
        self._shuffle = shuffle
        self._base = base

    def __len__(self) -> int:
        return self.length

    def indices(self, epoch: int) -> list[int]:
        """The sample indices of `epoch`, in order."""
        if self._base is not None:
            return self._drawn_from_base(epoch)
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def _drawn_from_base(self, epoch: int) -> list[int]:
        base: Any = self._base
        own = getattr(base, "generator", None)
        if hasattr(base, "set_epoch"):
            base.set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + epoch)
            if isinstance(own, torch.Generator):
                own.manual_seed(self.seed + epoch)
            indices = [int(index) for index in base]
        if len(indices) != self.length:
            raise LoaderError(
                f"the sampler {type(base).__name__} gave {len(indices)} samples in epoch {epoch}, but its length "
                f"is {self.length}; HeteroDDP needs a sampler that gives as many as it says."
            )
        return indices


class PlannedBatchSampler(Sampler[list[int]]):
    """This rank's slice of every global batch.

    Batch k of an epoch is `order[kB:(k+1)B]`, whatever the plan, and rank i takes the slice between the sums of
    the shares before it. So the samples of a step do not depend on the split, and a resumed run may split them
    over another number of ranks. A rank without a sample in a short last batch repeats the batch's first one;
    whoever trains on it gives it the weight zero.

    Args:
        order: of all samples.
        book: the plans, the same on every rank.
        rank: whose slices.
        drop_last: leave out the short batch at the end of an epoch.
        trained_batches: how many batches of the present epoch have been trained.
        on_draw: called whenever a batch's indices are drawn.
    """

    def __init__(
        self,
        order: GlobalOrder,
        book: PlanBook,
        rank: int,
        drop_last: bool,
        trained_batches: Callable[[], int],
        on_draw: Callable[[], None] | None = None,
    ) -> None:
        self._order = order
        self._book = book
        self._rank = rank
        self.drop_last = drop_last
        self._trained_batches = trained_batches
        self._on_draw = on_draw
        self._epoch = 0
        self._resume_batch: int | None = None  # where the next pass begins
        self._issued = StepKey(0, -1)

    @property
    def sampler(self) -> PlannedBatchSampler:
        """Itself: Lightning passes `set_epoch` to a batch sampler's `sampler` only."""
        return self

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a whole batch, by the plan in force at the furthest batch handed out."""
        return self._book.at(self._issued).shares[self._rank]

    @property
    def issued(self) -> StepKey:
        """The furthest batch handed out so far; workers draw ahead of the training."""
        return self._issued

    def batch_samples(self, batch: int) -> int:
        """Samples of all ranks together in batch number `batch` of an epoch."""
        whole = self._book.latest.global_batch_size
        return max(0, min(whole, len(self._order) - batch * whole))

    def set_epoch(self, epoch: int) -> None:
        """The passes that begin from now on belong to `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._resume_batch = epoch, None

    def __len__(self) -> int:
        whole = self._book.latest.global_batch_size
        return len(self._order) // whole if self.drop_last else -(-len(self._order) // whole)

    def __iter__(self) -> Iterator[list[int]]:
        # Epoch and first batch are read at the first draw, not when a pass is asked for: Lightning asks before it
        # sets the epoch, and a DataLoader with workers asks twice and draws from the second pass only.
        epoch, first = self._epoch, self._resume_batch or 0
        self._resume_batch = None
        indices = self._order.indices(epoch)
        whole = self._book.latest.global_batch_size
        for batch in range(first, len(self)):
            if self._on_draw is not None:
                self._on_draw()
            key = StepKey(epoch, batch)
            self._issued = max(self._issued, key)
            together = indices[batch * whole : (batch + 1) * whole]
            parts = self._book.at(key).split(len(together))
            start = sum(parts[: self._rank])
            yield together[start : start + parts[self._rank]] or together[:1]

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, the same for every rank and every number of ranks."""
        batches, whole = self._trained_batches(), self._book.latest.global_batch_size
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "batches": batches,
            "samples": min(batches * whole, len(self._order)),
            "seed": self._order.seed,
            "global_batch_size": whole,
            "length": len(self._order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin behind the samples that were trained; the one after it begins at 0.

        Raises:
            LoaderError: the state belongs to another dataset, order or global batch.
        """
        if state.get("version") != _VERSION:
            raise LoaderError(
                f"the loader's saved state has version {state.get('version')}, expected {_VERSION}; "
                "resume with the lightning_hetckpt that wrote it."
            )
        if state["length"] != len(self._order) or state["seed"] != self._order.seed:
            raise LoaderError(
                f"the checkpoint was saved with {state['length']} samples and seed {state['seed']}, but this loader has "
                f"{len(self._order)} and {self._order.seed}; the samples left in the epoch cannot be told. "
                "Use the same dataset and `seed_everything` seed, or resume from the end of an epoch."
            )
        whole = self._book.latest.global_batch_size
        at_end = state["samples"] >= state["length"]
        if state["global_batch_size"] != whole and not at_end and state["samples"]:
            raise LoaderError(
                f"the checkpoint stands in the middle of an epoch cut into global batches of "
                f"{state['global_batch_size']} samples, but the global batch is {whole} now. Use "
                "HeteroDDP(global_batch_size=None), which keeps the saved one, or change it at the end of an epoch."
            )
        self._epoch = int(state["epoch"])
        self._resume_batch = len(self) if at_end else int(state["samples"]) // whole
