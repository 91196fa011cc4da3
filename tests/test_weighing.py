"""Losses that are means over tokens, not over samples, still equal those of one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hetckpt import HetckptError, HeteroDDP
from tests import toy

Ranks = Callable[..., list[Any]]
LENGTH, WIDTH = 38, 6


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Padded rows of numbers and a mask of how many of them count; every tenth sentence is empty."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(LENGTH, WIDTH, toy.FEATURES, dtype=torch.float64, generator=generator)
        lengths = torch.randint(1, WIDTH + 1, (LENGTH,), generator=generator)
        lengths[::10] = 0
        self.masks = (torch.arange(WIDTH) < lengths[:, None]).double()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.masks[index]


def tokens(batch: Any) -> Tensor:
    return batch[1].sum()


def token_mean(net: torch.nn.Module, rows: Tensor, masks: Tensor) -> Tensor:
    losses = (net(rows).squeeze(-1) - rows.sum(-1)) ** 2
    return (losses * masks).sum() / masks.sum().clamp_min(1.0)


class Speaker(toy.Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = token_mean(self.net, *batch)
        self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.logged = [*getattr(self, "logged", []), float(self.trainer.callback_metrics["loss"])]


def fit(rank: int, root: str, shares: list[int], caps: Any) -> Any:
    strategy = HeteroDDP(
        policy="static",
        shares=shares,
        global_batch_size=sum(shares),
        weight_by=tokens,
        max_micro_batch=caps,
    )
    model = Speaker()
    toy.trainer(root, strategy, len(shares), max_epochs=2).fit(model, DataLoader(Sentences(), batch_size=4))
    return toy.parameters(model), model.logged


@pytest.mark.parametrize(
    ("shares", "caps"), [([8], None), ([8], 3), ([7, 1], None), ([5, 2, 1], None), ([6, 2], [2, None])]
)
def test_a_loss_weighted_by_tokens_equals_one_process(
    run_ranks: Ranks, tmp_path: Path, shares: list[int], caps: Any
) -> None:
    found = run_ranks(fit, len(shares), str(tmp_path), shares, caps, group=False)

    data, net, losses = Sentences(), toy.make_net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _, chosen in toy.batches(LENGTH, 8, 2):
        optimizer.zero_grad()
        loss = token_mean(net, data.rows[chosen], data.masks[chosen])
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    for parameters, logged in found:
        pairs = zip(parameters, toy.parameters(net), strict=True)
        assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-12
        assert logged == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    "options", [{"weight_by": tokens, "loss_reduction": "sum"}, {"weight_by": "tokens"}], ids=["sum", "name"]
)
def test_a_weight_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HetckptError, match=r"weight_by.*expected a function"):
        HeteroDDP(**options)


def test_a_weight_per_sample_is_refused(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, HeteroDDP(weight_by=lambda batch: batch[1].sum(1)), 1, max_epochs=1)
    with pytest.raises(
        HetckptError, match=r"weight_by returned a tensor of shape \(4,\), expected one number"
    ):
        trainer.fit(Speaker(), DataLoader(Sentences(), batch_size=4))


def fit_nothing(rank: int, root: str) -> Any:
    strategy = HeteroDDP(policy="static", shares=[3, 1], weight_by=lambda batch: 0.0)
    model = Speaker()
    toy.trainer(root, strategy, 2, max_steps=2).fit(model, DataLoader(Sentences(), batch_size=2))
    return [bool(parameter.isfinite().all()) for parameter in model.parameters()]


def test_a_batch_without_any_weight_has_no_gradient_and_no_nan(run_ranks: Ranks, tmp_path: Path) -> None:
    assert all(all(found) for found in run_ranks(fit_nothing, 2, str(tmp_path), group=False))


class Gatherer(toy.Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[0] if self.unequal else batch[0].sum())
        return super().training_step(batch, batch_idx)


def fit_gathering(rank: int, root: str, unequal: bool) -> str:
    model = Gatherer()
    model.unequal = unequal
    try:
        strategy = HeteroDDP(policy="static", shares=[3, 1])
        toy.trainer(root, strategy, 2, max_steps=2).fit(model, toy.loader(8, 2))
    except HetckptError as error:
        return str(error)
    return ""


def test_gathering_unequal_shapes_is_an_error_on_every_rank(run_ranks: Ranks, tmp_path: Path) -> None:
    message = r"all_gather.*rank 0: \(3,\), rank 1: \(1,\).*policy=\"even\""
    for text in run_ranks(fit_gathering, 2, str(tmp_path), True, group=False):
        assert re.search(message, text), text
    assert run_ranks(fit_gathering, 2, str(tmp_path), False, group=False) == ["", ""]
