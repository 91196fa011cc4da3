from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.solver import (
    DeviceModel,
    SyncModel,
    optimise,
    optperf_over,
    share_by_speed,
    solve,
    step_s,
)
from lightning_hetckpt.errors import PlanError
from tests.balance.problems import devices, devices_with_backward, networks, problems


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


def own_s(model: DeviceModel, share: int, sync: SyncModel | None) -> tuple[float, float]:
    """A device's two times, bound by its computing and by the transfers, from the formula alone."""
    compute_s = model.step_s(share)
    if sync is None:
        return compute_s, 0.0
    handed_over_s = compute_s - (1 - sync.overlap_from) * model.backward_s(share)
    return compute_s + sync.tail_s, handed_over_s + sync.hidden_s + sync.tail_s


def slowest_s(models: Sequence[DeviceModel], shares: Sequence[int], sync: SyncModel | None = None) -> float:
    return max(max(own_s(model, share, sync)) for model, share in zip(models, shares, strict=True))


@given(problems())
def test_the_split_is_as_good_as_the_best_of_all_splits(problem) -> None:
    models, total, low, high, multiple_of, sync = problem
    allowed = every_split(total, low, high, multiple_of)
    if not allowed:
        with pytest.raises(PlanError):
            solve(*problem)
        return
    best = optimise(*problem)
    assert best.shares in allowed
    best_s = min(slowest_s(models, split, sync) for split in allowed)
    assert slowest_s(models, best.shares, sync) == pytest.approx(best_s, rel=1e-12)
    assert best.step_s == pytest.approx(best_s, rel=1e-9)
    assert step_s(models, best.shares, sync) == pytest.approx(best_s, rel=1e-9)
    assert solve(*problem) == best.shares


@given(problems())
def test_each_device_is_bound_by_the_longer_of_its_times_and_one_more_sample_costs_what_it_says(
    problem,
) -> None:
    models, total, _, high, _, sync = problem
    try:
        best = optimise(*problem)
    except PlanError:
        return
    for model, share, most, bound, more_s in zip(
        models, best.shares, high, best.bound, best.marginal_s, strict=True
    ):
        compute_s, transfer_s = own_s(model, share, sync)
        if compute_s != pytest.approx(transfer_s, rel=1e-9):
            assert bound == ("compute" if compute_s > transfer_s else "communication")
        if share == most:
            assert more_s == float("inf")
        else:
            line = 0 if bound == "compute" else 1
            rise_s = own_s(model, share + 1, sync)[line] - own_s(model, share, sync)[line]
            assert more_s == pytest.approx(rise_s, rel=1e-6, abs=1e-9)
    assert best.global_batch_size == total


@given(
    st.lists(devices_with_backward, min_size=1, max_size=6),
    networks,
    st.lists(st.integers(6, 400), min_size=2, max_size=8, unique=True).map(sorted),
)
def test_devices_only_move_from_communication_to_compute_as_the_batch_grows(models, sync, totals) -> None:
    over = optperf_over(models, totals, [1] * len(models), [None] * len(models), sync=sync)
    for less, more in itertools.pairwise(over):
        assert less is not None and more is not None
        assert less.step_s <= more.step_s * (1 + 1e-12)
        for model, before, after, was, now in zip(
            models, less.shares, more.shares, less.bound, more.bound, strict=True
        ):
            assert before <= after
            times_s = own_s(model, after, sync)
            assert (was, now) != ("compute", "communication") or times_s[0] == pytest.approx(times_s[1])


@given(problems(), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_many_totals_at_once_are_the_same_as_one_after_another(problem, totals) -> None:
    models, _, *rest = problem
    for total, best in zip(totals, optperf_over(models, totals, *rest), strict=True):
        if best is None:
            with pytest.raises(PlanError):
                optimise(models, total, *rest)
        else:
            assert best == optimise(models, total, *rest)


def test_a_sample_more_in_the_global_batch_costs_what_all_devices_together_need_for_it() -> None:
    # 1 / (1 / 0.01 + 1 / 0.03); the third device is full and helps no more.
    models = [DeviceModel(0.01), DeviceModel(0.03), DeviceModel(0.02)]
    best = optimise(models, 10_001, [1, 1, 1], [None, None, 1])
    assert best.sample_s == pytest.approx(0.0075)
    more = optimise(models, 20_001, [1, 1, 1], [None, None, 1])
    assert (more.step_s - best.step_s) / 10_000 == pytest.approx(best.sample_s, rel=1e-3)


def test_the_paper_rule_for_a_mixed_state_holds() -> None:
    # One device computes long, the other's transfers take longest: t_compute of the one = syncStart + T_o of the other.
    models = [DeviceModel(0.004, 0.1, 0.003, 0.05), DeviceModel(0.002, 0.02, 0.001, 0.0)]
    sync = SyncModel(0.2, 0.4, 0.05)
    best = optimise(models, 600, [1, 1], [None, None], sync=sync)
    assert best.bound == ("compute", "communication")
    compute_s = models[0].step_s(best.shares[0])
    sync_start_s = models[1].step_s(best.shares[1]) - 0.8 * models[1].backward_s(best.shares[1])
    assert compute_s == pytest.approx(sync_start_s + sync.hidden_s, rel=0.01)
    assert best.step_s == pytest.approx(compute_s + sync.tail_s, rel=0.01)


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
    st.lists(devices_with_backward, min_size=1, max_size=6),
    st.one_of(st.none(), networks),
    st.integers(6, 500),
    st.integers(0, 5),
    st.floats(0.1, 1),
    st.floats(0.1, 1),
)
def test_a_device_that_gets_faster_never_makes_the_step_longer(
    models, sync, total, which, backward, rest
) -> None:
    which %= len(models)
    ones, open_end = [1] * len(models), [None] * len(models)
    before_s = slowest_s(models, solve(models, total, ones, open_end, sync=sync), sync)
    old, faster = models[which], list(models)
    steep, flat = old.backward_per_sample_s * backward, old.backward_fixed_s * backward
    faster[which] = DeviceModel(
        max(steep, (old.seconds_per_sample - old.backward_per_sample_s) * rest + steep) or 1e-6,
        (old.fixed_s - old.backward_fixed_s) * rest + flat,
        steep,
        flat,
    )
    assert slowest_s(faster, solve(faster, total, ones, open_end, sync=sync), sync) <= before_s * (1 + 1e-12)


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
