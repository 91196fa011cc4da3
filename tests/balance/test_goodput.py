"""Which global batch is chosen, on problems whose best batch is known in closed form or by search."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.goodput import candidates, choose, efficiency

FIXED_S, SAMPLE_S = 0.1, 0.001


def line_s(total: int) -> float:
    return FIXED_S + SAMPLE_S * total


def test_the_choice_is_near_the_best_batch_of_a_line() -> None:
    # d/dB of B/(f + sB) · 1/(φ + B) vanishes at B² = φf/s.
    noise_scale = 900.0
    best = math.sqrt(noise_scale * FIXED_S / SAMPLE_S)

    found = choose(32, 32, noise_scale, candidates(32, 4096, 32), line_s)

    assert found is not None
    assert found.total == pytest.approx(best, rel=0.1)
    assert found.step_s == line_s(found.total)
    assert found.efficiency == pytest.approx((noise_scale + 32) / (noise_scale + found.total))


@given(
    noise_scale=st.floats(0, 1e6),
    base=st.integers(1, 100),
    present=st.integers(1, 5000),
    fixed_s=st.floats(1e-4, 1),
    sample_s=st.floats(1e-6, 1e-2),
)
def test_a_switch_gains_more_than_five_percent_and_nothing_gains_more(
    noise_scale: float, base: int, present: int, fixed_s: float, sample_s: float
) -> None:
    totals = candidates(min(base, present), 5000, present)

    def goodput(total: int) -> float:
        return total / (fixed_s + sample_s * total) * (noise_scale + base) / (noise_scale + total)

    found = choose(present, base, noise_scale, totals, lambda total: fixed_s + sample_s * total)

    best = max(goodput(total) for total in totals) / goodput(present)
    if found is None:
        assert best <= 1.05 * (1 + 1e-12)
    else:
        assert found.gain == pytest.approx(best - 1)
        assert found.gain > 0.05 * (1 - 1e-12)


def test_a_batch_far_above_the_noise_scale_is_made_smaller_again() -> None:
    found = choose(2048, 64, 50.0, candidates(64, 2048, 2048), line_s)

    assert found is not None
    assert found.total < 200


def test_pure_noise_takes_all_that_saves_time() -> None:
    found = choose(64, 64, math.inf, candidates(64, 1024, 64), line_s)

    assert found is not None
    assert (found.total, found.efficiency) == (1024, 1.0)


def test_without_a_prediction_for_the_present_step_nothing_changes() -> None:
    assert choose(64, 64, 1e6, candidates(64, 1024, 64), lambda total: None) is None


def test_batches_that_no_split_allows_are_passed_over() -> None:
    found = choose(
        64, 64, 1e6, candidates(64, 1024, 64), lambda total: line_s(total) if total <= 500 else None
    )

    assert found is not None
    assert 400 < found.total <= 500


@given(
    least=st.integers(1, 1000),
    more=st.integers(0, 5000),
    at=st.floats(0, 1),
    multiple_of=st.sampled_from([1, 8]),
)
def test_candidates_rise_within_the_bounds_and_hold_the_present_batch(
    least: int, more: int, at: float, multiple_of: int
) -> None:
    most = least + more
    present = least + int(at * more)

    found = candidates(least, most, present, multiple_of)

    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (least, most)
    assert present in found
    assert all(total % multiple_of == 0 for total in set(found) - {least, most, present})
    assert len(found) <= 53


@given(base=st.integers(1, 512), scale=st.integers(1, 64), noise_scale=st.floats(0, 1e9))
def test_a_sample_of_a_larger_batch_is_worth_no_more_and_not_too_little(
    base: int, scale: int, noise_scale: float
) -> None:
    worth = efficiency(base * scale, base, noise_scale)

    assert 1 / scale * (1 - 1e-9) <= worth <= 1
    assert efficiency(base * scale, base, math.inf) == 1
