from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.optperf import DeviceModel, SyncModel, step_s
from lightning_hetckpt.errors import PlanError
from tests.balance.problems import devices_with_backward

milliseconds = st.floats(0, 0.2)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    transfer_s = draw(st.lists(milliseconds, min_size=1, max_size=5))
    ready = draw(st.lists(st.floats(0.05, 1), min_size=len(transfer_s) - 1, max_size=len(transfer_s) - 1))
    return [*sorted(ready), 1.0], transfer_s


def step_by_events(
    models: list[DeviceModel], shares: list[int], ready: list[float], transfer_s: list[float]
) -> float:
    """One bucket after another, each as soon as every rank has handed it over; written from that sentence."""
    over_s = 0.0
    for part, seconds in zip(ready, transfer_s, strict=True):
        handed_over_s = max(
            model.step_s(share) - model.backward_s(share) + part * model.backward_s(share)
            for model, share in zip(models, shares, strict=True)
        )
        over_s = max(over_s, handed_over_s) + seconds
    return over_s


@given(
    st.lists(st.tuples(devices_with_backward, st.integers(1, 50)), min_size=1, max_size=5),
    buckets(),
)
def test_a_step_takes_as_long_as_its_buckets_reduced_one_after_another(fleet, network) -> None:
    models, shares = [model for model, _ in fleet], [share for _, share in fleet]
    expected_s = step_by_events(models, shares, *network)
    assert step_s(models, shares, SyncModel.of_buckets(*network)) == pytest.approx(expected_s, rel=1e-9)


def test_two_buckets_are_the_two_states_of_the_paper() -> None:
    # a = 0.1 s, P = 0.4 s, and the first bucket is ready at 0.1 + 0.25 * 0.4 = 0.2 s.
    model = [DeviceModel(0.01, 0.1, 0.008, 0.0)]
    assert step_s(model, [50], SyncModel(0.25, 0.29, 0.02)) == pytest.approx(0.6 + 0.02)  # 0.2 + 0.29 < 0.6
    assert step_s(model, [50], SyncModel(0.25, 0.5, 0.02)) == pytest.approx(0.3 + 0.5 + 0.02)
    assert step_s(model, [50]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("slope", "fixed", "steep", "flat"),
    [(0.1, 0.1, 0.2, 0.0), (0.1, 0.1, 0.0, 0.2), (0.1, 0.1, -0.1, 0.0), (0.1, 0.1, math.nan, 0.0)],
)
def test_a_backward_pass_longer_than_the_step_is_refused(slope, fixed, steep, flat) -> None:
    with pytest.raises(PlanError, match="part of the whole step"):
        DeviceModel(slope, fixed, steep, flat)


@pytest.mark.parametrize(
    "numbers", [(0.0, 1.0, 1.0), (1.1, 1.0, 1.0), (0.5, -1.0, 1.0), (0.5, 1.0, math.inf)]
)
def test_an_all_reduce_that_cannot_be_is_refused(numbers) -> None:
    with pytest.raises(PlanError, match="share of the backward pass"):
        SyncModel(*numbers)


@pytest.mark.parametrize(
    ("ready", "transfer_s"), [([], []), ([0.5], [0.1]), ([1.0], [0.1, 0.1]), ([0.8, 0.5, 1.0], [0.1] * 3)]
)
def test_buckets_without_an_order_are_refused(ready, transfer_s) -> None:
    with pytest.raises(PlanError, match="rising shares"):
        SyncModel.of_buckets(ready, transfer_s)
