"""A checkpoint is what the state was at begin, on disk whole or not at all, and the same on all ranks."""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from lightning_hetckpt.channel import GroupChannel
from lightning_hetckpt.checkpoint import ledger, restore, snapshotter, verify
from lightning_hetckpt.checkpoint.folders import run_of
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES
from lightning_hetckpt.checkpoint.publish import scan
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.errors import CheckpointError, CommitError, ConfigurationError, TornSnapshotError
from tests.checkpoint.trees import assert_same, checkpoint, stable, training_state
from tests.doubles import Gate

Ranks = Callable[..., list[Any]]
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


class Drives:
    """Puts all drives behind a gate, or breaks the files that a test names."""

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.broken: Callable[[Path], bool] = lambda path: False

    def writer(self, name: str) -> StripeWriter:
        drives = self

        class Writer(StripeWriter):
            def open(self, path: Path, *rest: Any, **more: Any) -> Any:
                if drives.gate is not None:
                    self._submit(drives.gate.pass_through)
                return super().open(path / "no folder" if drives.broken(path) else path, *rest, **more)

        return Writer(name)


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> Drives:
    drives = Drives()
    monkeypatch.setattr(snapshotter, "StripeWriter", drives.writer)
    return drives


@pytest.fixture
def engine(drives: Drives) -> Iterator[Snapshotter]:
    with Snapshotter() as engine:
        yield engine


def meta_and_stripes(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def begin(engine: Snapshotter, path: Path, state: Any, step: int = 1, **more: Any) -> snapshotter.Snapshot:
    return engine.begin(checkpoint(*state, step), path, stable(*state), **more)


def test_a_checkpoint_equals_a_deep_copy_made_at_begin(
    engine: Snapshotter, drives: Drives, tmp_path: Path
) -> None:
    state = model, optimizer = training_state()
    truth = copy.deepcopy(checkpoint(model, optimizer))
    drives.gate = Gate()

    snapshot = begin(engine, tmp_path / "a.ckpt", state)
    model[1].running_mean.add_(1)  # a buffer, which the next forward pass moves
    snapshot.fence()
    optimizer.step()
    assert not snapshot.done()
    drives.gate.open()
    snapshot.wait()

    assert_same(restore.load(tmp_path / "a.ckpt"), truth)
    assert meta_and_stripes(tmp_path / "a.ckpt") == [
        "manifest.json",
        "meta.pt",
        "ranks.json",
        "stripe-r00000-d00.safetensors",
        "stripe-r00000-owned.safetensors",
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_over_slow_drives_and_every_snapshot_is_right(
    engine: Snapshotter, drives: Drives, tmp_path: Path, fused: bool
) -> None:
    model, _ = training_state()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    truth, snapshots = [], []
    drives.gate = Gate()
    for step in range(4):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()  # the hook fences the snapshot before
        truth.append(copy.deepcopy(checkpoint(model, optimizer, step)))
        snapshots.append(begin(engine, tmp_path / f"{step}.ckpt", (model, optimizer), step))
    assert not any(snapshot.done() for snapshot in snapshots)
    drives.gate.open()
    engine.wait()

    for step in range(4):
        assert_same(restore.load(tmp_path / f"{step}.ckpt"), truth[step])


def test_an_optimizer_step_without_a_fence_tears_the_snapshot_and_the_next_one_is_whole(
    engine: Snapshotter, drives: Drives, tmp_path: Path
) -> None:
    state = _, optimizer = training_state(width=1500)  # two chunks and more
    held = threading.Event()
    engine._stager._jobs.put(_Blocker(held))  # the stager is busy with another snapshot

    snapshot = begin(engine, tmp_path / "torn.ckpt", state)
    optimizer.step(lambda: torch.tensor(0.0))
    held.set()

    with pytest.raises(TornSnapshotError, match=r"torn\.ckpt.*AdamW\.step\(\).*fence"):
        snapshot.wait()
    assert not list(tmp_path.glob("*.ckpt"))
    begin(engine, tmp_path / "next.ckpt", state).wait()
    assert_same(restore.load(tmp_path / "next.ckpt"), checkpoint(*state))
    assert not list(tmp_path.glob(".hetckpt-*"))


class _Blocker:
    """A job of the stager that ends when the test says so; its snapshot hears of the odd end."""

    def __init__(self, held: threading.Event) -> None:
        self.held = held

    @property
    def begun(self) -> Any:
        self.held.wait(20)
        return {}

    @property
    def pours(self) -> Any:
        raise CheckpointError("done waiting")

    @property
    def snapshot(self) -> _Blocker:
        return self

    def failed(self, error: BaseException) -> None:
        pass


def test_a_write_outside_of_any_optimizer_is_found_by_its_version(
    engine: Snapshotter, drives: Drives, tmp_path: Path
) -> None:
    state = model, _ = training_state()
    held = threading.Event()
    engine._stager._jobs.put(_Blocker(held))
    snapshot = begin(engine, tmp_path / "torn.ckpt", state)
    with torch.no_grad():
        model[0].weight.mul_(2)
    held.set()

    with pytest.raises(TornSnapshotError, match=r"state_dict\.0\.weight"):
        snapshot.fence()
    with pytest.raises(TornSnapshotError):
        snapshot.wait()
    engine.wait()  # the error has been told


def test_a_pool_smaller_than_the_state_still_saves_it(tmp_path: Path) -> None:
    tree = {"lazy": torch.randn(9, 600_000), "owned": torch.randn(11, 500_000)}
    with Snapshotter(buffer_bytes=2 * CHUNK_BYTES) as engine:
        engine.begin(tree, tmp_path / "a.ckpt", [tree["lazy"]]).wait()
        engine.begin(tree, tmp_path / "b.ckpt", alone=True).wait()
    for name in ("a", "b"):
        assert_same(restore.load(tmp_path / f"{name}.ckpt"), tree)


def test_drives_hold_the_stripes_and_the_checkpoint_links_to_them(tmp_path: Path) -> None:
    drives = [tmp_path / "ssd0", tmp_path / "ssd1"]
    state = training_state()
    with Snapshotter(drives) as engine:
        begin(engine, tmp_path / "run" / "a.ckpt", state).wait()
    links = [file for file in (tmp_path / "run" / "a.ckpt").iterdir() if file.is_symlink()]

    assert len(links) == 3
    assert all(not link.readlink().is_absolute() for link in links)  # one mount: both may move together
    folders = {link.resolve().parent for link in links}
    assert {folder.parents[2] for folder in folders} == set(drives)
    for folder in folders:
        assert min(file.name for file in folder.iterdir()) == "owner.json"
        assert not (folder / "partial").exists()
        owner = json.loads((folder / "owner.json").read_text())
        assert owner == {"snapshot": folder.name, "checkpoint": str(tmp_path / "run" / "a.ckpt")}
    verify.verify(tmp_path / "run" / "a.ckpt")
    assert_same(restore.load(tmp_path / "run" / "a.ckpt"), checkpoint(*state))

    (tmp_path / "moved").mkdir()
    for name in ("run", "ssd0", "ssd1"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert_same(restore.load(tmp_path / "moved" / "run" / "a.ckpt"), checkpoint(*state))


@alone
@pytest.mark.parametrize("dirs", [0, 2])
def test_stock_readers_read_the_stripes(tmp_path: Path, dirs: int) -> None:
    state = model, optimizer = training_state()
    with Snapshotter([tmp_path / str(n) for n in range(dirs)] or None) as engine:
        begin(engine, tmp_path / "a.ckpt", state).wait()

    fresh, other = training_state(seed=5)
    blank = {
        "state_dict": fresh.state_dict(),
        "optimizer_states": [{"state": other.state_dict()["state"]}],  # tensors only
    }
    del blank["state_dict"]["4.weight"]  # tied: stored under its first name
    dcp.load(blank, storage_reader=HuggingFaceStorageReader(str(tmp_path / "a.ckpt")))
    assert_same({**blank["state_dict"], "4.weight": blank["state_dict"]["3.weight"]}, {**model.state_dict()})
    assert_same(blank["optimizer_states"][0]["state"], optimizer.state_dict()["state"])
    for stripe in (tmp_path / "a.ckpt").glob("*.safetensors"):
        with safe_open(stripe, "pt") as opened:
            assert len(opened.metadata()["snapshot"]) == 16


def test_a_write_error_surfaces_once_and_the_next_save_works(
    engine: Snapshotter, drives: Drives, tmp_path: Path
) -> None:
    state = training_state()
    drives.broken = lambda path: "owned" in path.name
    snapshot = begin(engine, tmp_path / "a.ckpt", state)
    with pytest.raises(CommitError, match=r"a\.ckpt.*nothing was saved.*rank 0: FileNotFoundError"):
        snapshot.wait()
    begin(engine, tmp_path / "b.ckpt", state)
    with pytest.raises(CommitError, match=r"b\.ckpt"):
        engine.wait()
    engine.wait()
    drives.broken = lambda path: False
    begin(engine, tmp_path / "c.ckpt", state).wait()

    assert sorted(path.name for path in tmp_path.iterdir()) == [".lightning_hetckpt_run", "c.ckpt"]


def test_an_error_that_nobody_asked_for_is_told_after_close(tmp_path: Path, drives: Drives) -> None:
    engine = Snapshotter()
    drives.broken = lambda path: path.name == "meta.pt"
    begin(engine, tmp_path / "a.ckpt", training_state())
    engine.close()
    engine.close()
    with pytest.raises(CommitError, match=r"a\.ckpt"):
        engine.raise_failures()
    engine.raise_failures()
    with pytest.raises(CheckpointError, match="closed"):
        begin(engine, tmp_path / "b.ckpt", training_state())


def test_an_object_that_cannot_be_pickled_fails_its_save_alone(engine: Snapshotter, tmp_path: Path) -> None:
    snapshot = engine.begin({"hook": lambda: None, "t": torch.ones(2)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="cannot be pickled"):
        snapshot.fence()
    engine.begin({"t": torch.ones(2)}, tmp_path / "b.ckpt").wait()
    assert_same(restore.load(tmp_path / "b.ckpt"), {"t": torch.ones(2)})


def test_an_interrupt_inside_begin_leaves_nothing_that_waits(
    engine: Snapshotter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshotter, "pack_meta", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.begin({"t": torch.ones(2)}, tmp_path / "a.ckpt")
    with pytest.raises(CommitError, match="KeyboardInterrupt"):
        engine.wait()


def test_a_folder_that_cannot_be_made_is_an_error_of_begin(engine: Snapshotter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoints can be written here"):
        engine.begin({}, tmp_path / "file" / "a.ckpt")
    engine.begin({}, tmp_path / "a.ckpt").wait()


def test_a_foreign_folder_at_the_path_is_left_alone(engine: Snapshotter, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt" / "thesis.tex").write_text("precious")
    with pytest.raises(CommitError, match=r"a\.ckpt.*other files"):
        engine.begin({}, tmp_path / "a.ckpt").wait()
    assert (tmp_path / "a.ckpt" / "thesis.tex").read_text() == "precious"


def test_saves_to_one_path_come_in_order(engine: Snapshotter, drives: Drives, tmp_path: Path) -> None:
    drives.gate = Gate()
    for step in range(3):
        engine.begin({"global_step": step, "t": torch.full((2,), step)}, tmp_path / "last.ckpt")
    assert engine.pending(tmp_path / "last.ckpt")
    assert not engine.pending(tmp_path / "other.ckpt")
    drives.gate.open()
    engine.wait(tmp_path / "last.ckpt")

    assert not engine.pending(tmp_path / "last.ckpt")
    assert restore.load(tmp_path / "last.ckpt")["global_step"] == 2
    engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lightning_hetckpt_run", "last.ckpt"]


def test_nobody_waits_until_the_checkpoint_that_was_replaced_is_unlinked(
    engine: Snapshotter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.begin({"global_step": 1}, tmp_path / "last.ckpt").wait()
    gate, real = Gate(), ledger.remove_tree

    def slow(*args: Any) -> None:
        gate.pass_through()
        real(*args)

    monkeypatch.setattr(ledger, "remove_tree", slow)
    crew, _ = engine._crews[False]
    answers: list[Any] = []
    monkeypatch.setattr(crew.exchange, "answer", lambda *answer: answers.append(answer))
    engine.begin({"global_step": 2}, tmp_path / "last.ckpt").wait()
    assert gate.arrived.wait(30)
    assert [reason for _, reason, _ in answers] == [None]
    assert restore.load(tmp_path / "last.ckpt")["global_step"] == 2
    assert list(tmp_path.glob(".hetckpt-*"))
    gate.open()
    engine.wait()
    assert not list(tmp_path.glob(".hetckpt-*"))


def test_a_removal_comes_behind_the_save_before_it(
    engine: Snapshotter, drives: Drives, tmp_path: Path
) -> None:
    engine.begin({}, tmp_path / "old.ckpt").wait()
    drives.gate = Gate()
    successor = engine.begin({}, tmp_path / "new.ckpt")
    engine.remove(tmp_path / "old.ckpt")
    assert (tmp_path / "old.ckpt").is_dir()
    drives.gate.open()
    successor.wait()
    engine.wait()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["new.ckpt"]


def test_a_removal_is_left_out_when_the_save_before_it_failed(
    engine: Snapshotter, drives: Drives, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.begin({}, tmp_path / "old.ckpt").wait()
    drives.broken = lambda path: True
    failed = engine.begin({}, tmp_path / "new.ckpt")
    engine.remove(tmp_path / "old.ckpt")
    with pytest.raises(CommitError):
        failed.wait()
    with caplog.at_level(logging.WARNING, "lightning_hetckpt"):
        engine.wait()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["old.ckpt"]
    assert "old.ckpt stays" in caplog.text


def test_removing_what_is_not_there_is_no_error(engine: Snapshotter, tmp_path: Path) -> None:
    engine.remove(tmp_path / "never.ckpt")
    engine.wait()


def test_retirement_counts_commits_and_touches_only_snapshots(engine: Snapshotter, tmp_path: Path) -> None:
    for step in (7, 8, 9, 3):  # training went back to step 2
        engine.begin({"global_step": step}, tmp_path / f"step={step}.ckpt")
        engine.begin({"global_step": step}, tmp_path / f"best-step={step}.ckpt")
        engine.retire(tmp_path, keep_last=2)
    engine.wait()
    assert sorted(path.name for path in tmp_path.glob("step=*")) == ["step=3.ckpt", "step=9.ckpt"]
    assert len(list(tmp_path.glob("best-*"))) == 4


def test_commits_count_on_and_name_their_parent(tmp_path: Path) -> None:
    for resumed in (None, tmp_path / "0.ckpt"):
        with Snapshotter() as engine:
            if resumed is not None:
                engine.resumed_from(resumed)
            for _ in range(2):
                engine.begin({}, tmp_path / f"{len(list(tmp_path.glob('*.ckpt')))}.ckpt").wait()
    manifests = [verify.read_manifest(tmp_path / f"{n}.ckpt") for n in range(4)]

    assert [manifest.commit for manifest in manifests] == [1, 2, 3, 4]
    ids = [manifest.snapshot_id for manifest in manifests]
    assert [manifest.parent for manifest in manifests] == [None, ids[0], ids[0], ids[2]]
    assert {manifest.run for manifest in manifests} == {run_of(tmp_path)}
    assert [info.path.name for info in scan(tmp_path)] == ["3.ckpt", "2.ckpt", "1.ckpt", "0.ckpt"]


def test_what_a_killed_run_left_behind_is_swept_at_the_first_save(tmp_path: Path) -> None:
    (tmp_path / ".hetckpt-0123456789abcdef").mkdir()
    (tmp_path / ".hetckpt-0123456789abcdef" / "meta.pt").write_bytes(b"half")
    with Snapshotter() as engine:
        engine.begin({}, tmp_path / "a.ckpt").wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lightning_hetckpt_run", "a.ckpt"]


def test_buffered_files_without_checksums_come_back_too(tmp_path: Path) -> None:
    state = training_state()
    with Snapshotter(checksum=False, direct=False) as engine:
        begin(engine, tmp_path / "a.ckpt", state).wait()
    assert not any(file.chunks for file in verify.read_manifest(tmp_path / "a.ckpt").files.values())
    assert_same(restore.load(tmp_path / "a.ckpt"), checkpoint(*state))


def test_insisting_on_direct_io_fails_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "supports_direct", lambda folder: False)
    with Snapshotter(direct=True) as engine, pytest.raises(ConfigurationError, match="O_DIRECT"):
        engine.begin({}, tmp_path / "a.ckpt")


def test_state_that_grows_gets_a_new_plan_and_a_larger_pool(engine: Snapshotter, tmp_path: Path) -> None:
    model, _ = training_state()
    optimizer = torch.optim.AdamW(model.parameters())
    begin(engine, tmp_path / "0.ckpt", (model, optimizer))
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    big = torch.randn(9 * CHUNK_BYTES // 4)
    engine.begin({"big": big, **checkpoint(model, optimizer)}, tmp_path / "1.ckpt", [big]).wait()
    assert restore.load(tmp_path / "0.ckpt")["optimizer_states"][0]["state"] == {}
    assert_same(restore.load(tmp_path / "1.ckpt"), {"big": big, **checkpoint(model, optimizer)})


# --- Several ranks ---


def rank_state_dict(rank: int) -> Any:
    """Parameters and optimizer state are equal on all ranks; buffers are each rank's own."""
    state = model, _ = training_state(width=40)
    model[1].running_mean.fill_(float(rank))
    return state


def save_together(rank: int, root: str, dirs: int) -> Any:
    folder = Path(root)
    state = rank_state_dict(rank)
    drives = [folder / f"ssd{n}" for n in range(dirs)] or None
    with Snapshotter(drives, channel=GroupChannel(), timeout_s=20) as engine:
        for step in range(3):
            snapshot = begin(
                engine, folder / "run" / f"step={step}.ckpt", state, step, rank_state=bytes([rank, step])
            )
            engine.retire(folder / "run", keep_last=2)
            snapshot.fence()
        engine.wait()
        lone = None
        if rank == 0:  # as under a stock strategy
            lone = engine.begin(checkpoint(*state, 9), folder / "run" / "alone.ckpt", alone=True)
            lone.wait()
    return torch.distributed.get_world_size()


@alone
@pytest.mark.parametrize(("world", "dirs"), [(2, 0), (2, 2), (3, 0)])
def test_ranks_save_together_and_one_process_reads_it(
    run_ranks: Ranks, tmp_path: Path, world: int, dirs: int
) -> None:
    assert run_ranks(save_together, world, str(tmp_path), dirs) == [world] * world

    assert sorted(p.name for p in (tmp_path / "run").glob("*.ckpt")) == [
        "alone.ckpt",
        "step=1.ckpt",
        "step=2.ckpt",
    ]
    path = tmp_path / "run" / "step=2.ckpt"
    assert_same(restore.load(path), checkpoint(*rank_state_dict(0), 2))
    assert_same(restore.load(tmp_path / "run" / "alone.ckpt"), checkpoint(*rank_state_dict(0), 9))
    assert restore.load_rank_states(path) == [bytes([rank, 2]) for rank in range(world)]
    assert verify.read_manifest(path).world_size == world
    shared = {file.name: file.stat().st_size for file in path.glob("stripe-*-d*")}
    assert len(shared) == world * max(dirs, 1)
    assert not list((tmp_path / "run").glob(".hetckpt-*"))
    assert not list(tmp_path.glob("ssd*/*/*/*/partial"))
    fresh = training_state(width=40, seed=3)[0].state_dict()
    del fresh["4.weight"]
    dcp.load({"state_dict": fresh}, storage_reader=HuggingFaceStorageReader(str(path)))
    assert torch.equal(fresh["3.weight"], rank_state_dict(0)[0].state_dict()["3.weight"])


def fail_on_one_rank(rank: int, root: str, how: str) -> Any:
    folder = Path(root)
    state = training_state(width=40)
    heard = []
    with Snapshotter(channel=GroupChannel(), timeout_s=20) as engine:
        for step in range(3):
            if rank == 1 and step == 1 and how == "torn":
                engine._stager._jobs.put(_Blocker(held := threading.Event()))
            if rank == 1 and step == 1 and how == "other state":
                state = training_state(width=20)
            snapshot = begin(engine, folder / f"{step}.ckpt", state, step)
            if rank == 1 and step == 1 and how == "torn":
                snapshot.mark_torn("rank 1 stepped early")
                held.set()
            try:
                snapshot.wait()
                heard.append("saved")
            except CheckpointError as error:
                heard.append(f"{type(error).__name__}: {error}")
            state = training_state(width=40)
    return heard


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("torn", "TornSnapshotError", "rank 1 stepped early"),
        ("other state", "CommitError", r"ranks \[1\] cut the state"),
    ],
)
def test_a_failure_on_one_rank_is_the_same_decision_on_all(
    run_ranks: Ranks, tmp_path: Path, how: str, kind: str, words: str
) -> None:
    first, second = run_ranks(fail_on_one_rank, 2, str(tmp_path), how)
    for heard in (first, second):
        assert [heard[0], heard[2]] == ["saved", "saved"]
        assert heard[1].startswith(kind)
        assert re.search(words, heard[1])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["0.ckpt", "2.ckpt"]
    assert not list(tmp_path.glob(".hetckpt-*"))


def answer_too_late(rank: int, root: str) -> Any:
    """Rank 0 publishes when rank 1 has long given up waiting for its answer."""
    folder = Path(root)
    engine = Snapshotter([folder / "ssd"], channel=GroupChannel(), timeout_s=0.5 if rank else 20)
    begin(engine, folder / "0.ckpt", training_state()).wait()
    given_up = folder / "given up"
    if rank == 0:
        late = Gate()
        engine._committer._tasks.put(late.pass_through)
        snapshot = begin(engine, folder / "1.ckpt", training_state())
        while not given_up.exists():
            time.sleep(0.01)
        late.open()
        snapshot.wait()
    else:
        with pytest.raises(CommitError, match="no answer"):
            begin(engine, folder / "1.ckpt", training_state()).wait()
        given_up.touch()
    engine.close()
    engine.raise_failures()
    return "over"


def test_a_rank_that_heard_no_answer_leaves_its_stripes_alone(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(answer_too_late, 2, str(tmp_path)) == ["over", "over"]
    verify.verify(tmp_path / "1.ckpt")
    assert_same(restore.load(tmp_path / "1.ckpt"), checkpoint(*training_state()))


def go_missing(rank: int, root: str) -> Any:
    """Rank 1 never begins the save, as if it had died."""
    folder = Path(root)
    state = training_state()
    engine = Snapshotter(channel=GroupChannel(), timeout_s=0.5)
    begin(engine, folder / "0.ckpt", state).wait()
    if rank == 1:
        engine.close()
        return "gone"
    snapshot = begin(engine, folder / "1.ckpt", state)
    try:
        snapshot.wait()
    except CommitError as error:
        return str(error)
    finally:
        engine.close()
    return "saved"


def test_a_rank_that_dies_fails_the_save_by_name_and_hangs_nobody(run_ranks: Ranks, tmp_path: Path) -> None:
    alive, _ = run_ranks(go_missing, 2, str(tmp_path))
    assert "no report from ranks [1]" in alive
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["0.ckpt"]


def begin_where_no_folder_can_be(rank: int, root: str) -> Any:
    with Snapshotter(channel=GroupChannel(), timeout_s=20) as engine:
        try:
            engine.begin({}, Path(root) / "file" / "a.ckpt")
        except CheckpointError as error:
            return str(error)
    return "begun"


def test_a_folder_that_rank_0_cannot_use_is_an_error_on_every_rank(run_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    heard = run_ranks(begin_where_no_folder_can_be, 2, str(tmp_path))
    assert all("no checkpoints can be written here" in text for text in heard)


def leave_at_once(rank: int, root: str) -> Any:
    engine = Snapshotter(channel=GroupChannel(), timeout_s=20)
    begin(engine, Path(root) / "a.ckpt", training_state())
    engine.close()
    engine.raise_failures()
    return "whole"


def test_closing_right_behind_begin_finishes_the_save_on_all_ranks(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(leave_at_once, 2, str(tmp_path)) == ["whole", "whole"]
    verify.verify(tmp_path / "a.ckpt")
