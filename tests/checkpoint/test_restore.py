"""What is read is what was written, or an error that names the file."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoint.test_state_tree import through_torch
from tests.checkpoint.trees import assert_same, checkpoint, stable, training_state, trees


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    state = training_state(width=1200)  # more than two chunks in a stripe
    with Snapshotter([folder / "ssd0", folder / "ssd1"]) as engine:
        engine.begin(checkpoint(*state), folder / "a.ckpt", stable(*state), b"\x00random").wait()
    return folder


@pytest.fixture
def ours(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage; the links lead into the copy."""
    shutil.copytree(saved, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy" / "a.ckpt"


@given(tree=trees())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_comes_back_from_disk_as_from_torch(tmp_path: Path, tree: dict[Any, Any]) -> None:
    with Snapshotter(buffer_bytes=2 * 2**23) as engine:
        engine.begin(tree, tmp_path / "a.ckpt", alone=True).wait()
    assert_same(restore.load(tmp_path / "a.ckpt"), through_torch(tree))


def test_large_stripes_come_back_whole(saved: Path) -> None:
    assert_same(restore.load(saved / "a.ckpt"), checkpoint(*training_state(width=1200)))


def test_meta_pt_names_its_checkpoint(saved: Path) -> None:
    assert_same(restore.load(saved / "a.ckpt" / "meta.pt"), checkpoint(*training_state(width=1200)))


def test_each_rank_finds_its_own_bytes(saved: Path) -> None:
    assert restore.load_rank_states(saved / "a.ckpt") == [b"\x00random"]


def names() -> list[str]:
    return [
        "meta.pt",
        "stripe-r00000-d00.safetensors",
        "stripe-r00000-d01.safetensors",
        "stripe-r00000-owned.safetensors",
    ]


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("name", names())
def test_one_flipped_bit_is_refused_by_the_name_of_its_file(ours: Path, name: str, where: str) -> None:
    file = (ours / name).resolve()
    data = bytearray(file.read_bytes())
    data[{"first": 0, "middle": len(data) // 2, "last": -1}[where]] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=name):
        restore.load(ours)


@pytest.mark.parametrize("name", names())
def test_a_cut_file_is_refused_by_name(ours: Path, name: str) -> None:
    file = (ours / name).resolve()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=name):
        restore.load(ours)


def test_a_drive_that_is_not_there_is_named(ours: Path) -> None:
    shutil.rmtree(ours.parent / "ssd1")
    with pytest.raises(CorruptCheckpointError, match=r"d01\.safetensors.*mounted"):
        restore.load(ours)


def test_damaged_random_states_are_refused(ours: Path) -> None:
    data = (ours / "ranks.json").read_bytes()
    (ours / "ranks.json").write_bytes(data.replace(b'"world_size": 1', b'"world_size": 2'))
    with pytest.raises(CorruptCheckpointError, match=r"ranks\.json"):
        restore.load_rank_states(ours)


def test_a_stripe_of_another_snapshot_is_refused_even_without_checksums(tmp_path: Path) -> None:
    with Snapshotter(checksum=False) as engine:
        for name in ("a", "b"):
            engine.begin({"t": torch.ones(3)}, tmp_path / f"{name}.ckpt").wait()
    stripe = "stripe-r00000-owned.safetensors"
    shutil.copy(tmp_path / "a.ckpt" / stripe, tmp_path / "b.ckpt" / stripe)
    with pytest.raises(CorruptCheckpointError, match=r"b\.ckpt.*belongs to the snapshot"):
        restore.load(tmp_path / "b.ckpt")


def test_nothing_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        restore.load(tmp_path / "never.ckpt")
    with pytest.raises(FileNotFoundError):
        restore.load_rank_states(tmp_path / "never.ckpt")


def test_objects_are_loaded_only_on_request(tmp_path: Path) -> None:
    tree = {"hyper_parameters": {"root": PurePosixPath("/data")}, "t": torch.ones(3)}
    with Snapshotter() as engine:
        engine.begin(tree, tmp_path / "a.ckpt").wait()
    with pytest.raises(CheckpointError, match=r"a\.ckpt/meta\.pt.*weights_only=False"):
        restore.load(tmp_path / "a.ckpt")
    assert_same(restore.load(tmp_path / "a.ckpt", weights_only=False), tree)


def test_map_location_moves_every_tensor(saved: Path) -> None:
    loaded = restore.load(saved / "a.ckpt", map_location="meta")
    assert all(tensor.is_meta for tensor in loaded["state_dict"].values())
    assert all(v.is_meta for state in loaded["optimizer_states"][0]["state"].values() for v in state.values())


def test_tied_weights_are_tied_again(saved: Path) -> None:
    weights = restore.load(saved / "a.ckpt")["state_dict"]
    assert weights["3.weight"].data_ptr() == weights["4.weight"].data_ptr()
