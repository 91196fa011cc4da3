from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.probe import probe_shares
from lightning_hetckpt.balance.solver import SyncModel
from lightning_hetckpt.balance.throughput import ThroughputModel, WindowStats

OPEN_END = ([1, 1], [None, None], 1)


def timed(*windows: tuple[int, float]) -> ThroughputModel:
    rank = ThroughputModel()
    for samples, seconds in windows:
        rank.observe(WindowStats(samples, seconds, 20, 0.0))
    return rank


def probe(
    ranks: Sequence[ThroughputModel],
    shares: Sequence[int],
    bounds=OPEN_END,
    error_s: float = 0.0,
    explore: bool = False,
) -> tuple[int, ...] | None:
    models = [rank.line() for rank in ranks]
    return probe_shares(ranks, models, shares, bounds, None, [error_s] * len(ranks), explore)


def test_the_slowest_gives_an_eighth_to_one_that_may_take_it_for_free() -> None:
    assert probe([timed((64, 1.0)), timed((64, 0.95))], [64, 64]) == (60, 68)
    assert probe([timed((64, 1.0)), timed((64, 0.6))], [64, 64]) == (56, 72)


def test_a_line_that_is_known_is_no_reason() -> None:
    known = [timed((64, 1.0), (32, 0.5)), timed((64, 0.97), (32, 0.485))]
    assert probe(known, [64, 64]) is None
    assert probe(known, [64, 64], explore=True) is None


def test_what_may_be_noise_is_no_reason() -> None:
    assert probe([timed((64, 1.0)), timed((64, 0.95))], [64, 64], error_s=0.02) is None


def test_equal_ranks_are_probed_for_predictions_only() -> None:
    equal = [timed((64, 1.0))] * 2
    assert probe(equal, [64, 64]) is None
    assert probe(equal, [64, 64], explore=True) == (72, 56)


@given(
    st.lists(st.tuples(st.integers(4, 100), st.floats(0.1, 1)), min_size=2, max_size=6),
    st.booleans(),
    st.integers(1, 4),
)
def test_no_share_moves_far_or_out_of_its_bounds(ranks, explore, multiple_of) -> None:
    shares = [share for share, _ in ranks]
    caps: list[int | None] = [share + 3 for share in shares]
    bounds = ([2] * len(ranks), caps, multiple_of)
    moved = probe([timed(each) for each in ranks], shares, bounds, explore=explore)
    if moved is not None:
        assert sum(moved) == sum(shares)
        for before, after in zip(shares, moved, strict=True):
            assert 2 <= after <= before + 3
            assert abs(after - before) <= max(before // 8, multiple_of)


def test_bounds_that_the_present_split_breaks_are_no_error() -> None:
    assert probe([timed((64, 1.0)), timed((64, 0.9))], [64, 64], ([1, 1], [10, 10], 1)) is None


def test_the_all_reduce_may_be_the_reason_that_nothing_can_pay() -> None:
    ranks = [timed((64, 1.0)), timed((64, 0.95))]
    models = [rank.line() for rank in ranks]
    network = SyncModel(0.5, 0.0, 30.0)  # beside 30 s of transfer nothing is gained by a few hundredths
    assert probe_shares(ranks, models, [64, 64], OPEN_END, network, [0.0, 0.0], False) is None
