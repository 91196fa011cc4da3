"""A run that resumes from any snapshot goes on exactly as the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from tests import toy

Ranks = Callable[..., list[Any]]

HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


class Recorder(Callback):
    """Notes every hook with the epoch, the step and the batch it came in."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []


def _note(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        batch_idx = [arg for arg in (*args, *kwargs.values()) if type(arg) is int]
        self.events.append((name, trainer.current_epoch, trainer.global_step, *batch_idx))

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _note(_name))


class Job(toy.Toy):
    """Dropout, a scheduler per step, a plateau scheduler, validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), "interval": "epoch"},
        ]

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def val_dataloader(self) -> Any:
        return toy.loader(6, 3)


def run(
    root: Path,
    shares: list[int],
    options: dict[str, Any],
    batch: int | None = 8,
    ckpt_path: str | None = None,
) -> dict[str, Any]:
    options = dict(options)
    seed_everything(11, verbose=False)
    recorder = Recorder()
    # BatchNorm takes no batch of one sample, which the third rank gets at the end of an epoch.
    model = Job(dropout=0.3, batch_norm=len(shares) < 3)
    strategy = HeteroDDP(global_batch_size=batch, policy="static", shares=shares)
    loader = toy.loader(
        options.pop("length", 45), options.pop("batch_size", 4), num_workers=options.pop("workers", 0)
    )
    trainer = toy.trainer(
        root,
        strategy,
        len(shares),
        callbacks=[recorder, SnapshotCallback(root / "snapshots", keep_last=1000)],
        plugins=[StripedAsyncCheckpointIO()],
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {
        "state": state,
        "events": recorder.events,
        "seen": model.seen,
        "step": trainer.global_step,
        "moments": trainer.optimizers[0].state_dict()["state"],
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "plan": strategy.plan_history[0].global_batch_size,
    }


def differences(found: dict[str, Any], truth: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    wrong = []
    for name, tensor in truth["state"].items():
        if (found["state"][name].double() - tensor.double()).abs().max() > tolerance:
            wrong.append(name)
    for index, moments in truth["moments"].items():
        for name, tensor in moments.items():
            if (found["moments"][index][name].double() - tensor.double()).abs().max() > tolerance:
                wrong.append(f"{index}.{name}")
    return wrong + [name for name in ("lr", "step") if found[name] != truth[name]]


def events_after(events: list[tuple[Any, ...]], step: int) -> list[tuple[Any, ...]]:
    """What came behind the snapshot of `step`: all that follows the `on_train_batch_end` that took it."""
    ends = [i for i, event in enumerate(events) if event[0] == "on_train_batch_end" and event[2] == step]
    return events[ends[0] + 1 :]


def resume_everywhere(
    rank: int, root: str, shares: list[int], options: dict[str, Any], tolerance: float
) -> Any:
    """Train once, then resume from every snapshot of that run; return what differed."""
    whole = run(Path(root) / "whole", shares, options)
    wrong: dict[int, Any] = {}
    for step in range(1, whole["step"] + 1):
        snapshot = Path(root) / "whole" / "snapshots" / f"step={step}.ckpt"
        again = run(Path(root) / f"from-{step}", shares, options, ckpt_path=str(snapshot))
        expected = events_after(whole["events"], step)
        if again["events"] != expected:
            wrong[step] = ("hooks", again["events"][:6], expected[:6])
        elif bad := differences(again, whole, tolerance):
            wrong[step] = ("state", bad)
        elif again["seen"] != whole["seen"][len(whole["seen"]) - len(again["seen"]) :]:
            wrong[step] = ("samples",)
    return wrong, whole["step"]


PLAIN = {"max_epochs": 2}
VAL_TWICE = {"max_epochs": 2, "val_check_interval": 0.5}
ACCUMULATE = {"max_epochs": 2, "accumulate_grad_batches": 2}
STEPS = {"max_steps": 9, "max_epochs": -1}
EPOCH_STEPS = {"max_steps": 12, "max_epochs": -1}
WORKERS = {"max_epochs": 2, "workers": 2}


@pytest.mark.parametrize(
    "options",
    [PLAIN, VAL_TWICE, ACCUMULATE, STEPS, EPOCH_STEPS, WORKERS],
    ids=["plain", "val-twice", "accumulate", "max-steps", "max-steps-at-epoch-end", "workers"],
)
def test_one_rank_resumes_bit_for_bit_at_every_step(
    run_ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    [(wrong, steps)] = run_ranks(resume_everywhere, 1, str(tmp_path), [8], options, 0.0, group=False)

    assert steps >= 6
    assert wrong == {}


@pytest.mark.parametrize("options", [VAL_TWICE, ACCUMULATE], ids=["val-twice", "accumulate"])
def test_two_unequal_ranks_resume_bit_for_bit_at_every_step(
    run_ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    found = run_ranks(resume_everywhere, 2, str(tmp_path), [5, 3], options, 0.0, group=False)

    assert [wrong for wrong, _ in found] == [{}, {}]


def test_three_ranks_resume_to_rounding(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(resume_everywhere, 3, str(tmp_path), [4, 2, 2], {"max_epochs": 1}, 1e-12, group=False)

    assert [wrong for wrong, _ in found] == [{}, {}, {}]


def leg(rank: int, root: str, world: int, until: dict[str, Any], ckpt_path: str | None) -> Any:
    """One part of a journey over several world sizes; every part asks for the loader's own batch size."""
    model = toy.Toy()
    strategy = HeteroDDP(policy="even")
    trainer = toy.trainer(
        root,
        strategy,
        world,
        plugins=[StripedAsyncCheckpointIO(dirs=[Path(root) / "a", Path(root) / "b"])],
        num_sanity_val_steps=0,
        **until,
    )
    trainer.fit(model, toy.loader(45, 4), ckpt_path=ckpt_path)
    return model.seen, strategy.plan_history[-1].global_batch_size


def test_other_numbers_of_ranks_go_on_with_the_next_sample(run_ranks: Ranks, tmp_path: Path) -> None:
    legs = [
        (2, {"max_steps": 4, "max_epochs": -1}, None),
        (1, {"max_steps": 9, "max_epochs": -1}, "last"),  # from the middle of an epoch, over its end
        (3, {"max_epochs": 3}, "last"),
    ]
    steps = []
    for world, until, ckpt_path in legs:
        found = run_ranks(leg, world, str(tmp_path), world, until, ckpt_path, group=False)
        assert {batch for _, batch in found} == {8}
        for parts in zip(*(seen for seen, _ in found), strict=True):
            together = [index for _, _, indices in parts for index in indices]
            steps.append((parts[0][0], together))

    assert steps == list(toy.batches(45, 8, 3))


def test_with_the_checkpoint_io_of_stock_lightning_the_next_sample_follows_too(tmp_path: Path) -> None:
    def fit(max_steps: int, ckpt_path: Any = None) -> toy.Toy:
        model = toy.Toy()
        trainer = toy.trainer(tmp_path, HeteroDDP(), 1, max_steps=max_steps, max_epochs=-1)
        trainer.fit(model, toy.loader(48, 8), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "stock.ckpt")
        return model

    whole = fit(10)
    fit(4)
    resumed = fit(10, tmp_path / "stock.ckpt")

    assert resumed.seen == whole.seen[4:]
    for one, other in zip(toy.parameters(resumed), toy.parameters(whole), strict=True):
        assert torch.equal(one, other)


def test_a_scheduler_that_asks_for_the_number_of_steps_early_resumes_too(tmp_path: Path) -> None:
    class OneCycle(toy.Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            steps = int(self.trainer.estimated_stepping_batches)  # sets the loaders up before the restore
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def fit(ckpt_path: Any = None) -> OneCycle:
        model = OneCycle()
        trainer = toy.trainer(
            tmp_path,
            HeteroDDP(),
            1,
            max_epochs=2,
            callbacks=[SnapshotCallback(keep_last=100)],
            plugins=[StripedAsyncCheckpointIO()],
        )
        trainer.fit(model, toy.loader(48, 8), ckpt_path=ckpt_path)
        return model

    whole = fit()
    resumed = fit(tmp_path / "snapshots" / "step=2.ckpt")

    assert resumed.seen == whole.seen[2:]
    for one, other in zip(toy.parameters(resumed), toy.parameters(whole), strict=True):
        assert torch.equal(one, other)


class Several(toy.Toy):
    """Trains on every loader that still has a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = {name: part for name, part in batch.items() if part is not None}
        self.seen.append((self.current_epoch, batch_idx, {k: part[0].tolist() for k, part in parts.items()}))
        losses = [torch.nn.functional.mse_loss(self.net(x), y) for _, x, y in parts.values()]
        return torch.stack(losses).sum()


def resume_several(rank: int, root: str, lengths: list[int], mode: str, shares: list[int]) -> Any:
    def go(name: str, ckpt_path: str | None = None) -> Several:
        seed_everything(11, verbose=False)
        model = Several()
        trainer = toy.trainer(
            Path(root) / name,
            HeteroDDP(global_batch_size=8, policy="static", shares=shares),
            len(shares),
            max_epochs=2,
            callbacks=[SnapshotCallback(Path(root) / name / "snapshots", keep_last=100)],
            plugins=[StripedAsyncCheckpointIO()],
        )
        parts = {str(n): toy.loader(n, 4, drop_last=True) for n in lengths}
        trainer.fit(model, CombinedLoader(parts, mode), ckpt_path=ckpt_path)
        return model

    whole = go("whole")
    wrong = {}
    for step in range(1, len(whole.seen) + 1):
        again = go(f"from-{step}", str(Path(root) / "whole" / "snapshots" / f"step={step}.ckpt"))
        if again.seen != whole.seen[step:]:
            wrong[step] = again.seen[:1], whole.seen[step : step + 1]
        elif any(
            not torch.equal(a, b) for a, b in zip(toy.parameters(again), toy.parameters(whole), strict=True)
        ):
            wrong[step] = "weights"
    return wrong, whole.seen


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
@pytest.mark.parametrize("lengths", [[40, 16], [16, 40]], ids=["longer-first", "shorter-first"])
def test_several_loaders_go_on_with_the_next_sample_of_each(
    run_ranks: Ranks, tmp_path: Path, lengths: list[int], mode: str
) -> None:
    [(wrong, seen)] = run_ranks(resume_several, 1, str(tmp_path), lengths, mode, [8], group=False)

    assert wrong == {}
    assert len(seen) == (4 if mode == "min_size" else 10)
    for epoch in range(2):
        longer = [index for at, _, parts in seen for index in parts["40"] if at == epoch]
        assert longer == toy.order(40, epoch, seed=11)[: len(longer)]
        shorter = [index for at, _, parts in seen for index in parts.get("16", []) if at == epoch]
        passes = -(-len(shorter) // 16)
        assert shorter == (toy.order(16, epoch, seed=11) * passes)[: len(shorter)]


def test_several_loaders_on_two_unequal_ranks_too(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(resume_several, 2, str(tmp_path), [16, 40], "max_size_cycle", [5, 3], group=False)
    assert [wrong for wrong, _ in found] == [{}, {}]
