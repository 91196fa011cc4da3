"""Which train loaders can be shared out over unequal ranks, and how their order is taken over."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_hetckpt import host
from lightning_hetckpt.balance.sampler import GlobalOrder, PlannedBatchSampler
from lightning_hetckpt.errors import LoaderError


def check_train_loaders(loaders: list[Any]) -> None:
    """Refuse, with the way out, what cannot be cut into unequal shares.

    Args:
        loaders: the user's train loaders before Lightning rebuilds them.

    Raises:
        LoaderError: an IterableDataset, a custom batch sampler, `batch_size=None`, something that is not a
            torch DataLoader, or several loaders of which one ends in a short batch.
    """
    for loader in loaders:
        if not isinstance(loader, DataLoader):
            raise not_a_dataloader(loader)
        if isinstance(loader.dataset, IterableDataset):
            raise LoaderError(
                f"found the IterableDataset {type(loader.dataset).__name__} in a train loader; HeteroDDP needs a dataset "
                "with a length, since it deals out one global order of samples. Use a map-style dataset, or stock DDP."
            )
        if loader.batch_sampler is None:
            raise LoaderError(
                "found a train loader with batch_size=None; HeteroDDP decides how many samples each rank gets, so it "
                "needs automatic batching. Give the DataLoader a batch_size and let the dataset return single samples."
            )
        if type(loader.batch_sampler) not in (BatchSampler, PlannedBatchSampler) or loader.batch_size is None:
            raise LoaderError(
                f"found the batch sampler {type(loader.batch_sampler).__name__} in a train loader; HeteroDDP must cut "
                "the batches itself. Pass batch_size and, for an order of your own, sampler=...; or use stock DDP."
            )
    if len(loaders) > 1:
        _check_whole_batches(loaders)


def _check_whole_batches(loaders: list[Any]) -> None:
    # One weight W·b_i/B serves all loaders of a step, so all must be cut in the same proportion.
    if any(not loader.drop_last for loader in loaders):
        raise LoaderError(
            f"found {len(loaders)} train loaders; one weight per step serves them all, so none may end in a short batch. "
            "Set drop_last=True on each of them."
        )


def not_a_dataloader(loader: object) -> LoaderError:
    """The error for a train loader of a foreign type."""
    return LoaderError(
        f"found a {type(loader).__name__} as train loader; HeteroDDP needs a torch.utils.data.DataLoader, "
        "since it decides how many samples each rank gets."
    )


def global_order(loader: DataLoader[Any]) -> GlobalOrder:
    """The order of samples that `loader` would give to one process.

    Lightning has put a DistributedSampler in; its shuffle flag and seed are kept. A sampler of the user's own
    keeps its order.
    """
    sampler: Any = loader.sampler
    length = len(loader.dataset)  # type: ignore[arg-type]
    beneath = host.sampler_beneath(sampler)
    if beneath is not None:
        return GlobalOrder(len(beneath), shuffle=False, seed=sampler.seed, base=beneath)
    if isinstance(sampler, DistributedSampler):
        return GlobalOrder(length, shuffle=sampler.shuffle, seed=sampler.seed)
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == length:
        return GlobalOrder(length, shuffle=True, seed=seed)
    if isinstance(sampler, SequentialSampler):
        return GlobalOrder(length, shuffle=False, seed=seed)
    if isinstance(sampler, Sampler):
        return GlobalOrder(len(sampler), shuffle=False, seed=seed, base=sampler)  # type: ignore[arg-type]
    raise LoaderError(
        f"found the sampler {type(sampler).__name__} in a train loader, which is no torch Sampler with a length; "
        "HeteroDDP needs one global order of known length."
    )


def with_batch_sampler(
    loader: DataLoader[Any], sampler: PlannedBatchSampler, beside: Callable[[], dict[str, Any]]
) -> DataLoader[Any]:
    """A copy of `loader` that draws from `sampler` and, for Lightning, has the state of `sampler`.

    Keeps the subclass, workers and collate function, and leaves the user's own object as it was.

    Args:
        beside: gives what else is saved with that state; loading leaves it alone.
    """
    loader = copy(loader)
    # A DataLoader refuses normal assignment once it is built.
    for name in ("batch_sampler", "sampler"):
        object.__setattr__(loader, name, sampler)
    # Lightning saves and restores every loader that has these two.
    object.__setattr__(loader, "state_dict", lambda: {**sampler.state_dict(), **beside()})
    object.__setattr__(loader, "load_state_dict", sampler.load_state_dict)
    return loader


def saved_state(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """What a PlannedBatchSampler left in `checkpoint`, or None where another kind of loader was used."""
    for state in host.train_loader_states(checkpoint):
        if isinstance(state, dict) and "global_batch_size" in state:
            return state
    return None
