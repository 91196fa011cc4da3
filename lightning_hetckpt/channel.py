"""How ranks swap small objects, and how a background thread reaches the other ranks without them."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lightning_hetckpt.errors import ConfigurationError

T = TypeVar("T")


class Channel(Protocol):
    """Swaps small objects; every rank must make the same calls in the same order, on its main thread."""

    rank: int
    size: int

    def all_gather(self, obj: T) -> list[T]:
        """What every rank passed, in rank order."""
        ...

    def broadcast(self, obj: T) -> T:
        """What rank 0 passed."""
        ...


class SoloChannel:
    """The channel of a process that is alone."""

    rank = 0
    size = 1

    def all_gather(self, obj: T) -> list[T]:
        """What was passed, as the only one."""
        return [obj]

    def broadcast(self, obj: T) -> T:
        """What was passed."""
        return obj


class GroupChannel:
    """The channel of a torch process group, through its object collectives.

    Args:
        group: None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, obj: T) -> list[T]:
        """What every rank passed, in rank order."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._group)
        return gathered

    def broadcast(self, obj: T) -> T:
        """What rank 0 passed."""
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        held: list[Any] = [obj]
        dist.broadcast_object_list(held, src=source, group=self._group)
        return held[0]  # type: ignore[no-any-return]


def present_channel() -> Channel:
    """The channel of all ranks of this job: the default group's where there is one, else one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GroupChannel()
    return SoloChannel()


def background_store() -> Store:
    """A connection of its own to the job's store, for one background thread.

    A blocking wait on the store object that the process group uses would block every other user of it.
    """
    store: Store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (it has no public name)
    return store.clone() if hasattr(store, "clone") else _reconnected(store)


def _reconnected(store: Store) -> Store:
    """What `Store.clone` does, for a torch before 2.8."""
    if isinstance(store, PrefixStore):
        return PrefixStore("hetckpt", _reconnected(store.underlying_store))
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    raise ConfigurationError(
        f"the process group meets over a {type(store).__name__}, to which a background thread cannot connect; "
        "use a tcp:// or env:// rendezvous, as torchrun and Lightning's launchers do."
    )
