"""The plugin by itself, in one process, and under stock strategies."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_hetckpt import HeteroDDP, checkpoint_io
from lightning_hetckpt.checkpoint import snapshotter, verify
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.checkpoint_io import StripedAsyncCheckpointIO
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, CommitError, ConfigurationError
from tests import toy
from tests.checkpoint.trees import assert_same, checkpoint, stable, training_state
from tests.doubles import Gate


@pytest.fixture
def plugin() -> Iterator[StripedAsyncCheckpointIO]:
    plugin = StripedAsyncCheckpointIO()
    yield plugin
    plugin.teardown()


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("hetckpt")}


class GatedWriter(StripeWriter):
    """A drive that writes nothing before the test opens the gate."""

    gate: Gate

    def open(self, *args: Any, **more: Any) -> Any:
        self._submit(self.gate.pass_through)
        return super().open(*args, **more)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(GatedWriter, "gate", gate, raising=False)
    monkeypatch.setattr(snapshotter, "StripeWriter", GatedWriter)
    return gate


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dirs": "/ssd"}, "list of folders"),
        ({"dirs": []}, "list of folders"),
        ({"dirs": ["a", "a"]}, "twice"),
        ({"buffer_bytes": 1000}, "16777216"),
        ({"direct": "yes"}, "direct is 'yes'"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        StripedAsyncCheckpointIO(**options)


def test_options_are_attributes_and_making_a_plugin_touches_nothing(tmp_path: Path) -> None:
    plugin = StripedAsyncCheckpointIO([tmp_path / "ssd"], 2**25, False, True, False)
    assert (plugin.dirs, plugin.buffer_bytes, plugin.checksum) == ([tmp_path / "ssd"], 2**25, False)
    assert (plugin.direct, plugin.snapshots) == (True, False)
    assert not list(tmp_path.iterdir())
    assert not our_threads()


def test_a_plugin_can_be_pickled_also_while_it_works(
    plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    plugin.save_checkpoint({"t": torch.ones(2)}, tmp_path / "a.ckpt")
    twin = pickle.loads(pickle.dumps(plugin))
    assert_same(twin.load_checkpoint(tmp_path / "a.ckpt"), {"t": torch.ones(2)})


def test_a_save_outside_of_a_trainer_is_durable_on_return(
    plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    state = training_state()
    plugin.save_checkpoint(checkpoint(*state), tmp_path / "a.ckpt")
    verify.verify(tmp_path / "a.ckpt")
    assert not plugin.pending(tmp_path / "a.ckpt")


def test_a_save_alone_uses_all_drives(tmp_path: Path) -> None:
    plugin = StripedAsyncCheckpointIO([str(tmp_path / "ssd0"), str(tmp_path / "ssd1")])
    state = training_state(width=100)
    plugin.save_checkpoint(checkpoint(*state), str(tmp_path / "a.ckpt"))
    plugin.teardown()
    sizes = [sum(f.stat().st_size for f in (tmp_path / d).rglob("*.safetensors")) for d in ("ssd0", "ssd1")]
    assert min(sizes) > 0.8 * max(sizes)
    assert plugin.places(tmp_path) == f"{tmp_path / 'ssd0'}, {tmp_path / 'ssd1'}"


def test_begin_overlaps_and_wait_makes_durable(
    gate: Gate, plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    state = _, optimizer = training_state()
    truth = copy.deepcopy(checkpoint(*state))
    snapshot = plugin.begin(
        checkpoint(*state), tmp_path / "a.ckpt", stable=stable(*state), rank_state=b"mine"
    )
    snapshot.fence()
    optimizer.step()
    assert plugin.pending(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    gate.open()
    plugin.wait(str(tmp_path / "a.ckpt"))
    assert_same(plugin.load_checkpoint(tmp_path / "a.ckpt"), truth)


def test_loading_waits_for_the_save_under_way(
    gate: Gate, plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    plugin.begin({"t": torch.ones(2)}, tmp_path / "a.ckpt")
    opener = threading.Thread(target=lambda: (gate.arrived.wait(20), gate.open()))
    opener.start()
    assert_same(plugin.load_checkpoint(tmp_path / "a.ckpt"), {"t": torch.ones(2)})
    opener.join()


def test_removal_waits_for_the_successor(
    gate: Gate, plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    plugin.begin({}, tmp_path / "old.ckpt")
    plugin.begin({}, tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert plugin.pending(tmp_path / "old.ckpt")
    gate.open()
    plugin.wait()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["new.ckpt"]


def test_teardown_finishes_everything_and_the_next_save_starts_anew(
    plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        plugin.begin({"name": name}, tmp_path / f"{name}.ckpt")
        assert our_threads()
        plugin.teardown()
        plugin.teardown()
        assert not our_threads()
        assert plugin.load_checkpoint(tmp_path / f"{name}.ckpt") == {"name": name}
    first, second = (verify.read_manifest(tmp_path / f"{name}.ckpt") for name in ("a", "b"))
    assert second.parent == first.snapshot_id
    assert second.commit == first.commit + 1


def test_a_failure_is_raised_by_the_next_save_and_then_forgotten(
    plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    (tmp_path / "taken.ckpt").mkdir()
    (tmp_path / "taken.ckpt" / "thesis.tex").write_text("precious")
    snapshot = plugin.begin({}, tmp_path / "taken.ckpt")
    snapshot.outcome.exception()
    with pytest.raises(CommitError, match=r"taken\.ckpt"):
        plugin.save_checkpoint({}, tmp_path / "next.ckpt")
    plugin.save_checkpoint({}, tmp_path / "next.ckpt")
    plugin.teardown()


def test_files_of_stock_lightning_are_loaded(plugin: StripedAsyncCheckpointIO, tmp_path: Path) -> None:
    state = checkpoint(*training_state())
    TorchCheckpointIO().save_checkpoint(state, tmp_path / "stock.ckpt")
    assert_same(plugin.load_checkpoint(tmp_path / "stock.ckpt"), state)
    loaded = plugin.load_checkpoint(tmp_path / "stock.ckpt", map_location="meta")
    assert loaded["state_dict"]["0.weight"].is_meta


def test_a_file_of_stock_lightning_can_be_replaced_and_removed(
    plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    TorchCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "last.ckpt")
    plugin.save_checkpoint({"x": 2}, tmp_path / "last.ckpt")
    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"x": 2}
    TorchCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "stock.ckpt")
    plugin.remove_checkpoint(tmp_path / "stock.ckpt")
    plugin.wait()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


def test_a_path_with_nothing_is_not_found(plugin: StripedAsyncCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        plugin.load_checkpoint(tmp_path / "never.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        plugin.load_checkpoint(tmp_path / "empty.ckpt")


def test_remote_paths_and_storage_options_are_refused(
    plugin: StripedAsyncCheckpointIO, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://bucket.*local"):
        plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"x": 1})


# --- In a Trainer of stock Lightning ---


class NotingIO(StripedAsyncCheckpointIO):
    """Opens the gate only after `save_checkpoint` has returned, unless the save must be durable."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        self.gate = gate
        self.returned_before_durable: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.must_be_durable(path):
            self.gate.open()
        super().save_checkpoint(checkpoint, path, storage_options)
        if self.pending(path):
            self.returned_before_durable.append(Path(path).name)
        self.gate.open()


def trainer(folder: Path, plugin: Any, *callbacks: Any, **more: Any) -> Trainer:
    options = {
        "max_epochs": 1,
        "limit_train_batches": 4,
        "limit_val_batches": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        **more,
    }
    return Trainer(default_root_dir=folder, plugins=[plugin], callbacks=list(callbacks), **options)


def test_a_save_in_a_running_trainer_returns_before_it_is_durable(gate: Gate, tmp_path: Path) -> None:
    plugin = NotingIO(gate)
    saver = ModelCheckpoint(tmp_path / "best", every_n_train_steps=2, save_top_k=-1)
    fit = trainer(tmp_path, plugin, saver)
    fit.fit(BoringModel())

    assert plugin.returned_before_durable[0] == "epoch=0-step=2.ckpt"
    assert not our_threads()
    for path in (tmp_path / "best").glob("*.ckpt"):
        verify.verify(path)
    assert len(list((tmp_path / "best").glob("*.ckpt"))) == 2


def test_a_save_of_a_finished_trainer_is_durable_on_return(tmp_path: Path) -> None:
    plugin = StripedAsyncCheckpointIO()
    fit = trainer(tmp_path, plugin, enable_checkpointing=False)
    fit.fit(BoringModel())
    fit.save_checkpoint(tmp_path / "end.ckpt")
    verify.verify(tmp_path / "end.ckpt")
    plugin.teardown()


def test_the_checkpoint_of_a_requeued_job_is_durable_on_return(gate: Gate, tmp_path: Path) -> None:
    class Requeue(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
            verify.verify(tmp_path / "hpc_ckpt_1.ckpt")

    plugin = NotingIO(gate)
    trainer(tmp_path, plugin, Requeue(), limit_train_batches=1).fit(BoringModel())
    assert "hpc_ckpt_1.ckpt" not in plugin.returned_before_durable


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_its_best_and_its_last_and_resumes(tmp_path: Path, save_last: Any) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path / "c",
            every_n_train_steps=1,
            save_top_k=2,
            monitor="step",
            mode="max",
            save_last=save_last,
        )

    trainer(tmp_path, StripedAsyncCheckpointIO(), saver()).fit(BoringModel())
    names = {path.name for path in (tmp_path / "c").glob("*.ckpt")}
    assert names == {"epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"}
    assert (tmp_path / "c" / "last.ckpt").is_symlink() == (save_last == "link")

    again = trainer(tmp_path, StripedAsyncCheckpointIO(), saver(), max_epochs=2)
    again.fit(BoringModel(), ckpt_path="last")
    assert again.global_step == 8
    verify.verify(tmp_path / "c" / "last.ckpt")


def test_the_async_plugin_of_lightning_may_be_wrapped_around(tmp_path: Path) -> None:
    inner = StripedAsyncCheckpointIO()
    fit = trainer(
        tmp_path,
        AsyncCheckpointIO(inner),
        ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1),
    )
    fit.fit(BoringModel())
    inner.teardown()  # which the wrapper leaves out
    for path in (tmp_path / "c").glob("*.ckpt"):
        verify.verify(path)


def test_a_model_is_loaded_from_a_folder_as_from_a_file(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, "auto", 1, max_steps=2, plugins=[StripedAsyncCheckpointIO()])
    model = toy.Toy()
    trainer.fit(model, toy.loader(16, 4))
    trainer.save_checkpoint(tmp_path / "ours.ckpt")

    for path in (tmp_path / "ours.ckpt", str(tmp_path / "ours.ckpt")):
        again = toy.Toy.load_from_checkpoint(path, lr=0.5)
        assert again.lr == 0.5
        for one, other in zip(toy.parameters(again), toy.parameters(model), strict=True):
            assert torch.equal(one, other)
    torch.save(StripedAsyncCheckpointIO().load_checkpoint(tmp_path / "ours.ckpt"), tmp_path / "stock.ckpt")
    assert toy.Toy.load_from_checkpoint(tmp_path / "stock.ckpt", lr=0.5).lr == 0.5


def save_alone_after_a_failure(rank: int, root: str) -> Any:
    """The other rank never begins the common save, as when it is stuck in a backward pass."""
    checkpoint_io._PATIENCE_AFTER_FAILURE_S = 0.2
    plugin = StripedAsyncCheckpointIO()
    tree = {"global_step": 1, "t": torch.ones(3)}
    plugin.begin(tree, Path(root) / "common-1.ckpt", stable=[tree["t"]]).wait()
    if rank == 0:
        plugin.begin(tree, Path(root) / "common-2.ckpt", stable=[tree["t"]]).fence()
        plugin.run_failed()
        plugin.save_checkpoint(tree, Path(root) / "rescue.ckpt")
    plugin.run_failed()
    plugin.teardown()
    return sorted(path.name for path in Path(root).glob("*.ckpt"))


def test_a_rescue_save_waits_for_nobody_who_may_never_come(run_ranks: Any, tmp_path: Path) -> None:
    # A save waits 300 s for another rank, `run_ranks` gives up after 60 s.
    found = run_ranks(save_alone_after_a_failure, 2, str(tmp_path))
    assert found[0] == ["common-1.ckpt", "rescue.ckpt"]


def test_every_folder_is_swept_before_the_first_save_into_it(tmp_path: Path) -> None:
    left = []
    for name in ("one", "two"):
        left.append(tmp_path / name / ".hetckpt-0123456789abcdef")
        left[-1].mkdir(parents=True)
        (left[-1] / "stripe-r00000-d00.safetensors").write_bytes(b"half")
    plugin = StripedAsyncCheckpointIO()
    for name in ("one", "two"):
        plugin.save_checkpoint({"t": torch.ones(2)}, tmp_path / name / "a.ckpt")
    plugin.teardown()
    assert not any(path.exists() for path in left)
    assert (tmp_path / "two" / "a.ckpt").is_dir()


def test_a_folder_of_dirs_that_cannot_be_made_ends_the_run_before_the_first_step_is_lost(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    trainer = toy.trainer(
        tmp_path,
        HeteroDDP(),
        1,
        max_steps=3,
        plugins=[StripedAsyncCheckpointIO(dirs=[tmp_path / "file" / "ssd"])],
    )
    with pytest.raises(CheckpointError, match="file/ssd"):
        trainer.fit(toy.Toy(), toy.loader(16, 4))
    assert trainer.global_step <= 1
