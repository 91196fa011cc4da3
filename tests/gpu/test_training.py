"""A whole run on a GPU: a snapshot at every step is the state at that step, and a resume goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from torch import Tensor

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from lightning_hetckpt.checkpoint import restore
from tests import toy
from tests.gpu import device  # noqa: F401 (skips where there is no GPU)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 12


class Copies(Callback):
    """The weights behind every step, copied on the GPU."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.by_step[trainer.global_step] = {
            name: value.clone() for name, value in pl_module.state_dict().items()
        }


def run(
    root: Path, strategy: Any, steps: int, ckpt_path: Path | None = None
) -> tuple[Copies, dict[str, Tensor]]:
    seed_everything(11, verbose=False)
    copies, model = Copies(), toy.Toy(dropout=0.5, batch_norm=True)
    trainer = toy.trainer(
        root,
        strategy,
        1,
        accelerator="gpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[copies, SnapshotCallback(root / "snapshots", keep_last=1000)],
        plugins=[StripedAsyncCheckpointIO()],
    )
    trainer.fit(model, toy.loader(40, 8), ckpt_path=ckpt_path)
    if dist.is_initialized():
        dist.destroy_process_group()
    return copies, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["hetero_ddp", "auto"])
def test_every_step_of_a_run_has_its_snapshot(tmp_path: Path, strategy: str) -> None:
    copies, _ = run(tmp_path, HeteroDDP() if strategy == "hetero_ddp" else strategy, STEPS)

    assert set(copies.by_step) == set(range(1, STEPS + 1))
    for step, truth in copies.by_step.items():
        found = restore.load(tmp_path / "snapshots" / f"step={step}.ckpt", map_location="cpu")["state_dict"]
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], truth[name].cpu()) for name in truth), step


def test_a_resumed_run_draws_the_same_dropout_masks_and_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    _, truth = run(tmp_path, HeteroDDP(), STEPS)
    for step in (1, 5, 7):
        _, found = run(
            tmp_path / f"again{step}", HeteroDDP(), STEPS, tmp_path / "snapshots" / f"step={step}.ckpt"
        )
        assert all(torch.equal(found[name], truth[name]) for name in truth), step
