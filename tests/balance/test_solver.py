from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.solver import DeviceModel, share_by_speed, solve
from lightning_hetckpt.errors import PlanError

# Whole thousandths make ties common, plain floats make them rare; both must come out right.
seconds = st.one_of(st.integers(1, 20).map(lambda ms: ms / 1000), st.floats(1e-4, 10))
devices = st.builds(DeviceModel, seconds, st.one_of(st.just(0.0), seconds))


def slowest_s(models: Sequence[DeviceModel], shares: Sequence[int]) -> float:
    return max(model.step_s(share) for model, share in zip(models, shares, strict=True))


def every_split(
    total: int, low: Sequence[int], high: Sequence[int | None], multiple_of: int
) -> list[tuple[int, ...]]:
    """All splits that keep the rules, written down from the rules alone."""
    ranges = [range(few, (total if most is None else most) + 1) for few, most in zip(low, high, strict=True)]
    return [
        split
        for split in itertools.product(*ranges)
        if sum(split) == total and sum(share % multiple_of != 0 for share in split) <= 1
    ]


@st.composite
def problems(
    draw: st.DrawFn,
) -> tuple[list[DeviceModel], int, list[int], list[int | None], int]:
    models = draw(st.lists(devices, min_size=1, max_size=3))
    total = draw(st.integers(1, 24))
    low = draw(st.lists(st.integers(1, 5), min_size=len(models), max_size=len(models)))
    high = draw(
        st.lists(
            st.one_of(st.none(), st.integers(1, 14)),
            min_size=len(models),
            max_size=len(models),
        )
    )
    return models, total, low, high, draw(st.integers(1, 5))


@given(problems())
def test_the_split_is_as_good_as_the_best_of_all_splits(problem) -> None:
    models, total, low, high, multiple_of = problem
    allowed = every_split(total, low, high, multiple_of)
    if not allowed:
        with pytest.raises(PlanError):
            solve(models, total, low, high, multiple_of)
        return
    shares = solve(models, total, low, high, multiple_of)
    assert shares in allowed
    best_s = min(slowest_s(models, split) for split in allowed)
    assert slowest_s(models, shares) == pytest.approx(best_s, rel=1e-12)


@given(st.lists(devices, min_size=2, max_size=6), st.integers(6, 500), st.integers(1, 4))
def test_a_faster_device_never_gets_less(models, total, multiple_of) -> None:
    try:
        shares = solve(models, total, [1] * len(models), [None] * len(models), multiple_of)
    except PlanError:
        return
    held = [pair for pair in zip(models, shares, strict=True) if pair[1] % multiple_of == 0]
    for (one, one_share), (other, other_share) in itertools.permutations(held, 2):
        if one.seconds_per_sample <= other.seconds_per_sample and one.fixed_s <= other.fixed_s:
            assert one_share >= other_share or one == other


@given(
    st.lists(devices, min_size=1, max_size=6),
    st.integers(6, 500),
    st.integers(0, 5),
    st.floats(0.1, 1),
)
def test_a_device_that_gets_faster_never_makes_the_step_longer(models, total, which, factor) -> None:
    which %= len(models)
    ones, open_end = [1] * len(models), [None] * len(models)
    before_s = slowest_s(models, solve(models, total, ones, open_end))
    faster = list(models)
    faster[which] = DeviceModel(models[which].seconds_per_sample * factor, models[which].fixed_s * factor)
    assert slowest_s(faster, solve(faster, total, ones, open_end)) <= before_s * (1 + 1e-12)


def test_ties_go_to_the_lower_rank() -> None:
    equal = [DeviceModel(0.01, 0.1)] * 4
    assert solve(equal, 10, [1] * 4, [None] * 4) == (3, 3, 2, 2)
    assert solve(equal, 11, [1] * 4, [None] * 4, multiple_of=2) == (3, 4, 2, 2)


def test_a_fixed_part_is_paid_before_the_first_sample() -> None:
    # 0.1 + 0.01 * 53 and 0.3 + 0.03 * 11 both end at 0.63 s.
    models = [DeviceModel(0.01, 0.1), DeviceModel(0.03, 0.3)]
    assert solve(models, 64, [1, 1], [None, None]) == (53, 11)


def test_a_thousand_devices_share_a_million_samples() -> None:
    models = [DeviceModel(0.001 * (1 + rank % 7), 0.01 * (rank % 3)) for rank in range(1000)]
    shares = solve(models, 1_000_003, [1] * 1000, [None] * 1000, multiple_of=8)
    assert sum(shares) == 1_000_003
    assert sum(share % 8 != 0 for share in shares) == 1
    even_s = slowest_s(models, [1_000_003 / 1000] * 1000)
    assert slowest_s(models, shares) < 0.5 * even_s


@pytest.mark.parametrize(
    ("total", "low", "high", "multiple_of"),
    [
        (8, [5, 5], [None, None], 1),  # the floors alone are too much
        (8, [1, 1], [3, 4], 1),  # the caps together are too little
        (8, [4, 1], [3, None], 1),  # a floor above its cap
        (8, [0, 1], [None, None], 1),  # every rank must run its backward
        (7, [1, 1, 1], [None, None, None], 4),  # two of three would have to hold 4
        (8, [1], [None, None], 1),
        (8, [1, 1], [None, None], 0),
    ],
)
def test_bounds_that_cannot_hold_are_an_error_with_the_numbers(total, low, high, multiple_of) -> None:
    with pytest.raises(PlanError, match=rf"{total} samples.*min_samples=\[{low[0]}.*max_samples="):
        solve(
            [DeviceModel(0.01)] * 2 if len(low) < 3 else [DeviceModel(0.01)] * 3,
            total,
            low,
            high,
            multiple_of,
        )


def test_no_devices_cannot_share_anything() -> None:
    with pytest.raises(PlanError):
        solve([], 8, [], [])


@pytest.mark.parametrize(("slope", "fixed"), [(0.0, 0.1), (-1.0, 0.1), (float("nan"), 0.1), (0.1, -0.1)])
def test_a_device_that_takes_no_time_is_refused(slope, fixed) -> None:
    with pytest.raises(PlanError, match="finite"):
        DeviceModel(slope, fixed)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_shares_that_sum_to_the_whole_come_back_as_they_are(shares) -> None:
    assert share_by_speed(sum(shares), shares) == tuple(shares)


@given(st.integers(64, 10_000), st.lists(st.floats(0.01, 100), min_size=1, max_size=64))
def test_a_proportional_split_sums_to_the_whole_and_a_faster_rank_never_gets_less(total, speeds) -> None:
    shares = share_by_speed(total, speeds)
    assert sum(shares) == total
    assert min(shares) >= 1
    by_speed = sorted(zip(speeds, shares, strict=True))
    assert all(slow[1] <= fast[1] for slow, fast in itertools.pairwise(by_speed) if slow[0] < fast[0])


def test_a_proportional_split_keeps_to_the_bounds() -> None:
    assert share_by_speed(64, [3, 1]) == (48, 16)
    assert share_by_speed(64, [3, 1], max_samples=[40, None]) == (40, 24)
    assert share_by_speed(64, [100, 1], min_samples=[1, 8]) == (56, 8)
    assert share_by_speed(66, [1, 1, 1], multiple_of=8) == (18, 24, 24)


def test_a_speed_of_zero_is_refused() -> None:
    with pytest.raises(PlanError, match="above zero"):
        share_by_speed(8, [1.0, 0.0])
