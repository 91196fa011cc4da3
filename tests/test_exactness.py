"""Unequal ranks train exactly as one process with the whole batch would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetckpt import HeteroDDP
from tests import toy

Ranks = Callable[..., list[Any]]


def fit(rank: int, root: str, shares: list[int], length: int, options: dict[str, Any]) -> Any:
    options = dict(options)
    model_class = {"auto": toy.Toy, "manual": toy.ManualToy}[options.pop("model", "auto")]
    loader_options = options.pop("loader", {})
    policy = options.pop("policy", "static")
    strategy = HeteroDDP(
        global_batch_size=sum(shares), policy=policy, shares=shares, **options.pop("strategy", {})
    )
    model = model_class()
    trainer = toy.trainer(root, strategy, len(shares), **options)
    trainer.fit(model, toy.loader(length, 4, **loader_options))
    return toy.parameters(model), model.seen


def furthest(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize(
    ("shares", "options", "truth"),
    [
        ([6, 2], {"gradient_clip_val": 0.5}, {"clip": 0.5}),
        ([6, 2], {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"accumulate": 2, "clip": 0.5}),
        ([6, 2], {"model": "manual"}, {}),
        ([5, 2, 1], {"gradient_clip_val": 0.5}, {"clip": 0.5}),
        ([2, 6], {"loader": {"num_workers": 2}}, {}),
        ([8], {"gradient_clip_val": 0.5}, {"clip": 0.5}),
    ],
    ids=["clipping", "accumulation", "manual", "three-ranks", "workers", "one-rank"],
)
def test_unequal_shares_equal_one_process(
    run_ranks: Ranks, tmp_path: Path, shares: list[int], options: dict[str, Any], truth: dict[str, Any]
) -> None:
    length, epochs = 32, 3

    found = run_ranks(
        fit, len(shares), str(tmp_path), shares, length, {"max_epochs": epochs, **options}, group=False
    )

    expected = toy.train_alone(length, 8, epochs, **truth)
    for parameters, _ in found:
        assert furthest(parameters, expected) <= 1e-12


@pytest.mark.parametrize("length", [33, 38, 34])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_epoch_that_is_no_multiple_of_the_batch_stays_exact(
    run_ranks: Ranks, tmp_path: Path, length: int, accumulate: int
) -> None:
    shares, epochs = [5, 2, 1], 2
    options = {"max_epochs": epochs, "accumulate_grad_batches": accumulate}

    found = run_ranks(fit, 3, str(tmp_path), shares, length, options, group=False)

    expected = toy.train_alone(length, 8, epochs, accumulate=accumulate)
    for parameters, _ in found:
        assert furthest(parameters, expected) <= 1e-12


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_comes_once_and_in_the_order_of_one_process(
    run_ranks: Ranks, tmp_path: Path, drop_last: bool
) -> None:
    length, epochs = 51, 3
    options = {
        "max_epochs": epochs,
        "policy": "live",
        "strategy": {"replan_every": 2},
        "loader": {"num_workers": 2, "persistent_workers": True, "drop_last": drop_last},
    }

    found = run_ranks(fit, 2, str(tmp_path), [4, 4], length, options, group=False)

    expected = [
        indices for _, indices in toy.batches(length, 8, epochs) if len(indices) == 8 or not drop_last
    ]
    together = [a + b for (_, _, a), (_, _, b) in zip(found[0][1], found[1][1], strict=True)]
    assert together == expected


def test_a_sum_loss_equals_one_process(run_ranks: Ranks, tmp_path: Path) -> None:
    length = 33  # one sample is left for two ranks
    found = run_ranks(fit_sum, 2, str(tmp_path), length, group=False)

    data, net = toy.Numbers(length), toy.make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _, indices in toy.batches(length, 8, 2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(
            net(data.inputs[indices]), data.targets[indices], reduction="sum"
        ).backward()
        optimizer.step()
    for parameters in found:
        assert furthest(parameters, toy.parameters(net)) <= 1e-12


class SumToy(toy.Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        _, inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets, reduction="sum")


def fit_sum(rank: int, root: str, length: int) -> Any:
    model = SumToy()
    strategy = HeteroDDP(policy="static", shares=[7, 1], loss_reduction="sum")
    toy.trainer(root, strategy, 2, max_epochs=2).fit(model, toy.loader(length, 4))
    return toy.parameters(model)


class LoggingToy(toy.Toy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, inputs, targets = batch
        mean = index.double().mean()
        self.log("one", torch.tensor(1.0), on_step=False, on_epoch=True, sync_dist=True)
        self.log("index", mean, on_step=True, on_epoch=True, sync_dist=True)
        self.seen.append((self.current_epoch, batch_idx, index.tolist()))
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps = [*getattr(self, "steps", []), float(self.trainer.callback_metrics["index_step"])]


def fit_logging(rank: int, root: str, length: int) -> Any:
    model = LoggingToy()
    trainer = toy.trainer(root, HeteroDDP(policy="static", shares=[6, 3]), 2, max_epochs=1)
    trainer.fit(model, toy.loader(length, 9))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, model.steps, float(model.trainer.strategy.world_size)


@pytest.mark.parametrize("length", [27, 31, 19])  # 19: the last batch has one sample for two ranks
def test_logged_means_are_means_over_samples(run_ranks: Ranks, tmp_path: Path, length: int) -> None:
    found = run_ranks(fit_logging, 2, str(tmp_path), length, group=False)

    steps = [sum(indices) / len(indices) for _, indices in toy.batches(length, 18, 1)]
    for metrics, logged, _ in found:
        assert metrics["one"] == 1.0
        assert metrics["index_epoch"] == pytest.approx((length - 1) / 2, rel=1e-6)
        assert logged == pytest.approx(steps, rel=1e-6)


class Growing(toy.Toy):
    """Gives a loader over other data at every epoch."""

    def train_dataloader(self) -> Any:
        return toy.loader(20 + 6 * self.current_epoch, 4)


def fit_growing(rank: int, root: str) -> Any:
    model = Growing()
    strategy = HeteroDDP(policy="static", shares=[6, 2])
    toy.trainer(root, strategy, 2, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
    return toy.parameters(model), model.seen


def test_loaders_that_are_reloaded_with_other_data_stay_exact(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(fit_growing, 2, str(tmp_path), group=False)

    net = toy.make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch in range(3):
        length = 20 + 6 * epoch
        data, indices = toy.Numbers(length), toy.order(length, epoch)
        for start in range(0, length, 8):
            batch = indices[start : start + 8]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(data.inputs[batch]), data.targets[batch]).backward()
            optimizer.step()
    for parameters, _ in found:
        assert furthest(parameters, toy.parameters(net)) <= 1e-12
