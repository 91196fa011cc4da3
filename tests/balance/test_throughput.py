from __future__ import annotations

import json
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.solver import DeviceModel
from lightning_hetckpt.balance.throughput import ThroughputModel, WindowStats

TRUE = DeviceModel(seconds_per_sample=0.01, fixed_s=0.1)
QUIET_S = 0.0


def quiet_window(device: DeviceModel, samples: int) -> WindowStats:
    return WindowStats(samples, device.step_s(samples), 20, QUIET_S)


def noisy_window(device: DeviceModel, samples: int, dice: random.Random, noise: float = 0.1) -> WindowStats:
    steps_s = [device.step_s(samples) * dice.gauss(1, noise) for _ in range(20)]
    return WindowStats(samples, statistics.median(steps_s), 20, statistics.stdev(steps_s))


def taught(windows: list[WindowStats]) -> ThroughputModel:
    model = ThroughputModel()
    for window in windows:
        model.observe(window)
    return model


def test_nothing_is_known_before_the_first_window() -> None:
    assert ThroughputModel().line() is None
    assert ThroughputModel().most_timed == 0


def test_one_batch_size_makes_the_line_proportional() -> None:
    line = taught([quiet_window(TRUE, 30)] * 5).line()
    assert line is not None
    assert line.fixed_s == pytest.approx(0.0, abs=1e-12)
    assert line.step_s(30) == pytest.approx(TRUE.step_s(30))


@given(
    st.floats(1e-4, 1),
    st.floats(0, 10),
    st.tuples(st.integers(1, 200), st.integers(1, 200)).filter(
        lambda sizes: 4 / 3 < max(sizes) / min(sizes) < 4
    ),
)
def test_two_batch_sizes_without_noise_give_a_line_through_both(slope, fixed, sizes) -> None:
    device = DeviceModel(slope, fixed * slope * 20)
    line = taught([quiet_window(device, size) for size in sizes * 4]).line()
    assert line is not None
    for size in sizes:
        assert line.step_s(size) == pytest.approx(device.step_s(size), rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(1e-6, 1e3), st.integers(1, 50)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_measured_the_slope_is_above_zero_and_the_fixed_part_is_not_below(
    windows,
) -> None:
    model = taught([WindowStats(*window) for window in windows])
    line = model.line()  # DeviceModel itself refuses anything else
    assert line is not None
    assert line.step_s(1) < line.step_s(2)
    assert model.relative_error(windows[-1][0]) >= 0


def test_noise_averages_out_over_the_windows() -> None:
    misses = []
    for seed in range(20):
        dice = random.Random(seed)
        line = taught([noisy_window(TRUE, 20 + 20 * (k % 2), dice) for k in range(20)]).line()
        assert line is not None
        misses.append(line.step_s(30) / TRUE.step_s(30) - 1)
    assert statistics.fmean(misses) == pytest.approx(0.0, abs=0.01)
    assert statistics.stdev(misses) < 0.02  # a single window's median is good to 0.03


def test_the_stated_error_is_the_error_that_is_made() -> None:
    stated, made = [], []
    for seed in range(200):
        model = taught([noisy_window(TRUE, 30, random.Random(seed))])
        line = model.line()
        assert line is not None
        stated.append(model.relative_error(30))
        made.append(line.step_s(30) / TRUE.step_s(30) - 1)
    assert statistics.fmean(stated) == pytest.approx(statistics.stdev(made), rel=0.3)


def test_a_quiet_device_is_believed_sooner_than_a_noisy_one() -> None:
    quiet = taught([WindowStats(30, 0.4, 20, spread_s=0.0)])
    unmeasured = taught([WindowStats(30, 0.4, 20)])
    noisy = taught([WindowStats(30, 0.4, 20, spread_s=0.2)])
    assert quiet.relative_error(30) < unmeasured.relative_error(30) < noisy.relative_error(30)


@pytest.mark.parametrize("factor", [0.5, 1.3, 2.0, 10.0])
def test_a_device_that_changes_its_speed_is_believed_at_once_and_keeps_the_shape_of_its_line(
    factor,
) -> None:
    after = DeviceModel(TRUE.seconds_per_sample * factor, TRUE.fixed_s * factor)
    model = taught([quiet_window(TRUE, size) for size in (20, 40, 20, 40)] + [quiet_window(after, 40)])
    line = model.line()
    assert line is not None
    assert line.step_s(40) == pytest.approx(after.step_s(40), rel=0.01)
    assert line.step_s(20) == pytest.approx(after.step_s(20), rel=0.05)


def test_a_device_whose_line_takes_another_shape_is_learnt_anew() -> None:
    windows = [quiet_window(TRUE, size) for size in (20, 40) * 5]
    other = DeviceModel(seconds_per_sample=0.03, fixed_s=0.0)
    line = taught(windows + [quiet_window(other, size) for size in (40, 20) * 5]).line()
    assert line is not None
    for size in (20, 40):
        assert line.step_s(size) == pytest.approx(other.step_s(size), rel=0.1)


def test_a_slow_drift_is_followed() -> None:
    model = ThroughputModel()
    for k in range(50):
        device = DeviceModel(TRUE.seconds_per_sample * 1.02**k, TRUE.fixed_s * 1.02**k)
        model.observe(quiet_window(device, 30))
    line = model.line()
    assert line is not None
    assert line.step_s(30) == pytest.approx(device.step_s(30), rel=0.05)


@pytest.mark.parametrize(
    "window",
    [
        WindowStats(0, 0.1, 20),
        WindowStats(4, 0.0, 20),
        WindowStats(4, float("nan"), 20),
        WindowStats(4, 0.1, 0),
    ],
)
def test_a_window_that_cannot_be_true_is_left_out(window) -> None:
    assert taught([window]).line() is None


def test_many_windows_at_one_size_leave_the_line_sound() -> None:
    dice = random.Random(0)
    windows = [quiet_window(TRUE, 20), quiet_window(TRUE, 40)]
    line = taught(windows + [noisy_window(TRUE, 40, dice) for _ in range(5000)]).line()
    assert line is not None
    assert line.step_s(20) == pytest.approx(TRUE.step_s(20), rel=0.1)


def with_backward(samples: int) -> WindowStats:
    """A device of which the backward pass is 60 % of each sample and half of the fixed part."""
    step_s = TRUE.step_s(samples)
    return WindowStats(samples, step_s, 20, QUIET_S, 0.05 + 0.006 * samples)


def test_the_backward_pass_is_a_line_of_its_own_within_the_whole() -> None:
    line = taught([with_backward(size) for size in (20, 40) * 6]).line()
    assert line is not None
    for size in (20, 30, 40):
        assert line.step_s(size) == pytest.approx(TRUE.step_s(size), rel=0.02)
        assert line.backward_s(size) == pytest.approx(0.05 + 0.006 * size, rel=0.02)
    assert not taught([quiet_window(TRUE, 20)]).knows_backward


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 10), st.floats(0.01, 1)), min_size=1, max_size=10)
)
def test_whatever_is_measured_the_backward_pass_stays_a_part_of_the_step(windows) -> None:
    model = taught([WindowStats(size, step_s, 20, None, part * step_s) for size, step_s, part in windows])
    assert model.line() is not None  # DeviceModel itself refuses anything else
    assert model.turned(windows[-1][0], 2.0).step_s(windows[-1][0]) == pytest.approx(
        model.line().step_s(windows[-1][0])
    )


def test_a_line_is_a_guess_until_a_second_batch_size_is_far_enough() -> None:
    model = taught([quiet_window(TRUE, 30)] * 5)
    assert model.is_guess
    assert model.reach == 60
    model.observe(quiet_window(TRUE, 60))
    assert not model.is_guess
    assert model.reach == 180


def test_a_few_steps_that_look_quiet_are_not_believed_as_much_as_many() -> None:
    noisy, lucky = WindowStats(30, 0.4, 20, 0.04), WindowStats(30, 0.4, 4, 0.0)
    assert taught([noisy, lucky]).relative_error(30) > 0.015
    assert taught([WindowStats(30, 0.4, 4, 0.04)]).relative_error(30) > 2 * taught([noisy]).relative_error(30)


def test_what_was_learnt_survives_json() -> None:
    model, copy = (
        taught([with_backward(20), with_backward(40)]),
        ThroughputModel(),
    )
    copy.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for each in (model, copy):
        each.observe(quiet_window(TRUE, 31))
    assert copy.line() == model.line()
    assert copy.most_timed == model.most_timed == 40
    empty = ThroughputModel()
    empty.load_state_dict(json.loads(json.dumps(ThroughputModel().state_dict())))
    assert empty.line() is None
