"""What a save cost is told as it was measured, each figure in its unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hetckpt.checkpoint.figures import Figures
from lightning_hetckpt.checkpoint.layout import build_folder, drive_folder, drive_of
from lightning_hetckpt.checkpoint.manifest import FileEntry
from tests.doubles import ManualClock


def entry(name: str, nbytes: int, write_s: float) -> FileEntry:
    return FileEntry(name, nbytes, 8, (), write_s)


def test_times_count_from_the_moment_it_was_made() -> None:
    clock = ManualClock()
    clock.advance(5)
    figures = Figures({"wait_ms": 3.0}, clock)
    clock.advance(0.25)

    figures.mark("begin_ms")
    clock.advance(1)
    figures.mark("durable_ms")

    assert figures.as_dict() == {"wait_ms": 3.0, "begin_ms": 250.0, "durable_ms": 1250.0, "fence_ms": 0.0}


def test_a_drive_that_two_ranks_share_is_as_fast_as_what_both_wrote_in_the_longer_of_their_times() -> None:
    a, b = (drive_folder(Path(drive), "f" * 16, "0" * 16) for drive in ("/mnt/a", "/mnt/b"))
    figures = Figures()

    figures.wrote(
        [entry("0", 10**9, 2.0), entry("1", 2 * 10**9, 3.0), entry("2", 10**9, 10.0), entry("meta.pt", 7, 1)],
        {"0": a, "1": a, "2": b},
    )

    assert figures.as_dict()["gb_per_s"] == {"/mnt/a": 1.0, "/mnt/b": 0.1}
    assert figures.get("nbytes") == 4 * 10**9 + 7
    assert figures.get("bytes_per_day") is None  # nobody said how often this happens


def test_bytes_per_day_are_those_of_one_save_in_every_period() -> None:
    figures = Figures({"period_s": 60.0})

    figures.wrote([entry("0", 10**9, 2.0)], {})

    assert figures.get("bytes_per_day") == pytest.approx(1440 * 10**9)


def test_loggers_get_one_number_under_each_name() -> None:
    figures = Figures({"period_s": 60.0})
    figures.wrote([entry("0", 10**9, 2.0)], {"0": build_folder(Path("/runs/a.ckpt"), "0" * 16)})

    assert figures.flat("hetckpt") == {
        "hetckpt/period_s": 60.0,
        "hetckpt/fence_ms": 0.0,
        "hetckpt/nbytes": 1e9,
        "hetckpt/gb_per_s/runs": 0.5,
        "hetckpt/bytes_per_day": 1440e9,
    }
    assert figures.get("gb_per_s") is None  # one per drive is no single number


def test_the_drive_of_a_folder_is_what_it_was_made_of() -> None:
    assert drive_of(drive_folder(Path("/mnt/a"), "f" * 16, "0" * 16)) == Path("/mnt/a")
    assert drive_of(build_folder(Path("/runs/a.ckpt"), "0" * 16)) == Path("/runs")
