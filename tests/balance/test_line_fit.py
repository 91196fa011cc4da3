from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.line_fit import LineFit


def test_many_sizes_give_the_line_of_least_squares() -> None:
    dice = random.Random(3)
    sizes = [dice.randint(10, 100) for _ in range(60)]
    seconds = [0.2 + 0.01 * size + dice.gauss(0, 0.02) for size in sizes]
    fit = LineFit()
    for size, took_s in zip(sizes, seconds, strict=True):
        fit.observe(size, took_s, 0.02)
    slope, fixed_s = np.polyfit(sizes, seconds, 1)
    for size in (20, 50, 90):
        assert fit.at(size) == pytest.approx(fixed_s + slope * size, rel=0.02)
        assert fit.at(size) == pytest.approx(0.2 + 0.01 * size, abs=3 * fit.error_s(size))


@given(st.integers(1, 1000), st.floats(1e-4, 100), st.floats(0, 0.3))
def test_one_size_makes_a_proportional_line_that_is_sure_of_nothing_else(size, took_s, error) -> None:
    fit = LineFit()
    fit.observe(size, took_s, error * took_s)
    assert fit.at(size) == pytest.approx(took_s)
    assert fit.fixed_s == 0.0
    assert fit.error_s(size) == pytest.approx(error * took_s, abs=1e-5 * took_s)
    assert fit.error_s(3 * size) >= 0.99 * took_s  # half a step for each step away


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 10), st.floats(0, 1)), min_size=1, max_size=30)
)
def test_doubt_never_turns_negative_and_the_line_never_falls(windows) -> None:
    fit = LineFit()
    for size, took_s, error_s in windows:
        fit.observe(size, took_s, error_s + 1e-9)
        assert fit.fixed_s >= 0
        assert fit.per_sample_s > 0
        assert fit.fixed_error_s >= 0
        assert fit.error_s(size) >= 0
