"""Watches the optimizers: the weights may move only when no snapshot reads them any more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Reader(Protocol):
    """What reads live tensors: a `Snapshot`, as the guard sees it."""

    @property
    def fenced(self) -> bool:
        """Whether nothing more is read."""
        ...

    def settle(self) -> None:
        """Wait until nothing more is read; whatever went wrong is told elsewhere."""
        ...

    def hold(self) -> None:
        """A step began that somebody else must fence."""
        ...

    def mark_torn(self, reason: str) -> bool:
        """The tensors moved while they were read."""
        ...


class StepGuard:
    """Counts optimizer steps against fences, for every optimizer of the process, while it is open.

    A step without a closure moves the weights at once, so it is fenced here. A step with a closure first
    runs forward and backward in it, which a snapshot should overlap: whoever runs the closure fences at
    its end (HeteroDDP, SnapshotCallback). If nobody did, the snapshot is torn.

    All calls come from the thread that trains.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[Reader, frozenset[int]]] = []
        self.moves = 0  # begins and ends of steps so far: the same number twice means no step in between
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def watch(self, reader: Reader, addresses: frozenset[int]) -> None:
        """Guard the tensors at `addresses` until `reader` is fenced."""
        self._watched = [watched for watched in self._watched if not watched[0].fenced]
        self._watched.append((reader, addresses))

    def close(self) -> None:
        """Stop watching. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._watched = []

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.moves += 1
        has_closure = kwargs.get("closure") is not None or any(arg is not None for arg in args[1:])
        for reader in self._readers_of(optimizer):
            if has_closure:
                reader.hold()
            else:
                reader.settle()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.moves += 1
        for reader in self._readers_of(optimizer):
            if not reader.fenced:
                reader.mark_torn(
                    f"{type(optimizer).__name__}.step() moved the weights while the snapshot still read them. "
                    "Call `fence()` after backward and before the weights move; HeteroDDP and SnapshotCallback do."
                )

    def _readers_of(self, optimizer: Optimizer) -> Iterator[Reader]:
        for reader, addresses in self._watched:
            if not reader.fenced and any(
                parameter.data_ptr() in addresses
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                yield reader


class Versions:
    """How often each of some tensors had been changed in place, to tell later which ones moved.

    It is no proof of the contrary: fused optimizers and writes through `.data` do not count.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.seen: list[int] | None = None  # for those that all keep a count
        try:
            self._seen = self.seen = list(map(version_of, tensors.values()))
        except RuntimeError:  # inference tensors keep no count
            self._tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_inference()}
            self._seen = list(map(version_of, self._tensors.values()))

    def moved(self) -> list[str]:
        """The names of the tensors that were changed in place since."""
        now = map(version_of, self._tensors.values())
        return [
            name
            for name, seen, version in zip(self._tensors, self._seen, now, strict=True)
            if seen != version
        ]


version_of = attrgetter("_version")  # the only name that autograd gives it
