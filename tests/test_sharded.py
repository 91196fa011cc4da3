"""A model that Lightning shards goes through our checkpoints: onto other shards, from HeteroDDP and back to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO, StripedModelParallel
from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.verify import verify
from lightning_hetckpt.errors import ConfigurationError
from tests import toy

Ranks = Callable[..., list[Any]]


class Sharded(toy.Toy):
    """The toy job with FSDP2 where its strategy has a mesh."""

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is not None and not any(isinstance(one, DTensor) for one in self.parameters()):
            fully_shard(self.net, mesh=mesh["data_parallel"])


def fit(rank: int, root: str, kind: str, world: int, epochs: int, path: str | None) -> list[Tensor]:
    extra: dict[str, Any] = {}
    if kind == "sharded":
        dirs = [Path(root) / "ssd0", Path(root) / "ssd1"]
        strategy: Any = StripedModelParallel(dirs, data_parallel_size=world, tensor_parallel_size=1)
    else:
        strategy, extra = HeteroDDP(policy="even"), {"plugins": [StripedAsyncCheckpointIO(snapshots=False)]}
    trainer = toy.trainer(root, strategy, world, max_epochs=epochs, **extra)
    model = Sharded()
    trainer.fit(model, toy.loader(32, 16 // world, shuffle=False), ckpt_path=path)
    trainer.save_checkpoint(f"{root}/{kind}-{epochs}.ckpt")
    return [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for one in model.parameters()
    ]


@pytest.mark.parametrize(
    ("first", "then"), [("sharded", "hetero"), ("hetero", "sharded"), ("sharded", "sharded")]
)
def test_training_goes_on_in_another_shape(run_ranks: Ranks, tmp_path: Path, first: str, then: str) -> None:
    truth = run_ranks(fit, 2, str(tmp_path), "hetero", 2, 2, None, group=False)[0]
    run_ranks(fit, 2, str(tmp_path), first, 2, 1, None, group=False)
    path = tmp_path / f"{first}-1.ckpt"
    verify(path)
    assert restore.load(path)["global_step"] == 2
    world = 4 if first == then else 2
    found = run_ranks(fit, world, str(tmp_path), then, world, 2, str(path), group=False)[0]
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_snapshots_of_a_sharded_model_are_refused_with_the_way_out(tmp_path: Path) -> None:
    trainer = toy.trainer(
        tmp_path,
        StripedModelParallel(data_parallel_size=1, tensor_parallel_size=1),
        1,
        plugins=[StripedAsyncCheckpointIO()],
        callbacks=[SnapshotCallback()],
        max_epochs=1,
    )
    with pytest.raises(ConfigurationError, match="ModelCheckpoint"):
        trainer.fit(Sharded(), toy.loader(8, 4))
