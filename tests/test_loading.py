"""A Trainer that restores fills its own tensors: nothing twice, nothing unread that is needed, nothing read that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torchmetrics import MeanMetric

from lightning_hetckpt import StripedAsyncCheckpointIO
from lightning_hetckpt.checkpoint import direct_reads, restore
from lightning_hetckpt.checkpoint.manifest import Manifest
from lightning_hetckpt.errors import ConfigurationError, CorruptCheckpointError
from tests import toy
from tests.checkpoint.trees import assert_same

Ranks = Callable[..., list[Any]]


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(file, bytes) of every read that a load does."""
    found: list[tuple[str, int]] = []
    read = direct_reads.DirectReads.read

    def counted(self: Any, views: Any, offset: int, needed: int) -> None:
        found.append((self.path.name, needed))
        read(self, views, offset, needed)

    monkeypatch.setattr(direct_reads.DirectReads, "read", counted)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()], max_epochs=1)
    trainer.fit(toy.Toy(batch_norm=True), toy.loader(16, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


class Spy(StripedAsyncCheckpointIO):
    """Keeps what it gave to the Trainer."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        self.loaded = super().load_checkpoint(path, map_location, weights_only)
        return self.loaded


def resume(root: Path, path: Path, model: LightningModule, fn: str = "fit", **options: Any) -> Any:
    spy = Spy()
    trainer = toy.trainer(root, options.pop("strategy", "auto"), 1, plugins=[spy], max_epochs=1, **options)
    getattr(trainer, fn)(model, toy.loader(16, 4), ckpt_path=path)
    return trainer, spy.loaded


@pytest.mark.parametrize("strategy", ["auto", "ddp", "hetero_ddp"])
def test_the_modules_own_tensors_are_filled(saved: Path, tmp_path: Path, strategy: str) -> None:
    truth = restore.load(saved)
    model = toy.Toy(batch_norm=True)
    for parameter in model.parameters():
        nn.init.constant_(parameter, -3.0)
    before = dict(model.state_dict(keep_vars=True))
    trainer, loaded = resume(tmp_path, saved, model, strategy=strategy)
    assert_same(dict(trainer.lightning_module.state_dict()), dict(truth["state_dict"]))
    for name, tensor in before.items():
        assert loaded["state_dict"][name] is tensor
    for state, [held] in zip(
        loaded["optimizer_states"], [[one.state.values()] for one in trainer.optimizers], strict=True
    ):
        for given, kept in zip(state["state"].values(), held, strict=True):
            assert given["exp_avg"].data_ptr() == kept["exp_avg"].data_ptr()  # made once
    assert_same(loaded["optimizer_states"], truth["optimizer_states"])


class MetaToy(toy.Toy):
    """Is made on the meta device, with two names for one weight and one that no checkpoint holds if asked so."""

    def __init__(self, homeless: bool = False) -> None:
        super().__init__(batch_norm=True)
        self.net = self.net.to("meta")
        self.twin = nn.Linear(8, 1, device="meta", dtype=torch.float64)
        self.twin.weight = self.net[-1].weight
        self.twin.bias = self.net[-1].bias
        if homeless:
            self.register_buffer("cache", torch.empty(3, device="meta"), persistent=False)


class TiedToy(toy.Toy):
    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.twin = self.net[-1]


def test_a_meta_module_gets_memory_once_and_stays_tied(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()], max_epochs=1)
    trainer.fit(TiedToy(), toy.loader(16, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    truth = restore.load(tmp_path / "a.ckpt")
    model = MetaToy()
    trainer, _ = resume(tmp_path, tmp_path / "a.ckpt", model)
    assert_same(dict(model.state_dict()), dict(truth["state_dict"]))
    assert model.twin.weight is model.net[-1].weight
    assert len(trainer.optimizers[0].param_groups[0]["params"]) == len(list(TiedToy().parameters()))


def test_a_meta_tensor_that_the_checkpoint_does_not_hold_is_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="1 meta tensors of MetaToy, such as cache"):
        resume(tmp_path, saved, MetaToy(homeless=True))


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_outside_of_fit_no_optimizer_state_is_read(
    tmp_path: Path, bytes_read: list[tuple[str, int]], fn: str
) -> None:
    class Wide(toy.Toy):
        """Large enough for the optimizer's part to be chunks of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(2000, 2500)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.wide.weight.square().sum()

    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()], max_steps=1)
    trainer.fit(Wide(), toy.loader(4, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model = Wide()
    name = {"validate": "validation"}.get(fn, fn)
    setattr(model, f"{name}_step", lambda batch, batch_idx: torch.zeros(1))
    _, loaded = resume(tmp_path, tmp_path / "a.ckpt", model, fn)
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert sum(n for name, n in bytes_read if name.endswith("safetensors")) < weights + 2 * 8 * 2**20
    assert all(value["exp_avg"].is_meta for value in loaded["optimizer_states"][0]["state"].values())


class KeepsItsHead(toy.Toy):
    """Looks at the checkpoint, and does not want all of it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.looked = {name: tensor.clone() for name, tensor in checkpoint["state_dict"].items()}
        own = self.state_dict()
        checkpoint["state_dict"]["net.0.bias"] = own["net.0.bias"].clone()


def test_a_hook_sees_the_real_values_and_decides(saved: Path, tmp_path: Path) -> None:
    truth = restore.load(saved)["state_dict"]
    model = KeepsItsHead(batch_norm=True)
    nn.init.constant_(model.net[0].bias, 5.0)
    resume(tmp_path, saved, model)
    assert_same(model.looked, dict(truth))
    assert bool((model.net[0].bias == 5.0).all())
    assert torch.equal(model.net[0].weight, truth["net.0.weight"])


class Remembers(Callback):
    """Holds on to the weights that were loaded, as an averaging callback might."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.held = checkpoint["state_dict"]


def test_what_a_callback_keeps_does_not_move_with_the_model(saved: Path, tmp_path: Path) -> None:
    truth = restore.load(saved)["state_dict"]
    remembers = Remembers()
    spy = Spy()
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[spy], max_epochs=2, callbacks=[remembers])
    trainer.fit(toy.Toy(batch_norm=True), toy.loader(16, 4), ckpt_path=saved)
    assert_same(dict(remembers.held), dict(truth))


def test_weight_averaging_goes_on_as_with_a_stock_checkpoint(tmp_path: Path) -> None:
    def averaged(path: Path | None, plugin: Any, epochs: int) -> Any:
        model = toy.Toy()
        trainer = toy.trainer(
            tmp_path, "auto", 1, plugins=plugin, max_epochs=epochs, callbacks=[WeightAveraging()]
        )
        trainer.fit(model, toy.loader(16, 4), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{'ours' if plugin else 'stock'}-{epochs}.ckpt")
        return toy.parameters(model)

    averaged(None, [StripedAsyncCheckpointIO()], 1)
    averaged(None, None, 1)
    ours = averaged(tmp_path / "ours-1.ckpt", [StripedAsyncCheckpointIO()], 2)
    stock = averaged(tmp_path / "stock-1.ckpt", None, 2)
    assert all(torch.equal(one, other) for one, other in zip(ours, stock, strict=True))


class WithMetric(toy.Toy):
    """Its metric loads itself in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.mean.persistent(True)


def test_submodules_with_their_own_way_of_loading_get_real_tensors(tmp_path: Path) -> None:
    model = WithMetric()
    model.mean.update(torch.tensor([2.0, 4.0]))
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()], max_epochs=1)
    trainer.fit(model, toy.loader(16, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = WithMetric()
    resume(tmp_path, tmp_path / "a.ckpt", other)
    assert (float(other.mean.mean_value), float(other.mean.weight)) == (6.0, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(toy.parameters(model), toy.parameters(other), strict=True))


class Renamed(toy.Toy):
    """Drops one of its keys before it loads, as a pre-hook may."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.strict_loading = False
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *rest: state.pop("net.0.bias", None)
        )


def test_a_pre_hook_may_keep_a_tensor_from_being_loaded(saved: Path, tmp_path: Path) -> None:
    model = Renamed()
    nn.init.constant_(model.net[0].bias, 5.0)
    resume(tmp_path, saved, model)
    assert bool((model.net[0].bias == 5.0).all())


class Other(LightningModule):
    """Lacks a key, has one more, and one of another shape."""

    def __init__(self, strict: bool, fitting: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(toy.FEATURES, 9 if fitting else 8, dtype=torch.float64))
        self.extra = nn.Linear(1, 1)
        self.strict_loading = strict

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.extra.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_keys_that_do_not_fit_are_listed(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as told:
        resume(tmp_path, saved, Other(strict=True))
    for text in (
        'Missing key(s) in state_dict: "extra.weight", "extra.bias"',
        'Unexpected key(s) in state_dict: "net.1.weight"',
        "size mismatch for net.0.weight: copying a param with shape torch.Size([8, 5])",
    ):
        assert text in str(told.value)


def test_what_fits_is_loaded_where_keys_may_be_missing(saved: Path, tmp_path: Path) -> None:
    model = Other(strict=False, fitting=False)
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()])
    model.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer.validate(model, toy.loader(4, 4), ckpt_path=saved)
    assert torch.equal(model.net[0].weight, restore.load(saved)["state_dict"]["net.0.weight"])


def test_another_dtype_is_converted_as_copying_does(saved: Path, tmp_path: Path) -> None:
    model = toy.Toy(batch_norm=True).float()
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()])
    model.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer.validate(model, toy.loader(4, 4), ckpt_path=saved)
    truth = restore.load(saved)["state_dict"]
    assert torch.equal(model.net[0].weight, truth["net.0.weight"].float())


class Looks(toy.Toy):
    """Reads another checkpoint in the middle of training."""

    def on_train_start(self) -> None:
        before = toy.parameters(self)
        self.found = self.trainer.strategy.load_checkpoint(self.other)
        assert all(torch.equal(a, b) for a, b in zip(before, self.parameters(), strict=True))


def test_who_just_looks_at_a_checkpoint_changes_no_model(saved: Path, tmp_path: Path) -> None:
    model = Looks(batch_norm=True)
    model.other = saved
    trainer = toy.trainer(tmp_path, "auto", 1, plugins=[StripedAsyncCheckpointIO()], max_epochs=1)
    trainer.fit(model, toy.loader(16, 4))
    assert_same(model.found, restore.load(saved))


def count_reads(rank: int, root: str, path: str, strategy: str, world: int) -> tuple[int, Any]:
    counted: list[int] = []
    read = direct_reads.DirectReads.read

    def counting(self: Any, views: Any, offset: int, needed: int) -> None:
        counted.append(needed)
        read(self, views, offset, needed)

    direct_reads.DirectReads.read = counting  # type: ignore[method-assign]
    model = toy.Toy(batch_norm=True)
    trainer = toy.trainer(root, strategy, world, max_epochs=1, plugins=[StripedAsyncCheckpointIO()])
    trainer.fit(model, toy.loader(16, 4), ckpt_path=path)
    return sum(counted), {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "hetero_ddp"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_of_a_trainer_read_each_byte_once(
    run_ranks: Ranks, saved: Path, tmp_path: Path, strategy: str, world: int
) -> None:
    manifest = Manifest.from_json((saved / "manifest.json").read_bytes(), saved)
    told = run_ranks(count_reads, world, str(tmp_path), str(saved), strategy, world, group=False)
    assert sum(read for read, _ in told) == sum(entry.nbytes for entry in manifest.files.values())
    truth = restore.load(saved)["state_dict"]
    for _, found in told:
        assert_same(found, dict(truth))


def test_damage_stops_the_resume(saved: Path, tmp_path: Path) -> None:
    file = next(saved.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=file.name):
        resume(tmp_path, saved, toy.Toy(batch_norm=True))
