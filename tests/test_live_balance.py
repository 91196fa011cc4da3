"""The split finds the speeds of the devices, and follows them when they change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hetckpt import HeteroDDP
from tests import toy

Ranks = Callable[..., list[Any]]
BATCH = 48
REPLAN_EVERY = 10


class Paced(toy.Toy):
    """Needs `pace_s` for each sample, spent asleep so that two ranks on one core do not disturb each other."""

    def __init__(
        self, paces_s: list[float], change_at: int, changed_s: list[float], sync_dist: bool = False
    ) -> None:
        super().__init__()
        self.sync_dist = sync_dist
        self.paces_s, self.change_at, self.changed_s = paces_s, change_at, changed_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        paces_s = self.paces_s if self.trainer.global_step < self.change_at else self.changed_s
        time.sleep(paces_s[self.trainer.global_rank] * len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        if self.sync_dist:
            # The fast rank waits for the slow one in here, in the middle of its own step.
            self.log("loss", loss, sync_dist=True)
            self.all_gather(loss.detach())
        return loss


class Shares(Callback):
    """Notes the split of every step."""

    def __init__(self) -> None:
        self.found: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.found.append(trainer.strategy.plan.shares)


def fit(
    rank: int,
    root: str,
    paces_s: list[float],
    changed_s: list[float],
    steps: int,
    change_at: int,
    sync_dist: bool = False,
) -> Any:
    shares = Shares()
    strategy = HeteroDDP(global_batch_size=BATCH, replan_every=REPLAN_EVERY)
    trainer = toy.trainer(root, strategy, len(paces_s), max_steps=steps, max_epochs=-1, callbacks=[shares])
    model = Paced(paces_s, change_at, changed_s, sync_dist)
    trainer.fit(model, toy.loader(BATCH * 20, 1))
    seen = [sorted(indices) for _, _, indices in model.seen]
    return shares.found, seen, len(strategy.plan_history)


def step_s(shares: tuple[int, ...], paces_s: list[float]) -> float:
    return max(share * pace for share, pace in zip(shares, paces_s, strict=True))


def best_s(paces_s: list[float]) -> float:
    speeds = [1 / pace for pace in paces_s]
    return BATCH / sum(speeds)


@pytest.mark.parametrize("sync_dist", [False, True], ids=["silent", "metrics-are-exchanged"])
def test_the_split_of_a_three_to_one_pair_is_near_the_best_in_three_looks(
    run_ranks: Ranks, tmp_path: Path, sync_dist: bool
) -> None:
    paces_s = [0.003, 0.001]
    steps = 3 * REPLAN_EVERY + 2

    found = run_ranks(fit, 2, str(tmp_path), paces_s, paces_s, steps, 10**6, sync_dist, group=False)

    assert found[0][0] == found[1][0]  # every rank has the same plans
    assert found[0][0][0] == (24, 24)
    assert step_s(found[0][0][-1], paces_s) <= 1.1 * best_s(paces_s)


def test_a_device_that_changes_its_speed_is_followed(run_ranks: Ranks, tmp_path: Path) -> None:
    before_s, after_s = [0.001, 0.001], [0.002, 0.001]

    found = run_ranks(
        fit, 2, str(tmp_path), before_s, after_s, 8 * REPLAN_EVERY, 3 * REPLAN_EVERY, group=False
    )

    shares = found[0][0]
    assert step_s(shares[3 * REPLAN_EVERY - 1], before_s) <= 1.1 * best_s(before_s)
    assert step_s(shares[-1], after_s) <= 1.1 * best_s(after_s)


def test_a_resumed_run_keeps_the_split_and_all_it_had_learnt(run_ranks: Ranks, tmp_path: Path) -> None:
    learnt = run_ranks(fit_and_save, 2, str(tmp_path), 3 * REPLAN_EVERY, None, group=False)[0]
    saved = learnt_in(tmp_path / "x.ckpt")

    again = run_ranks(
        fit_and_save, 2, str(tmp_path), 3 * REPLAN_EVERY + 1, str(tmp_path / "x.ckpt"), group=False
    )

    assert learnt != (24, 24)
    assert again == [learnt, learnt]
    assert len(saved["controller"]["devices"]) == len(saved["memory"]) == 2
    assert (
        learnt_in(tmp_path / "x.ckpt") == saved
    )  # it went on from there, and one step has taught nothing yet


def test_what_was_learnt_on_other_devices_is_left(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(fit_and_save, 2, str(tmp_path), 3 * REPLAN_EVERY, None, group=False)
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    saved = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["learnt"]
    saved["controller"]["devices"][1] = "a device of yesterday"
    torch.save(checkpoint, tmp_path / "x.ckpt")

    again = run_ranks(
        fit_and_save, 2, str(tmp_path), 3 * REPLAN_EVERY + 1, str(tmp_path / "x.ckpt"), group=False
    )

    assert again == [(24, 24), (24, 24)]
    assert "a device of yesterday" not in learnt_in(tmp_path / "x.ckpt")["controller"]["devices"]


def learnt_in(path: Path) -> Any:
    states = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return states[0]["learnt"]


def fit_and_save(rank: int, root: str, steps: int, ckpt_path: str | None) -> Any:
    strategy = HeteroDDP(global_batch_size=BATCH, replan_every=REPLAN_EVERY)
    trainer = toy.trainer(root, strategy, 2, max_steps=steps, max_epochs=-1)
    model = Paced([0.003, 0.001], 10**6, [])
    trainer.fit(model, toy.loader(BATCH * 20, 1), ckpt_path=ckpt_path)
    trainer.save_checkpoint(Path(root) / "x.ckpt")
    return strategy.plan_history[0 if ckpt_path else -1].shares


@pytest.mark.parametrize("policy", ["static", "even"])
def test_other_policies_never_replan(run_ranks: Ranks, tmp_path: Path, policy: str) -> None:
    found = run_ranks(fit_policy, 2, str(tmp_path), policy, group=False)

    assert found == [1, 1]


def fit_policy(rank: int, root: str, policy: str) -> int:
    strategy = HeteroDDP(policy=policy, shares=[3, 1], replan_every=1)  # type: ignore[arg-type]
    toy.trainer(root, strategy, 2, max_steps=6, max_epochs=-1).fit(toy.Toy(), toy.loader(64, 4))
    assert strategy.plan is not None
    assert strategy.plan.shares == ((6, 2) if policy == "static" else (4, 4))
    return len(strategy.plan_history)


def fit_and_look(rank: int, root: str) -> Any:
    strategy = HeteroDDP(global_batch_size=8, replan_every=10**6, bucket_cap_mb=1e-4)
    trainer = toy.trainer(root, strategy, 2, max_steps=12, max_epochs=-1)
    trainer.fit(Paced([0.002, 0.001], 10**6, []), toy.loader(64, 4))
    assert strategy._balancer is not None
    return strategy._balancer.timer.window()


def test_a_fit_measures_every_phase_on_every_rank(run_ranks: Ranks, tmp_path: Path) -> None:
    for window in run_ranks(fit_and_look, 2, str(tmp_path), group=False):
        assert window.samples == 4
        assert 0 < window.load_s < window.compute_s
        assert 0 < window.first_bucket_s < window.backward_s < window.compute_s
        assert window.hidden_s > 0  # there are several buckets
        assert window.tail_s >= 0  # gloo has several threads: the last may be through before the last but one
        assert window.step_s > window.compute_s
