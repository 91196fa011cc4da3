"""Lightning's own checkpointing, with our plugin beneath it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import SequentialSampler

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from tests import toy

Ranks = Callable[..., list[Any]]


class Validated(toy.Toy):
    """Logs a metric that falls and rises, so that top-k has something to choose."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.current_epoch % 3), sync_dist=True)

    def val_dataloader(self) -> Any:
        return toy.loader(4, 2)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", next(self.net.parameters()).sum(), sync_dist=True)


def fit(rank: int, root: str, strategy: str, devices: int, save_last: Any, stock: bool, epochs: int) -> Any:
    checkpoint = ModelCheckpoint(Path(root) / "kept", monitor="score", save_top_k=2, save_last=save_last)
    plugin = StripedAsyncCheckpointIO(dirs=[Path(root) / "a", Path(root) / "b"], snapshots=False)
    trainer = toy.trainer(
        root,
        HeteroDDP() if strategy == "hetero" else strategy,
        devices,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[checkpoint],
        plugins=[] if stock else [plugin],
    )
    model = Validated()
    trainer.fit(model, toy.loader(16, 4), ckpt_path="last")
    best = trainer.test(model, toy.loader(4, 2), ckpt_path="best", verbose=False)[0]["weight"]
    return {
        "kept": sorted(path.name for path in (Path(root) / "kept").glob("[!.]*")),
        "best": Path(checkpoint.best_model_path).name,
        "best_weight": best,
        "steps": trainer.global_step,
        "top": sorted(Path(path).name for path in checkpoint.best_k_models),
        "link": (Path(root) / "kept" / "last.ckpt").is_symlink(),
    }


@pytest.mark.parametrize(("strategy", "devices"), [("hetero", 2), ("ddp", 2), ("auto", 1), ("hetero", 1)])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_top_k_last_and_best_work_as_in_stock(
    run_ranks: Ranks, tmp_path: Path, strategy: str, devices: int, save_last: Any
) -> None:
    for epochs in (5, 7):  # the second run resumes from the first one's last
        ours, stock = (
            run_ranks(
                fit,
                devices,
                str(tmp_path / name),
                strategy,
                devices,
                save_last,
                name == "stock",
                epochs,
                group=False,
            )
            for name in ("ours", "stock")
        )
        assert ours == stock
        saved = StripedAsyncCheckpointIO().load_checkpoint(tmp_path / "ours" / "kept" / ours[0]["best"])
        assert ours[0]["best_weight"] == pytest.approx(float(saved["state_dict"]["net.0.weight"].sum()))


def test_a_file_of_stock_lightning_loads(tmp_path: Path) -> None:
    stock = toy.trainer(tmp_path, "auto", 1, max_steps=3)
    stock.fit(toy.Toy(), toy.loader(32, 8))
    stock.save_checkpoint(tmp_path / "stock.ckpt")

    def resume(**options: Any) -> tuple[int, list[torch.Tensor]]:
        trainer, model = toy.trainer(tmp_path, devices=1, max_epochs=2, **options), toy.Toy()
        trainer.fit(
            model, toy.loader(32, 8, sampler=SequentialSampler(range(32))), ckpt_path=tmp_path / "stock.ckpt"
        )
        return trainer.global_step, toy.parameters(model)

    steps, truth = resume(strategy="auto")
    found_steps, found = resume(
        strategy=HeteroDDP(), plugins=[StripedAsyncCheckpointIO()], use_distributed_sampler=False
    )

    assert found_steps == steps
    for one, other in zip(found, truth, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("alias", ["", "meta.pt"])
def test_a_directory_and_its_meta_file_load(tmp_path: Path, alias: str) -> None:
    trainer = toy.trainer(tmp_path, "auto", 1, max_steps=3, plugins=[StripedAsyncCheckpointIO()])
    model = toy.Toy()
    trainer.fit(model, toy.loader(32, 8))
    trainer.save_checkpoint(tmp_path / "x.ckpt")

    again = toy.trainer(tmp_path, "auto", 1, max_steps=3, plugins=[StripedAsyncCheckpointIO()])
    other = toy.Toy()
    torch.nn.init.zeros_(other.net[0].weight)
    again.validate(
        with_validation(other), toy.loader(4, 2), ckpt_path=str(tmp_path / "x.ckpt" / alias), verbose=False
    )

    assert torch.equal(other.net[0].weight, model.net[0].weight)


def with_validation(model: toy.Toy) -> toy.Toy:
    model.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    return model


def test_saving_before_and_after_a_run_works(tmp_path: Path) -> None:
    trainer = toy.trainer(
        tmp_path, HeteroDDP(), 1, max_steps=2, plugins=[StripedAsyncCheckpointIO(snapshots=False)]
    )
    model = toy.Toy()
    trainer.fit(model, toy.loader(32, 8))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer.save_checkpoint(tmp_path / "after.ckpt")

    loaded = trainer.strategy.checkpoint_io.load_checkpoint(tmp_path / "after.ckpt")

    assert torch.equal(loaded["state_dict"]["net.0.weight"], model.net[0].weight)
    trainer.strategy.checkpoint_io.teardown()


def test_the_default_callback_comes_and_goes_with_the_option(tmp_path: Path) -> None:
    def callbacks(strategy: Any, **plugin: Any) -> int:
        trainer = toy.trainer(
            tmp_path, strategy, 1, max_steps=1, plugins=[StripedAsyncCheckpointIO(**plugin)]
        )
        trainer.fit(toy.Toy(), toy.loader(8, 4))
        return sum(isinstance(one, SnapshotCallback) for one in trainer.callbacks)

    assert callbacks(HeteroDDP()) == 1
    assert callbacks(HeteroDDP(), snapshots=False) == 0
    assert callbacks("auto") == 0


def test_fast_dev_run_leaves_no_snapshots(tmp_path: Path) -> None:
    trainer = Trainer(
        default_root_dir=tmp_path,
        strategy=HeteroDDP(),
        accelerator="cpu",
        devices=1,
        fast_dev_run=True,
        logger=False,
        plugins=[StripedAsyncCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(toy.Toy(), toy.loader(8, 4))

    assert not list(tmp_path.rglob("*.ckpt"))
