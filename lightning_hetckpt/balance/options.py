"""How the user wants the global batch shared out, and the plan that a fit begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hetckpt.balance.plan import BatchPlan
from lightning_hetckpt.balance.solver import share_by_speed
from lightning_hetckpt.errors import ConfigurationError, PlanError

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

    def bounds(self, world: int) -> tuple[list[int], list[int | None], int]:
        """Fewest and most samples of each rank, and what shares are multiples of."""
        return (
            _per_rank(self.min_samples, world, "min_samples"),
            _per_rank(self.max_samples, world, "max_samples"),
            self.multiple_of,
        )

    def caps(self, world: int) -> list[int | None]:
        """Most samples that each rank may run at once."""
        return _per_rank(self.max_micro_batch, world, "max_micro_batch")

    def first_plan(self, world: int, global_batch_size: int, saved: Sequence[int]) -> BatchPlan:
        """The plan of the first batch.

        Args:
            world: number of ranks.
            global_batch_size: samples of all ranks together.
            saved: the shares of the run that goes on here; empty for none.

        Raises:
            PlanError: no split keeps to the bounds.
            ConfigurationError: options for another number of ranks.
        """
        if global_batch_size < world:
            raise PlanError(
                f"the global batch of {global_batch_size} samples is smaller than the {world} ranks, and every rank "
                f"needs one sample. Set HeteroDDP(global_batch_size={world}) or more, or use fewer devices."
            )
        bounds, shares = self.bounds(world), self.shares
        if shares is not None and len(shares) != world:
            raise ConfigurationError(
                f"HeteroDDP(shares={list(shares)}) names {len(shares)} ranks, but the job has {world}. "
                "Give one share per rank, in the order of the global ranks."
            )
        if shares is not None and self.policy != "even":
            exact = [int(share) for share in shares]
            if sum(shares) != global_batch_size or exact != list(shares):
                exact = list(share_by_speed(global_batch_size, shares, *bounds))
            return BatchPlan(tuple(exact), reason="shares")
        if self.policy == "live" and len(saved) == world and sum(saved) == global_batch_size:
            return BatchPlan(tuple(saved), reason="as saved")
        return BatchPlan(share_by_speed(global_batch_size, [1.0] * world, *bounds), reason="even")


def _per_rank(limit: Any, world: int, name: str) -> list[Any]:
    """One limit for each rank, from one for all or one per rank."""
    if limit is None or isinstance(limit, int):
        return [limit] * world
    if len(limit) != world:
        raise ConfigurationError(
            f"HeteroDDP({name}={list(limit)}) names {len(limit)} ranks, but the job has {world}; "
            "give one number for all ranks or one per rank."
        )
    return list(limit)
