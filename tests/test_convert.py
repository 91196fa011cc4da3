"""What goes out is read by stock Lightning, torch and safetensors; what comes in is what was in the file."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_hetckpt import (
    HeteroDDP,
    SnapshotCallback,
    StripedAsyncCheckpointIO,
    export_checkpoint,
    import_checkpoint,
    load_from_checkpoint,
    open_checkpoint,
)
from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests import toy
from tests.checkpoint.test_state_tree import through_torch
from tests.checkpoint.trees import assert_same, checkpoint, training_state, trees

Ranks = Callable[..., list[Any]]
any_tree = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def save(folder: Path, tree: dict[Any, Any]) -> Path:
    with Snapshotter([folder / "ssd0", folder / "ssd1"]) as engine:
        engine.begin(tree, folder / "a.ckpt", alone=True).wait()
    return folder / "a.ckpt"


@given(tree=trees())
@any_tree
def test_any_exported_tree_is_what_torch_would_have_saved(tmp_path: Path, tree: dict[Any, Any]) -> None:
    export_checkpoint(save(tmp_path, tree), tmp_path / "out.ckpt")
    found = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert_same(found, through_torch(tree))


@given(tree=trees())
@any_tree
def test_any_imported_file_comes_back(tmp_path: Path, tree: dict[Any, Any]) -> None:
    torch.save(tree, tmp_path / "in.ckpt")
    import_checkpoint(tmp_path / "in.ckpt", tmp_path / "b.ckpt", dirs=[tmp_path / "ssd0"])
    assert_same(restore.load(tmp_path / "b.ckpt"), through_torch(tree))


def test_a_training_state_survives_export_with_ties_and_strides(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    tree = {
        "state_dict": model.state_dict(),
        "odd": nn.Parameter(torch.ones(3)),
        "again": model[0].weight.data,
    }
    export_checkpoint(save(tmp_path, tree), tmp_path / "out.ckpt")
    found = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert found["state_dict"]["0.weight"].stride() == model[0].weight.stride()
    assert found["again"].data_ptr() == found["state_dict"]["0.weight"].data_ptr()
    assert_same(found["odd"], tree["odd"])
    assert_same(found["state_dict"], through_torch(tree)["state_dict"])


def test_safetensors_hold_the_weights_by_their_own_names(tmp_path: Path) -> None:
    parts = training_state()
    path = save(tmp_path, checkpoint(*parts))
    export_checkpoint(path, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert_same(
        {name: found[name] for name in sorted(found)},
        dict(sorted(parts[0].state_dict().items())),
    )


def test_safetensors_of_every_dtype(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn]
    tree = {"state_dict": {str(one): torch.ones(3, 2).to(one) for one in dtypes} | {"none": torch.ones(0, 4)}}
    export_checkpoint(save(tmp_path, tree), tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(tree["state_dict"].items())))


def test_complex_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, {"state_dict": {"phase": torch.ones(2, dtype=torch.complex64)}})
    with pytest.raises(CheckpointError, match="phase is complex64"):
        export_checkpoint(path, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


class Saved(LightningModule):
    """Has hyper-parameters, and says what it saw of the checkpoint."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(toy.FEATURES, width, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Looking(Saved):
    """Wants to see the optimizer."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["optimizer_states"][0]["state"][0]["exp_avg"]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Saved]:
    model = Saved(width=6)
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()], max_epochs=1)
    trainer.fit(model, toy.loader(16, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt", model


def test_stock_lightning_loads_an_open_folder(trained: tuple[Path, Saved]) -> None:
    path, model = trained
    with open_checkpoint(path) as file:
        found = Saved.load_from_checkpoint(file)
    assert found.hparams["width"] == 6
    assert_same(dict(found.state_dict()), dict(model.state_dict()))
    with open_checkpoint(path) as file:
        assert "optimizer_states" not in torch.load(file, weights_only=True)
    with open_checkpoint(path, optimizers=True) as file:
        assert_same(torch.load(file, weights_only=True), restore.load(path))


def test_our_own_load_takes_folders_and_files(trained: tuple[Path, Saved], tmp_path: Path) -> None:
    path, model = trained
    export_checkpoint(path, tmp_path / "out.ckpt")
    for source in (path, tmp_path / "out.ckpt"):
        found = load_from_checkpoint(Saved, source)
        assert found.hparams["width"] == 6
        assert_same(dict(found.state_dict()), dict(model.state_dict()))


def test_optimizer_state_is_there_only_for_models_that_look(
    trained: tuple[Path, Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = trained
    seen: list[dict[Any, Any]] = []
    load = restore.load

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(load(*args, **options))
        return seen[-1]

    monkeypatch.setattr(restore, "load", watched)
    load_from_checkpoint(Saved, path)
    assert seen[0]["optimizer_states"][0]["state"][0]["exp_avg"].is_meta
    truth = load(path)["optimizer_states"][0]["state"][0]["exp_avg"]
    assert torch.equal(load_from_checkpoint(Looking, path).seen, truth)


def fit(rank: int, root: str, ours: bool, epochs: int, path: str | None) -> list[Tensor]:
    strategy = HeteroDDP(policy="even") if ours else "ddp"
    extra: dict[str, Any] = {}
    if ours:
        extra = {"plugins": [StripedAsyncCheckpointIO()], "callbacks": [SnapshotCallback(keep_last=50)]}
    trainer = toy.trainer(root, strategy, 2, max_epochs=epochs, **extra)
    model = toy.Toy()
    trainer.fit(model, toy.loader(32, 4), ckpt_path=path)
    return toy.parameters(model)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("step", [4, 2])
def test_stock_ddp_goes_on_from_an_exported_snapshot(run_ranks: Ranks, tmp_path: Path, step: int) -> None:
    truth = run_ranks(fit, 2, str(tmp_path), True, 2, None, group=False)[0]
    snapshot = tmp_path / "snapshots" / f"step={step}.ckpt"
    export_checkpoint(snapshot, tmp_path / "out.ckpt")
    found = run_ranks(fit, 2, str(tmp_path), False, 2, str(tmp_path / "out.ckpt"), group=False)[0]
    if step == 4:  # in the middle of an epoch a stock loader begins anew
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def grow(rank: int, path: str, out: str) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export_checkpoint(path, out)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.parametrize("name", ["out.ckpt", "out.safetensors"])
def test_an_export_needs_little_memory(run_ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = save(tmp_path, {"state_dict": {f"w{i}": torch.ones(2**23) for i in range(10)}})  # 320 MiB
    [grown] = run_ranks(grow, 1, str(path), str(tmp_path / name), group=False)
    assert grown < 160 * 2**20
    [warmed] = run_ranks(grow, 1, str(path), str(tmp_path / f"again-{name}"), group=False)
    assert warmed < 160 * 2**20


def test_damage_leaves_nothing_behind(tmp_path: Path) -> None:
    path = save(tmp_path, {"state_dict": {"w": torch.ones(1000)}})
    stripe = next(path.glob("stripe-*")).resolve()
    data = bytearray(stripe.read_bytes())
    data[-1] ^= 1
    stripe.write_bytes(data)
    for name in ("out.ckpt", "out.safetensors"):
        with pytest.raises(CorruptCheckpointError, match=stripe.name):
            export_checkpoint(path, tmp_path / name)
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(path)
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".hetckpt-*"))


def test_what_is_no_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        export_checkpoint(tmp_path / "none.ckpt", tmp_path / "out.ckpt")
