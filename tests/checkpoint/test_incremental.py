"""Incremental and differential checkpoints load as full ones would, write what changed, and each stands alone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from lightning_hetckpt.channel import GroupChannel
from lightning_hetckpt.checkpoint import restore, verify
from lightning_hetckpt.checkpoint.consolidate import consolidate
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.together import SharedReader, group_broadcast
from lightning_hetckpt.errors import CheckpointError
from tests.checkpoint.trees import assert_same

KINDS = ["incremental", "differential"]


def tree_of(tensors: dict[str, Tensor], step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": dict(tensors), "note": "x" * step}


def copied(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "state_dict": {name: tensor.clone() for name, tensor in tree["state_dict"].items()}}


def odd_tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "big": torch.randn(3000, 1000),
        "double": torch.randn(500, 77, dtype=torch.float64),
        "half": torch.randn(300_000).bfloat16(),
        "complex": torch.randn(1000, 40, dtype=torch.complex64),
        "flags": torch.rand(70_000) > 0.5,
        "step": torch.tensor(1.0),
        "nothing": torch.empty(0, 3),
        "turned": torch.randn(400, 300).T,
        "float8": torch.randn(5000).to(torch.float8_e4m3fn),
    }


def edit(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    """Change single numbers, ranges, whole tensors, or nothing."""
    for name, tensor in tensors.items():
        choice = int(torch.randint(0, 4, (), generator=generator))
        if not tensor.numel() or choice == 0:
            continue
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        elif tensor.dtype is torch.float8_e4m3fn:
            tensor.view(torch.uint8)[int(torch.randint(0, 5000, (), generator=generator))] ^= 1
        elif choice == 1 or not tensor.dim():
            tensor.add_(1)
        else:
            row = int(torch.randint(0, len(tensor), (), generator=generator))
            tensor[row : row + (1 if choice == 2 else 1000)] += 1
        assert name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drives", [0, 2])
def test_every_checkpoint_of_a_chain_loads_as_it_was_saved(tmp_path: Path, kind: Any, drives: int) -> None:
    tensors, generator = odd_tensors(), torch.Generator().manual_seed(1)
    folders = [tmp_path / f"drive{n}" for n in range(drives)] or None
    truths = []
    with Snapshotter(drives=folders, save=kind, full_every=5) as engine:
        for step in range(8):
            tree = tree_of(tensors, step)
            truths.append(copied(tree))
            engine.begin(tree, tmp_path / f"{step}.ckpt", list(tensors.values())).wait()
            edit(tensors, generator)
    kinds = []
    for step, truth in enumerate(truths):
        verify.verify(tmp_path / f"{step}.ckpt")
        assert_same(restore.load(tmp_path / f"{step}.ckpt"), truth)
        kinds.append(verify.read_manifest(tmp_path / f"{step}.ckpt").kind)
    assert kinds == ["full", *[kind] * 4, "full", *[kind] * 2]


@pytest.mark.parametrize("kind", KINDS)
def test_any_of_a_chain_may_go_and_the_others_stay_whole(tmp_path: Path, kind: Any) -> None:
    tensors = odd_tensors()
    truths = {}
    with Snapshotter(save=kind) as engine:
        for step in range(5):
            tree = tree_of(tensors, step)
            truths[step] = copied(tree)
            engine.begin(tree, tmp_path / f"{step}.ckpt", list(tensors.values())).wait()
            tensors["big"][step * 100] += 1
            if step == 2:
                engine.remove(tmp_path / "0.ckpt")
    shutil.rmtree(tmp_path / "3.ckpt")
    for step in (1, 2, 4):
        verify.verify(tmp_path / f"{step}.ckpt")
        assert_same(restore.load(tmp_path / f"{step}.ckpt"), truths[step])


def written_bytes(path: Path) -> int:
    manifest = verify.read_manifest(path)
    return sum(file.nbytes for file in manifest.files.values() if file.snapshot is None)


def test_what_did_not_change_is_not_written(tmp_path: Path) -> None:
    tensors = {f"layer{n}": torch.randn(1000, 1000) for n in range(10)}
    with Snapshotter(save="incremental") as engine:
        for step in range(3):
            engine.begin(tree_of(tensors, step), tmp_path / f"{step}.ckpt", list(tensors.values())).wait()
            tensors["layer7"].add_(1)
    full, changed = written_bytes(tmp_path / "0.ckpt"), tensors["layer7"].nbytes
    assert full > 10 * changed
    for step in (1, 2):
        assert changed <= written_bytes(tmp_path / f"{step}.ckpt") <= 1.05 * changed


def test_rows_of_a_sparse_table_are_written_one_by_one(tmp_path: Path) -> None:
    table = nn.Embedding(50_000, 64, sparse=True).weight.detach()
    rows = torch.randperm(50_000, generator=torch.Generator().manual_seed(1))[:1000]
    with Snapshotter(save="incremental") as engine:
        for step in range(2):
            tree = {"state_dict": {"table": table}, "global_step": step}
            engine.begin(tree, tmp_path / f"{step}.ckpt", [table], sparse=[table]).wait()
            truth = table.clone()
            table[rows] += 1
    assert_same(restore.load(tmp_path / "0.ckpt")["state_dict"]["table"].shape, table.shape)
    assert torch.equal(restore.load(tmp_path / "1.ckpt")["state_dict"]["table"], truth)
    assert written_bytes(tmp_path / "1.ckpt") <= 2 * len(rows) * 64 * 4


def test_frozen_tensors_are_not_even_read_but_for_a_check_now_and_then(tmp_path: Path) -> None:
    frozen, trained = torch.randn(4000, 1000), torch.randn(3000, 1000)
    tree = {"state_dict": {"frozen": frozen, "trained": trained}}
    with Snapshotter(save="incremental", verify_unchanged=3) as engine:
        for step in range(5):
            if step == 1:
                frozen.data[5] += 1  # escapes every count
            if step == 4:
                frozen[6] += 1  # does not
            engine.begin(
                {**tree, "global_step": step}, tmp_path / f"{step}.ckpt", [frozen, trained], frozen=[frozen]
            ).wait()
            if step == 0:
                before = frozen.clone()
            trained += 1
    seen = [restore.load(tmp_path / f"{step}.ckpt")["state_dict"]["frozen"] for step in range(5)]
    assert torch.equal(seen[2], before)
    assert torch.equal(seen[3][5], frozen[5])
    assert torch.equal(seen[4], frozen)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_stock_readers_stop_at_an_incremental_checkpoint_and_say_what_to_do(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(500, 500)}
    with Snapshotter(save="incremental") as engine:
        for step in range(2):
            engine.begin(tree_of(tensors, step), tmp_path / f"{step}.ckpt", [tensors["w"]]).wait()
            truth = tensors["w"].clone()
            tensors["w"][3] += 1
    target = {"state_dict": {"w": torch.zeros(500, 500)}}
    with pytest.raises(dcp.api.CheckpointException, match="hetckpt consolidate"):
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "1.ckpt")), no_dist=True)
    assert torch.equal(restore.load(tmp_path / "1.ckpt")["state_dict"]["w"], truth)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("drives", [0, 2])
def test_consolidated_it_is_a_full_one_that_stock_readers_read(tmp_path: Path, drives: int) -> None:
    folders = [tmp_path / f"drive{n}" for n in range(drives)] or None
    tensors = odd_tensors()
    del tensors["float8"], tensors["complex"]
    with Snapshotter(drives=folders, save="incremental") as engine:
        for step in range(3):
            tree = tree_of(tensors, step)
            truth = copied(tree)
            engine.begin(tree, tmp_path / f"{step}.ckpt", list(tensors.values())).wait()
            edit(tensors, torch.Generator().manual_seed(step))
    path = tmp_path / "2.ckpt"
    assert consolidate(path)
    assert not consolidate(path)
    shutil.rmtree(tmp_path / "0.ckpt")
    shutil.rmtree(tmp_path / "1.ckpt")
    for folder in folders or []:
        shutil.rmtree(folder)
    verify.verify(path)
    assert_same(restore.load(path), truth)
    target = {"state_dict": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)))
    assert_same(target["state_dict"], truth["state_dict"])


def test_a_save_that_fails_is_followed_by_a_full_one(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(500, 500)}
    with Snapshotter(save="incremental") as engine:
        engine.begin(tree_of(tensors, 0), tmp_path / "0.ckpt", [tensors["w"]]).wait()
        shutil.rmtree(tmp_path / "0.ckpt")
        tensors["w"][3] += 1
        with pytest.raises(Exception, match=r"0\.ckpt"):
            engine.begin(tree_of(tensors, 1), tmp_path / "1.ckpt", [tensors["w"]]).wait()
        engine.begin(tree_of(tensors, 2), tmp_path / "2.ckpt", [tensors["w"]]).wait()
    assert verify.read_manifest(tmp_path / "2.ckpt").kind == "full"
    assert torch.equal(restore.load(tmp_path / "2.ckpt")["state_dict"]["w"], tensors["w"])


def test_another_checkpoint_at_the_path_of_the_base_lends_it_nothing(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(500, 500)}
    path = tmp_path / "last.ckpt"
    with Snapshotter(save="incremental") as engine:
        engine.begin(tree_of(tensors, 0), path, [tensors["w"]]).wait()
        tensors["w"][3] += 1
        alone = copied(tree_of(tensors, 1))
        engine.begin(tree_of(tensors, 1), path, alone=True).wait()
        tensors["w"][4] += 1
        with pytest.raises(CheckpointError, match="does not lie there any more"):
            engine.begin(tree_of(tensors, 2), path, [tensors["w"]]).wait()
        assert_same(restore.load(path), alone)
        last = copied(tree_of(tensors, 3))
        engine.begin(tree_of(tensors, 3), path, [tensors["w"]]).wait()
    verify.verify(path)
    assert_same(restore.load(path), last)


def _load_together(rank: int, path: str, truth: str) -> int:
    reader = SharedReader(Path(path), GroupChannel(), group_broadcast())
    assert_same(restore.load(Path(path), reader=reader), torch.load(truth))
    return reader.bytes_read


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_read_one_together(tmp_path: Path, run_ranks: Any, kind: Any) -> None:
    tensors = odd_tensors()
    with Snapshotter(save=kind) as engine:
        for step in range(3):
            tree = tree_of(tensors, step)
            torch.save(tree, tmp_path / "truth")
            engine.begin(tree, tmp_path / f"{step}.ckpt", list(tensors.values())).wait()
            edit(tensors, torch.Generator().manual_seed(step))
    path = tmp_path / "2.ckpt"
    read_bytes = run_ranks(_load_together, 2, str(path), str(tmp_path / "truth"))
    assert all(read_bytes)
    assert sum(read_bytes) <= sum(file.nbytes for file in verify.read_manifest(path).files.values())


@pytest.mark.parametrize("what", ["saved over", "consolidated", "removed"])
@pytest.mark.parametrize("drives", [0, 2])
def test_what_no_longer_is_as_it_was_saved_is_never_shared(tmp_path: Path, what: str, drives: int) -> None:
    folders = [tmp_path / f"drive{n}" for n in range(drives)] or None
    tensors = {"w": torch.randn(500, 500)}
    with Snapshotter(drives=folders, save="incremental") as engine:
        for step in range(2):
            tensors["w"][step] += 1
            engine.begin(tree_of(tensors, step), tmp_path / f"{step}.ckpt", [tensors["w"]]).wait()
        if what == "saved over":
            engine.begin(tree_of({"w": torch.zeros(500, 500)}, 0), tmp_path / "1.ckpt", alone=True).wait()
        elif what == "consolidated":
            assert consolidate(tmp_path / "1.ckpt")
        else:
            engine.remove(tmp_path / "1.ckpt")
        engine.wait()
        tensors["w"][3] += 1
        with pytest.raises(CheckpointError, match=r"2\.ckpt: nothing was saved"):
            engine.begin(tree_of(tensors, 2), tmp_path / "2.ckpt", [tensors["w"]]).wait()
        assert not (tmp_path / "2.ckpt").exists()
        engine.begin(tree_of(tensors, 3), tmp_path / "3.ckpt", [tensors["w"]]).wait()
    for path in tmp_path.glob("*.ckpt"):
        verify.verify(path)
    assert verify.read_manifest(tmp_path / "3.ckpt").kind == "full"
    assert torch.equal(restore.load(tmp_path / "3.ckpt")["state_dict"]["w"], tensors["w"])


def test_other_sparse_tensors_begin_a_new_chain(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5000, 64), "v": torch.randn(5000, 64)}
    kinds = []
    with Snapshotter(save="incremental") as engine:
        for step, sparse in enumerate([[], ["w"], ["w"], ["v"]]):
            tree = tree_of(tensors, step)
            truth = copied(tree)
            rows = [tensors[name] for name in sparse]
            engine.begin(tree, tmp_path / f"{step}.ckpt", list(tensors.values()), sparse=rows).wait()
            engine.begin({"x": torch.ones(3)}, tmp_path / "x.ckpt", alone=True).wait()  # plans of its own
            assert_same(restore.load(tmp_path / f"{step}.ckpt"), truth)
            kinds.append(verify.read_manifest(tmp_path / f"{step}.ckpt").kind)
            tensors["v"][step] += 1
    assert kinds == ["full", "full", "incremental", "full"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tensor_once_seen_changed_stays_so_in_all_that_follow(tmp_path: Path, kind: Any) -> None:
    frozen, trained = torch.randn(4000, 1000), torch.randn(3000, 1000)
    tree = {"state_dict": {"frozen": frozen, "trained": trained}}
    with Snapshotter(save=kind, verify_unchanged=3) as engine:
        for step in range(6):
            if step == 1:
                frozen.data[5] += 1  # escapes every count
            path = tmp_path / f"{step}.ckpt"
            engine.begin({**tree, "global_step": step}, path, [frozen, trained], frozen=[frozen]).wait()
            trained += 1
            is_as_now = torch.equal(restore.load(path)["state_dict"]["frozen"], frozen)
            assert is_as_now == (step not in (1, 2))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV])
@pytest.mark.parametrize("from_the_start", [True, False])
def test_without_hard_links_every_checkpoint_is_whole_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, from_the_start: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    tensors = odd_tensors()
    if from_the_start:
        monkeypatch.setattr(os, "link", refuse)
    with Snapshotter([tmp_path / "drive"], save="incremental") as engine:
        for step in range(4):
            tree = tree_of(tensors, step)
            truth = copied(tree)
            engine.begin(tree, tmp_path / f"{step}.ckpt", list(tensors.values())).wait()
            edit(tensors, torch.Generator().manual_seed(step))
            verify.verify(tmp_path / f"{step}.ckpt")
            assert_same(restore.load(tmp_path / f"{step}.ckpt"), truth)
            if step == 1:
                monkeypatch.setattr(os, "link", refuse)
    kind = "full" if from_the_start else "incremental"
    assert verify.read_manifest(tmp_path / "3.ckpt").kind == kind
    assert not [path for path in (tmp_path / "drive").iterdir() if path.name != "lightning_hetckpt"]


def _save_chain(rank: int, folder: str, drives: int) -> None:
    folders = [Path(folder) / f"drive{n}" for n in range(drives)] or None
    tensors = odd_tensors()
    with Snapshotter(drives=folders, channel=GroupChannel(), save="incremental") as engine:
        for step in range(4):
            tree = tree_of(tensors, step)
            engine.begin(tree, Path(folder) / f"{step}.ckpt", list(tensors.values())).wait()
            if rank == 0:
                torch.save(tree, Path(folder) / f"{step}.truth")
            edit(tensors, torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("ranks", "drives"), [(2, 0), (3, 2)])
def test_ranks_take_a_chain_together(tmp_path: Path, run_ranks: Any, ranks: int, drives: int) -> None:
    run_ranks(_save_chain, ranks, str(tmp_path), drives)
    for step in range(4):
        verify.verify(tmp_path / f"{step}.ckpt")
        assert_same(restore.load(tmp_path / f"{step}.ckpt"), torch.load(tmp_path / f"{step}.truth"))
        assert verify.read_manifest(tmp_path / f"{step}.ckpt").kind == ("incremental" if step else "full")
