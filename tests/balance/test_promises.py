"""What the controller promises to a user, in virtual time through the simulator, with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.cluster import Cluster, Slowdown
from benchmarks.simulate import LOOK_EVERY, READY, Course, Ours, simulate
from lightning_hetckpt.balance.solver import DeviceModel

FLEETS = [
    (3, 1),
    (1, 3),
    (2, 1),
    (8, 1),
    (4, 2, 1),
    (4, 4, 2, 1),
    (2.5, 2.5, 1.4, 1.4, *[1] * 4),
    (10, *[1] * 15),
]


def cluster(
    speeds: Sequence[float],
    fixed_share: float = 0.3,
    comm_s: float = 0.02,
    noise: float = 0.0,
    slowdowns: tuple[Slowdown, ...] = (),
) -> Cluster:
    """Devices that need 50 ms over their speed for 32 samples, two thirds of each sample backward."""
    devices = []
    for speed in speeds:
        sample_s, fixed_s = (1 - fixed_share) * 0.05 / speed / 32, fixed_share * 0.05 / speed
        devices.append(DeviceModel(sample_s, fixed_s, sample_s * 2 / 3, fixed_s / 2))
    transfer_s = tuple([comm_s / len(READY)] * len(READY))
    return Cluster(tuple(devices), 32 * len(speeds), READY, transfer_s, noise, slowdowns=slowdowns)


def course(found: Cluster, steps: int, seed: int = 0, prefetch: int = 1) -> Course:
    return simulate(found, Ours(found), steps, seed, prefetch=prefetch)


@pytest.mark.parametrize("speeds", FLEETS)
@pytest.mark.parametrize("fixed_share", [0.0, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("comm_s", [0.0, 0.02, 0.06])
def test_the_first_plan_comes_after_ten_steps_and_by_step_forty_three_percent_are_left(
    speeds, fixed_share, comm_s
) -> None:
    found = course(cluster(speeds, fixed_share, comm_s), 80)
    if found.over[0] > 0.15:
        assert found.replans[0] <= 10
    assert max(found.over[40:]) <= 0.03


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_noise_delays_that_for_few(noise) -> None:
    late = [
        max(course(cluster(speeds, fixed_share, 0.02, noise), 60, seed).over[41:])
        for speeds in FLEETS[:-1]
        for fixed_share in (0.0, 0.3, 0.6)
        for seed in range(4)
    ]
    assert sum(over > 0.03 for over in late) <= 0.1 * len(late)
    assert max(late) <= 0.1


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("offset", [0, 3, 5, 8])  # of the change within a window
@pytest.mark.parametrize("speeds", [(1, 1), (3, 1), (4, 2, 1), (1,) * 8])
def test_another_speed_is_noticed_within_twenty_steps_and_settled_within_forty(
    speeds, offset, factor
) -> None:
    begin, end = 100 + offset, 200 + offset
    for seed in range(3):
        changing = cluster(speeds, noise=0.02, slowdowns=(Slowdown(0, begin, end, factor),))
        found = course(changing, end + 80, seed)
        for change, until in ((begin, end), (end, end + 80)):
            if found.over[change] > 0.1:  # else there is nothing to notice
                assert found.noticed_after(change) <= 20
            assert found.settled_after(change, until) <= 40


def test_the_loaders_prefetch_comes_on_top() -> None:
    prefetch = 16
    changing = cluster((1, 1, 1, 1), noise=0.02, slowdowns=(Slowdown(2, 105, 400, 2.0),))
    found = course(changing, 240, prefetch=prefetch)
    assert found.noticed_after(105) <= 20
    assert found.settled_after(105) <= 40 + 2 * prefetch


@pytest.mark.parametrize("world", [2, 4, 8, 32])
def test_equal_devices_under_ten_percent_noise_are_left_alone(world) -> None:
    replans = [len(course(cluster((1,) * world, noise=0.1), 200, seed).replans) for seed in range(30)]
    assert max(replans) <= 1
    assert sum(replans) <= 2


@pytest.mark.parametrize("speeds", [(3, 1), (4, 4, 2, 1)])
def test_what_has_settled_stays_settled(speeds) -> None:
    found = course(cluster(speeds, noise=0.1), 400, seed=2)
    assert len([step for step in found.replans if step >= 200]) <= 1
    assert max(found.over[200:]) <= 0.05


def test_a_slow_slide_is_followed() -> None:
    found = course(cluster((1,) * 8, noise=0.03, slowdowns=(Slowdown(3, 100, 300, 1.6, slides=True),)), 360)
    assert max(found.over[100:]) <= 0.1
    assert found.over[-1] <= 0.03


def test_windows_come_as_often_as_promises_are_made_for() -> None:
    assert LOOK_EVERY == 10
