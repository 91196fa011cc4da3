"""What torch.distributed.checkpoint saves through us, it and everybody else reads back, however it is sharded then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.dcp import StripedStorageReader, StripedStorageWriter
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.verify import read_manifest, verify
from tests.checkpoint.trees import DTYPES, assert_same, bits, checkpoint, stable, training_state

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """Nested dictionaries and lists of tensors and objects, as models and optimizers have them."""
    made: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([one for one in DTYPES if one is not torch.float8_e8m0fnu]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        raw = torch.randint(
            256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
        if draw(st.booleans()):
            tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
        made[f"t{number}"] = tensor
    return {
        "model": made,
        "list": [{"lr": 0.5, "betas": (0.9, 0.99)}, torch.ones(2)],
        "step": 7,
        "none": None,
    }


@given(state=states(), drives=st.integers(0, 2))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_process_gets_back_what_it_saved(tmp_path: Path, state: dict[str, Any], drives: int) -> None:
    dirs = [tmp_path / f"ssd{i}" for i in range(drives)] or None
    dcp.save(state, storage_writer=StripedStorageWriter(tmp_path / "a.ckpt", dirs))
    verify(tmp_path / "a.ckpt")
    found: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
        "list": [{"lr": 0, "betas": ()}, torch.zeros(2)],
        "step": 0,
        "none": 1,
    }
    dcp.load(found, storage_reader=StripedStorageReader(tmp_path / "a.ckpt"))
    assert {name: bits(t) for name, t in found["model"].items()} == {
        name: bits(t) for name, t in state["model"].items()
    }
    assert torch.equal(found["list"][1], torch.ones(2))
    assert (found["list"][0], found["step"], found["none"]) == (state["list"][0], 7, None)
    alone = restore.load(tmp_path / "a.ckpt")
    assert {name: bits(t) for name, t in alone["model"].items()} == {
        name: bits(t) for name, t in state["model"].items()
    }


def test_a_checkpoint_of_the_snapshotter_is_read_through_dcp(tmp_path: Path) -> None:
    parts = training_state()
    with Snapshotter([tmp_path / "ssd0", tmp_path / "ssd1"]) as engine:
        engine.begin(checkpoint(*parts), tmp_path / "a.ckpt", stable(*parts)).wait()
    truth = checkpoint(*parts)
    found = {"state_dict": {name: torch.zeros_like(t) for name, t in truth["state_dict"].items()}}
    found["optimizer_states"] = [{"state": {0: {"exp_avg": torch.zeros(16, 8)}}}]  # type: ignore[assignment]
    dcp.load(found, storage_reader=StripedStorageReader(tmp_path / "a.ckpt"))
    assert_same(found["state_dict"], dict(truth["state_dict"]))
    first = truth["optimizer_states"][0]["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], first)  # type: ignore[index]


NAMES = {
    "plain": (7, 3),
    "long": (2000, 5),
    "rows": (9, 4),
    "columns": (6, 8),
    "same": (5, 2),
    "both": (8, 8),
}


def truth_of(name: str) -> torch.Tensor:
    shape = NAMES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + len(name)


def sharded(how: dict[str, Any], fill: bool) -> dict[str, Any]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {}
    for name in NAMES:
        tensor = truth_of(name) if fill else torch.full(NAMES[name], -1.0, dtype=torch.float64)
        state[name] = distribute_tensor(tensor, mesh, [how[name]]) if name in how else tensor
    return {"model": state, "step": 3 if fill else 0}


SAVED_AS = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "both": Shard(0)}
LAYOUTS = [
    {},
    {"rows": Shard(1), "columns": Shard(0), "plain": Shard(0), "long": Shard(0)},
    {"rows": Shard(0), "columns": Shard(1), "both": Shard(1), "same": Shard(0), "long": Shard(1)},
]


def save_sharded(rank: int, path: str, dirs: list[str] | None) -> None:
    dcp.save(sharded(SAVED_AS, fill=True), storage_writer=StripedStorageWriter(path, dirs))


def load_sharded(rank: int, path: str, stock: bool) -> bool:
    for layout in LAYOUTS:
        state = sharded(layout, fill=False)
        if stock:
            del state["step"]
        dcp.load(
            state, storage_reader=HuggingFaceStorageReader(path) if stock else StripedStorageReader(path)
        )
        for name, found in state["model"].items():
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(whole, truth_of(name)), name
        assert stock or state["step"] == 3
    return True


@pytest.mark.parametrize(("world", "drives", "later"), [(2, 0, 3), (3, 2, 1), (4, 1, 2)])
def test_shards_come_back_whole_and_sharded_anew(
    run_ranks: Ranks, tmp_path: Path, world: int, drives: int, later: int
) -> None:
    path = tmp_path / "a.ckpt"
    dirs = [str(tmp_path / f"ssd{i}") for i in range(drives)] or None
    run_ranks(save_sharded, world, str(path), dirs)
    verify(path)
    alone = restore.load(path)
    assert all(torch.equal(alone["model"][name], truth_of(name)) for name in NAMES)
    assert alone["step"] == 3
    assert all(run_ranks(load_sharded, later, str(path), False))
    assert all(run_ranks(load_sharded, later, str(path), True))  # the stock reader, over the same files


def test_what_all_ranks_hold_is_divided_over_them(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(save_sharded, 4, str(tmp_path / "a.ckpt"), None)
    pieces = read_manifest(tmp_path / "a.ckpt").tensors["model.long"].pieces
    rows = [piece.rows for piece in pieces]
    assert len(rows) == 4
    assert max(rows) - min(rows) < 20


def save_async(rank: int, path: str) -> None:
    state = sharded(SAVED_AS, fill=True)
    dcp.async_save(state, storage_writer=StripedStorageWriter(path)).result()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_asynchronous_save_is_the_same(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(save_async, 2, str(tmp_path / "a.ckpt"))
    assert all(run_ranks(load_sharded, 2, str(tmp_path / "a.ckpt"), False))


def save_own_keys(rank: int, path: str) -> None:
    dcp.save(
        {f"own{rank}": torch.full((3,), rank), "all": torch.ones(4)},
        checkpoint_id=path,
        storage_writer=StripedStorageWriter(),
    )


def test_keys_of_single_ranks_are_kept(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(save_own_keys, 2, str(tmp_path / "a.ckpt"))
    found = restore.load(tmp_path / "a.ckpt")
    assert sorted(found) == ["all", "own0", "own1"]
    assert torch.equal(found["own1"], torch.full((3,), 1))


def fail_on_rank_1(rank: int, path: str) -> str:
    class Broken(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                raise OSError("no space left")
            return super().resolve_data(write_item)

    try:
        dcp.save(sharded(SAVED_AS, fill=True), storage_writer=StripedStorageWriter(path), planner=Broken())
    except BaseException as error:  # noqa: BLE001 (CheckpointException is no Exception)
        return str(error)
    return ""


def test_a_rank_that_fails_leaves_the_old_checkpoint(run_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(save_sharded, 2, str(path), None)
    before = read_manifest(path).snapshot_id
    assert all("no space left" in told for told in run_ranks(fail_on_rank_1, 2, str(path)))
    verify(path)
    assert read_manifest(path).snapshot_id == before


def test_a_later_save_replaces_and_counts_on(tmp_path: Path) -> None:
    writer = StripedStorageWriter(tmp_path / "a.ckpt")
    for value in (1, 2):
        dcp.save({"t": torch.full((3,), value)}, storage_writer=writer)
    assert torch.equal(restore.load(tmp_path / "a.ckpt")["t"], torch.full((3,), 2))
    assert read_manifest(tmp_path / "a.ckpt").commit == 2
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["a.ckpt"]


def test_plan_caching_is_refused_by_name(tmp_path: Path) -> None:
    def save() -> None:
        dcp.save(
            {"t": torch.ones(3)},
            storage_writer=StripedStorageWriter(tmp_path / "a.ckpt"),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )

    save()  # the first plan is whole
    with pytest.raises(BaseException, match="enable_plan_caching=False"):
        save()


def test_a_missing_key_and_a_wrong_shape_are_told(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(3)}, storage_writer=StripedStorageWriter(tmp_path / "a.ckpt"))
    for state, text in (({"u": torch.ones(3)}, "Missing key.*u"), ({"t": torch.ones(4)}, "Size mismatch.*t")):
        with pytest.raises(BaseException, match=text):
            dcp.load(state, storage_reader=StripedStorageReader(tmp_path / "a.ckpt"))
