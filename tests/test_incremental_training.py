"""Incremental snapshots of a Trainer: what they write, and that a resume from one is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from lightning_hetckpt.checkpoint.verify import read_manifest


class FineTuned(LightningModule):
    """A frozen body, a head that learns, and a table of which each step moves a few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20_000, 64, sparse=True)
        self.body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)).requires_grad_(False)
        self.head = nn.Linear(512, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """One step of both optimizers."""
        loss = self.head(self.body(self.table(batch))).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        """SparseAdam for the table, AdamW for the head."""
        return [
            torch.optim.SparseAdam(list(self.table.parameters())),
            torch.optim.AdamW(self.head.parameters()),
        ]


def fit(
    folder: Path,
    steps: int,
    save: Any,
    ckpt_path: str | None = None,
    callback: SnapshotCallback | None = None,
) -> FineTuned:
    model = FineTuned()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_steps=2 * steps,  # two optimizers
        strategy=HeteroDDP(),
        plugins=[StripedAsyncCheckpointIO(dirs=[folder], save=save)],
        callbacks=[callback or SnapshotCallback(keep_last=100)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
    )
    ids = torch.randint(0, 20_000, (64, 8), generator=torch.Generator().manual_seed(2))
    trainer.fit(model, DataLoader(list(ids), batch_size=8), ckpt_path=ckpt_path)
    return model


@pytest.mark.parametrize("save", ["incremental", "differential"])
def test_a_run_that_resumes_from_one_ends_as_if_it_had_not_stopped(tmp_path: Path, save: Any) -> None:
    truth = fit(tmp_path / "whole", 6, "full")
    fit(tmp_path / "cut", 4, save)
    resumed = fit(tmp_path / "cut", 6, save, ckpt_path="last")
    for name, tensor in truth.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_snapshots_hold_little_more_than_what_moved(tmp_path: Path) -> None:
    fit(tmp_path, 5, "incremental")
    manifests = [read_manifest(path) for path in sorted((tmp_path / "snapshots").glob("step=*.ckpt"))]
    written = {
        manifest.global_step: sum(file.nbytes for file in manifest.files.values() if file.snapshot is None)
        for manifest in manifests
    }
    assert {manifest.kind for manifest in manifests} == {"full", "incremental"}
    full, later = max(written.values()), sorted(written.values())[:3]
    # 64 rows of the table and of both moments at most, the head with its moments, meta.pt and the like
    assert full > 10_000_000
    assert max(later) < 2 * 64 * 64 * 4 * 3 + 3 * 513 * 4 + 60_000


def test_a_history_stays_beside_the_newest(tmp_path: Path) -> None:
    fit(tmp_path, 8, "incremental", callback=SnapshotCallback(keep_last=1, keep_every_n_steps=6))
    steps = sorted(read_manifest(path).global_step for path in (tmp_path / "snapshots").glob("step=*.ckpt"))
    assert steps == [6, 12, 16]
