from __future__ import annotations

import logging
import os
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_hetckpt.checkpoint import publish
from lightning_hetckpt.checkpoint.folders import run_of, write_owner
from lightning_hetckpt.checkpoint.layout import (
    BLOCK_BYTES,
    HIDDEN_PREFIX,
    MANIFEST_NAME,
    PARTIAL_NAME,
    new_id,
    run_file,
    stripe_name,
)
from lightning_hetckpt.checkpoint.publish import newest_whole, read_manifest, remove_tree, scan, sweep, verify
from lightning_hetckpt.errors import CheckpointError
from tests.checkpoint.disk_saves import build, open_build, open_drive, save

HOW = ["exchange", "two steps"]
STRIPE = stripe_name(0, 0)


@pytest.fixture(params=HOW)
def how(request, monkeypatch) -> str:
    """Both ways to replace a checkpoint: the kernel's exchange, and without it."""
    if request.param == "two steps":
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    return request.param


def commits(folder: Path) -> list[int]:
    return [info.commit for info in scan(folder)]


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {run_file(folder).name}


def stripes(*drives: Path) -> list[Path]:
    return [path for drive in drives for path in drive.rglob("stripe-*")]


def no_log(line: str) -> None:
    raise AssertionError(f"unexpected: {line}")


# --- publish ---


def test_publishing_over_a_checkpoint_leaves_the_new_one_alone_on_every_drive(tmp_path, how) -> None:
    drives = [tmp_path / "drive0", tmp_path / "drive1"]
    for commit in (1, 2, 3):
        path = save(tmp_path / "snapshots" / "last.ckpt", commit, drives)
        verify(path)
        assert read_manifest(path).commit == commit
        assert visible(path.parent) == {"last.ckpt"}
        assert len(stripes(*drives)) == 2


def test_a_published_checkpoint_is_no_longer_partial(tmp_path) -> None:
    save(tmp_path / "a.ckpt", drives=[tmp_path / "drive"])
    assert not list((tmp_path / "drive").rglob(PARTIAL_NAME))


def a_stock_file(path: Path) -> None:
    path.write_bytes(b"stock")


def a_link(path: Path) -> None:
    path.symlink_to(save(path.parent / "other.ckpt"))


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "gone.ckpt")


def a_damaged_one(path: Path) -> None:
    os.truncate(save(path) / MANIFEST_NAME, 10)


@pytest.mark.parametrize("make", [a_stock_file, a_link, a_dangling_link, a_damaged_one, Path.mkdir])
def test_publishing_replaces_a_file_a_link_a_damaged_checkpoint_or_an_empty_folder(
    tmp_path, how, make
) -> None:
    make(tmp_path / "last.ckpt")
    others = visible(tmp_path)
    path = save(tmp_path / "last.ckpt", commit=2)
    assert not path.is_symlink()
    assert read_manifest(path).commit == 2
    assert visible(tmp_path) == others
    if "other.ckpt" in others:
        verify(tmp_path / "other.ckpt")


def test_publishing_over_a_folder_of_the_users_is_refused_and_nothing_moves(tmp_path, how) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    folder = build(tmp_path / "data")
    with pytest.raises(CheckpointError, match="other files than a checkpoint's"):
        publish.publish(folder, tmp_path / "data")
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years of work"
    verify(folder)


def test_a_build_without_a_manifest_cannot_be_published(tmp_path) -> None:
    folder = open_build(tmp_path / "a.ckpt", new_id())
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        publish.publish(folder, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_without_exchange_a_failed_second_rename_puts_the_old_checkpoint_back(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    path = save(tmp_path / "last.ckpt", commit=1)
    folder, real = build(path, commit=2), os.replace

    def failing(source, target):
        if (source, target) == (folder, path):
            raise OSError(5, "Input/output error")
        return real(source, target)

    monkeypatch.setattr(publish.os, "replace", failing)
    with pytest.raises(OSError, match="Input/output error"):
        publish.publish(folder, path)
    assert read_manifest(path).commit == 1
    verify(path)


def test_a_scan_between_the_two_renames_finishes_them_and_the_publisher_goes_on(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    path = save(tmp_path / "last.ckpt", commit=1)
    folder, real, seen = build(path, commit=2), os.replace, []

    def scanning(source, target):
        real(source, target)
        if source == path:
            monkeypatch.setattr(publish.os, "replace", real)
            seen.extend(commits(tmp_path))

    monkeypatch.setattr(publish.os, "replace", scanning)
    publish.publish(folder, path)
    assert seen == [2]
    assert commits(tmp_path) == [2]
    assert visible(tmp_path) == {"last.ckpt"}


def test_a_replaced_checkpoint_that_cannot_be_removed_fails_no_save(tmp_path, monkeypatch, caplog) -> None:
    path = save(tmp_path / "last.ckpt", commit=1)
    folder = build(path, commit=2)

    def failing(path, *_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(publish, "remove_tree", failing)
    with caplog.at_level(logging.WARNING, logger="lightning_hetckpt"):
        publish.publish(folder, path)
    assert read_manifest(path).commit == 2
    assert "Operation not permitted" in caplog.text
    monkeypatch.undo()
    assert commits(tmp_path) == [2]
    sweep(tmp_path, [], run_of(tmp_path))
    assert visible(tmp_path) == {"last.ckpt"}


# --- A death between any two changes of the disk ---


class Death(BaseException):
    """The process is gone: nothing after it happens any more, no clean-up either."""


CHANGES = (
    "replace", "unlink", "rmdir", "mkdir", "symlink", "link", "truncate", "ftruncate", "pwrite", "fdatasync", "fsync"
)  # fmt: skip


class DeathAt:
    """Lets `changes` changes of the disk happen; every later one meets a dead process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
        self.left = changes
        self.happened = False
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name)))
        monkeypatch.setattr(publish, "_exchange", self._mortal(publish._exchange))

    def _mortal(self, change: Callable) -> Callable:
        def call(*args, **kwargs):
            if self.left == 0:
                self.happened = True
                raise Death
            self.left -= 1
            return change(*args, **kwargs)

        return call


def lives(tmp_path: Path, start: Callable[[Path], None], end: Callable[[Path], None], monkeypatch):
    """Yields the folder after each possible death inside `end`, and at last after none."""
    for changes in range(200):
        folder = tmp_path / str(changes)
        folder.mkdir()
        start(folder)
        with monkeypatch.context() as patch:
            death = DeathAt(patch, changes)
            try:
                end(folder)
            except Death:
                pass
        yield folder, death.happened
        if not death.happened:
            return
    raise AssertionError("it never ended")


def drives_of(folder: Path) -> list[Path]:
    return [folder / "drive0", folder / "drive1"]


def test_a_save_over_a_path_killed_anywhere_leaves_the_old_or_the_new_one_whole(
    tmp_path, how, monkeypatch
) -> None:
    seen = []

    def start(folder: Path) -> None:
        save(folder / "snapshots" / "last.ckpt", 1, drives_of(folder))

    def end(folder: Path) -> None:
        save(folder / "snapshots" / "last.ckpt", 2, drives_of(folder))

    for folder, died in lives(tmp_path, start, end, monkeypatch):
        snapshots, drives = folder / "snapshots", drives_of(folder)
        newest = newest_whole(snapshots, verify_hashes=True, log=no_log)
        assert newest == snapshots / "last.ckpt"
        seen.append(read_manifest(newest).commit)
        assert died or seen[-1] == 2
        sweep(snapshots, drives, run_of(snapshots))
        assert newest_whole(snapshots, verify_hashes=True, log=no_log) == newest
        assert read_manifest(newest).commit == seen[-1]
        assert visible(snapshots) == {"last.ckpt"}
        assert len(stripes(*drives)) == 2
        assert not list(folder.rglob(PARTIAL_NAME))
        assert sweep(snapshots, drives, run_of(snapshots)) == []
    assert seen == sorted(seen)
    assert {1, 2} == set(seen)


def test_a_first_save_killed_anywhere_leaves_it_whole_or_nothing(tmp_path, monkeypatch) -> None:
    for folder, died in lives(
        tmp_path,
        lambda folder: None,
        lambda folder: save(folder / "snapshots" / "a.ckpt", 1, drives_of(folder)) and None,
        monkeypatch,
    ):
        snapshots, drives = folder / "snapshots", drives_of(folder)
        newest = newest_whole(snapshots, verify_hashes=True, log=no_log)
        assert died or newest is not None
        sweep(snapshots, drives, run_of(snapshots))
        assert len(stripes(*drives)) == (2 if newest else 0)
        assert visible(snapshots) == ({"a.ckpt"} if newest else set())


def test_a_removal_killed_anywhere_shows_no_half_checkpoint_and_a_sweep_ends_it(
    tmp_path, monkeypatch
) -> None:
    def start(folder: Path) -> None:
        save(folder / "snapshots" / "a.ckpt", 1, drives_of(folder))
        save(folder / "snapshots" / "b.ckpt", 2, drives_of(folder))

    for folder, _ in lives(
        tmp_path, start, lambda folder: remove_tree(folder / "snapshots" / "a.ckpt"), monkeypatch
    ):
        snapshots, drives = folder / "snapshots", drives_of(folder)
        for info in scan(snapshots):
            verify(info.path)
        sweep(snapshots, drives, run_of(snapshots))
        left = {"a.ckpt", "b.ckpt"} if (snapshots / "a.ckpt").exists() else {"b.ckpt"}
        assert visible(snapshots) == left
        assert len(stripes(*drives)) == 2 * len(left)


@pytest.mark.parametrize("way", HOW)
def test_a_process_killed_at_random_moments_always_leaves_a_whole_last_checkpoint(tmp_path, way) -> None:
    moments = random.Random(0)
    snapshots, drives = tmp_path / "snapshots", drives_of(tmp_path)
    newest_commit = 0
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.disk_saves", str(tmp_path), way],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        with child:
            assert child.stdout is not None
            printed = [child.stdout.readline() for _ in range(moments.randrange(1, 4))]
            select.select([], [], [], moments.uniform(0, 0.06))  # a random moment, not a wait for anything
            child.kill()
            printed += child.stdout.read().splitlines()
        finished = int(printed[-1])
        newest = newest_whole(snapshots, verify_hashes=True, log=no_log)
        assert newest == snapshots / "last.ckpt"
        commit = read_manifest(newest).commit
        assert commit in (finished, finished + 1)
        assert commit > newest_commit
        newest_commit = commit
        sweep(snapshots, drives, run_of(snapshots))
        assert visible(snapshots) == {"last.ckpt"}
        assert len(stripes(*drives)) == 2


# --- scan and newest_whole ---


def test_the_newest_is_the_one_that_was_committed_last_whatever_its_name_or_time(tmp_path) -> None:
    for commit, name in ((3, "step=10.ckpt"), (1, "step=90.ckpt"), (2, "step=99.ckpt")):
        save(tmp_path / name, commit)
    assert [(info.commit, info.path.name, info.global_step) for info in scan(tmp_path)] == [
        (3, "step=10.ckpt", 30),
        (2, "step=99.ckpt", 20),
        (1, "step=90.ckpt", 10),
    ]
    assert newest_whole(tmp_path, verify_hashes=True, log=no_log) == tmp_path / "step=10.ckpt"


def test_a_folder_that_is_missing_or_a_file_holds_no_checkpoint(tmp_path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file", tmp_path):
        assert scan(folder) == []
        assert newest_whole(folder, verify_hashes=True, log=no_log) is None


def test_scanning_ignores_what_is_not_ours_links_and_saves_that_are_under_way(tmp_path) -> None:
    path = save(tmp_path / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to(path)
    (tmp_path / "stock.ckpt").write_bytes(b"stock")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").touch()
    under_way = build(tmp_path / "b.ckpt", 2)
    before = sorted(tmp_path.rglob("*"))
    assert [info.path for info in scan(tmp_path, no_log)] == [path]
    assert sorted(tmp_path.rglob("*")) == before
    publish.publish(under_way, tmp_path / "b.ckpt")
    assert commits(tmp_path) == [2, 1]


def damage_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST_NAME, 100)


def cut_stripe(path: Path) -> None:
    os.truncate(path / STRIPE, 10)


def flip_byte(path: Path) -> None:
    with (path / STRIPE).open("r+b") as file:
        file.seek(BLOCK_BYTES)  # behind the header, which says whose it is
        byte = file.read(1)[0]
        file.seek(BLOCK_BYTES)
        file.write(bytes([byte ^ 1]))


def lose_stripe(path: Path) -> None:
    (path / STRIPE).unlink()


@pytest.mark.parametrize("harm", [damage_manifest, cut_stripe, flip_byte, lose_stripe])
def test_a_damaged_newest_one_is_passed_over_for_the_one_before_and_the_log_says_why(tmp_path, harm) -> None:
    for commit in (1, 2):
        save(tmp_path / f"step={commit}.ckpt", commit)
    harm(tmp_path / "step=2.ckpt")
    lines: list[str] = []
    assert newest_whole(tmp_path, verify_hashes=True, log=lines.append) == tmp_path / "step=1.ckpt"
    (line,) = lines
    assert line.startswith("passed over")
    assert str(tmp_path / "step=2.ckpt") in line
    harm(tmp_path / "step=1.ckpt")
    assert newest_whole(tmp_path, verify_hashes=True, log=lines.append) is None


def test_without_hashes_a_flipped_byte_is_not_looked_for(tmp_path) -> None:
    flip_byte(save(tmp_path / "a.ckpt"))
    assert newest_whole(tmp_path, verify_hashes=False, log=no_log) == tmp_path / "a.ckpt"


def test_a_sealed_build_whose_old_checkpoint_is_out_of_the_way_is_found_also_in_a_moved_folder(
    tmp_path,
) -> None:
    path = tmp_path / "here" / "last.ckpt"
    folder = build(path, commit=2, drives=[tmp_path / "drive"])
    write_owner(folder, read_manifest(folder).snapshot_id, path)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert (
        newest_whole(tmp_path / "there", verify_hashes=True, log=no_log) == tmp_path / "there" / "last.ckpt"
    )


def test_a_replaced_checkpoint_never_comes_back_when_its_successor_is_deleted(
    tmp_path, how, monkeypatch
) -> None:
    path = tmp_path / "last.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(publish, "remove_tree", lambda *_: None)  # killed before it could remove it
        for commit in (1, 2, 3):
            save(path, commit)
    shutil.rmtree(path)
    assert scan(tmp_path) == []
    sweep(tmp_path, [], run_of(tmp_path))
    assert visible(tmp_path) == set()


# --- sweep ---


def test_sweeping_takes_saves_that_never_committed_and_nothing_else(tmp_path) -> None:
    snapshots, drives = tmp_path / "snapshots", drives_of(tmp_path)
    kept = save(snapshots / "a.ckpt", 1, drives)
    run, foreign_run = run_of(snapshots), new_id()
    foreign = open_drive(drives[0], foreign_run, new_id(), tmp_path / "elsewhere" / "x.ckpt")
    elsewhere = open_drive(drives[0], run, new_id(), tmp_path / "x.ckpt")
    (snapshots / "notes.txt").touch()
    before = {path for path in tmp_path.rglob("*") if elsewhere not in (path, path.parent)}
    unlinked = open_drive(drives[1], run, new_id(), snapshots / "b.ckpt")
    (unlinked / "stripe-r00000-d01.safetensors").write_bytes(b"half")
    sealed = build(snapshots / "b.ckpt", 2, drives)
    begun = open_build(snapshots / "c.ckpt", new_id())
    (snapshots / f"{HIDDEN_PREFIX}{new_id()}.tmp").touch()
    removed = sweep(snapshots, drives, run)
    assert {elsewhere, unlinked, sealed, begun} <= set(removed)
    assert set(tmp_path.rglob("*")) == before
    assert foreign.exists()
    verify(kept)
    assert sweep(snapshots, drives, run) == []


@pytest.mark.parametrize("asked", ["snapshots", "elsewhere", "moved"])
def test_sweeping_keeps_the_stripes_of_a_committed_checkpoint_that_still_say_partial(tmp_path, asked) -> None:
    drive, snapshots = tmp_path / "drive", tmp_path / "snapshots"
    path = save(snapshots / "a.ckpt", 1, [drive])
    run = run_of(snapshots)
    (stripe,) = stripes(drive)
    (stripe.parent / PARTIAL_NAME).touch()
    if asked == "moved":
        path = snapshots.rename(tmp_path / "moved") / "a.ckpt"
    assert sweep(tmp_path / asked, [drive], run) == []
    verify(path)
    assert (stripe.parent / PARTIAL_NAME).exists() is (asked == "elsewhere")


def test_sweeping_never_follows_a_link_among_the_drive_folders(tmp_path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / PARTIAL_NAME).write_text("precious")
    snapshots = tmp_path / "snapshots"
    committed = read_manifest(save(snapshots / "a.ckpt")).snapshot_id
    run = run_of(snapshots)
    root = tmp_path / "drive" / "lightning_hetckpt" / run
    root.mkdir(parents=True)
    for name in (new_id(), committed):
        (root / name).symlink_to(tmp_path / "home")
    assert sweep(snapshots, [tmp_path / "drive"], run) == []
    assert (tmp_path / "home" / PARTIAL_NAME).read_text() == "precious"


def test_a_leftover_that_cannot_be_removed_is_named_and_stops_no_start(tmp_path, monkeypatch, caplog) -> None:
    stuck, free = open_build(tmp_path / "a.ckpt", "0" * 16), open_build(tmp_path / "b.ckpt", "1" * 16)
    real = publish.remove_tree

    def failing(path: Path) -> None:
        if path == stuck:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path)

    monkeypatch.setattr(publish, "remove_tree", failing)
    with caplog.at_level(logging.WARNING, logger="lightning_hetckpt"):
        assert sweep(tmp_path, [], new_id()) == [free]
    assert str(stuck) in caplog.text
