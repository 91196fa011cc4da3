"""What cannot work is refused at once, with what was found, what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_hetckpt import HetckptError, HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from tests import toy

Ranks = Callable[..., list[Any]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(toy.Numbers(8))


class Pairs(BatchSampler):
    """A batch sampler with a signature of its own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i, i + 1] for i in range(0, self.length, 2)])

    def __len__(self) -> int:
        return self.length // 2


class Foreign:
    def __iter__(self) -> Iterator[Any]:
        return iter([])


LOADERS = {
    "iterable": (lambda: DataLoader(Stream(), batch_size=4), "IterableDataset Stream.*map-style"),
    "batch-sampler": (lambda: DataLoader(toy.Numbers(8), batch_sampler=Pairs(8)), "Pairs.*sampler="),
    "known-batch-sampler": (
        lambda: DataLoader(toy.Numbers(8), batch_sampler=SlowBatches(SequentialSampler(range(8)), 4, False)),
        "SlowBatches.*sampler=",
    ),
    "stock-batch-sampler": (
        lambda: DataLoader(toy.Numbers(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 4, False)),
        "batch sampler BatchSampler.*Pass batch_size",
    ),
    "no-batching": (lambda: DataLoader(toy.Numbers(8), batch_size=None), "batch_size=None.*single samples"),
    "foreign": (Foreign, "Foreign.*torch.utils.data.DataLoader"),
    "short-last-batches": (lambda: [toy.loader(9, 4), toy.loader(8, 4)], "2 train loaders.*drop_last=True"),
    "two-batch-sizes": (
        lambda: [toy.loader(9, 4, drop_last=True), toy.loader(8, 2, drop_last=True)],
        "global batches of 4 and 2",
    ),
}


class SlowBatches(BatchSampler):
    pass


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("place", ["argument", "hook"])
def test_a_loader_that_cannot_be_shared_out_is_refused(tmp_path: Path, name: str, place: str) -> None:
    make, message = LOADERS[name]
    model = toy.Toy()
    trainer = toy.trainer(tmp_path, HeteroDDP(), 1, max_steps=2)

    given = make() if place == "argument" else None
    if given is None:
        model.train_dataloader = make  # type: ignore[method-assign]

    with pytest.raises(HetckptError, match=f"(?s){message}"):
        trainer.fit(model, given)


def fit_error(
    rank: int, root: str, strategy: dict[str, Any], lengths: list[int], batch: int, manual: bool
) -> str:
    model = toy.ManualToy(bare=True) if manual else toy.Toy()
    trainer = toy.trainer(root, HeteroDDP(**strategy), len(lengths), max_epochs=2)
    try:
        trainer.fit(model, toy.loader(lengths[rank], batch))
    except HetckptError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "lengths", "batch", "manual", "message"),
    [
        ({"shares": [1, 2, 3], "policy": "static"}, [8, 8], 4, False, r"shares=\[1, 2, 3\].*3 ranks.*has 2"),
        ({"global_batch_size": 1}, [8, 8], 4, False, r"global batch of 1 .*smaller than the 2 ranks"),
        ({}, [8, 9], 4, False, r"rank 0: 8 samples.*rank 1: 9 samples"),
        ({"min_samples": [1]}, [8, 8], 4, False, r"min_samples=\[1\].*has 2"),
        ({"max_samples": 3}, [8, 8], 4, False, r"8"),
        ({"shares": [3, 1], "policy": "static"}, [8, 8], 4, True, r"self\.manual_backward"),
    ],
    ids=["shares", "small-batch", "lengths", "bounds", "caps", "bare-backward"],
)
def test_what_does_not_fit_the_job_is_refused_on_every_rank(
    run_ranks: Ranks,
    tmp_path: Path,
    strategy: dict[str, Any],
    lengths: list[int],
    batch: int,
    manual: bool,
    message: str,
) -> None:
    found = run_ranks(fit_error, 2, str(tmp_path), strategy, lengths, batch, manual, group=False)

    for text in found:
        assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fast"},
        {"policy": "static"},
        {"shares": []},
        {"shares": [1, 0]},
        {"global_batch_size": 0},
        {"multiple_of": 0},
        {"replan_every": 0},
        {"loss_reduction": "none"},
    ],
)
def test_wrong_options_are_refused_when_they_are_given(options: dict[str, Any]) -> None:
    with pytest.raises(HetckptError, match="HeteroDDP"):
        HeteroDDP(**options)


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"keep_last": 0}])
def test_a_callback_that_would_never_save_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HetckptError, match="every_n_steps >= 1 and keep_last >= 1"):
        SnapshotCallback(**options)


def test_the_callback_needs_the_plugin(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, "auto", 1, callbacks=[SnapshotCallback()], max_steps=1)

    with pytest.raises(HetckptError, match=r"plugins=\[StripedAsyncCheckpointIO\(\)\]"):
        trainer.fit(toy.Toy(), toy.loader(8, 4))


def test_another_global_batch_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    plugins = [StripedAsyncCheckpointIO()]
    trainer = toy.trainer(tmp_path, HeteroDDP(), 1, max_steps=2, plugins=plugins)
    trainer.fit(toy.Toy(), toy.loader(16, 4))

    trainer = toy.trainer(tmp_path, HeteroDDP(global_batch_size=8), 1, max_steps=4, plugins=plugins)
    with pytest.raises(HetckptError, match=r"8.*4|4.*8"):
        trainer.fit(toy.Toy(), toy.loader(16, 4), ckpt_path="last")


def test_a_pytorch_lightning_trainer_is_refused(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    boring_classes = pytest.importorskip("pytorch_lightning.demos.boring_classes")

    with pytest.raises(HetckptError, match=r"from lightning\.pytorch import Trainer"):
        other.Trainer(strategy=HeteroDDP(), default_root_dir=tmp_path, logger=False)
    trainer = other.Trainer(
        callbacks=[SnapshotCallback()],
        default_root_dir=tmp_path,
        logger=False,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
    )
    with pytest.raises(HetckptError, match=r"from lightning\.pytorch import Trainer"):
        trainer.fit(boring_classes.BoringModel())


def test_a_model_checkpoint_beside_the_callback_still_saves(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    trainer = toy.trainer(
        tmp_path,
        HeteroDDP(),
        1,
        max_steps=4,
        enable_checkpointing=True,
        callbacks=[checkpoint],
        plugins=[StripedAsyncCheckpointIO()],
    )
    trainer.fit(toy.Toy(), toy.loader(32, 4))

    assert sorted(path.name for path in (tmp_path / "kept").iterdir() if path.suffix == ".ckpt") == [
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
    ]
    assert sorted(path.name for path in (tmp_path / "snapshots").glob("*.ckpt")) == [
        "step=3.ckpt",
        "step=4.ckpt",
    ]
    assert torch.is_tensor(next(iter(trainer.lightning_module.parameters())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 64}, "no option 'batch_size'.*did you mean 'global_batch_size'"),
        ({"find_unused_parameter": True}, "did you mean 'find_unused_parameters'"),
        ({"xyzzy": 1}, "no option 'xyzzy'.*global_batch_size, policy"),
    ],
)
def test_an_option_that_neither_we_nor_ddp_have_is_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(HetckptError, match=message):
        HeteroDDP(**options)


def test_every_option_of_ddp_is_still_taken() -> None:
    HeteroDDP(find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=5, timeout=None)
