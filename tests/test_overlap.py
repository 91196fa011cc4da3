"""A snapshot written while the next step runs equals a copy taken when it began."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from lightning_hetckpt.checkpoint import staging
from tests import toy
from tests.doubles import Gate

Ranks = Callable[..., list[Any]]


class Wide(toy.Toy):
    """Big enough that a step may overtake a copy; BatchNorm buffers move in every forward pass."""

    def __init__(self, optimizer: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(toy.FEATURES, 300),
            nn.BatchNorm1d(300),
            nn.Tanh(),
            nn.Linear(300, 300),
            nn.Linear(300, 1),
        ).double()
        self.optimizer = optimizer or {}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, **self.optimizer)


class TwoOptimizers(Wide):
    """Manual optimization with two optimizers, as in a GAN: the global step grows by two per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers = list(self.net.children())
        return [
            torch.optim.AdamW([*layers[0].parameters(), *layers[1].parameters()], lr=1e-2),
            torch.optim.SGD([*layers[3].parameters(), *layers[4].parameters()], lr=1e-3, momentum=0.9),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.net(inputs), targets))
            optimizer.step()


class Copies(Callback):
    """Copies everything at the end of each batch: what the snapshot of that step must hold."""

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        state = {
            "state_dict": pl_module.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        }
        self.at[trainer.global_step] = copy.deepcopy(state)


def fit(rank: int, root: str, model: str, optimizer: dict[str, Any], shares: list[int], ema: bool) -> Any:
    copies = Copies()
    callbacks: list[Callback] = [copies, SnapshotCallback(Path(root) / "snapshots", keep_last=100)]
    if ema:
        callbacks.insert(0, EMAWeightAveraging(decay=0.5))
    trainer = toy.trainer(
        root,
        HeteroDDP(policy="static", shares=shares) if shares != [4, 4] else "ddp",
        len(shares),
        max_epochs=2,
        callbacks=callbacks,
        plugins=[StripedAsyncCheckpointIO()],
    )
    trainer.fit(Wide(optimizer) if model == "wide" else TwoOptimizers(), toy.loader(36, 4, drop_last=True))
    return copies.at


def assert_same(found: Any, truth: Any, where: str) -> None:
    if isinstance(truth, Tensor):
        assert torch.equal(found, truth), where
    elif isinstance(truth, dict):
        assert list(found) == list(truth), where
        for key in truth:
            assert_same(found[key], truth[key], f"{where}.{key}")
    elif isinstance(truth, (list, tuple)):
        assert len(found) == len(truth), where
        for number, (one, other) in enumerate(zip(found, truth, strict=True)):
            assert_same(one, other, f"{where}.{number}")
    else:
        assert found == truth, where


CASES = {
    "for-loop": ("wide", {"foreach": False}, [4], False),
    "foreach": ("wide", {"foreach": True}, [4], False),
    "fused": ("wide", {"fused": True}, [4], False),
    "two-optimizers": ("two", {}, [4], False),
    "ema": ("wide", {}, [4], True),
    "two-ranks-stock-ddp": ("wide", {}, [4, 4], False),
    "two-ranks-fused": ("wide", {"fused": True}, [6, 2], False),
    "two-ranks-manual": ("two", {}, [5, 3], False),
    "two-ranks-ema": ("wide", {}, [6, 2], True),
}


@pytest.mark.parametrize("case", CASES)
def test_every_snapshot_equals_the_copy_of_its_step(run_ranks: Ranks, tmp_path: Path, case: str) -> None:
    model, optimizer, shares, ema = CASES[case]

    found = run_ranks(fit, len(shares), str(tmp_path), model, optimizer, shares, ema, group=False)

    truth = found[0]  # buffers differ between ranks by design; rank 0's are the ones that DDP keeps
    assert len(truth) >= 8
    for step, expected in truth.items():
        saved = StripedAsyncCheckpointIO().load_checkpoint(tmp_path / "snapshots" / f"step={step}.ckpt")
        live = saved["current_model_state"] if ema else saved["state_dict"]
        assert_same(live, expected["state_dict"], f"step {step}")
        assert_same(saved["optimizer_states"], expected["optimizer_states"], f"step {step}")


class RawStep(Wide):
    """Steps an optimizer that neither Lightning nor the callback hears of."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            own = torch.optim.SGD(self.parameters(), lr=0.1)
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)
            own.step()
            own.zero_grad()
        return super().training_step(batch, batch_idx)


class InPlace(Wide):
    """Moves a weight behind the back of every hook, while the copy of the last step is held up."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            assert self.gate.arrived.wait(10)
            with torch.no_grad():
                self.net[4].bias.add_(1.0)
            self.gate.open()
        return super().training_step(batch, batch_idx)


def fit_alone(tmp_path: Path, model: Wide) -> Copies:
    copies = Copies()
    trainer = toy.trainer(
        tmp_path,
        HeteroDDP(),
        1,
        max_epochs=1,
        callbacks=[copies, SnapshotCallback(tmp_path / "snapshots", keep_last=100)],
        plugins=[StripedAsyncCheckpointIO()],
    )
    trainer.fit(model, toy.loader(24, 4))
    return copies


def assert_saved(tmp_path: Path, copies: Copies, steps: set[int]) -> None:
    assert {int(path.stem.removeprefix("step=")) for path in (tmp_path / "snapshots").glob("*.ckpt")} == steps
    for step in steps:
        saved = StripedAsyncCheckpointIO().load_checkpoint(tmp_path / "snapshots" / f"step={step}.ckpt")
        assert_same(saved["state_dict"], copies.at[step]["state_dict"], f"step {step}")


def test_an_optimizer_that_nobody_knows_of_is_fenced_by_its_own_hook(tmp_path: Path) -> None:
    copies = fit_alone(tmp_path, RawStep())

    assert_saved(tmp_path, copies, {1, 2, 3, 4, 5, 6})


def test_a_change_slipped_past_the_fence_is_caught_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, pour = Gate(), staging.pour
    drains = itertools.count(1)

    def held_up(*args: Any) -> Any:
        if next(drains) == 3:
            gate.pass_through()
        return pour(*args)

    monkeypatch.setattr(staging, "pour", held_up)
    copies = fit_alone(tmp_path, InPlace(gate))

    assert_saved(tmp_path, copies, {1, 2, 4, 5, 6})
    assert any("step=3.ckpt" in text and "net.4.bias" in text for text in caplog.messages)


class SavesLate(Callback):
    """Saves where forward and backward are over and the optimizer comes next: nothing is left to overlap with."""

    def __init__(self, root: Path) -> None:
        self.root, self.truth = root, {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step
        self.truth[step] = copy.deepcopy(pl_module.state_dict())
        trainer.save_checkpoint(self.root / f"late-{step}.ckpt")


def test_a_save_right_before_the_optimizer_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = SavesLate(tmp_path)
    trainer = toy.trainer(
        tmp_path,
        HeteroDDP(),
        1,
        max_steps=4,
        callbacks=[late],
        plugins=[StripedAsyncCheckpointIO(snapshots=False)],
    )
    slow = staging._drain  # the copy would surely be overtaken
    monkeypatch.setattr(staging, "_drain", lambda *job: (time.sleep(0.2), slow(*job)))
    trainer.fit(Wide(), toy.loader(36, 4))

    assert len(late.truth) == 4
    for step, expected in late.truth.items():
        saved = StripedAsyncCheckpointIO().load_checkpoint(tmp_path / f"late-{step}.ckpt")
        assert_same(saved["state_dict"], expected, f"step {step}")


def test_saves_of_model_checkpoint_overlap_and_are_fenced_by_the_strategy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies()
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = toy.trainer(
        tmp_path,
        HeteroDDP(),
        1,
        max_steps=4,
        enable_checkpointing=True,
        callbacks=[copies, every],
        plugins=[StripedAsyncCheckpointIO(snapshots=False)],
    )
    slow = staging._drain  # the step would surely overtake the copy
    monkeypatch.setattr(staging, "_drain", lambda *job: (time.sleep(0.2), slow(*job)))
    trainer.fit(Wide(), toy.loader(36, 4))

    assert len(copies.at) == 4
    for step, expected in copies.at.items():
        saved = StripedAsyncCheckpointIO().load_checkpoint(tmp_path / "every" / f"step={step}.ckpt")
        assert_same(saved["state_dict"], expected["state_dict"], f"step {step}")
        assert_same(saved["optimizer_states"], expected["optimizer_states"], f"step {step}")
