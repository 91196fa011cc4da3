"""The ranks of a job read every byte once between them, wherever it lies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetckpt.channel import present_channel
from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.together import SharedReader, group_broadcast
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoint.trees import assert_same, checkpoint, stable, training_state

Ranks = Callable[..., list[Any]]
WIDTH = 900


def state() -> dict[str, Any]:
    return checkpoint(*training_state(width=WIDTH))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    parts = training_state(width=WIDTH)
    with Snapshotter([tmp_path / f"ssd{i}" for i in range(3)]) as engine:
        engine.begin(checkpoint(*parts), tmp_path / "a.ckpt", stable(*parts), b"random").wait()
    return tmp_path / "a.ckpt"


def shared(path: str, **options: Any) -> SharedReader:
    return SharedReader(Path(path), present_channel(), group_broadcast(), **options)


def load_together(rank: int, paths: list[str]) -> tuple[int, int, list[bytes]]:
    reader = shared(paths[rank], buffer_bytes=2**25)
    assert_same(restore.load(Path(paths[rank]), reader=reader), state())
    files = [entry for name, entry in reader.manifest.files.items() if name != "ranks.json"]
    read = reader.bytes_read
    return read, sum(entry.nbytes for entry in files), restore.load_rank_states(reader.folder, reader)


@pytest.mark.parametrize("world", [2, 4])
def test_each_byte_is_read_by_one_rank(run_ranks: Ranks, saved: Path, world: int) -> None:
    told = run_ranks(load_together, world, [str(saved)] * world)
    read, whole = [one[0] for one in told], told[0][1]
    assert sum(read) == whole
    assert max(read) - min(read) <= 2 * 2**23
    assert all(one[2] == [b"random"] for one in told)


def test_a_node_without_the_folder_gets_everything_from_the_others(run_ranks: Ranks, saved: Path) -> None:
    told = run_ranks(load_together, 2, [str(saved.parent / "elsewhere.ckpt"), str(saved)])
    assert told[0][0] == 0
    assert told[1][0] == told[1][1]


def test_stripes_on_the_drives_of_several_nodes_come_together(run_ranks: Ranks, saved: Path) -> None:
    root = saved.parent
    for node, lacks in enumerate(["ssd1", "ssd2"]):
        shutil.copytree(root, root / f"node{node}", symlinks=True, ignore=shutil.ignore_patterns("node*"))
        shutil.rmtree(root / f"node{node}" / lacks)
    paths = [str(root / f"node{node}" / "a.ckpt") for node in range(2)]
    told = run_ranks(load_together, 2, paths)
    assert sum(one[0] for one in told) == told[0][1]


def refuse_together(rank: int, paths: list[str]) -> tuple[str, str]:
    try:
        restore.load(Path(paths[rank]), reader=shared(paths[rank]))
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_damage_that_one_rank_reads_is_refused_by_all(run_ranks: Ranks, saved: Path) -> None:
    file = max(saved.glob("*.safetensors"), key=lambda one: one.stat().st_size).resolve()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told = run_ranks(refuse_together, 3, [str(saved)] * 3)
    assert {kind for kind, _ in told} == {CorruptCheckpointError.__name__}
    assert all(file.name in text for _, text in told)


def test_a_stripe_that_no_rank_can_see_is_named_by_all(run_ranks: Ranks, saved: Path) -> None:
    shutil.rmtree(saved.parent / "ssd1")
    told = run_ranks(refuse_together, 2, [str(saved)] * 2)
    assert all(kind == "CorruptCheckpointError" and "-d01" in text for kind, text in told)


def test_nothing_anywhere_is_not_found_by_all(run_ranks: Ranks, tmp_path: Path) -> None:
    told = run_ranks(refuse_together, 2, [str(tmp_path / "x.ckpt")] * 2)
    assert {kind for kind, _ in told} == {CheckpointNotFoundError.__name__}


def test_two_snapshots_by_one_name_are_not_mixed(run_ranks: Ranks, tmp_path: Path) -> None:
    paths = []
    for node in range(2):
        with Snapshotter() as engine:
            engine.begin({"t": torch.full((3,), node)}, tmp_path / f"node{node}" / "a.ckpt").wait()
        paths.append(str(tmp_path / f"node{node}" / "a.ckpt"))
    told = run_ranks(refuse_together, 2, paths)
    assert all("different snapshots" in text for _, text in told)


def want_different_parts(rank: int, path: str) -> bool:
    truth = state()
    reader = shared(path)

    def destination(place: Any, shape: Any, dtype: Any) -> Any:
        skipped = (rank == 0) == (place[0] == "state_dict")
        return torch.empty(shape, dtype=dtype, device="meta") if skipped else None

    loaded = restore.load(Path(path), destination=destination, reader=reader)
    kept = "optimizer_states" if rank == 0 else "state_dict"
    assert_same(loaded[kept], truth[kept])
    return True


def test_ranks_may_want_different_parts(run_ranks: Ranks, saved: Path) -> None:
    assert run_ranks(want_different_parts, 2, str(saved)) == [True, True]
