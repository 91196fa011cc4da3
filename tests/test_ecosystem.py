"""Checkpoints of a real run are read by tools that know nothing of us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from tests import toy

Ranks = Callable[..., list[Any]]


def train(rank: int, root: str, shares: list[int], drives: int) -> Any:
    dirs = [Path(root) / f"ssd{i}" for i in range(drives)] or None
    trainer = toy.trainer(
        root,
        HeteroDDP(policy="static", shares=shares),
        len(shares),
        max_epochs=1,
        callbacks=[SnapshotCallback(keep_last=1)],
        plugins=[StripedAsyncCheckpointIO(dirs=dirs)],
    )
    model = toy.Toy(batch_norm=True)
    trainer.fit(model, toy.loader(32, 4))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def load_with_stock_dcp(rank: int, path: str) -> Any:
    model = toy.Toy(batch_norm=True)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, -7.0)
    state = {"state_dict": model.state_dict()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    model.load_state_dict(state["state_dict"])
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("shares", "drives"), [([4], 0), ([6, 2], 2), ([4, 2, 2], 3)])
def test_safetensors_and_stock_dcp_read_a_snapshot(
    run_ranks: Ranks, tmp_path: Path, shares: list[int], drives: int
) -> None:
    truth = run_ranks(train, len(shares), str(tmp_path), shares, drives, group=False)[0]
    [snapshot] = (tmp_path / "snapshots").glob("*.ckpt")

    stripes = sorted(snapshot.glob("*.safetensors"))
    pieces: dict[str, int] = {}
    for stripe in stripes:
        with safe_open(stripe, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                pieces[name] = pieces.get(name, 0) + file.get_tensor(name).numel()
    assert {name: pieces[f"state_dict.{name}"] for name in truth} == {n: t.numel() for n, t in truth.items()}
    assert "optimizer_states.0.state.0.exp_avg" in pieces

    [alone] = run_ranks(load_with_stock_dcp, 1, str(snapshot))
    together = run_ranks(load_with_stock_dcp, 3, str(snapshot))
    for found in (alone, *together):
        for name, tensor in truth.items():
            assert torch.equal(found[name], tensor), name
