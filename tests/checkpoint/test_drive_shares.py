"""Which rank writes to which drive, and how much: laws over random drives, and cases that can be told by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import builds, floats, integers, lists, sampled_from, tuples

from lightning_hetckpt.checkpoint.drive_shares import (
    FILE_OVERHEAD_S,
    DriveSpeeds,
    HostDrives,
    all_drives_s,
    corrected,
    drive_weights,
    is_worth_replanning,
    one_drive_each,
    seen_speeds,
)

MB = 1_000_000


def host(*mbps: float, ranks: int = 1, disks: str = "abcdefgh") -> HostDrives:
    return HostDrives(tuple(range(ranks)), tuple(disks[: len(mbps)]), tuple(one * MB for one in mbps))


hosts = builds(
    lambda ranks, drives: HostDrives(
        tuple(range(ranks)), tuple(f"{n}" for n in range(len(drives))), tuple(drives)
    ),
    integers(1, 9),
    lists(floats(1e7, 1e10), min_size=1, max_size=8),
)


def simulated_s(host: HostDrives, rows: tuple[tuple[float, ...], ...], nbytes: int) -> float:
    """Seconds until the last drive is done, counted file by file: nothing of the predictions is in here."""
    ends = dict.fromkeys(host.disks, 0.0)
    for row in rows:
        for weight, disk, speed in zip(row, host.disks, host.speeds, strict=True):
            if weight:
                ends[disk] += nbytes / len(rows) * weight / sum(row) / speed + FILE_OVERHEAD_S
    return max(ends.values())


@given(host=hosts, nbytes=integers(0, 10**12))
def test_no_drive_ends_later_than_with_the_better_of_the_two_ways(host: HostDrives, nbytes: int) -> None:
    rank_bytes = nbytes / len(host.ranks)
    rows = drive_weights([host], nbytes)
    best_s = min(all_drives_s(host, rank_bytes), one_drive_each(host, rank_bytes)[1])
    assert simulated_s(host, rows, nbytes) <= best_s * (1 + 1e-9)


@given(host=hosts, nbytes=integers(0, 10**12))
def test_the_predictions_are_what_counting_file_by_file_gives(host: HostDrives, nbytes: int) -> None:
    rank_bytes = nbytes / len(host.ranks)
    everywhere = (host.weights,) * len(host.ranks)
    drives, apart_s = one_drive_each(host, rank_bytes)
    alone = tuple(tuple(1.0 * (disk == mine) for disk in host.disks) for mine in drives)
    assert all_drives_s(host, rank_bytes) == pytest.approx(simulated_s(host, everywhere, nbytes))
    assert apart_s == pytest.approx(simulated_s(host, alone, nbytes))


def test_four_ranks_take_one_of_four_equal_drives_each() -> None:
    rows = drive_weights([host(200, 200, 200, 200, ranks=4)], 1000 * MB)
    assert [tuple(weight > 0 for weight in row) for row in rows] == [
        tuple(drive == rank for drive in range(4)) for rank in range(4)
    ]


def test_one_rank_takes_all_drives_in_proportion_to_their_speed() -> None:
    (row,) = drive_weights([host(400, 200, 100, 100)], 1000 * MB)
    assert [weight / sum(row) for weight in row] == [0.5, 0.25, 0.125, 0.125]


def test_four_ranks_share_four_unequal_drives_since_the_slowest_would_hold_all_up() -> None:
    rows = drive_weights([host(400, 200, 100, 100, ranks=4)], 4000 * MB)
    assert all(min(row) > 0 for row in rows)


def test_three_ranks_share_two_drives_unless_the_files_are_tiny() -> None:
    two = host(200, 200, ranks=3)
    assert all(min(row) > 0 for row in drive_weights([two], 3000 * MB))
    assert [sum(weight > 0 for weight in row) for row in drive_weights([two], 3000)] == [1, 1, 1]


def test_two_folders_on_one_drive_get_one_drives_share_and_stay_together() -> None:
    (row,) = drive_weights([host(200, 200, 200, disks="aab")], 1000 * MB)
    assert row == (100 * MB, 100 * MB, 200 * MB)
    rows = drive_weights([host(200, 200, 200, disks="aab", ranks=2)], 1000 * MB)
    assert sorted([weight > 0 for weight in row] for row in rows) == [
        [False, False, True],
        [True, True, False],
    ]


def test_every_host_decides_for_its_own_ranks() -> None:
    one = HostDrives((0, 2), ("a",), (MB,))
    other = HostDrives((1, 3), ("a", "b"), (MB, MB))
    rows = drive_weights([one, other], 1000 * MB)
    assert [len(row) for row in rows] == [1, 2, 1, 2]
    assert [[weight > 0 for weight in row] for row in (rows[1], rows[3])] == [[True, False], [False, True]]


def test_a_drive_is_as_fast_as_all_its_ranks_together() -> None:
    two = host(1, 1, ranks=2)
    written = [(0, 0, 50 * MB, 0.5), (0, 1, 50 * MB, 1.0), (1, 0, 50 * MB, 0.4), (1, 1, 50 * MB, 1.0)]
    assert seen_speeds(two, written) == {"a": 200 * MB, "b": 100 * MB}


def test_a_small_file_or_a_strangers_says_nothing_about_a_drive() -> None:
    assert seen_speeds(host(1, 1), [(0, 0, 4096, 0.004), (0, 1, 50 * MB, 0.0), (7, 1, 50 * MB, 1.0)]) == {}


def write(host: HostDrives, true_mbps: tuple[float, ...], nbytes: int) -> list[tuple[int, int, int, float]]:
    """What a save over drives of these speeds reports."""
    (row,) = drive_weights([host], nbytes)
    return [
        (0, number, int(nbytes * weight / sum(row)), nbytes * weight / sum(row) / (mbps * MB))
        for number, (weight, mbps) in enumerate(zip(row, true_mbps, strict=True))
        if weight
    ]


@given(
    measured=tuples(floats(100, 5000), floats(100, 5000), floats(100, 5000)),
    truth=tuples(floats(100, 5000), floats(100, 5000), floats(100, 5000)),
)
def test_whatever_was_measured_first_the_shares_come_to_fit_the_truth(
    measured: tuple[float, ...], truth: tuple[float, ...]
) -> None:
    speeds = DriveSpeeds([host(*measured)])
    for _ in range(60):
        speeds.note(write(speeds.in_force[0], truth, 8000 * MB))
    assert not is_worth_replanning(speeds.in_force[0], corrected(host(*truth), {}))


def test_a_drive_that_slows_down_gets_less_and_gets_it_back_later() -> None:
    speeds = DriveSpeeds([host(200, 200)])

    def share() -> float:
        return speeds.in_force[0].weights[0] / sum(speeds.in_force[0].weights)

    speeds.note(write(speeds.in_force[0], (50, 200), 1000 * MB))
    first = share()
    for _ in range(30):
        speeds.note(write(speeds.in_force[0], (50, 200), 1000 * MB))
    slow = share()
    for _ in range(60):
        speeds.note(write(speeds.in_force[0], (200, 200), 1000 * MB))
    assert 0.5 > first > slow == pytest.approx(0.2, rel=0.1)
    assert share() == pytest.approx(0.5, rel=0.1)


def test_a_drive_that_nearly_stands_still_is_still_given_enough_to_be_seen_to_recover() -> None:
    speeds = DriveSpeeds([host(200, 200)])
    for _ in range(60):
        speeds.note(write(speeds.in_force[0], (0.01, 200), 1000 * MB))
    assert speeds.in_force[0].weights[0] > 0
    for _ in range(60):
        speeds.note(write(speeds.in_force[0], (200, 200), 1000 * MB))
    assert speeds.in_force[0].weights[0] == pytest.approx(speeds.in_force[0].weights[1], rel=0.15)


@given(noise=lists(sampled_from([0.97, 1.0, 1.03]), min_size=2, max_size=40))
def test_noise_changes_no_plan(noise: list[float]) -> None:
    speeds = DriveSpeeds([host(200, 400)])
    before = speeds.in_force
    for one in noise:
        speeds.note(write(speeds.in_force[0], (200 * one, 400), 1000 * MB))
    assert speeds.in_force is before
