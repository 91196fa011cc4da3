"""The noise scale against draws of which the truth is known, and against the theory of their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_hetckpt.balance.noise_scale import NoiseAverages, estimate, noise_parts, ratio

Numbers = NDArray[np.float64]
DIMENSIONS = 40
DRAWS = 60_000

SPLITS = [
    (16, 16),
    (24, 8),
    (5, 4, 3),
    (8, 8, 8, 8),
    (64, 32, 16, 8),
    (20, 1, 1, 1, 9),
    (16, 12, 10, 8, 8, 6, 3, 1),
]


def draw(samples: Sequence[int], seed: int) -> tuple[list[Numbers], Numbers, Numbers, Numbers]:
    """`DRAWS` steps of ranks with normal gradients: all |g_i|², all |g|², the true G and the spread of a sample."""
    generator = np.random.default_rng(seed)
    mean = generator.normal(size=DIMENSIONS) / math.sqrt(DIMENSIONS)
    spread = np.exp(
        generator.normal(size=DIMENSIONS)
    )  # standard deviations, so trΣ is the sum of their squares
    whole = np.zeros((DRAWS, DIMENSIONS))
    squares = []
    for own in samples:
        gradient = mean + spread / math.sqrt(own) * generator.normal(size=(DRAWS, DIMENSIONS))
        whole += own / sum(samples) * gradient
        squares.append(np.square(gradient).sum(axis=1))
    return squares, np.square(whole).sum(axis=1), mean, spread


def estimates(samples: Sequence[int], squares: list[Numbers], whole: Numbers) -> tuple[Numbers, Numbers]:
    parts = [
        noise_parts(own, square, whole, sum(samples), len(samples))
        for own, square in zip(samples, squares, strict=True)
    ]
    return sum(noise for noise, _ in parts), sum(signal for _, signal in parts)


@pytest.mark.parametrize("samples", SPLITS, ids=str)
def test_estimates_are_unbiased_and_spread_as_the_theory_says(samples: tuple[int, ...]) -> None:
    squares, whole, mean, spread = draw(samples, seed=len(samples) + samples[0])
    total, ranks = sum(samples), len(samples)
    trace, trace_of_square = np.sum(spread**2), np.sum(spread**4)

    noise, signal = estimates(samples, squares, whole)

    noise_variance = 2 * trace_of_square / (ranks - 1)
    signal_variance = 4 * np.sum(mean**2 * spread**2) / total + 2 * trace_of_square / total**2 * ranks / (
        ranks - 1
    )
    # Five standard errors of a mean of that many draws.
    assert noise.mean() == pytest.approx(trace, abs=5 * math.sqrt(noise_variance / DRAWS))
    assert signal.mean() == pytest.approx(mean @ mean, abs=5 * math.sqrt(signal_variance / DRAWS))
    assert noise.var() == pytest.approx(noise_variance, rel=0.03)
    assert signal.var() == pytest.approx(signal_variance, rel=0.03)


@pytest.mark.parametrize("samples", [(24, 8), (64, 32, 16, 8)], ids=str)
@pytest.mark.parametrize("name", ["uniform", "by samples", "released"])
def test_no_other_weighing_of_the_local_estimates_spreads_less(samples: tuple[int, ...], name: str) -> None:
    squares, whole, _, _ = draw(samples, seed=11)
    own, total = np.array(samples), sum(samples)
    ours_noise, ours_signal = estimates(samples, squares, whole)
    # The local estimators of AdaptDL and Cannikin, and the ways to combine them (cannikin.md §1.6).
    local_noise = np.stack(
        [b * total / (total - b) * (s - whole) for b, s in zip(samples, squares, strict=True)]
    )
    local_signal = np.stack(
        [(total * whole - b * s) / (total - b) for b, s in zip(samples, squares, strict=True)]
    )
    if name == "released":
        weights = _released(own, total)
    else:
        weights = np.full(len(own), 1 / len(own)) if name == "uniform" else own / total
        weights = np.stack([weights, weights])

    # Normal draws vary in their variance by sqrt(2/N).
    slack = 1 + 4 * math.sqrt(2 / DRAWS)
    assert ours_signal.var() <= slack * (weights[0] @ local_signal).var()
    assert ours_noise.var() <= slack * (weights[1] @ local_noise).var()


def _released(own: NDArray[np.int64], total: int) -> Numbers:
    """The weights in the authors' code (chengyinie/hetero_adaptdl)."""
    i, j = own[:, None], own[None, :]
    signal = (total**2 - i**2 - j**2) / (total * (total - i) * (total - j))
    noise = i * j * (total - i - j) / ((total - i) * (total - j))
    np.fill_diagonal(signal, (total + 2 * own) / (total**2 - total * own))
    np.fill_diagonal(noise, total * own / (total - own))
    raw = np.stack([np.linalg.solve(matrix, np.ones(len(own))) for matrix in (signal, noise)])
    return raw / raw.sum(axis=1, keepdims=True)


@given(
    samples=st.lists(st.integers(1, 64), min_size=2, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_noise_is_the_spread_of_the_local_gradients_around_their_mean(
    samples: list[int], seed: int
) -> None:
    gradients = np.random.default_rng(seed).normal(size=(len(samples), 6))
    own = np.array(samples)
    whole = own @ gradients / own.sum()

    found = estimate(samples, np.square(gradients).sum(axis=1).tolist(), float(whole @ whole))

    assert found is not None
    around = own @ np.square(gradients - whole).sum(axis=1) / (len(own) - 1)
    assert found[0] == pytest.approx(around, rel=1e-9)
    assert found[1] == pytest.approx(whole @ whole - around / own.sum(), rel=1e-9, abs=1e-9)


def test_one_rank_alone_has_no_estimate() -> None:
    assert estimate([8], [1.0], 1.0) is None


def test_the_averages_find_the_noise_scale_of_a_long_run() -> None:
    samples = (12, 4)
    squares, whole, mean, spread = draw(samples, seed=5)
    noise, signal = estimates(samples, squares, whole)
    averages = NoiseAverages()

    for one in zip(noise[:20_000].tolist(), signal[:20_000].tolist(), strict=True):
        averages.add(*one)

    truth = float(np.sum(spread**2) / (mean @ mean))
    assert averages.noise_scale == pytest.approx(truth, rel=0.35)  # two ranks: one degree of freedom a step
    assert averages.cautious is not None
    assert averages.noise_scale is not None
    assert averages.cautious < averages.noise_scale


def test_a_ratio_of_averages_is_taken_and_not_an_average_of_ratios() -> None:
    averages = NoiseAverages()
    averages.add(1.0, 0.1)
    averages.add(1.0, 1.9)

    assert averages.noise_scale == pytest.approx(1.0, rel=2e-3)  # the ratios are 10 and 0.53


def test_old_steps_fade_by_the_samples_that_came_since() -> None:
    small, large = NoiseAverages(), NoiseAverages()
    for averages in (small, large):
        averages.add(100.0, 1.0)
    for _ in range(4000):
        small.add(1.0, 1.0)
    for _ in range(1000):
        large.add(1.0, 1.0, steps=4.0)

    assert small.noise_scale == pytest.approx(1.0, rel=2e-3)
    assert large.noise_scale == pytest.approx(1.0, rel=8e-3)
    assert small.steps == pytest.approx(2000, rel=0.1)


def test_a_step_that_overflowed_is_left_out() -> None:
    averages = NoiseAverages()
    averages.add(2.0, 1.0)
    averages.add(math.inf, 1.0)
    averages.add(math.nan, math.nan)

    assert averages.noise_scale == 2.0


def test_before_the_first_step_nothing_is_claimed() -> None:
    averages = NoiseAverages()
    assert (averages.noise_scale, averages.cautious) == (None, None)

    averages.add(1.0, 1.0)
    assert averages.noise_scale == 1.0
    assert averages.cautious is None  # of one step the spread is not known


def test_caution_never_says_more_than_the_plain_ratio_even_where_the_signal_drowns() -> None:
    averages = NoiseAverages()
    for signal in (-1.0, 1.0) * 50:
        averages.add(4.0, signal - 0.01)

    assert averages.noise_scale == math.inf
    assert averages.cautious is not None
    assert 0 < averages.cautious < 100


@pytest.mark.parametrize(
    ("noise", "signal", "expected"), [(3, 2, 1.5), (3, -1, math.inf), (0, 0, 0), (-1e-9, 1, 0)]
)
def test_the_ratio_is_never_negative(noise: float, signal: float, expected: float) -> None:
    assert ratio(noise, signal) == expected


def test_saved_averages_go_on_as_if_never_saved() -> None:
    kept, loaded = NoiseAverages(), NoiseAverages()
    kept.add(3.0, 1.0)
    kept.add(2.0, 0.5, 3.0)
    loaded.load_state_dict(kept.state_dict())
    for averages in (kept, loaded):
        averages.add(1.0, 1.0)

    assert loaded.state_dict() == kept.state_dict()
