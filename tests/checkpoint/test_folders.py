from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_hetckpt.checkpoint.folders import (
    drive_folders,
    remove_tree,
    run_of,
)
from lightning_hetckpt.checkpoint.layout import (
    DRIVE_FOLDER,
    HIDDEN_PREFIX,
    MANIFEST_NAME,
    META_NAME,
    drive_folder,
    new_id,
    run_file,
)
from lightning_hetckpt.checkpoint.verify import read_manifest, verify
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.disk_saves import build, save


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_run_id_is_made_up_once_per_folder_and_differs_between_folders(tmp_path) -> None:
    first, second = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    assert first == run_of(tmp_path / "a")
    assert first != second


@pytest.mark.parametrize("forged", ["", "../../../../etc", "0" * 15, "0" * 16 + "\n"])
def test_a_run_id_that_is_no_plain_id_is_refused(tmp_path, forged) -> None:
    run_file(tmp_path).write_text(forged)
    with pytest.raises(CorruptCheckpointError, match="expected 16 hexadecimal digits"):
        run_of(tmp_path)


def test_removing_takes_the_stripes_on_every_drive_along_and_nothing_else(tmp_path) -> None:
    drives = [tmp_path / "drive0", tmp_path / "drive1"]
    keep = save(tmp_path / "keep.ckpt", drives=drives)
    before = everything(tmp_path)
    remove_tree(save(tmp_path / "old.ckpt", drives=drives))
    assert everything(tmp_path) == before
    verify(keep)


def test_removing_what_is_not_there_does_nothing(tmp_path) -> None:
    remove_tree(tmp_path / "missing.ckpt")


def test_a_plain_file_is_unlinked_and_a_link_without_what_it_leads_to(tmp_path) -> None:
    whole = save(tmp_path / "a.ckpt")
    (tmp_path / "stock.ckpt").write_bytes(b"stock")
    (tmp_path / "last.ckpt").symlink_to(whole)
    for name in ("stock.ckpt", "last.ckpt"):
        remove_tree(tmp_path / name)
        assert not os.path.lexists(tmp_path / name)
    verify(whole)


def test_a_folder_of_the_users_is_refused_and_untouched(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    (tmp_path / "data" / MANIFEST_NAME).write_text('{"name": "a web page"}')
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match="other files than ours"):
        remove_tree(tmp_path / "data")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_a_damaged_checkpoint_can_be_removed(tmp_path, harm) -> None:
    path = save(tmp_path / "a.ckpt")
    if harm == "cut":
        os.truncate(path / MANIFEST_NAME, 50)
    else:
        (path / MANIFEST_NAME).unlink()
    remove_tree(path)
    assert not path.exists()


def test_forged_links_delete_nothing_outside_this_snapshots_own_folders(tmp_path) -> None:
    path = save(tmp_path / "forged.ckpt")
    snapshot_id = read_manifest(path).snapshot_id
    victims = [
        tmp_path / "home" / "photo.jpg",  # no folder of ours
        tmp_path / "drive" / DRIVE_FOLDER / "run" / new_id() / "stripe",  # another snapshot's
        tmp_path / "home" / snapshot_id / "file",  # named like it, not in our folder
        tmp_path / "drive" / DRIVE_FOLDER / "run" / snapshot_id / "deeper" / "file",
    ]
    for number, victim in enumerate(victims):
        victim.parent.mkdir(parents=True, exist_ok=True)
        victim.write_bytes(b"precious")
        (path / f"link{number}").symlink_to(victim)
    # A link in the middle of a good-looking way, and a way that climbs out of it again.
    run = tmp_path / "other" / DRIVE_FOLDER / "run"
    run.mkdir(parents=True)
    (run / snapshot_id).symlink_to(tmp_path / "home")
    (path / "through").symlink_to(run / snapshot_id / "photo.jpg")
    (path / "climbing").symlink_to(run / snapshot_id / ".." / "home" / "photo.jpg")
    assert drive_folders(path) == set()
    remove_tree(path)
    assert not path.exists()
    assert [victim.read_bytes() for victim in victims] == [b"precious"] * len(victims)


def test_a_link_inside_a_drive_folder_is_removed_and_not_followed(tmp_path) -> None:
    path = save(tmp_path / "a.ckpt", drives=[tmp_path / "drive"])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "photo.jpg").write_bytes(b"precious")
    (folder,) = drive_folders(path)
    (folder / "trap").symlink_to(tmp_path / "home")
    remove_tree(path)
    assert not folder.exists()
    assert (tmp_path / "home" / "photo.jpg").read_bytes() == b"precious"


def test_removing_a_copy_leaves_the_stripes_that_the_original_links_to(tmp_path) -> None:
    path = save(tmp_path / "a.ckpt", drives=[tmp_path / "drive"])
    shutil.copytree(path, tmp_path / "copy.ckpt", symlinks=True)
    remove_tree(tmp_path / "copy.ckpt")
    verify(path)
    remove_tree(path)
    assert not list((tmp_path / "drive").rglob("stripe*"))


def test_a_checkpoint_that_was_moved_takes_its_stripes_along_when_it_is_removed(tmp_path) -> None:
    save(tmp_path / "a.ckpt", drives=[tmp_path / "drive"]).rename(tmp_path / "best.ckpt")
    verify(tmp_path / "best.ckpt")
    remove_tree(tmp_path / "best.ckpt")
    assert not list((tmp_path / "drive").rglob("stripe*"))


def test_a_build_without_a_manifest_takes_its_linked_stripes_along(tmp_path) -> None:
    folder = build(tmp_path / "a.ckpt", drives=[tmp_path / "drive"])
    (folder / MANIFEST_NAME).unlink()
    (folder / META_NAME).unlink()
    assert drive_folders(folder) == {
        drive_folder(tmp_path / "drive", run_of(tmp_path), folder.name.removeprefix(HIDDEN_PREFIX))
    }
    remove_tree(folder)
    assert not list((tmp_path / "drive").rglob("stripe*"))
