"""The learning-rate rules and their limits, and the count of a scheduler's ticks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.lr_scaling import LrScaling, lr_factor, scheduler_ticks

RULES: list[LrScaling] = ["adascale", "sqrt", "linear", "none"]


@pytest.mark.parametrize("rule", RULES)
@given(base=st.integers(1, 10_000), noise_scale=st.none() | st.floats(0, 1e9) | st.just(math.inf))
def test_the_base_batch_has_the_users_learning_rate(
    rule: LrScaling, base: int, noise_scale: float | None
) -> None:
    assert lr_factor(rule, base, base, noise_scale) == 1


@given(base=st.integers(1, 1000), scale=st.integers(1, 100), noise_scale=st.floats(1e-6, 1e9))
def test_adascale_lies_between_one_and_linear(base: int, scale: int, noise_scale: float) -> None:
    gain = lr_factor("adascale", base * scale, base, noise_scale)

    assert 1 - 1e-9 <= gain <= scale * (1 + 1e-9)


@given(
    base=st.integers(1, 1000),
    scale=st.integers(1, 100),
    noise=st.floats(1e-3, 1e6),
    signal=st.floats(1e-3, 1e6),
)
def test_adascale_is_the_gain_of_its_paper(base: int, scale: int, noise: float, signal: float) -> None:
    # Johnson et al., arXiv 2007.05105: (σ² + μ²)/(σ²/S + μ²), σ² the variance of the gradient of a base batch.
    variance = noise / base
    paper = (variance + signal) / (variance / scale + signal)

    assert lr_factor("adascale", base * scale, base, noise / signal) == pytest.approx(paper)


def test_the_rules_at_a_batch_four_times_as_large() -> None:
    assert lr_factor("adascale", 400, 100, math.inf) == 4
    assert lr_factor("adascale", 400, 100, 0.0) == 1
    assert lr_factor("adascale", 400, 100, None) == 1
    assert lr_factor("adascale", 400, 100, 100.0) == pytest.approx(2 / 1.25)
    assert lr_factor("sqrt", 400, 100) == 2
    assert lr_factor("linear", 400, 100) == 4
    assert lr_factor("none", 400, 100) == 1


@given(steps=st.integers(1, 300), base_steps=st.integers(1, 300))
def test_an_epoch_moves_a_scheduler_as_often_as_the_base_batch_would(steps: int, base_steps: int) -> None:
    ticks = [scheduler_ticks(step, steps, base_steps) for step in range(steps)]

    assert sum(ticks) == base_steps
    assert max(ticks) - min(ticks) <= 1  # evenly spread
    if steps == base_steps:
        assert set(ticks) == {1}
