"""The interval between snapshots follows from what they cost, and from nothing else."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.cadence import (
    CAUTION,
    MOST_GROWTH,
    NOTHING_MEASURED,
    REVIEW_EVERY,
    Cadence,
    SnapshotCost,
    best_interval_s,
    required_bytes_per_s,
    shortest_interval,
    stall_s,
)

seconds = st.floats(1e-4, 100)
shares = st.floats(0.001, 2)


def stall_at(interval: int, cost: SnapshotCost) -> float:
    """The stall of one snapshot, by FastPersist's own formula with a window of `interval` steps."""
    return cost.own_s + stall_s(10**9, 10**9 / cost.durable_s, interval * cost.step_s)


def test_the_papers_figure_phi3_mini_at_14_gb() -> None:
    # 14.23 GB in 0.80 s are 17.8 GB/s; a step of 0.8 s hides them and one of half a second does not.
    assert required_bytes_per_s(14_230_000_000, 0.8) == pytest.approx(17.79e9, rel=1e-3)
    assert stall_s(14_230_000_000, 17.7875e9, 0.8) == pytest.approx(0.0, abs=1e-9)
    assert stall_s(14_230_000_000, 17.7875e9, 0.5) == pytest.approx(0.3)


@given(state=st.integers(1, 10**13), window_s=seconds, accumulate=st.integers(1, 64))
def test_at_the_required_bandwidth_the_stall_just_vanishes(
    state: int, window_s: float, accumulate: int
) -> None:
    needed = required_bytes_per_s(state, window_s, accumulate)

    assert stall_s(state, needed * (1 + 1e-9), accumulate * window_s) == 0
    assert stall_s(state, needed / 2, accumulate * window_s) == pytest.approx(accumulate * window_s)


@given(
    state=st.integers(0, 10**13), rate=st.floats(1e6, 1e12), window_s=seconds, accumulate=st.integers(1, 64)
)
def test_a_step_takes_the_longer_of_computing_and_writing(
    state: int, rate: float, window_s: float, accumulate: int
) -> None:
    # T = max(F + B, C/b) + O, with g batches in one step.
    computing_s = accumulate * window_s

    assert computing_s + stall_s(state, rate, computing_s) == pytest.approx(max(computing_s, state / rate))
    assert (stall_s(state, rate, computing_s) > 0) == (state / rate > computing_s)


def test_a_state_of_no_bytes_needs_no_drive() -> None:
    assert required_bytes_per_s(0, 0.5) == 0
    assert stall_s(0, 1.0, 0.0) == 0


def test_without_a_window_the_whole_write_stalls() -> None:
    assert stall_s(3_000, 1_000.0, 0.0) == 3


def test_accumulating_four_batches_needs_a_quarter_of_the_bandwidth() -> None:
    assert required_bytes_per_s(12_000, 1.5, accumulate=4) == required_bytes_per_s(12_000, 1.5) / 4 == 2_000


def test_a_job_that_fails_once_a_day_and_pays_a_second_saves_every_seven_minutes() -> None:
    assert best_interval_s(1.0, 86_400) == pytest.approx(415.7, abs=0.1)


@given(cost_s=st.floats(0.001, 10), mtbf_s=st.floats(1e4, 1e7), factor=st.floats(0.1, 10))
def test_no_other_interval_loses_less_time_than_youngs(cost_s: float, mtbf_s: float, factor: float) -> None:
    def lost(interval_s: float) -> float:  # share of time: checkpoints, and half an interval per failure
        return cost_s / interval_s + interval_s / (2 * mtbf_s)

    best = best_interval_s(cost_s, mtbf_s)

    assert lost(best) <= lost(factor * best) * (1 + 1e-12)
    assert best_interval_s(0.0, mtbf_s) == 0


@given(
    cost=st.builds(SnapshotCost, st.floats(1e-4, 1), st.floats(1e-4, 10), st.floats(1e-2, 10)), share=shares
)
def test_the_interval_is_the_first_whose_stall_is_small_enough(cost: SnapshotCost, share: float) -> None:
    found = shortest_interval(cost, share)

    def allowed(n: int, slack: float) -> bool:
        return stall_at(n, cost) <= share * n * cost.step_s * (1 + slack)

    assert allowed(found, 1e-6)
    assert not any(allowed(n, -1e-6) for n in range(1, min(found, 2000)))


@given(
    cost=st.builds(SnapshotCost, st.floats(0, 1), st.floats(0, 10), st.floats(1e-2, 10)),
    share=shares,
    factor=st.floats(1, 4),
)
def test_dearer_snapshots_never_come_sooner_and_a_larger_allowance_never_later(
    cost: SnapshotCost, share: float, factor: float
) -> None:
    found = shortest_interval(cost, share)

    assert shortest_interval(SnapshotCost(factor * cost.own_s, cost.durable_s, cost.step_s), share) >= found
    assert shortest_interval(SnapshotCost(cost.own_s, factor * cost.durable_s, cost.step_s), share) >= found
    assert shortest_interval(SnapshotCost(cost.own_s, cost.durable_s, factor * cost.step_s), share) <= found
    assert shortest_interval(cost, factor * share) <= found


def test_a_snapshot_that_costs_nothing_comes_at_every_step() -> None:
    assert shortest_interval(SnapshotCost(0.0, 0.0, 1e-6), 0.001) == 1


@pytest.mark.parametrize("interval", [1, 7, 1000])
def test_an_interval_that_fits_exactly_is_not_made_longer_by_rounding(interval: int) -> None:
    step_s, share = 0.3, 0.05  # whose quotients are a bit above 7 and 1000

    assert shortest_interval(SnapshotCost(share * interval * step_s, 0.0, step_s), share) == interval
    durable_s = (1 + share) * interval * step_s
    assert shortest_interval(SnapshotCost(0.0, durable_s, step_s), share) == interval


def review(cadence: Cadence, *costs: SnapshotCost) -> list[int]:
    """The interval after each of `costs` was the typical one."""
    found = []
    for cost in costs:
        cadence.review(cost)
        found.append(cadence.interval)
    return found


@given(
    own_s=st.floats(0, 1),
    durable_s=st.floats(0, 10),
    step_s=st.floats(1e-3, 10),
    noise=st.lists(st.floats(1, CAUTION**0.49), min_size=20, max_size=20),
    share=st.floats(0.01, 0.5),
    every=st.integers(1, 50),
)
def test_noise_within_the_caution_never_makes_the_interval_swing(
    own_s: float, durable_s: float, step_s: float, noise: list[float], share: float, every: int
) -> None:
    costs = [SnapshotCost(a * own_s, a * durable_s, b * step_s) for a, b in itertools.pairwise(noise)]

    found = review(Cadence(every, share), *costs)

    assert found == sorted(found)  # it may still grow to its place, but nothing goes back and forth
    assert found[0] >= every


def test_it_lengthens_step_by_step_and_comes_back_when_the_drives_are_well_again() -> None:
    well, ill = SnapshotCost(0.001, 0.1, 0.2), SnapshotCost(0.001, 10.5, 0.2)

    found = review(Cadence(1, 0.05), well, ill, ill, ill, ill, well, well)

    # 10.501 s have to fit into 1.05 intervals of 0.2 s each: 50.005, so 51.
    assert found == [1, MOST_GROWTH, MOST_GROWTH**2, 51, 51, 1, 1]


def test_it_never_falls_below_the_users_interval() -> None:
    assert review(Cadence(10, 0.05), SnapshotCost(0, 0, 1), SnapshotCost(5, 0, 1)) == [10, 40]


def test_a_snapshot_that_costs_twice_the_step_waits_for_forty_of_them() -> None:
    assert shortest_interval(SnapshotCost(0.2, 0.0, 0.1), 0.05) == 40


def test_the_review_comes_at_the_same_snapshot_on_every_rank_also_where_one_measured_nothing() -> None:
    measured, silent = Cadence(1, 0.05), Cadence(1, 0.05)
    cost = SnapshotCost(0.1, 0.1, 1.0)

    turns = [(measured.note(cost), silent.note(None)) for _ in range(3 * REVIEW_EVERY)]

    assert turns == [(n % REVIEW_EVERY == 0,) * 2 for n in range(1, 3 * REVIEW_EVERY + 1)]
    assert silent.typical() == NOTHING_MEASURED
    assert not silent.review(NOTHING_MEASURED)


def test_one_slow_snapshot_among_four_changes_nothing() -> None:
    cadence = Cadence(1, 0.05)
    for own_s in (0.01, 0.01, 9.0, 0.01):
        cadence.note(SnapshotCost(own_s, 0.1, 1.0))

    assert not cadence.review(cadence.typical())
    assert cadence.typical() == NOTHING_MEASURED  # what was looked at is not looked at again


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.inf, math.nan])
def test_a_step_without_a_length_says_nothing(step_s: float) -> None:
    assert not Cadence(1, 0.05).review(SnapshotCost(9.0, 9.0, step_s))


def test_without_a_limit_nothing_is_noted_and_nothing_changes() -> None:
    cadence = Cadence(3, None)

    assert not any(cadence.note(SnapshotCost(9.0, 9.0, 1.0)) for _ in range(20))
    assert not cadence.review(SnapshotCost(9.0, 9.0, 1.0))
    assert cadence.interval == 3


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [
        (1, [1, 2, 2, 3], [1, 2, 3]),
        (2, [1, 2, 3, 4], [2, 4]),
        (5, [2, 4, 6, 8, 10], [6, 10]),  # two optimizers
    ],
)
def test_it_is_due_when_another_multiple_was_passed(every: int, steps: list[int], due: list[int]) -> None:
    cadence, last, found = Cadence(every, None), 0, []
    for step in steps:
        if cadence.is_due(step, last):
            found.append(step)
            last = step

    assert found == due
