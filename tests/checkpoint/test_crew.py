"""What the ranks agree on once, and how rank 0 takes its leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hetckpt.channel import SoloChannel
from lightning_hetckpt.checkpoint import crew
from lightning_hetckpt.checkpoint.crew import Crew
from lightning_hetckpt.checkpoint.folders import run_of
from lightning_hetckpt.errors import CheckpointError
from tests.doubles import ManualClock


class Told:
    """A channel on which rank 0 has already spoken."""

    def __init__(self, rank: int, size: int, said: list[Any]) -> None:
        self.rank, self.size, self._said = rank, size, said

    def all_gather(self, obj: Any) -> list[Any]:
        raise NotImplementedError

    def broadcast(self, obj: Any) -> Any:
        if self.rank == 0:
            self._said.append(obj)
        return self._said[0]


def crews(folder: Path, size: int) -> list[Crew]:
    store, said = dist.HashStore(), []  # type: ignore[var-annotated]
    return [
        Crew(Told(rank, size, said), folder, lambda run: None, lambda: store, timeout_s=1)
        for rank in range(size)
    ]


class Waiting(ManualClock):
    """Time that passes by sleeping; calls `after` once so many naps are over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, naps: int = -1, after: Any = None) -> None:
        super().__init__()
        self.naps, self._at, self._after = 0, naps, after
        monkeypatch.setattr(crew.time, "monotonic", self)
        monkeypatch.setattr(crew.time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self.naps += 1
        if self.naps == self._at:
            self._after()


def test_every_rank_names_the_next_save_alike_and_no_two_saves_alike(tmp_path: Path) -> None:
    ranks = crews(tmp_path, 3)
    named = [[one.next_save() for _ in range(4)] for one in ranks]
    assert named[0] == named[1] == named[2]
    assert [serial for serial, _ in named[0]] == [0, 1, 2, 3]
    ids = {snapshot_id for _, snapshot_id in named[0]} | {crews(tmp_path, 1)[0].next_save()[1]}
    assert len(ids) == 5
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in ids)
    assert {one.run for one in ranks} == {run_of(tmp_path)}


def test_rank_0_stays_until_every_rank_has_heard_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = crews(tmp_path, 3)
    for one in (first, second, third):
        one.next_save()
        one.next_save()
    second.acknowledge(1)
    third.acknowledge(0)
    waiting = Waiting(monkeypatch, naps=3, after=lambda: third.acknowledge(1))

    first.await_goodbye()

    assert waiting.naps == 3


def test_rank_0_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = crews(tmp_path, 2)
    first.next_save()
    waiting = Waiting(monkeypatch)

    first.await_goodbye()

    assert 9 < waiting.now_s < 11


def test_nobody_waits_where_there_is_nothing_to_hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = crews(tmp_path, 2)
    waiting = Waiting(monkeypatch)
    first.await_goodbye()
    second.next_save()
    second.await_goodbye()
    alone = Crew(SoloChannel(), tmp_path, lambda run: None, dist.HashStore, 1)
    alone.next_save()
    alone.await_goodbye()
    assert waiting.naps == 0


def test_what_rank_0_cannot_prepare_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def fail(run: str) -> None:
        raise PermissionError("read-only")

    said: list[Any] = []
    for rank in range(2):
        with pytest.raises(CheckpointError, match="read-only"):
            Crew(Told(rank, 2, said), tmp_path, fail, dist.HashStore, 1)
