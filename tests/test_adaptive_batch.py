"""A global batch that changes between epochs: the same training as one process that changes it, and Lightning knows."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, StepLR

from lightning_hetckpt import AdaptiveBatch, HeteroDDP
from lightning_hetckpt.balance.noise_scale import NoiseAverages, estimate
from lightning_hetckpt.balance.plan import BatchPlan, StepKey
from lightning_hetckpt.errors import ConfigurationError, LoaderError
from tests import toy

Ranks = Callable[..., list[Any]]
LENGTH, BASE = 50, 8
SCRIPT = {
    1: (11, 5),
    2: (4, 6),
    4: (20, 20),
}  # shares from that epoch on; the last batch of an epoch is short
TOTALS = [8, 16, 10, 10, 40]
EPOCHS = len(TOTALS)
BASE_STEPS = math.ceil(LENGTH / BASE)


class Scripted(AdaptiveBatch):
    """Chooses what the script says; all that follows from a choice is the real thing."""

    def __init__(self, script: dict[int, tuple[int, ...]], **options: Any) -> None:
        options = {"max_global_batch_size": 64, "min_global_batch_size": 4, "lr_scaling": "sqrt", **options}
        super().__init__(**options)
        self.script = script

    def choose(self, predict: Any, epoch: int, *bounds: Any) -> BatchPlan | None:
        shares = self.script.get(epoch)
        return BatchPlan(shares, StepKey(epoch, 0), "by script") if shares else None


class Scheduled(toy.Toy):
    """AdamW under a one-cycle schedule laid out for the whole fit; notes every learning rate there is."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[float] = []  # by the optimizer
        self.shown: list[float] = []  # to the user
        self.estimates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(
            lambda optimizer, *_: self.used.append(optimizer.param_groups[0]["lr"])
        )
        self.estimates.append(self.trainer.estimated_stepping_batches)
        schedule = one_cycle(optimizer, int(self.estimates[0]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shown.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.estimates.append(self.trainer.estimated_stepping_batches)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=2e-2, total_steps=steps + 1, cycle_momentum=False)


def alone(
    totals: list[int],
    accumulate: int = 1,
    ticks_per_step: bool = False,
    steps: int = 10**9,
    length: int = LENGTH,
) -> tuple[list[Tensor], list[float]]:
    """The truth in plain PyTorch: parameters, and the learning rate of every step."""
    data, net = toy.Numbers(length), toy.make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    base_steps = math.ceil(math.ceil(length / BASE) / accumulate)
    schedule = one_cycle(optimizer, min(len(totals) * base_steps, steps))
    rates: list[float] = []
    for epoch, total in enumerate(totals):
        indices = toy.order(length, epoch)
        parts = [indices[start : start + total] for start in range(0, length, total)]
        windows = [parts[start : start + accumulate] for start in range(0, len(parts), accumulate)]
        for j, window in enumerate(windows):
            if len(rates) == steps:
                return toy.parameters(net), rates
            for part in window:
                loss = nn.functional.mse_loss(net(data.inputs[part]), data.targets[part])
                (loss / accumulate).backward()
            group = optimizer.param_groups[0]
            user = group["lr"]
            group["lr"] = user * math.sqrt(total / BASE)
            rates.append(group["lr"])
            optimizer.step()
            group["lr"] = user
            optimizer.zero_grad()
            # Behind the last step of an epoch the schedule is where the base batch would have brought it.
            due = (
                1 if ticks_per_step else (j + 1) * base_steps // len(windows) - j * base_steps // len(windows)
            )
            for _ in range(due):
                schedule.step()
    return toy.parameters(net), rates


class Notes(Callback):
    """What Lightning thinks of every epoch at its begin."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.bars: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.batches.append((trainer.num_training_batches, len(trainer.train_dataloader)))

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        bar = trainer.progress_bar_callback
        if bar is not None and len(self.bars) < len(self.batches):
            self.bars.append(bar.train_progress_bar.total)


class SaveAt(Callback):
    """Saves once, behind one batch or in the end hooks of the epoch that it ends, as a user would."""

    def __init__(self, path: str, step: int, at_epoch_end: bool) -> None:
        self.path, self.step, self.at_epoch_end = path, step, at_epoch_end

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not self.at_epoch_end:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and self.at_epoch_end:
            trainer.save_checkpoint(self.path)


def fit(
    rank: int,
    root: str,
    script: dict[int, tuple[int, ...]] = SCRIPT,
    save_at: int | None = None,
    at_epoch_end: bool = False,
    ckpt_path: str | None = None,
    workers: int = 0,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    model, notes = Scheduled(), Notes()
    callbacks: list[Callback] = [notes]
    if save_at is not None:
        callbacks.append(SaveAt(f"{root}/at.ckpt", save_at, at_epoch_end))
    if options.get("enable_progress_bar"):
        callbacks.append(TQDMProgressBar(refresh_rate=100))
    hetero = HeteroDDP(adaptive_batch=Scripted(script), **{"replan_every": 3, **(strategy or {})})
    options = {"max_epochs": EPOCHS, **options}
    trainer = toy.trainer(root, hetero, 2, callbacks=callbacks, **options)
    # A rank's own default would be a server that imports torch and Lightning anew.
    workers_of = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    trainer.fit(model, toy.loader(LENGTH, BASE // 2, **workers_of), ckpt_path=ckpt_path)
    return {
        "parameters": toy.parameters(model),
        "seen": model.seen,
        "used": model.used,
        "shown": model.shown,
        "estimates": model.estimates,
        "batches": notes.batches,
        "bars": notes.bars,
        "steps": trainer.global_step,
        "plans": [(plan.start, plan.global_batch_size) for plan in hetero.plan_history],
        "noise": hetero.adaptive_batch.noise_scale if hetero.adaptive_batch is not None else None,
    }


def furthest(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


def samples_of(found: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """All ranks' samples of every batch, in rank order."""
    seen: dict[tuple[int, int], list[int]] = {}
    for one in found:
        for epoch, batch, indices in one["seen"]:
            seen.setdefault((epoch, batch), []).extend(indices)
    return seen


@pytest.mark.parametrize("case", [{}, {"workers": 2}, {"accumulate_grad_batches": 2}], ids="".join)
def test_training_equals_one_process_that_changes_its_batch(
    run_ranks: Ranks, tmp_path: Path, case: dict[str, Any]
) -> None:
    found = run_ranks(functools.partial(fit, root=str(tmp_path), **case), 2, group=False)

    parameters, rates = alone(TOTALS, case.get("accumulate_grad_batches", 1))
    for one in found:
        assert furthest(one["parameters"], parameters) <= 1e-12
        assert one["used"] == pytest.approx(rates, rel=1e-12)
        assert one["steps"] == len(rates)


def test_every_sample_of_every_epoch_comes_once_in_the_order_of_one_process(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    seen = samples_of(run_ranks(functools.partial(fit, root=str(tmp_path)), 2, group=False))

    for epoch, total in enumerate(TOTALS):
        order = toy.order(LENGTH, epoch)
        for batch, start in enumerate(range(0, LENGTH, total)):
            assert seen.pop((epoch, batch)) == order[start : start + total]
    assert not seen


def test_lightning_knows_the_batches_of_every_epoch_and_the_schedule_ends_with_the_fit(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    found = run_ranks(functools.partial(fit, root=str(tmp_path), enable_progress_bar=True), 2, group=False)[0]

    lengths = [math.ceil(LENGTH / total) for total in TOTALS]
    assert found["batches"] == [(length, length) for length in lengths]
    assert found["bars"] == lengths
    assert set(found["estimates"]) == {EPOCHS * BASE_STEPS}  # at the start, and at the end of every epoch
    assert found["steps"] == sum(lengths)
    # The user sees the schedule's own values, unscaled, and the last step is near its end.
    scale = [
        math.sqrt(total / BASE) for total, length in zip(TOTALS, lengths, strict=True) for _ in range(length)
    ]
    assert [used / shown for used, shown in zip(found["used"], found["shown"], strict=True)] == pytest.approx(
        scale
    )
    assert max(found["shown"]) == pytest.approx(2e-2, rel=0.02)
    assert found["shown"][-1] < 2e-3


def test_max_steps_counts_optimizer_steps_and_a_schedule_made_for_them_fits(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    found = run_ranks(
        functools.partial(fit, root=str(tmp_path), max_epochs=-1, max_steps=13), 2, group=False
    )[0]

    parameters, rates = alone(TOTALS, ticks_per_step=True, steps=13)
    assert found["steps"] == 13
    assert set(found["estimates"]) == {13}
    assert found["used"] == pytest.approx(rates, rel=1e-12)
    assert furthest(found["parameters"], parameters) <= 1e-12


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, lambda batches: batches),
        ({"limit_train_batches": 3}, lambda batches: min(batches, 3)),
        ({"limit_train_batches": 0.5}, lambda batches: batches // 2),
    ],
    ids=["reloaded", "limited", "half"],
)
def test_reloaded_and_limited_loaders_are_counted_by_the_present_batch(
    run_ranks: Ranks, tmp_path: Path, options: dict[str, Any], limit: Callable[[int], int]
) -> None:
    found = run_ranks(functools.partial(fit, root=str(tmp_path), **options), 2, group=False)

    lengths = [math.ceil(LENGTH / total) for total in TOTALS]
    assert found[0]["batches"] == [(limit(length), length) for length in lengths]
    assert found[0]["steps"] == sum(map(limit, lengths))
    assert set(found[0]["estimates"]) == {EPOCHS * limit(BASE_STEPS)}
    seen = samples_of(found)
    for epoch, (total, length) in enumerate(zip(TOTALS, lengths, strict=True)):
        together = [index for batch in range(limit(length)) for index in seen[epoch, batch]]
        assert together == toy.order(LENGTH, epoch)[: limit(length) * total]


class Decaying(toy.Toy):
    """Plain SGD whose scheduler multiplies what it finds; notes what it finds at every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, 0.5)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shown.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


def fit_decaying(rank: int, root: str) -> tuple[list[float], list[float]]:
    model = Decaying()
    trainer = toy.trainer(root, HeteroDDP(adaptive_batch=Scripted(SCRIPT)), 2, max_epochs=EPOCHS)
    trainer.fit(model, toy.loader(LENGTH, BASE // 2))
    trainer.save_checkpoint(f"{root}/end.ckpt")
    saved = torch.load(f"{root}/end.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    return model.shown, [group["lr"] for group in saved]


def test_a_scheduler_that_multiplies_never_meets_the_scaled_rate(run_ranks: Ranks, tmp_path: Path) -> None:
    shown, saved = run_ranks(functools.partial(fit_decaying, root=str(tmp_path)), 2, group=False)[0]

    lengths = [math.ceil(LENGTH / total) for total in TOTALS]
    assert shown == [1e-2 * 0.5**epoch for epoch, length in enumerate(lengths) for _ in range(length)]
    assert saved == [1e-2 * 0.5**EPOCHS]


class Validated(toy.Toy):
    """Notes behind which batches validation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, int]] = []

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.seen[-1][:2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize(
    ("interval", "expected"), [(0.5, [2, 5, 1, 3, 1, 3, 1, 3, 0, 1]), (4, [3, 3, 3, 3, 1])]
)
def test_validation_within_an_epoch_keeps_its_place_in_it(
    run_ranks: Ranks, tmp_path: Path, interval: float, expected: list[int]
) -> None:
    found = run_ranks(functools.partial(fit_validated, root=str(tmp_path), interval=interval), 2, group=False)

    assert [batch for _, batch in found[0]] == expected
    assert found[0] == found[1]


def fit_validated(rank: int, root: str, interval: float) -> list[tuple[int, int]]:
    model = Validated()
    strategy = HeteroDDP(adaptive_batch=Scripted(SCRIPT))
    options = {"val_check_interval": interval, "num_sanity_val_steps": 0}
    trainer = toy.trainer(root, strategy, 2, max_epochs=EPOCHS, **options)
    trainer.fit(model, toy.loader(LENGTH, BASE // 2), toy.loader(4, 2))
    return model.validated


# Behind the first and the last batch of the changed epoch 1, the last of epoch 2, and the first of the last epoch.
@pytest.mark.parametrize(
    ("step", "epochs", "options"),
    [
        (8, 5, {}),
        (8, 2, {"workers": 1}),
        (11, 5, {}),
        (11, 3, {"workers": 1}),
        (11, 5, {"at_epoch_end": True}),
        (11, 3, {"at_epoch_end": True, "workers": 1}),
        (16, 5, {}),
        (22, 5, {}),
    ],
    ids=str,
)
def test_a_resume_goes_on_as_if_it_had_never_stopped(
    run_ranks: Ranks, tmp_path: Path, step: int, epochs: int, options: dict[str, Any]
) -> None:
    # Fixed splits between the choices: what a step tells about the noise depends on its split.
    fixed = {"replan_every": 10**6}
    one = functools.partial(fit, root=str(tmp_path), max_epochs=epochs, strategy=fixed, **options)
    whole = run_ranks(functools.partial(one, save_at=step), 2, group=False)

    found = run_ranks(functools.partial(one, ckpt_path=str(tmp_path / "at.ckpt")), 2, group=False)

    for before, after in zip(whole, found, strict=True):
        assert furthest(after["parameters"], before["parameters"]) <= 1e-12
        assert after["used"] == pytest.approx(before["used"][step:], rel=1e-12)
        assert set(after["estimates"]) == {epochs * BASE_STEPS}
        assert after["steps"] == before["steps"]
        assert after["noise"] == pytest.approx(before["noise"], rel=1e-9)
    complete, rest = samples_of(whole), samples_of(found)
    assert rest == dict(list(complete.items())[step:])


def test_a_resume_on_more_ranks_keeps_the_batch_that_was_chosen(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(functools.partial(fit, root=str(tmp_path), save_at=8), 2, group=False)

    found = run_ranks(functools.partial(resume_on_three, root=str(tmp_path)), 3, group=False)

    order = toy.order(LENGTH, 1)
    assert samples_of(found)[1, 1] == order[16:32]
    assert found[0]["batches"] == []  # no epoch began


def resume_on_three(rank: int, root: str) -> dict[str, Any]:
    model, notes = Scheduled(), Notes()
    strategy = HeteroDDP(adaptive_batch=Scripted({}))
    trainer = toy.trainer(root, strategy, 3, callbacks=[notes], max_epochs=2)
    trainer.fit(model, toy.loader(LENGTH, 7), ckpt_path=f"{root}/at.ckpt")
    return {"seen": model.seen, "batches": notes.batches}


def test_another_start_in_the_middle_of_an_epoch_is_refused(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(functools.partial(fit, root=str(tmp_path), save_at=8), 2, group=False)
    again = functools.partial(
        refused,
        root=str(tmp_path),
        ckpt_path=str(tmp_path / "at.ckpt"),
        strategy={"global_batch_size": 12},
        error=LoaderError,
    )

    assert "16 samples in a global batch" in run_ranks(again, 2, group=False)[0]


def refused(rank: int, error: type[Exception] = ConfigurationError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        fit(rank, **options)
    return str(caught.value)


# ------------------------------------------------------------ what is measured


def measured(rank: int, root: str, shares: list[int], case: dict[str, Any]) -> Any:
    adaptive = Scripted({}, lr_scaling="none")
    case = dict(case)
    if "scaler" in case:
        scaler = torch.amp.GradScaler("cpu", init_scale=case.pop("scaler"))
        case["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    strategy = HeteroDDP(
        global_batch_size=8,
        shares=shares,
        replan_every=10**6,
        max_micro_batch=case.pop("max_micro_batch", None),
        adaptive_batch=adaptive,
    )
    trainer = toy.trainer(root, strategy, len(shares), max_epochs=2, **case)
    trainer.fit(toy.Toy(lr=0.0), toy.loader(LENGTH, 4))
    return adaptive.state_dict()["noise"], {
        name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("hetckpt")
    }


def expected_noise(shares: list[int], accumulate: int) -> NoiseAverages:
    """The same by hand, from weights that do not move (the learning rate is 0)."""
    data, averages = toy.Numbers(LENGTH), NoiseAverages()

    def square(indices: list[int]) -> float:
        net = toy.make_net()
        nn.functional.mse_loss(net(data.inputs[indices]), data.targets[indices]).backward()
        return sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None)

    for epoch in range(2):
        order = toy.order(LENGTH, epoch)
        whole = [order[start : start + 8] for start in range(0, LENGTH, 8)]
        for first in range(0, len(whole), accumulate):
            window = whole[first : first + accumulate]
            if len(window[-1]) < 8:
                continue  # the short batch at the end of an epoch
            parts: list[list[int]] = [[] for _ in shares]
            for batch in window:
                for rank, share in enumerate(shares):
                    start = sum(shares[:rank])
                    parts[rank] += batch[start : start + share]
            both = estimate(
                [share * len(window) for share in shares],
                [square(own) for own in parts],
                square([index for batch in window for index in batch]),
            )
            assert both is not None
            averages.add(*both, steps=len(window))
    return averages


@pytest.mark.parametrize(
    ("shares", "case"),
    [
        ([6, 2], {}),
        ([4, 3, 1], {}),
        ([6, 2], {"gradient_clip_val": 1e-3}),
        ([6, 2], {"accumulate_grad_batches": 3}),
        ([6, 2], {"scaler": 4096.0, "gradient_clip_val": 1e-3}),
        ([6, 2], {"max_micro_batch": 4, "accumulate_grad_batches": 2}),
    ],
    ids=["plain", "three-ranks", "clipping", "accumulation", "loss-scaling", "micro-batches"],
)
def test_the_noise_is_that_of_the_gradients_before_clipping_and_scaling(
    run_ranks: Ranks, tmp_path: Path, shares: list[int], case: dict[str, Any]
) -> None:
    found = run_ranks(
        functools.partial(measured, root=str(tmp_path), shares=shares, case=case), len(shares), group=False
    )

    truth = expected_noise(shares, case.get("accumulate_grad_batches", 1))
    for sums, logged in found:
        assert sums == pytest.approx(truth.state_dict(), rel=1e-9)
        assert logged["hetckpt/global_batch_size"] == 8
        assert logged["hetckpt/lr_factor"] == 1
        assert logged["hetckpt/noise_scale"] > 0


# ------------------------------------------------------------ what is chosen


class Costly(toy.Toy):
    """A step takes 20 ms and next to nothing for each sample; targets are noise, or the same for all samples."""

    def __init__(self, noisy: bool) -> None:
        super().__init__(lr=1e-4)
        self.noisy = noisy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, inputs, _ = batch
        time.sleep(0.02 + 1e-5 * len(index))
        self.seen.append((self.current_epoch, batch_idx, index.tolist()))
        targets = torch.where(index % 2 == 0, 30.0, -30.0) if self.noisy else torch.full_like(index, 30.0)
        inputs = inputs if self.noisy else torch.ones_like(inputs)
        return nn.functional.mse_loss(self.net(inputs), targets.double().unsqueeze(1))


def fit_costly(rank: int, root: str, noisy: bool) -> tuple[list[tuple[Any, int]], float | None]:
    adaptive = AdaptiveBatch(96)
    strategy = HeteroDDP(replan_every=5, adaptive_batch=adaptive)
    trainer = toy.trainer(root, strategy, 2, max_epochs=5)
    trainer.fit(Costly(noisy), toy.loader(30 * 16, 8))
    return [(tuple(p.start), p.global_batch_size) for p in strategy.plan_history], adaptive.noise_scale


def test_a_batch_grows_epoch_by_epoch_where_steps_are_dear_and_gradients_noisy(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    found = run_ranks(functools.partial(fit_costly, root=str(tmp_path), noisy=True), 2, group=False)

    assert found[0] == found[1]
    plans, _ = found[0]
    totals = [total for _, total in plans]
    assert totals[0] == 16
    assert totals[-1] == 96  # the most that is allowed
    assert all(after <= 2 * before for before, after in itertools.pairwise(totals))
    changes = [start for (start, after), before in zip(plans[1:], totals, strict=False) if after != before]
    assert all(batch == 0 for _, batch in changes)


def test_a_batch_stays_where_one_sample_says_as_much_as_many(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(functools.partial(fit_costly, root=str(tmp_path), noisy=False), 2, group=False)

    plans, noise_scale = found[0]
    assert noise_scale == pytest.approx(0, abs=1e-6)
    assert {total for _, total in plans} == {16}


def test_one_rank_alone_trains_on_with_its_batch_and_claims_nothing(tmp_path: Path) -> None:
    adaptive = AdaptiveBatch(64, lr_scaling="sqrt")
    trainer = toy.trainer(tmp_path, HeteroDDP(adaptive_batch=adaptive), 1, max_epochs=2)
    model = toy.Toy()
    trainer.fit(model, toy.loader(LENGTH, 8))

    assert adaptive.noise_scale is None
    assert furthest(toy.parameters(model), toy.train_alone(LENGTH, 8, 2)) <= 1e-12


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "options",
    [
        {"max_global_batch_size": 8, "min_global_batch_size": 16},
        {"max_global_batch_size": 8, "min_global_batch_size": 0},
        {"max_global_batch_size": 8, "every_n_epochs": 0},
        {"max_global_batch_size": 8, "lr_scaling": "adam"},
    ],
    ids=str,
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"AdaptiveBatch\(.*expected"):
        AdaptiveBatch(**options)


@pytest.mark.parametrize(
    "options", [{"policy": "even"}, {"loss_reduction": "sum"}, {"weight_by": len}], ids=str
)
def test_it_needs_learnt_speeds_and_a_mean(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r'expected policy="live", loss_reduction="mean"'):
        HeteroDDP(adaptive_batch=AdaptiveBatch(64), **options)


def test_a_start_outside_the_bounds_is_refused(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, HeteroDDP(adaptive_batch=AdaptiveBatch(4)), 1, max_epochs=1)

    with pytest.raises(ConfigurationError, match=r"the start has 8 samples.*1 to 4"):
        trainer.fit(toy.Toy(), toy.loader(LENGTH, 8))


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, HeteroDDP(adaptive_batch=AdaptiveBatch(64)), 1, max_epochs=1)

    with pytest.raises(ConfigurationError, match="manual optimization in ManualToy"):
        trainer.fit(toy.ManualToy(), toy.loader(LENGTH, 8))


class Configured(toy.Toy):
    """With the optimizer of the test's own choice."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def every_other_step(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    schedule = {"scheduler": StepLR(optimizer, 5), "interval": "step", "frequency": 2}
    return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.parametrize(
    ("make", "named"), [(torch.optim.LBFGS, "LBFGS"), (every_other_step, "StepLR with frequency=2")]
)
def test_what_cannot_be_scaled_or_paced_is_refused(tmp_path: Path, make: Any, named: str) -> None:
    trainer = toy.trainer(tmp_path, HeteroDDP(adaptive_batch=AdaptiveBatch(64)), 1, max_epochs=1)

    with pytest.raises(ConfigurationError, match=named):
        trainer.fit(Configured(make), toy.loader(LENGTH, 8))


def test_a_hook_that_gives_no_mean_is_refused(run_ranks: Ranks, tmp_path: Path) -> None:
    assert (
        "powerSGD_hook" in run_ranks(functools.partial(refuse_power, root=str(tmp_path)), 2, group=False)[0]
    )


def refuse_power(rank: int, root: str) -> str:
    hooked = {"ddp_comm_hook": powerSGD_hook, "ddp_comm_state": PowerSGDState(None)}
    return refused(rank, root=root, strategy=hooked)
