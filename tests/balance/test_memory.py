from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_hetckpt.balance.memory import MemoryLine, MemoryLines, MemoryStats

GIB = 2**30


@given(
    fixed=st.integers(0, 40 * GIB),
    per_sample=st.integers(2**20, GIB),
    sizes=st.lists(st.integers(1, 200), min_size=2, max_size=6, unique=True),
    limit=st.integers(GIB, 200 * GIB),
)
def test_a_true_line_is_found_from_two_sizes_and_the_cap_leaves_room(
    fixed: int, per_sample: int, sizes: list[int], limit: int
) -> None:
    line = MemoryLine()
    for size in sizes:
        line.observe(MemoryStats(size, fixed + per_sample * size, limit))
    cap = line.cap()
    assert cap is not None
    foreseen = (0.92 * limit - fixed) / per_sample
    ran = max((size for size in sizes if fixed + per_sample * size <= limit), default=1)
    # A slope below a hundredth of the mean is not believed, so the cap may be lower than the truth there.
    assume(per_sample > 0.01 * (fixed / max(sizes) + per_sample))
    assert cap == pytest.approx(max(1, ran, foreseen), abs=1.001, rel=1e-6)


@given(fixed=st.integers(0, 40 * GIB), per_sample=st.integers(1, GIB), size=st.integers(1, 200))
def test_from_one_size_more_is_foreseen_than_any_line_through_it_needs(
    fixed: int, per_sample: int, size: int
) -> None:
    line = MemoryLine()
    line.observe(MemoryStats(size, fixed + per_sample * size, 1))
    for more in (size + 1, 2 * size, 10 * size):
        foreseen = line.bytes_for(more)
        assert foreseen is not None
        assert foreseen >= (fixed + per_sample * more) * (1 - 1e-9)


@given(peaks=st.dictionaries(st.integers(1, 64), st.integers(1, 8 * GIB), min_size=1, max_size=8))
def test_no_peak_that_was_seen_lies_above_the_line_and_what_ran_is_never_cut(peaks: dict[int, int]) -> None:
    line = MemoryLine()
    for size, peak in peaks.items():
        line.observe(MemoryStats(size, peak, 8 * GIB))
    for size, peak in peaks.items():
        foreseen, cap = line.bytes_for(size), line.cap()
        assert foreseen is not None
        assert cap is not None
        assert foreseen >= peak * (1 - 1e-9)
        assert cap >= size


def test_a_limit_that_shrinks_lowers_the_cap_below_what_once_ran() -> None:
    line = MemoryLine()
    line.observe(MemoryStats(10, 6 * GIB, 16 * GIB))
    line.observe(MemoryStats(20, 10 * GIB, 16 * GIB))
    assert line.cap() == 31  # 2 GiB + 0.4 GiB per sample within 14.72 GiB
    line.observe(MemoryStats(20, 10 * GIB, 8 * GIB))
    assert line.cap() == 13


def test_nothing_is_known_before_the_first_window_nor_from_one_that_cannot_be_true() -> None:
    line = MemoryLine()
    line.observe(MemoryStats(0, GIB, GIB))
    line.observe(MemoryStats(4, 0, GIB))
    assert line.cap() is None
    assert line.bytes_for(4) is None


def test_what_was_learnt_survives_as_json() -> None:
    lines, again = MemoryLines(2), MemoryLines(2)
    lines.observe([MemoryStats(8, GIB, 2 * GIB), None])
    again.load_state_dict(json.loads(json.dumps(lines.state_dict())))
    assert again.caps() == lines.caps() == [14, None]
