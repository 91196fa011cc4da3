from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster import Cluster, Slowdown, VirtualRun
from lightning_hetckpt.balance.solver import DeviceModel
from tests.balance.problems import devices_with_backward

TWO = (DeviceModel(0.01, 0.1, 0.006, 0.04), DeviceModel(0.02, 0.1, 0.012, 0.04))
READY, TRANSFER_S = (0.25, 0.5, 1.0), (0.1, 0.2, 0.05)


def by_queue(cluster: Cluster, shares: tuple[int, ...]) -> float:
    """A step by a queue of events: a rank hands over a bucket, a transfer ends."""
    events: list[
        tuple[float, int, int]
    ] = []  # when, bucket handed over (or -1 at the end of a transfer), rank
    for rank, (model, share) in enumerate(zip(cluster.devices, shares, strict=True)):
        before_s = model.step_s(share) - model.backward_s(share)
        for bucket, part in enumerate(cluster.ready):
            heapq.heappush(events, (before_s + part * model.backward_s(share), bucket, rank))
    missing = [len(shares)] * len(cluster.ready)
    due, busy, now_s = 0, False, 0.0
    while events:
        now_s, bucket, _ = heapq.heappop(events)
        if bucket < 0:
            due, busy = due + 1, False
        else:
            missing[bucket] -= 1
        if due < len(missing) and not busy and missing[due] == 0:
            busy = True
            heapq.heappush(events, (now_s + cluster.transfer_s[due], -1, 0))
    return now_s


@given(
    st.lists(st.tuples(devices_with_backward, st.integers(1, 40)), min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(0.05, 1), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_a_step_takes_as_long_as_a_queue_of_events_says(fleet, buckets) -> None:
    ready = (*sorted(part for part, _ in buckets[1:]), 1.0)
    shares = tuple(share for _, share in fleet)
    devices = tuple(model for model, _ in fleet)
    cluster = Cluster(devices, sum(shares), ready, tuple(seconds for _, seconds in buckets))
    assert VirtualRun(cluster).train(shares) == pytest.approx(by_queue(cluster, shares), rel=1e-9)


def test_each_rank_tells_what_its_own_clock_saw() -> None:
    run = VirtualRun(Cluster(TWO, 40, READY, TRANSFER_S, load_share=0.1))
    for _ in range(10):
        took_s = run.train((20, 20))
    fast, slow = run.windows()
    assert fast is not None and slow is not None
    assert (fast.samples, fast.count, slow.count) == (20, 7, 7)  # the first three are left out
    assert (fast.compute_s, slow.compute_s) == pytest.approx((0.3, 0.5))
    assert (fast.backward_s, slow.backward_s) == pytest.approx((0.16, 0.28))
    assert (fast.first_bucket_s, slow.first_bucket_s) == pytest.approx((0.04, 0.07))
    assert fast.load_s == pytest.approx(0.03)
    # The slow rank hands over at 0.29, 0.36 and 0.5; the transfers end at 0.39, 0.59 and 0.64, and it waits for nobody.
    assert (slow.hidden_s, slow.tail_s) == pytest.approx((0.3, 0.05))
    # The fast one has its first bucket ready at 0.18 and waits 0.11 s for the other's.
    assert (fast.hidden_s, fast.tail_s) == pytest.approx((0.41, 0.05))
    assert (took_s, slow.step_s) == pytest.approx((0.64, 0.64))


def test_the_first_step_of_a_size_and_windows_of_too_few_steps_are_left_out() -> None:
    run = VirtualRun(Cluster(TWO, 40), backward=False)
    for _ in range(5):
        run.train((20, 20))
    assert run.windows() == [None, None]
    for _ in range(4):
        run.train((25, 15))
    fast, slow = run.windows()
    assert fast is not None and slow is not None
    assert (fast.samples, fast.count, slow.samples, slow.count) == (25, 3, 15, 3)
    assert fast.backward_s is None
    assert run.windows() == [None, None]


def test_stalls_hardly_move_the_median() -> None:
    run = VirtualRun(Cluster(TWO, 40, noise=0.01, stalls=0.05), seed=1)
    for _ in range(60):
        run.train((20, 20))
    for window, true_s in zip(run.windows(), (0.3, 0.5), strict=True):
        assert window is not None
        assert window.compute_s == pytest.approx(true_s, rel=0.01)
        assert window.spread_s == pytest.approx(0.01 * true_s, rel=0.5)


def test_a_co_tenant_comes_and_goes_and_a_slide_stays() -> None:
    guest, slide = Slowdown(0, 10, 20, 2.0), Slowdown(1, 10, 20, 2.0, slides=True)
    assert [guest.at(step) for step in (9, 10, 19, 20)] == [1, 2, 2, 1]
    assert [slide.at(step) for step in (9, 10, 15, 20, 99)] == [1, 1, 1.5, 2, 2]
    cluster = Cluster(TWO, 40, slowdowns=(guest,))
    assert cluster.over_optimum((27, 13), 0) == pytest.approx(0.0, abs=0.02)
    assert cluster.over_optimum((27, 13), 10) > 0.3
