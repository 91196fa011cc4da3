"""One global order of samples per epoch, of which every rank cuts its own part of each batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_hetckpt.balance.plan import PlanBook, StepKey
from lightning_hetckpt.errors import LoaderError

_STATE_VERSION = 1


class GlobalOrder:
    """The order in which an epoch deals out its samples: the same on every rank, the same after a restart.

    Args:
        length: samples in an epoch.
        shuffle: permute anew in every epoch, exactly as torch's `DistributedSampler` does for one process.
        seed: of all permutations together.
        base: a sampler of the user's own that gives the order instead.
    """

    def __init__(self, length: int, shuffle: bool, seed: int, base: Sampler[Any] | None = None) -> None:
        self._length = length
        self._shuffle = shuffle
        self._base = base
        self.seed = seed

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    @property
    def is_random(self) -> bool:
        """Whether the order may depend on the seed."""
        return self._shuffle or self._base is not None

    def indices(self, epoch: int) -> Sequence[Any]:
        """What the sampler of one process would yield in `epoch`.

        Raises:
            LoaderError: the user's sampler yields another number of indices than it promised.
        """
        if self._base is not None:
            return _drawn(self._base, self._length, self.seed, epoch)
        if not self._shuffle:
            return range(self._length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        # The view spares a list of Python numbers, which would be several times as large.
        return torch.randperm(self._length, generator=generator).numpy().data


def _drawn(base: Sampler[Any], length: int, seed: int, epoch: int) -> list[Any]:
    """What the user's own sampler yields in `epoch`, the same whenever and wherever it is asked."""
    if callable(set_epoch := getattr(base, "set_epoch", None)):
        set_epoch(epoch)
    with _seeded(seed + epoch, getattr(base, "generator", None)):
        indices = list(islice(base, length + 1))  # one more tells, and an endless one ends
    if len(indices) != length:
        found = "more" if len(indices) > length else f"only {len(indices)}"
        raise LoaderError(
            f"{type(base).__name__} yielded {found} indices in epoch {epoch}, expected {length}, its length. "
            "HeteroDDP deals out one global order, so the sampler must keep its length in every epoch."
        )
    return indices


@contextmanager
def _seeded(seed: int, generator: object) -> Iterator[None]:
    """Let every random source that a sampler may draw from start at `seed`, and put it back afterwards.

    Ranks must not draw differently, and what they draw must not depend on what was drawn before: else a
    resumed run would go on in another order.
    """
    generators = [torch.default_generator]
    if isinstance(generator, torch.Generator):
        generators.append(generator)
    kept = [(each, each.get_state()) for each in generators]
    kept_python, kept_numpy = random.getstate(), np.random.get_state()
    try:
        for each in generators:
            each.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        for each, state in kept:
            each.set_state(state)
        random.setstate(kept_python)
        np.random.set_state(kept_numpy)


class PlannedBatchSampler(Sampler[list[Any]]):
    """Yields this rank's part of each global batch, by the plan in force at that batch.

    Batch k of an epoch is `order[k*B : (k+1)*B]` on every rank, whatever the plans of that epoch say; they only
    move the borders between the ranks inside it. So every sample comes exactly once per epoch, and the
    place in the order is one number that holds for any number of ranks.

    Loaders with workers draw far ahead of training, and each rank differently. Hence a plan holds from a
    batch on that none has drawn (`issued`), and what counts as done is told by `trained_batches`.

    Args:
        order: of all samples in an epoch.
        book: the plans, shared with whoever adds new ones.
        rank: whose part this is.
        drop_last: leave out the remainder of an epoch.
        trained_batches: batches of the present epoch that training is done with.
    """

    def __init__(
        self,
        order: GlobalOrder,
        book: PlanBook,
        rank: int,
        drop_last: bool,
        trained_batches: Callable[[], int],
    ) -> None:
        super().__init__()
        self._order = order
        self._book = book
        self._rank = rank
        self.drop_last = drop_last
        self._trained_batches = trained_batches
        self._epoch = 0
        self._resume: StepKey | None = None  # where the next pass begins, if it is not a fresh one
        self._passed = 0  # batches of the epoch that lie in passes behind us: a cycled loader makes several
        self._issued = StepKey(0, -1)

    @property
    def sampler(self) -> PlannedBatchSampler:
        """Itself: Lightning looks for `set_epoch` on the sampler of a batch sampler only."""
        return self

    @property
    def batch_size(self) -> int:
        """This rank's share by the plan of the batch that was handed out last."""
        return self._book.at(self._issued).shares[self._rank]

    @property
    def samples(self) -> int:
        """Samples of all ranks together in an epoch."""
        return len(self._order)

    @property
    def issued(self) -> StepKey:
        """The furthest batch that was ever handed out; batch -1 before the first."""
        return self._issued

    def batch_samples(self, batch: int) -> int:
        """Samples of all ranks together in a batch of the epoch."""
        return self._samples_of(self._epoch, batch)

    def __len__(self) -> int:
        """Batches in the epoch that was announced last, the same on every rank."""
        return self.batches_of(self._book.global_batch_size(self._epoch))

    def batches_of(self, whole: int) -> int:
        """Batches in an epoch with a global batch of `whole` samples."""
        samples = len(self._order)
        return samples // whole if self.drop_last else -(-samples // whole)

    def __iter__(self) -> Iterator[list[Any]]:
        """One pass: the rest of the saved one if one was loaded and not begun, else a whole one.

        Beside a longer loader there may be several in an epoch, or none any more; which, Lightning decides. After
        a resume behind the first pass, this one is empty, and the one that Lightning may then ask for goes on.
        """
        # All this runs at the first draw. Lightning makes the iterator of a fresh run before it sets the epoch,
        # and a DataLoader with workers makes two and throws the first away.
        epoch, done = self._resume or StepKey(self._epoch, self._passed)
        batches = self.batches_of(self._book.global_batch_size(epoch))
        if not batches:
            return
        if self._resume is not None and done >= batches:
            self._resume, self._passed = None, done
            return
        self._resume = None
        first = done % batches
        order = self._order.indices(epoch)
        for batch in range(first, batches):
            step = StepKey(epoch, done - first + batch)  # as Lightning counts, over all passes
            self._issued = max(self._issued, step)
            yield self._part(order, batch, step)
        self._passed = done - first + batches

    def set_epoch(self, epoch: int) -> None:
        """Let the passes that begin from now on belong to `epoch`."""
        if epoch != self._epoch:
            # The saved epoch is over, without a single draw where nothing of it was left.
            self._resume, self._passed = None, 0
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place in the global order, the same on every rank and good for any number of them."""
        # A new epoch is announced before the count of trained batches goes back to zero.
        batches = self._trained_batches() if self._issued.epoch >= self._epoch else 0
        whole = self._book.global_batch_size(self._epoch)
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "batches": batches,
            "samples": min(batches * whole, len(self._order)),
            "seed": self._order.seed,
            "global_batch_size": whole,
            "length": len(self._order),
            "shares": list(self._book.latest.shares),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on at the saved place; the pass after it is a fresh one.

        Raises:
            LoaderError: the saved place does not exist in the order of this loader.
        """
        if state.get("version") != _STATE_VERSION:
            raise LoaderError(
                f"found a loader state of version {state.get('version')}, expected {_STATE_VERSION}; "
                "resume with the lightning_hetckpt that saved it."
            )
        if self._order.is_random and state["seed"] != self._order.seed:
            raise LoaderError(
                f"the checkpoint was shuffled with seed {state['seed']}, this run has seed {self._order.seed}: it would "
                f"repeat some samples and miss others. Call seed_everything({state['seed']}) before the Trainer."
            )
        self._epoch, batches = state["epoch"], state["batches"]
        whole, rest = divmod(state["length"], state["global_batch_size"])
        in_pass = whole if self.drop_last else whole + (rest > 0)
        if in_pass and batches % in_pass:
            self._check_place(state)
        over = batches >= in_pass  # also where this loader has another length by now
        self._resume = StepKey(self._epoch, max(batches, len(self)) if over else batches)
        self._issued = max(self._issued, StepKey(self._epoch, self._resume.batch - 1))

    def _samples_of(self, epoch: int, batch: int) -> int:
        whole = self._book.global_batch_size(epoch)
        return max(0, min(whole, len(self._order) - batch * whole))

    def _check_place(self, state: dict[str, Any]) -> None:
        """Refuse to go on in the middle of an epoch of other samples or other batches."""
        place = f"the checkpoint lies behind batch {state['batches']} of epoch {state['epoch']}"
        if state["length"] != len(self._order):
            raise LoaderError(
                f"{place} of {state['length']} samples, but this loader has {len(self._order)}. Give it the same "
                "dataset, or resume from a checkpoint of an epoch's end."
            )
        whole = self._book.global_batch_size(self._epoch)
        if state["global_batch_size"] != whole:
            raise LoaderError(
                f"{place} with {state['global_batch_size']} samples in a global batch, but this run has "
                f"{whole}. Set global_batch_size={state['global_batch_size']} or None, and change "
                "it at an epoch's end."
            )

    def _part(self, order: Sequence[Any], batch: int, step: StepKey) -> list[Any]:
        begin = batch * self._book.global_batch_size(step.epoch)
        shares = self._book.split(step, self._samples_of(step.epoch, batch))
        mine = shares[self._rank]
        if mine == 0:
            # Every rank must run its backward pass; the caller gives this sample weight zero.
            return [order[begin]]
        begin += sum(shares[: self._rank])
        return list(order[begin : begin + mine])
