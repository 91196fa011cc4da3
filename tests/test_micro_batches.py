"""A share that exceeds a device's memory runs in parts, and trains exactly as in one piece."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hetckpt import HetckptError, HeteroDDP
from tests import toy

Ranks = Callable[..., list[Any]]
LENGTH, EPOCHS = 38, 2  # the last batch has 6 samples


class Sizes(toy.Toy):
    """Notes how many samples every forward pass had; may log, exchange, and sum its loss."""

    def __init__(self, exchange: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.exchange = exchange
        self.reduction = reduction

    def configure_optimizers(self) -> Any:
        if self.reduction == "sum":
            return torch.optim.SGD(self.parameters(), lr=1e-3)
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, inputs, targets = batch
        self.sizes.append(len(inputs))
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets, reduction=self.reduction)
        mean = index.double().mean()
        self.log("index", mean, on_step=True, on_epoch=True, sync_dist=self.exchange)
        if self.exchange:
            self.all_gather(torch.zeros(2))
        return {"loss": loss}


class Steps(Callback):
    """Notes the step value of `index` after every batch, and how often hooks of the gradients run."""

    def __init__(self) -> None:
        self.logged: list[float] = []
        self.backwards = 0

    def on_after_backward(self, *args: Any) -> None:
        self.backwards += 1

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.logged.append(float(trainer.callback_metrics["index_step"]))


def fit(
    rank: int, root: str, shares: list[int], caps: Any, model: dict[str, Any], options: dict[str, Any]
) -> Any:
    options = dict(options)
    strategy = HeteroDDP(
        policy="static",
        shares=shares,
        global_batch_size=sum(shares),
        max_micro_batch=caps,
        loss_reduction=model.get("reduction", "mean"),
        **options.pop("strategy", {}),
    )
    module, steps = Sizes(**model), Steps()
    trainer = toy.trainer(root, strategy, len(shares), max_epochs=EPOCHS, callbacks=[steps], **options)
    trainer.fit(module, toy.loader(LENGTH, 4))
    epoch = float(trainer.callback_metrics["index_epoch"])
    return toy.parameters(module), module.sizes, steps.logged, epoch, steps.backwards


def furthest(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize(
    ("shares", "caps", "options", "truth"),
    [
        ([8], 3, {}, {}),
        ([6, 2], [2, None], {}, {}),
        ([6, 2], 1, {"gradient_clip_val": 0.5}, {"clip": 0.5}),
        (
            [6, 2],
            [4, None],
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
            {"accumulate": 2, "clip": 0.5},
        ),
        ([6, 2], 2, {"strategy": {"find_unused_parameters": True}}, {}),
        ([6, 2], 2, {"strategy": {"gradient_as_bucket_view": True}}, {}),
    ],
    ids=["one-rank", "one-of-two", "both", "accumulation", "find-unused", "bucket-view"],
)
@pytest.mark.parametrize("exchange", [False, True], ids=["silent", "exchanging"])
def test_micro_batches_equal_one_process(
    run_ranks: Ranks,
    tmp_path: Path,
    shares: list[int],
    caps: Any,
    options: dict[str, Any],
    truth: dict[str, Any],
    exchange: bool,
) -> None:
    model = {"exchange": exchange}
    found = run_ranks(fit, len(shares), str(tmp_path), shares, caps, model, options, group=False)

    expected = toy.train_alone(LENGTH, 8, EPOCHS, **truth)
    batches = [indices for _, indices in toy.batches(LENGTH, 8, EPOCHS)]
    for rank, (parameters, sizes, logged, epoch, backwards) in enumerate(found):
        assert furthest(parameters, expected) <= 1e-12
        cap = caps[rank] if isinstance(caps, list) else caps
        assert cap is None or max(sizes) <= cap
        assert backwards == len(batches)  # hooks see whole batches only
        if exchange:
            # Means over the whole batch of all ranks and parts, as one process logs them.
            assert logged == pytest.approx([sum(b) / len(b) for b in batches], rel=1e-6)
            assert epoch == pytest.approx((LENGTH - 1) / 2, rel=1e-6)


def test_step_values_without_an_exchange_are_those_of_the_ranks_own_batch(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    found = run_ranks(fit, 1, str(tmp_path), [8], 3, {}, {}, group=False)[0]

    batches = [indices for _, indices in toy.batches(LENGTH, 8, EPOCHS)]
    assert found[2] == pytest.approx([sum(b) / len(b) for b in batches], rel=1e-6)
    assert found[1][:3] == [3, 3, 2]


def test_a_sum_loss_in_micro_batches_equals_one_process(run_ranks: Ranks, tmp_path: Path) -> None:
    found = run_ranks(fit, 2, str(tmp_path), [6, 2], [4, 1], {"reduction": "sum"}, {}, group=False)

    data, net = toy.Numbers(LENGTH), toy.make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _, indices in toy.batches(LENGTH, 8, EPOCHS):
        optimizer.zero_grad()
        outputs = net(data.inputs[indices])
        torch.nn.functional.mse_loss(outputs, data.targets[indices], reduction="sum").backward()
        optimizer.step()
    for parameters, *_ in found:
        assert furthest(parameters, toy.parameters(net)) <= 1e-12


def fit_error(rank: int, root: str, kind: str) -> str:
    model = toy.ManualToy() if kind == "manual" else WithSyncBatchNorm()
    strategy = HeteroDDP(policy="static", shares=[6, 2], max_micro_batch=[4, None])
    try:
        toy.trainer(root, strategy, 2, max_epochs=1).fit(model, toy.loader(16, 4))
    except HetckptError as error:
        return str(error)
    return ""


class WithSyncBatchNorm(toy.Toy):
    """Has such a layer once DDP is built, which refuses it on a CPU."""

    def on_train_start(self) -> None:
        self.norm = torch.nn.SyncBatchNorm(2)


class Uncut(toy.Toy):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, torch.zeros(5)]


class Hungry(toy.Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise MemoryError


@pytest.mark.parametrize(
    ("kind", "message", "ranks"),
    [
        ("manual", "8 samples.*2 micro-batches.*manual optimization.*max_samples", 2),
        ("sync-batch-norm", "8 samples.*SyncBatchNorm.*max_micro_batch", 2),
        ("uncut", r"6 samples.*batch\[3\] is a Tensor of shape \(5,\).*max_samples", 1),
        (
            "memory",
            r"rank 0 \(.+\) ran out of memory.*6 of the batch's 8 .*micro-batches of up to 3.*\[1, None\]",
            1,
        ),
    ],
)
def test_what_cannot_run_in_parts_is_refused(
    run_ranks: Ranks, tmp_path: Path, kind: str, message: str, ranks: int
) -> None:
    # A rank that alone cannot go on ends, and the launcher ends the others; here it is asked alone.
    if ranks == 2:
        found = run_ranks(fit_error, 2, str(tmp_path), kind, group=False)
    else:
        model: Any = {"uncut": Uncut, "memory": Hungry}[kind]()
        strategy = HeteroDDP(max_micro_batch=4)
        with pytest.raises(HetckptError) as error:
            toy.trainer(tmp_path, strategy, 1, max_epochs=1).fit(model, toy.loader(12, 6))
        found = [str(error.value)]
        message = message.replace("of the batch's 8", "of the batch's 6").replace(r"\[1, None\]", r"\[1\]")
    for text in found:
        assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize("caps", [0, [4, 0], [4, None, 2]])
def test_wrong_caps_are_refused(run_ranks: Ranks, tmp_path: Path, caps: Any) -> None:
    if caps == [4, None, 2]:
        trainer = toy.trainer(tmp_path, HeteroDDP(max_micro_batch=caps), 1, max_epochs=1)
        with pytest.raises(HetckptError, match=r"max_micro_batch=\[4, None, 2\].*has 1"):
            trainer.fit(toy.Toy(), toy.loader(12, 6))
    else:
        with pytest.raises(HetckptError, match="max_micro_batch"):
            HeteroDDP(max_micro_batch=caps)
