"""A stripe is written over only when nobody can have to do with it any more, and a crash in between costs nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_hetckpt.checkpoint import publish, restore, spares
from lightning_hetckpt.checkpoint.direct_io import DirectFile
from lightning_hetckpt.checkpoint.folders import run_of
from lightning_hetckpt.checkpoint.layout import SPARE_NAME, stripe_name
from lightning_hetckpt.checkpoint.publish import newest_whole, read_manifest, remove_tree, sweep, verify
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.spares import Spares, is_free, take
from lightning_hetckpt.checkpoint.stripe_header import header_bytes
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.disk_saves import save, stripe_bytes
from tests.checkpoint.test_publish import drives_of, lives, no_log, stripes, visible

STRIPE = stripe_name(0, 0)

pytestmark = pytest.mark.skipif(
    not hasattr(__import__("fcntl"), "F_SETLEASE"), reason="only Linux tells who has a file open"
)


def a_stripe(folder: Path, nbytes: int = 20_000) -> Path:
    folder.mkdir(parents=True)
    (folder / STRIPE).write_bytes(stripe_bytes("0" * 16, nbytes))
    return folder / STRIPE


def inode(path: Path) -> int:
    return path.stat().st_ino


# --- One file ---


def test_a_spare_becomes_the_next_file_of_its_name_and_is_taken_once(tmp_path: Path) -> None:
    old = a_stripe(tmp_path / "old")
    number, kept = inode(old), Spares()
    assert kept.keep(old)
    assert not old.exists()
    (tmp_path / "new").mkdir()
    assert not take(tmp_path / "new" / "other name")
    assert take(tmp_path / "new" / STRIPE)
    assert inode(tmp_path / "new" / STRIPE) == number
    assert not take(tmp_path / "new" / STRIPE)


def test_of_one_name_two_are_kept_and_clearing_gives_their_room_back(tmp_path: Path) -> None:
    kept = Spares()
    assert [kept.keep(a_stripe(tmp_path / str(n))) for n in range(3)] == [True, True, False]
    assert (tmp_path / "2" / STRIPE).exists()
    kept.clear()
    assert not (tmp_path / SPARE_NAME).exists()


def a_hard_link(path: Path) -> contextlib.AbstractContextManager:
    os.link(path, path.with_name("copy"))
    return contextlib.nullcontext()


def a_reader(path: Path) -> contextlib.AbstractContextManager:
    return path.open("rb")


@contextlib.contextmanager
def a_mapping(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with mapped:
        yield


def a_symbolic_link(path: Path) -> contextlib.AbstractContextManager:
    path.rename(path.with_name("target"))
    path.symlink_to("target")
    return contextlib.nullcontext()


def a_pipe(path: Path) -> contextlib.AbstractContextManager:
    path.unlink()
    os.mkfifo(path)
    return contextlib.nullcontext()


def nothing(path: Path) -> contextlib.AbstractContextManager:
    path.unlink()
    return contextlib.nullcontext()


@pytest.mark.parametrize("use", [a_hard_link, a_reader, a_mapping, a_symbolic_link, a_pipe, nothing])
def test_a_file_that_somebody_else_has_to_do_with_is_not_free(tmp_path: Path, use: Callable) -> None:
    stripe = a_stripe(tmp_path / "old")
    assert is_free(stripe)
    with use(stripe):
        assert not is_free(stripe)
        assert not Spares().keep(stripe)


@pytest.mark.parametrize("use", [a_hard_link, a_reader, a_mapping])
def test_a_spare_that_somebody_got_hold_of_is_left_to_him(tmp_path: Path, use: Callable) -> None:
    stripe = a_stripe(tmp_path / "old")
    before, kept = stripe.read_bytes(), Spares()
    assert kept.keep(stripe)
    (spare,) = (tmp_path / SPARE_NAME).iterdir()
    (tmp_path / "new").mkdir()
    with use(spare):
        assert not take(tmp_path / "new" / STRIPE)
        assert not (tmp_path / "new" / STRIPE).exists()
        copy = tmp_path / SPARE_NAME / "copy"
        assert not copy.exists() or copy.read_bytes() == before


def test_a_reused_file_is_no_stripe_before_its_first_new_byte(tmp_path: Path) -> None:
    stripe = a_stripe(tmp_path / "old")
    header_bytes(stripe.read_bytes(), stripe)
    DirectFile(stripe, 20_000, True, reuse=True).abort()
    with pytest.raises(CorruptCheckpointError):
        header_bytes(stripe.read_bytes(), stripe)
    assert stripe.stat().st_size == 20_000  # the room stays


def test_a_name_is_durable_before_the_first_byte_is_written_over(tmp_path: Path, monkeypatch) -> None:
    path, events = tmp_path / "s" / "last.ckpt", []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(*args):
            what = args[1] if name == "replace" else Path(f"/proc/self/fd/{args[0]}").readlink()
            retires = str(what).endswith("retired.json")
            events.append(("retired" if retires else name, what if name == "fsync" else what.name))
            return real(*args)

        monkeypatch.setattr(os, name, call)

    for name in ("replace", "fsync", "pwrite", "fdatasync"):
        spy(name)
    kept = Spares()
    for commit in (1, 2):
        save(path, commit, spares=kept)
    # The manifest of the first goes, durably, before its stripe is put aside …
    names = [event[0] for event in events]
    retired = names.index("retired")
    assert names[retired + 1] == "fsync"
    assert events[retired + 2] == ("replace", f"{STRIPE}.0")
    events.clear()
    save(path, 3, spares=kept)
    # … and its new name is durable before the first byte; once more it is not flushed.
    ours = events[events.index(("replace", STRIPE)) :]
    build = ours[1][1]
    assert [ours[1][0], *(event for event in ours[2:5])] == [
        "fsync", ("pwrite", STRIPE), ("pwrite", STRIPE), ("fdatasync", STRIPE)
    ]  # fmt: skip
    assert build.parent == tmp_path / "s"
    assert ours.count(("fdatasync", STRIPE)) == 1


# --- Whole checkpoints ---


@pytest.mark.parametrize("way", ["exchange", "two steps"])
@pytest.mark.parametrize("on_drives", [True, False])
def test_a_save_that_writes_over_old_stripes_killed_anywhere_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, on_drives: bool
) -> None:
    if way == "two steps":
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    seen = []
    kept = Spares()

    def where(folder: Path) -> list[Path]:
        return drives_of(folder) if on_drives else []

    def start(folder: Path) -> None:
        for commit in (1, 2):
            save(folder / "s" / "last.ckpt", commit, where(folder), 9000, kept)
        assert [path.name for path in folder.rglob(SPARE_NAME)]

    def end(folder: Path) -> None:  # writes over the first, and puts the second aside
        save(folder / "s" / "last.ckpt", 3, where(folder), 7000, kept)

    for folder, died in lives(tmp_path, start, end, monkeypatch):
        snapshots, drives = folder / "s", where(folder)
        newest = newest_whole(snapshots, verify_hashes=True, log=no_log)
        assert newest == snapshots / "last.ckpt"
        seen.append(read_manifest(newest).commit)
        assert died or seen[-1] == 3
        sweep(snapshots, drives, run_of(snapshots))
        assert newest_whole(snapshots, verify_hashes=True, log=no_log) == newest
        assert visible(snapshots) == {"last.ckpt"}
        assert len(stripes(folder)) == len({path.resolve() for path in stripes(folder)}) + len(drives)
        assert not list(folder.rglob(SPARE_NAME))
        assert sweep(snapshots, drives, run_of(snapshots)) == []
    assert seen == sorted(seen)
    assert {2, 3} == set(seen)


def test_a_removal_that_keeps_stripes_killed_anywhere_leaves_the_others_whole_and_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(folder: Path) -> None:
        for commit, name in enumerate("ab", 1):
            save(folder / "s" / f"{name}.ckpt", commit, drives_of(folder))

    kept = Spares()

    def end(folder: Path) -> None:
        remove_tree(folder / "s" / "a.ckpt", None, kept)

    for folder, _ in lives(tmp_path, start, end, monkeypatch):
        snapshots, drives = folder / "s", drives_of(folder)
        verify(snapshots / "b.ckpt")
        sweep(snapshots, drives, run_of(snapshots))
        left = {"a.ckpt", "b.ckpt"} if (snapshots / "a.ckpt").exists() else {"b.ckpt"}
        for name in left:
            verify(snapshots / name)
        assert visible(snapshots) == left
        assert len(stripes(*drives)) == 2 * len(left)


@pytest.mark.parametrize("copy", ["hard links", "symbolic links", "symbolic links elsewhere"])
@pytest.mark.parametrize("on_drives", [True, False])
def test_a_copy_made_of_links_never_shows_the_bytes_of_another_checkpoint(
    tmp_path: Path, copy: str, on_drives: bool
) -> None:
    drives = drives_of(tmp_path) if on_drives else []
    path, kept = tmp_path / "s" / "last.ckpt", Spares()
    save(path, 1, drives, 9000, kept)
    target = tmp_path / ("elsewhere" if "elsewhere" in copy else "s") / "copy.ckpt"
    target.mkdir(parents=True)
    for child in path.iterdir():
        if copy == "hard links":
            os.link(child.resolve(), target / child.name)
        elif child.name.startswith("stripe"):
            (target / child.name).symlink_to(child.resolve())
        else:
            shutil.copy2(child, target / child.name)
    for commit in range(2, 6):
        save(path, commit, drives, 9000, kept)
        verify(path)
    if copy == "hard links" or (on_drives and "elsewhere" not in copy):
        verify(target)
        assert read_manifest(target).commit == 1
    else:  # gone, as after any removal; nothing else has come in their place
        with pytest.raises(CheckpointError):
            verify(target)


# --- The whole engine ---


def state(step: int, rows: int = 3000) -> tuple[dict, list[torch.Tensor]]:
    tensor = torch.arange(float(4 * rows)).reshape(rows, 4) * step
    return {"global_step": step, "t": tensor, "buffer": torch.full((5,), float(step))}, [tensor]


def generations(*folders: Path) -> int:
    """How many stripes with the first stripe's name there are, spare ones too, whatever they are called."""
    found = [path for folder in folders for path in folder.rglob(f"{STRIPE}*") if not path.is_symlink()]
    return len({(path.stat().st_dev, path.stat().st_ino) for path in found})


@pytest.mark.parametrize("dirs", [0, 2])
def test_snapshots_write_over_retired_ones_and_never_take_more_room_than_two_more_than_are_kept(
    tmp_path: Path, dirs: int
) -> None:
    drives = [tmp_path / f"ssd{n}" for n in range(dirs)] or None
    most, reused = 0, 0
    inodes: set[int] = set()
    with Snapshotter(drives) as engine:
        for step in range(1, 9):
            tree, stable = state(step)
            path = tmp_path / "s" / f"step={step}.ckpt"
            engine.begin(tree, path, stable).wait()
            most = max(most, generations(tmp_path))
            number = inode(path / STRIPE)
            reused += number in inodes
            inodes.add(number)
            engine.retire(path.parent, keep_last=2)
            if step % 2:
                engine.wait()
            assert torch.equal(restore.load(path)["t"], tree["t"])
            verify(path)
    assert most <= 4
    assert reused >= 4
    assert sorted(path.name for path in (tmp_path / "s").glob("*.ckpt")) == ["step=7.ckpt", "step=8.ckpt"]
    for step in (7, 8):
        verify(tmp_path / "s" / f"step={step}.ckpt")
    assert not list(tmp_path.rglob(SPARE_NAME))
    assert generations(tmp_path) == 2


def test_stripes_of_another_length_are_written_over_and_hold_the_new_bytes_alone(tmp_path: Path) -> None:
    with Snapshotter() as engine:
        for step, rows in enumerate([3000, 10, 700_000, 3000, 1, 20_000], 1):
            tree, stable = state(step, rows)
            engine.begin(tree, tmp_path / "last.ckpt", stable).wait()
            engine.wait()
            verify(tmp_path / "last.ckpt")
            assert torch.equal(restore.load(tmp_path / "last.ckpt")["t"], tree["t"])


def puts_aside(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    kept: list[Path] = []
    real = Spares.keep

    def keep(self: Spares, stripe: Path) -> bool:
        kept.append(stripe)
        return real(self, stripe)

    monkeypatch.setattr(spares.Spares, "keep", keep)
    return kept


def test_without_hashes_nothing_is_ever_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = puts_aside(monkeypatch)
    with Snapshotter(checksum=False) as engine:
        for step in range(3):
            engine.begin(*_at(tmp_path / "last.ckpt", *state(step))).wait()
    assert kept == []


def test_the_checkpoint_that_was_resumed_from_and_the_newest_one_are_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Snapshotter() as engine:
        engine.begin(*_at(tmp_path / "step=1.ckpt", *state(1))).wait()
    kept = puts_aside(monkeypatch)
    with Snapshotter() as engine:
        engine.resumed_from(tmp_path / "step=1.ckpt")
        for step in (2, 3):
            engine.begin(*_at(tmp_path / f"step={step}.ckpt", *state(step))).wait()
        engine.remove(tmp_path / "step=1.ckpt")
        engine.remove(tmp_path / "step=3.ckpt")
        engine.wait()
        assert kept == []
        assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=2.ckpt"]
    verify(tmp_path / "step=2.ckpt")


def test_spares_go_with_the_process_also_where_nobody_closes_anything(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, os\n"
        "from lightning_hetckpt.checkpoint.spares import Spares\n"
        "kept = Spares()\n"
        "assert kept.keep(pathlib.Path(sys.argv[1]))\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "os.wait()\n"
        "assert pathlib.Path(sys.argv[2]).exists()\n"
    )
    stripe = a_stripe(tmp_path / "old")
    subprocess.run(
        [sys.executable, "-c", script, str(stripe), str(tmp_path / SPARE_NAME)],
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert not (tmp_path / SPARE_NAME).exists()


def test_what_a_killed_run_had_put_aside_goes_at_the_next_start(tmp_path: Path) -> None:
    drives = [tmp_path / "ssd"]
    folder = tmp_path / "s"
    kept = Spares()
    for commit in (1, 2):
        save(folder / "last.ckpt", commit, drives, spares=kept)
    assert len(list(tmp_path.rglob(SPARE_NAME))) == 1
    with Snapshotter(drives) as engine:
        engine.begin(*_at(folder / "next.ckpt", *state(1))).wait()
        assert not list(tmp_path.rglob(SPARE_NAME))
    verify(folder / "last.ckpt")


def _at(path: Path, tree: dict, stable: list) -> tuple[dict, Path, list]:
    return tree, path, stable
