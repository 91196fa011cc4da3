"""Two checkpoints of one state share their bytes; where anything may have moved in between, they do not."""

from __future__ import annotations

import copy
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from lightning_hetckpt.channel import GroupChannel
from lightning_hetckpt.checkpoint import restore, sharing, snapshotter
from lightning_hetckpt.checkpoint.layout import MANIFEST_NAME, META_NAME, owned_stripe_name, stripe_name
from lightning_hetckpt.checkpoint.manifest import Manifest
from lightning_hetckpt.checkpoint.publish import remove_tree
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.checkpoint.verify import read_manifest, verify
from lightning_hetckpt.errors import CheckpointError, CommitError, CorruptCheckpointError
from tests.checkpoint.trees import assert_same, checkpoint, stable, training_state
from tests.doubles import Gate

Ranks = Callable[..., list[Any]]
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
STRIPE = stripe_name(0, 0)


@pytest.fixture
def engine() -> Iterator[Snapshotter]:
    with Snapshotter() as engine:
        yield engine


def begin(engine: Snapshotter, path: Path, state: Any, step: int = 1, **more: Any) -> snapshotter.Snapshot:
    return engine.begin(checkpoint(*state, step), path, stable(*state), **more)


def is_shared(one: Path, other: Path) -> bool:
    return (one / STRIPE).stat().st_ino == (other / STRIPE).stat().st_ino


def pair(engine: Snapshotter, folder: Path, state: Any) -> tuple[Path, Path]:
    """A snapshot and, with all of it still under way, the last checkpoint of the same step."""
    paths = folder / "step=1.ckpt", folder / "last.ckpt"
    for path in paths:
        begin(engine, path, state)
    engine.wait()
    return paths


@alone
@pytest.mark.parametrize("dirs", [0, 2])
def test_a_second_checkpoint_of_a_step_is_whole_by_itself_and_shares_the_bytes(
    tmp_path: Path, dirs: int
) -> None:
    state = training_state()
    with Snapshotter([tmp_path / f"ssd{n}" for n in range(dirs)] or None) as engine:
        first, second = pair(engine, tmp_path / "s", state)
    names = {path.name for path in first.glob("stripe*-d*")}
    assert len(names) == max(dirs, 1)
    for name in names:
        assert (first / name).stat().st_ino == (second / name).stat().st_ino
        assert (first / name).resolve() != (second / name).resolve()
    assert (first / owned_stripe_name()).stat().st_ino != (second / owned_stripe_name()).stat().st_ino
    ids = [read_manifest(path).snapshot_id for path in (first, second)]
    assert ids[0] != ids[1]
    assert {name: read_manifest(second).files[name].snapshot for name in names} == dict.fromkeys(
        names, ids[0]
    )
    assert read_manifest(second).figures["nbytes"] < read_manifest(first).figures["nbytes"]
    for path in (first, second):
        verify(path)
        assert_same(restore.load(path), checkpoint(*state))
        fresh = training_state(seed=3)[0].state_dict()
        del fresh["4.weight"]  # tied
        dcp.load({"state_dict": fresh}, storage_reader=HuggingFaceStorageReader(str(path)))
        assert torch.equal(fresh["3.weight"], state[0].state_dict()["3.weight"])


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("dirs", [0, 2])
def test_either_of_two_that_share_goes_without_the_other_and_is_not_written_over(
    tmp_path: Path, gone: int, dirs: int
) -> None:
    state = training_state()
    truth = copy.deepcopy(checkpoint(*state))
    with Snapshotter([tmp_path / f"ssd{n}" for n in range(dirs)] or None) as engine:
        paths = pair(engine, tmp_path / "s", state)
        begin(engine, tmp_path / "s" / "later.ckpt", training_state(seed=1), 2).wait()
        engine.remove(paths[gone])
        for step in range(3, 6):
            begin(engine, tmp_path / "s" / "later.ckpt", training_state(seed=step), step).wait()
        engine.wait()
    assert not paths[gone].exists()
    verify(paths[1 - gone])
    assert_same(restore.load(paths[1 - gone]), truth)


def test_training_goes_on_from_either_of_two_that_share(tmp_path: Path) -> None:
    with Snapshotter() as engine:
        paths = pair(engine, tmp_path, training_state())
    ids = [read_manifest(path).snapshot_id for path in paths]
    for path, parent in zip(paths, ids, strict=True):
        with Snapshotter() as engine:
            engine.resumed_from(path)
            begin(engine, tmp_path / "next.ckpt", training_state(seed=1), 2).wait()
        assert read_manifest(tmp_path / "next.ckpt").parent == parent


def test_three_of_one_step_share_one_file_and_name_who_wrote_it(engine: Snapshotter, tmp_path: Path) -> None:
    state = training_state()
    paths = [tmp_path / f"{name}.ckpt" for name in "abc"]
    for path in paths:
        begin(engine, path, state).wait()
    engine.wait()
    assert (paths[0] / STRIPE).stat().st_nlink == 3
    writer = read_manifest(paths[0]).snapshot_id
    assert [read_manifest(path).files[STRIPE].snapshot for path in paths] == [None, writer, writer]
    remove_tree(paths[0])
    for path in paths[1:]:
        verify(path)


def step_of_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.step()


def write_in_place(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def swap_through_data(model: Any, optimizer: Any) -> None:  # as averaging callbacks do; no version counts it
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 2)


def other_memory(model: Any, optimizer: Any) -> None:
    model[0].weight.data = model[0].weight.data + 1


def nothing(model: Any, optimizer: Any) -> None:
    pass


@pytest.mark.parametrize(
    "move", [step_of_optimizer, write_in_place, swap_through_data, other_memory, nothing]
)
@pytest.mark.parametrize("fused", [False, True])
def test_whatever_moved_in_between_is_in_the_second_one(
    engine: Snapshotter, tmp_path: Path, move: Callable, fused: bool
) -> None:
    model, _ = training_state()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    begin(engine, first, (model, optimizer)).fence()
    before = copy.deepcopy(checkpoint(model, optimizer))
    move(model, optimizer)
    begin(engine, second, (model, optimizer)).wait()
    assert is_shared(first, second) is (move is nothing)
    assert_same(restore.load(first), before)
    assert_same(restore.load(second), checkpoint(model, optimizer))


def test_another_step_the_same_path_or_inference_tensors_share_nothing(
    engine: Snapshotter, tmp_path: Path
) -> None:
    state = training_state()
    for number, (name, step) in enumerate([("a", 1), ("b", 2), ("b", 2), ("c", 3)]):
        begin(engine, tmp_path / f"{name}.ckpt", state, step).wait()
        files = read_manifest(tmp_path / f"{name}.ckpt").files.values()
        assert all(file.snapshot is None for file in files), number
    with torch.inference_mode():
        tensor = torch.ones(4)
    for name in "de":
        engine.begin({"global_step": 9, "t": tensor}, tmp_path / f"{name}.ckpt", [tensor]).wait()
    assert not is_shared(tmp_path / "d.ckpt", tmp_path / "e.ckpt")


def test_buffers_and_everything_else_are_each_ones_own(engine: Snapshotter, tmp_path: Path) -> None:
    state = model, _ = training_state()
    begin(engine, tmp_path / "a.ckpt", state).wait()
    model[1].running_mean.add_(1)  # what a validation in train mode would do
    begin(engine, tmp_path / "b.ckpt", state).wait()
    assert is_shared(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert_same(restore.load(tmp_path / "b.ckpt"), checkpoint(*state))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_without_hard_links_the_bytes_are_copied_and_from_then_on_written(
    engine: Snapshotter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, code: int
) -> None:
    asked = []

    def refuse(*args: Any, **more: Any) -> None:
        asked.append(args)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(sharing.os, "link", refuse)
    state = training_state()
    with caplog.at_level(logging.WARNING, "lightning_hetckpt"):
        for name in "abc":
            begin(engine, tmp_path / f"{name}.ckpt", state).wait()
    for name in "abc":
        verify(tmp_path / f"{name}.ckpt")
        assert_same(restore.load(tmp_path / f"{name}.ckpt"), checkpoint(*state))
        assert (tmp_path / f"{name}.ckpt" / STRIPE).stat().st_nlink == 1
    assert len(asked) == 1
    assert "written twice" in caplog.text


def test_a_save_whose_lender_failed_fails_too_and_leaves_nothing(
    engine: Snapshotter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    class Full(StripeWriter):
        def open(self, path: Path, *rest: Any, **more: Any) -> Any:
            self._submit(gate.pass_through)
            return super().open(path / "missing" if path.name == STRIPE else path, *rest, **more)

    monkeypatch.setattr(snapshotter, "StripeWriter", Full)
    state = training_state()
    first = begin(engine, tmp_path / "a.ckpt", state)
    second = begin(engine, tmp_path / "b.ckpt", state)
    gate.open()
    with pytest.raises(CommitError, match="FileNotFoundError"):
        first.wait()
    with pytest.raises(CommitError, match=r"share the stripes of the save before"):
        second.wait()
    engine.wait()
    assert not list(tmp_path.glob("*.ckpt"))
    assert not list(tmp_path.glob(".hetckpt-*"))
    monkeypatch.undo()


def test_a_save_that_failed_in_between_costs_the_next_one_nothing_but_the_sharing(
    engine: Snapshotter, tmp_path: Path
) -> None:
    state = training_state()
    begin(engine, tmp_path / "a.ckpt", state)
    unpicklable = {**checkpoint(*state), "hook": lambda: None}
    with pytest.raises(CheckpointError, match="pickled"):
        engine.begin(unpicklable, tmp_path / "b.ckpt", stable(*state)).fence()
    begin(engine, tmp_path / "c.ckpt", state).wait()
    assert_same(restore.load(tmp_path / "c.ckpt"), checkpoint(*state))
    assert not is_shared(tmp_path / "a.ckpt", tmp_path / "c.ckpt")


def test_a_removal_of_the_lender_in_between_makes_the_second_one_write(
    engine: Snapshotter, tmp_path: Path
) -> None:
    state = training_state()
    begin(engine, tmp_path / "a.ckpt", state)
    engine.remove(tmp_path / "a.ckpt")
    begin(engine, tmp_path / "b.ckpt", state).wait()
    verify(tmp_path / "b.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def share_on_each_rank(rank: int, root: str) -> Any:
    state = training_state(width=40)
    folder = Path(root)
    with Snapshotter([folder / "ssd0", folder / "ssd1"], channel=GroupChannel(), timeout_s=20) as engine:
        paths = folder / "s" / "step=1.ckpt", folder / "s" / "last.ckpt"
        begin(engine, paths[0], state)
        if rank == 1:  # this one cannot be sure, and writes
            engine._lender.forget(paths[0])
        begin(engine, paths[1], state).wait()
        engine.wait()
    return {name: value.tolist() for name, value in state[0].state_dict().items()}


def test_each_rank_shares_or_writes_its_own_part(run_ranks: Ranks, tmp_path: Path) -> None:
    saved, _ = run_ranks(share_on_each_rank, 2, str(tmp_path))
    first, second = tmp_path / "s" / "step=1.ckpt", tmp_path / "s" / "last.ckpt"
    files = read_manifest(second).files
    for rank in (0, 1):
        for drive in (0, 1):
            name = stripe_name(rank, drive)
            is_link = (first / name).stat().st_ino == (second / name).stat().st_ino
            assert is_link is (rank == 0)
            assert (files[name].snapshot is None) is (rank == 1)
    for path in (first, second):
        verify(path)
        assert {k: v.tolist() for k, v in restore.load(path)["state_dict"].items()} == saved
    remove_tree(first)
    verify(second)


# --- What a manifest may say of it ---


def forged(path: Path, name: str, snapshot: Any) -> bytes:
    manifest = read_manifest(path)
    entry = replace(manifest.files[name], snapshot=snapshot)
    return replace(manifest, files={**manifest.files, name: entry}).to_json()


@pytest.mark.parametrize(
    ("name", "snapshot", "words"),
    [
        (META_NAME, "0" * 16, "of stripes and deltas only"),
        (STRIPE, "0" * 15, "expected"),
        (STRIPE, 7, "expected"),
        (STRIPE, "own", "that is this one"),
        (STRIPE, "0" * 16, "belongs to the snapshot"),
    ],
)
def test_a_manifest_that_says_odd_things_about_shared_stripes_is_refused(
    engine: Snapshotter, tmp_path: Path, name: str, snapshot: Any, words: str
) -> None:
    path = tmp_path / "a.ckpt"
    begin(engine, path, training_state()).wait()
    own_id = read_manifest(path).snapshot_id
    (path / MANIFEST_NAME).write_bytes(forged(path, name, own_id if snapshot == "own" else snapshot))
    with pytest.raises(CorruptCheckpointError, match=words):
        verify(path)
    with pytest.raises(CorruptCheckpointError, match=words):
        restore.load(path)


def test_a_stripe_of_another_snapshot_is_still_refused_where_the_manifest_does_not_name_it(
    tmp_path: Path,
) -> None:
    with Snapshotter(checksum=False) as engine:
        _, second = pair(engine, tmp_path, training_state())
    manifest = read_manifest(second)
    entry = replace(manifest.files[STRIPE], snapshot=None)
    plain = replace(manifest, files={**manifest.files, STRIPE: entry})
    (second / MANIFEST_NAME).write_bytes(plain.to_json())
    with pytest.raises(CorruptCheckpointError, match="belongs to the snapshot"):
        verify(second)


def test_who_wrote_a_file_survives_the_manifest(tmp_path: Path) -> None:
    with Snapshotter() as engine:
        _, second = pair(engine, tmp_path, training_state())
    manifest = read_manifest(second)
    assert Manifest.from_json(manifest.to_json(), second) == manifest
