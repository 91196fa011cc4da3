from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.retention import SnapshotInfo, retire
from lightning_hetckpt.errors import ConfigurationError


def snapshot(commit: int, step: int) -> SnapshotInfo:
    return SnapshotInfo(Path(f"step-{step}-{commit}.ckpt"), commit, step, f"{commit:016x}")


@given(steps=st.lists(st.integers(0, 100)), keep_last=st.integers(1, 10), order=st.randoms())
def test_the_newest_commits_stay_and_the_oldest_goes_first(steps: list[int], keep_last: int, order) -> None:
    by_commit = [snapshot(commit, step) for commit, step in enumerate(steps)]
    shuffled = by_commit.copy()
    order.shuffle(shuffled)
    gone = retire(shuffled, keep_last)
    assert gone == by_commit[: max(0, len(by_commit) - keep_last)]


def test_a_new_commit_of_an_older_step_outlives_the_abandoned_later_steps() -> None:
    abandoned, went_back = snapshot(commit=1, step=90), snapshot(commit=2, step=60)
    assert retire([went_back, abandoned], keep_last=1) == [abandoned]


@given(order=st.permutations([SnapshotInfo(Path(name), 1, 1, name) for name in "abcd"]))
def test_snapshots_of_one_commit_number_retire_in_one_order_on_every_rank(order: list[SnapshotInfo]) -> None:
    assert [gone.snapshot_id for gone in retire(order, 1)] == ["a", "b", "c"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_nothing_to_resume_from_is_refused(keep_last: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        retire([snapshot(1, 1)], keep_last)


def test_one_snapshot_at_or_behind_each_multiple_stays_for_good() -> None:
    listed: list[SnapshotInfo] = []
    for commit, step in enumerate(range(3, 60, 3)):
        listed.append(snapshot(commit, step))
        gone = retire(listed, 2, keep_every_n_steps=10)
        listed = [one for one in listed if one not in gone]
    assert [one.global_step for one in listed] == [12, 21, 30, 42, 51, 54, 57]


def test_training_that_went_back_keeps_a_history_of_its_own() -> None:
    steps = [10, 20, 30, 15, 20, 30, 31]
    found = [snapshot(commit, step) for commit, step in enumerate(steps)]
    assert [one.commit for one in retire(found, 1, keep_every_n_steps=10)] == [3]
