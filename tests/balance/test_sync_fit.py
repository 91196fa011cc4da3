from __future__ import annotations

import json
import random
import statistics

import pytest

from lightning_hetckpt.balance.sync_fit import SyncFit
from lightning_hetckpt.balance.throughput import WindowStats


def seen(
    overlap: float = 0.3, hidden_s: float = 0.2, tail_s: float = 0.05, spread: float = 0.0, count: int = 10
) -> WindowStats:
    return WindowStats(32, 0.5, count, 0.5 * spread, 0.3, overlap * 0.3, hidden_s, tail_s)


def taught(*exchanges: list[WindowStats]) -> SyncFit:
    fit = SyncFit()
    for windows in exchanges:
        fit.observe(windows)
    return fit


def numbers(fit: SyncFit) -> tuple[float, float, float]:
    model = fit.model()
    assert model is not None
    return model.overlap_from, model.hidden_s, model.tail_s


def test_nothing_is_known_until_all_three_numbers_were_seen() -> None:
    assert SyncFit().model() is None
    assert taught([WindowStats(32, 0.5, 10)]).model() is None
    assert taught([WindowStats(32, 0.5, 10, None, 0.3, 0.1, 0.2)]).model() is None
    in_parts = taught(
        [WindowStats(32, 0.5, 10, None, 0.3, 0.09, 0.2)], [WindowStats(32, 0.5, 10, tail_s=0.1)]
    )
    assert numbers(in_parts) == pytest.approx((0.3, 0.2, 0.1))


def test_only_the_rank_that_is_ready_last_sees_the_transfer_and_no_waiting() -> None:
    fit = taught(
        [seen(hidden_s=0.9, tail_s=0.05), seen(hidden_s=0.2, tail_s=0.4), seen(hidden_s=0.5, tail_s=0.1)]
    )
    assert numbers(fit) == pytest.approx((0.3, 0.2, 0.05))


def test_a_shorter_transfer_is_believed_at_once_and_a_longer_one_slowly() -> None:
    fit = taught([seen(hidden_s=0.5)], [seen(hidden_s=0.2)])
    assert fit.model().hidden_s == 0.2
    fit.observe([seen(hidden_s=0.4)])
    assert 0.2 < fit.model().hidden_s < 0.25
    for _ in range(30):
        fit.observe([seen(hidden_s=0.4)])
    assert fit.model().hidden_s == pytest.approx(0.4, rel=0.05)


def test_the_overlap_is_the_mean_by_inverse_variance() -> None:
    # Relative errors of 10 % and 20 % of 0.3 and 0.6, and a floor of 1 % each.
    fit = taught([seen(0.3, spread=0.1), seen(0.6, spread=0.2)])
    variances = [0.3**2 * (0.01 + 0.0001), 0.6**2 * (0.04 + 0.0001)]
    expected = (0.3 / variances[0] + 0.6 / variances[1]) / (1 / variances[0] + 1 / variances[1])
    assert fit.model().overlap_from == pytest.approx(expected)


def test_many_ranks_and_windows_together_know_the_overlap_better_than_one() -> None:
    dice = random.Random(0)

    def noisy() -> WindowStats:
        return seen(0.3 * dice.gauss(1, 0.2 / 10**0.5), spread=0.2)

    alone = [taught([noisy()]).model().overlap_from for _ in range(200)]
    together = [taught([noisy() for _ in range(8)]).model().overlap_from for _ in range(200)]
    assert statistics.stdev(together) == pytest.approx(statistics.stdev(alone) / 8**0.5, rel=0.2)
    assert statistics.fmean(together) == pytest.approx(0.3, rel=0.02)
    followed = taught(*[[noisy()] for _ in range(60)]).model().overlap_from
    assert followed == pytest.approx(0.3, rel=0.06)


@pytest.mark.parametrize(
    "window",
    [
        WindowStats(32, 0.5, 10, 0.0, 0.0, 0.1),  # no backward pass
        WindowStats(32, 0.5, 10, 0.0, 0.3, 0.4),  # a first bucket after the last one
        WindowStats(32, 0.5, 10, 0.0, 0.3, 0.09, -1.0, -1.0),
        WindowStats(32, 0.5, 10, 0.0, 0.3, 0.09, float("inf"), float("nan")),
        WindowStats(32, -0.5, 10, 0.0, 0.3, 0.1, 0.0, 0.0),
    ],
)
def test_what_cannot_be_is_left_out(window) -> None:
    assert numbers(taught([seen()], [window])) == pytest.approx((0.3, 0.2, 0.05))


def test_what_was_learnt_survives_json() -> None:
    for fit in (SyncFit(), taught([seen()], [seen(0.4)])):
        copy = SyncFit()
        copy.load_state_dict(json.loads(json.dumps(fit.state_dict())))
        assert copy.model() == fit.model()
        copy.observe([seen(0.5)])
        fit.observe([seen(0.5)])
        assert copy.model() == fit.model()
