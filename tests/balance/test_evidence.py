from __future__ import annotations

import random

import pytest

from lightning_hetckpt.balance.evidence import stands_out


def excesses(world: int, dice: random.Random, slow: int = 0, by: float = 0.0) -> list[float]:
    """Of ranks with unit noise, `slow` of which are slow `by` so many deviations, over the mean of all."""
    seen = [dice.gauss(by if rank < slow else 0.0, 1.0) for rank in range(world)]
    level = sum(seen) / world
    return [each - level for each in seen]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16, 64, 256])
def test_equal_ranks_seldom_stand_out(world) -> None:
    dice = random.Random(world)
    alarms = sum(stands_out(excesses(world, dice), [1.0] * world) for _ in range(4000))
    assert alarms <= 8  # 2 in a thousand


@pytest.mark.parametrize(
    ("world", "slow", "by"), [(2, 1, 10), (16, 1, 7), (16, 8, 5), (64, 32, 4), (256, 1, 8)]
)
def test_one_rank_far_off_stands_out_and_so_do_many_a_little_off(world, slow, by) -> None:
    dice = random.Random(world)
    found = sum(stands_out(excesses(world, dice, slow, by), [1.0] * world) for _ in range(500))
    assert found >= 450


def test_ranks_that_are_done_sooner_are_no_reason() -> None:
    assert not stands_out([-100.0, -50.0, 0.0], [1.0] * 3)


def test_without_any_noise_everything_stands_out() -> None:
    assert stands_out([1e-9, 0.0], [0.0, 0.0])
    assert not stands_out([0.0, 0.0], [0.0, 0.0])
