"""All ranks agree on the drives, and on what later saves have taught about them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hetckpt.channel import GroupChannel
from lightning_hetckpt.checkpoint import fleet, restore, verify
from lightning_hetckpt.checkpoint.commit import RankReport
from lightning_hetckpt.checkpoint.drive_shares import HostDrives
from lightning_hetckpt.checkpoint.drives import Found
from lightning_hetckpt.checkpoint.fleet import DELAY, Fleet
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, stripe_name
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.errors import CheckpointError

Ranks = Callable[..., list[Any]]
MB = 10**6


def two_drives(speeds: tuple[float, float] = (200e6, 200e6), disks: tuple[str, str] = ("a", "b")) -> Fleet:
    found = Found(("/a", "/b"), disks, "home", frozenset())
    return Fleet(0, [HostDrives((0,), disks, speeds)], [found], timeout_s=0.1)


def report(seconds: tuple[float, float], nbytes: int = 100 * MB) -> RankReport:
    files = [
        FileEntry(stripe_name(0, k), nbytes, CHUNK_BYTES, (), busy_s) for k, busy_s in enumerate(seconds)
    ]
    return RankReport(0, tuple(files), "plan")


def test_what_a_save_has_taught_counts_a_few_saves_later_and_not_before() -> None:
    ours = two_drives()
    before = ours.in_force(0)
    for serial in range(10):
        speeds = ours.learn([report((0.5, 2.0))])  # 200 and 50 MB/s
        ours.heard(serial, speeds)
    for serial in range(DELAY):
        assert ours.in_force(serial) == before
    first, second = ours.in_force(9 + DELAY)[0].speeds
    assert first == pytest.approx(200e6)
    assert 50e6 <= second < 70e6


def test_a_rank_that_missed_an_answer_is_right_again_with_the_next() -> None:
    ours, other = two_drives(), two_drives()
    for serial in range(8):
        speeds = ours.learn([report((0.5, 1.0))])
        ours.heard(serial, speeds)
        other.heard(serial, None if serial in (3, 4) else speeds)
    assert other.in_force(7 + DELAY) == ours.in_force(7 + DELAY)


def test_a_plan_waits_for_the_answer_it_needs_and_no_longer_than_allowed() -> None:
    ours = two_drives()
    for serial in range(2):
        ours.heard(serial, [[1e6, 2e6]])
    assert ours.in_force(DELAY)[0].speeds == (1e6, 2e6)
    late = threading.Timer(0.02, ours.heard, (2, [[3e6, 4e6]]))
    late.start()
    assert ours.in_force(DELAY + 2)[0].speeds == (3e6, 4e6)
    late.join()
    assert ours.in_force(DELAY + 3)[0].speeds == (3e6, 4e6)  # never answered: goes on with what it knows


def test_where_there_is_one_drive_nobody_learns_or_waits() -> None:
    ours = two_drives(disks=("a", "a"))
    assert ours.learn([report((0.5, 5.0))]) is None
    assert ours.in_force(100)[0].speeds == (200e6, 200e6)


def striped_by_two(rank: int, root: str) -> Any:
    """Save with a fast and a slow drive, measured differently by each rank: the ranks must still agree."""
    home = Path(root)
    fleet.find = lambda home, dirs, auto=False: Found(  # type: ignore[assignment]
        tuple(map(str, dirs)), ("fast", "slow"), "home", frozenset()
    )
    fleet.measure = lambda found, home, direct=True: (3e8, 1e8) if rank == 0 else (1e8, 9e8)  # type: ignore[assignment]
    tree = {"global_step": 1, "t": torch.arange(6_000_000.0)}
    with Snapshotter([home / "ssd0", home / "ssd1"], channel=GroupChannel()) as engine:
        engine.begin(tree, home / "a.ckpt", [tree["t"]]).wait()
        dist.barrier()
    verify.verify(home / "a.ckpt")
    return torch.equal(restore.load(home / "a.ckpt")["t"], tree["t"])


def test_two_ranks_stripe_by_the_speeds_that_one_of_them_measured(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(striped_by_two, 2, str(tmp_path)) == [True, True]

    sizes = {file.name: file.stat().st_size for file in (tmp_path / "a.ckpt").glob("stripe-*-d*.safetensors")}
    for rank in range(2):
        fast, slow = sizes[stripe_name(rank, 0)], sizes[stripe_name(rank, 1)]
        assert fast / slow == pytest.approx(3, rel=0.02)


def without_a_drive(rank: int, root: str) -> str:
    def broken(home: Path, dirs: Any, auto: bool = False) -> Found:
        raise OSError(5, "Input/output error", "/mnt/dead")

    fleet.find = broken  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        fleet.agree(GroupChannel(), Path(root), None, auto=True, direct=True, timeout_s=1.0)
    return str(caught.value)


def test_a_host_whose_drives_cannot_be_used_stops_every_rank_with_one_error(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    first, second = run_ranks(without_a_drive, 2, str(tmp_path))
    assert first == second
    assert "rank 0: [Errno 5] Input/output error: '/mnt/dead'" in first
