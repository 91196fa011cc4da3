from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.plan import BatchPlan, PlanBook, StepKey
from lightning_hetckpt.errors import PlanError

some_shares = st.lists(st.integers(1, 64), min_size=1, max_size=8).map(tuple)
steps = st.builds(StepKey, st.integers(0, 3), st.integers(0, 20))


@given(some_shares)
def test_a_whole_batch_is_split_as_the_plan_says(shares) -> None:
    plan = BatchPlan(shares)
    assert plan.split(plan.global_batch_size) == shares


@given(some_shares, st.data())
def test_a_short_batch_keeps_its_sum_and_gives_every_rank_one_to_its_share(shares, data) -> None:
    samples = data.draw(st.integers(len(shares), sum(shares)))
    parts = BatchPlan(shares).split(samples)
    assert sum(parts) == samples
    assert min(parts) >= 1
    assert all(part <= share for part, share in zip(parts, shares, strict=True))


@given(some_shares, st.data())
def test_a_short_batch_is_split_in_the_order_of_the_shares(shares, data) -> None:
    samples = data.draw(st.integers(len(shares), sum(shares)))
    parts = BatchPlan(shares).split(samples)
    by_share = sorted(zip(shares, parts, strict=True))
    assert all(less[1] <= more[1] for less, more in itertools.pairwise(by_share) if less[0] < more[0])


def test_with_fewer_samples_than_ranks_the_first_ranks_take_one_each() -> None:
    plan = BatchPlan((6, 5, 4, 1))
    assert plan.split(3) == (1, 1, 1, 0)
    assert plan.split(1) == (1, 0, 0, 0)
    assert plan.split(4) == (1, 1, 1, 1)


@given(some_shares, st.data())
def test_a_short_batch_keeps_to_the_least_of_each_rank_while_it_can(shares, data) -> None:
    least = [data.draw(st.integers(1, share)) for share in shares]
    samples = data.draw(st.integers(len(shares), sum(shares)))
    parts = BatchPlan(shares).split(samples, least)
    assert sum(parts) == samples
    floor = least if samples >= sum(least) else [1] * len(shares)
    assert all(low <= part <= share for low, part, share in zip(floor, parts, shares, strict=True))
    book = PlanBook(BatchPlan(shares), least)
    assert book.split(StepKey(0, 3), samples) == parts


def test_two_of_five_for_the_slow_rank_where_batch_norm_needs_them() -> None:
    assert BatchPlan((6, 2)).split(5) == (4, 1)
    assert BatchPlan((6, 2)).split(5, (2, 2)) == (3, 2)
    assert BatchPlan((6, 2)).split(3, (2, 2)) == (2, 1)


@pytest.mark.parametrize("shares", [(), (0, 8), (9, -1)])
def test_a_plan_without_a_sample_for_every_rank_is_refused(shares) -> None:
    with pytest.raises(PlanError, match="at least one sample for every rank"):
        BatchPlan(shares)


@given(st.lists(steps, max_size=10, unique=True), steps)
def test_the_plan_in_force_is_the_last_that_has_started(starts, asked) -> None:
    book = PlanBook(BatchPlan((4, 4)))
    for k, start in enumerate(sorted(start for start in starts if start > StepKey(0, 0))):
        book.add(BatchPlan((1 + k % 7, 7 - k % 7), start))
    started = [plan for plan in book.history if plan.start <= asked]
    assert book.at(asked) is started[-1]
    assert book.latest is book.history[-1]


def test_time_runs_over_the_batches_of_an_epoch_into_the_next() -> None:
    assert StepKey(0, 99) < StepKey(1, 0) < StepKey(1, 1)


@pytest.mark.parametrize(
    "plan",
    [
        BatchPlan((5, 3), StepKey(0, 10)),  # as early as the last
        BatchPlan((5, 3), StepKey(0, 9)),  # earlier
        BatchPlan((5, 4), StepKey(0, 20)),  # another global batch
    ],
)
def test_a_plan_that_cannot_follow_is_refused(plan) -> None:
    book = PlanBook(BatchPlan((4, 4)))
    book.add(BatchPlan((6, 2), StepKey(0, 10)))
    with pytest.raises(PlanError, match="cannot follow"):
        book.add(plan)


def test_another_global_batch_may_begin_with_an_epoch_and_holds_from_there_on() -> None:
    book = PlanBook(BatchPlan((4, 4)))
    book.add(BatchPlan((6, 2), StepKey(0, 99)))  # behind the end of its epoch, so never in force
    book.add(BatchPlan((12, 4), StepKey(2, 0)))
    book.add(BatchPlan((10, 6), StepKey(2, 7)))
    assert [book.global_batch_size(epoch) for epoch in range(4)] == [8, 8, 16, 16]
    assert book.split(StepKey(1, 0), 8) == (6, 2)
    assert book.split(StepKey(2, 0), 16) == (12, 4)


def test_the_history_that_was_handed_out_is_a_copy() -> None:
    book = PlanBook(BatchPlan((4, 4)))
    book.history.clear()
    assert book.latest.shares == (4, 4)
