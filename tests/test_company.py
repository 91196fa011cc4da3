"""HeteroDDP in the company of Lightning's other features: as one process, or a clear error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lightning_hetckpt import HeteroDDP
from tests import toy

Ranks = Callable[..., list[Any]]
LENGTH, BATCH, EPOCHS, SHARES = 38, 8, 3, [6, 2]  # the last batch has 6 samples


class Ordered(Sampler[int]):
    """The order of each epoch that all ranks together follow, for a process that is alone."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(toy.order(self.length, self.epoch))

    def __len__(self) -> int:
        return self.length


class Validated(toy.Toy):
    """Logs a loss for training and one for validation, as most users do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("val", loss, batch_size=len(inputs), sync_dist=True)

    def val_dataloader(self) -> Any:
        return toy.loader(16, 4)


class TwoOptimizers(toy.Toy):
    """A network and a second one that learns to predict it, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = toy.make_net()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.net.parameters(), lr=1e-2),
            torch.optim.SGD(self.second.parameters(), lr=1e-2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(inputs), targets))
        first.step()
        second.zero_grad()
        aim = self.net(inputs).detach()
        self.manual_backward(nn.functional.mse_loss(self.second(inputs), aim))
        second.step()


class Choosy(toy.Toy):
    """Has a second head that only every other batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(toy.FEATURES, 1).double()
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.head(batch[1]).square().mean() if batch_idx % 2 else loss


class Scheduled(toy.Toy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=5e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=5e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Compiled(toy.Toy):
    """Its network is compiled for batches of any size, without a C compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, dynamic=True, backend="aot_eager")


class Pair(toy.Toy):
    """Trains on batches of two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)


MODELS: dict[str, Callable[[], Any]] = {
    "toy": toy.Toy,
    "validated": Validated,
    "two-optimizers": TwoOptimizers,
    "choosy": Choosy,
    "scheduled": Scheduled,
    "compiled": Compiled,
    "pair": Pair,
}
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "accumulate": lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}),
    "stop": lambda: EarlyStopping("val", min_delta=10.0, patience=1),  # no epoch is ever that much better
    "lr": lambda: LearningRateFinder(min_lr=1e-3, max_lr=1e-1, num_training_steps=6),
}


def train(root: str, strategy: Any, devices: int, case: dict[str, Any], batch: int) -> Any:
    """One fit of `case`; returns the parameters and what was logged."""
    options = {"max_epochs": EPOCHS, **case.get("trainer", {})}
    if "callbacks" in case:
        options["callbacks"] = [CALLBACKS[name]() for name in case["callbacks"]]
    model = MODELS[case.get("model", "toy")]()
    given: dict[str, Any] = {"batch_size": batch, "drop_last": case.get("drop_last", False)}
    if devices == 1:
        given["sampler"] = Ordered(LENGTH)
    loader: Any = DataLoader(toy.Numbers(LENGTH), **given)
    if case.get("model") == "pair":
        loader = {"a": loader, "b": DataLoader(toy.Numbers(LENGTH), **given)}
    trainer: Trainer = toy.trainer(root, strategy, devices, **options)
    trainer.fit(model, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return toy.parameters(model), metrics, trainer.global_step, trainer.current_epoch


def train_rank(rank: int, root: str, case: dict[str, Any]) -> Any:
    options = {"policy": "static", "shares": SHARES, "global_batch_size": BATCH, **case.get("strategy", {})}
    return train(root, HeteroDDP(**options), 2, case, BATCH // 2)


def train_alone(rank: int, root: str, case: dict[str, Any]) -> Any:
    return train(root, "auto", 1, case, BATCH)


CASES: dict[str, dict[str, Any]] = {
    "accumulation-scheduler": {"callbacks": ["accumulate"]},
    "clipping-by-value": {"trainer": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},  # autocast leaves float64 as it is
    "16-mixed": {"trainer": {"precision": "16-mixed", "gradient_clip_val": 0.5}},
    "16-mixed-in-parts": {"trainer": {"precision": "16-mixed"}, "strategy": {"max_micro_batch": [4, 1]}},
    "two-optimizers": {"model": "two-optimizers", "strategy": {"find_unused_parameters": True}},
    "find-unused": {"model": "choosy", "strategy": {"find_unused_parameters": True}},
    "static-graph": {"strategy": {"static_graph": True}},
    "live": {"strategy": {"policy": "live", "replan_every": 2}},
    "compiled": {"model": "compiled"},
    "two-loaders": {"model": "pair", "drop_last": True},
    "scheduler-by-step": {"model": "scheduled"},
    "limit-batches": {"trainer": {"limit_train_batches": 3}},
    "limit-share": {"trainer": {"limit_train_batches": 0.5}},
    "max-steps": {"trainer": {"max_epochs": -1, "max_steps": 7}},
    "fast-dev-run": {"trainer": {"fast_dev_run": 2}},
    "validation-inside": {
        "model": "validated",
        "trainer": {"val_check_interval": 2},
        "logs": True,
    },
    "early-stopping": {
        "model": "validated",
        "callbacks": ["stop"],
        "trainer": {"max_epochs": 9},
        "logs": True,
    },
    "lr-finder": {"model": "toy", "callbacks": ["lr"]},
}


@pytest.mark.parametrize("name", CASES)
def test_unequal_ranks_in_company_equal_one_process(run_ranks: Ranks, tmp_path: Path, name: str) -> None:
    case = CASES[name]

    alone = run_ranks(train_alone, 1, str(tmp_path / "alone"), case, group=False)[0]
    found = run_ranks(train_rank, 2, str(tmp_path / "ranks"), case, group=False)

    for parameters, metrics, steps, epochs in found:
        assert (steps, epochs) == alone[2:]
        furthest = max(float((a - b).abs().max()) for a, b in zip(parameters, alone[0], strict=True))
        assert furthest <= 1e-12
        if case.get("logs"):
            assert metrics == pytest.approx(alone[1], rel=1e-6)


def overfit(rank: int, root: str) -> Any:
    model = toy.Toy()
    strategy = HeteroDDP(policy="static", shares=SHARES)
    toy.trainer(root, strategy, 2, max_epochs=3, overfit_batches=2).fit(model, toy.loader(LENGTH, 4))
    return [indices for _, _, indices in model.seen]


def test_overfitting_sees_the_same_whole_batches_in_every_epoch(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(overfit, 2, str(tmp_path), group=False)

    together = [a + b for a, b in zip(*found, strict=True)]
    assert together == [list(range(8)), list(range(8, 16))] * 3


class Normed(toy.Toy):
    """Normalises its raw inputs, so that what the layer sees does not depend on training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(toy.FEATURES).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, inputs, targets = batch
        return super().training_step((index, self.norm(inputs), targets), batch_idx)


def fit_normed(rank: int, root: str) -> Any:
    model = Normed()
    strategy = HeteroDDP(policy="static", shares=SHARES, min_samples=2)
    toy.trainer(root, strategy, 2, max_epochs=2).fit(model, toy.loader(LENGTH, 4))
    return model.norm.state_dict()


def test_batch_norm_keeps_the_statistics_of_the_whole_batch(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(fit_normed, 2, str(tmp_path), group=False)

    alone, data = nn.BatchNorm1d(toy.FEATURES).double(), toy.Numbers(LENGTH)
    for _, indices in toy.batches(LENGTH, BATCH, 2):
        alone(data.inputs[indices])
    for state in found:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(state[name], getattr(alone, name), rtol=1e-12, atol=1e-12)


def fit_error(rank: int, root: str, kind: str) -> str:
    options: dict[str, Any] = {"sync_batchnorm": True} if kind == "sync-batch-norm" else {}
    if kind == "batch-size-finder":
        options["callbacks"] = [BatchSizeFinder()]
    static_graph = kind == "static-graph-accumulation"
    if static_graph:
        options["accumulate_grad_batches"] = 2
    model = Normed()
    try:
        strategy = HeteroDDP(policy="static", shares=SHARES, static_graph=static_graph)
        trainer = toy.trainer(root, strategy, 2, max_epochs=1, **options)
        trainer.fit(model, toy.loader(LENGTH, 4))
    except Exception as error:  # noqa: BLE001 (these are torch's and Lightning's own)
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sync-batch-norm", "SyncBatchNorm layers only work with GPU modules"),
        ("static-graph-accumulation", "Leave static_graph out"),
        ("batch-size-finder", "Batch size finder is not supported with distributed strategies"),
    ],
)
def test_what_cannot_work_here_says_so(run_ranks: Ranks, tmp_path: Path, kind: str, message: str) -> None:
    for text in run_ranks(fit_error, 2, str(tmp_path), kind, group=False):
        assert re.search(message, text), text


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's own backend needs a C++ compiler")
def test_a_compiled_module_trains_with_batches_of_several_sizes(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(fit_compiled, 2, str(tmp_path), group=False)

    expected = toy.train_alone(LENGTH, BATCH, 1)
    for parameters in found:
        pairs = zip(parameters, expected, strict=True)
        assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-10  # other kernels round otherwise


def fit_compiled(rank: int, root: str) -> Any:
    model = toy.Toy()
    strategy = HeteroDDP(policy="static", shares=SHARES, global_batch_size=BATCH)
    compiled: Any = torch.compile(model, dynamic=True)
    toy.trainer(root, strategy, 2, max_epochs=1).fit(compiled, toy.loader(LENGTH, 4))
    return toy.parameters(model)
