"""SIGKILL at any moment: "last" is whole, recent, and the run goes on from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO
from lightning_hetckpt.checkpoint import publish
from tests import toy

SAVES = 50  # of one run, at most; the kill comes somewhere within them


class Reporter(Callback):
    """Tells the parent which step the training has finished."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.pipe.send(trainer.global_step)


def train(root: str, pipe: Any, until_step: int) -> None:
    os.setpgrp()  # a terminal's Ctrl-C for the test run is not for this process
    torch.set_num_threads(1)
    last = ModelCheckpoint(
        Path(root) / "kept", every_n_train_steps=1, save_top_k=1, filename="only", save_last=True
    )
    last._enable_version_counter = False  # every save goes over the same path
    trainer = toy.trainer(
        root,
        HeteroDDP(),
        1,
        max_steps=until_step,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[Reporter(pipe), last],
        plugins=[StripedAsyncCheckpointIO(dirs=[Path(root) / "a", Path(root) / "b"])],
    )
    trainer.fit(toy.Toy(), toy.loader(64, 4), ckpt_path="last")


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_rank_server")
@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_last_is_whole_and_recent_after_a_kill_at_any_moment(tmp_path: Path, kills: int) -> None:
    from tests.ranks import _CONTEXT

    chance = random.Random(20261202)
    reached = 0
    for _ in range(kills):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=train, args=(str(tmp_path), theirs, reached + SAVES))
        process.start()
        theirs.close()
        # Killed after a random number of steps, a random moment later: anywhere within a save.
        steps = chance.randint(2, SAVES)
        finished = reached
        try:
            for _ in range(steps):
                finished = ours.recv()
            ours.poll(chance.random() * 0.01)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            process.close()
            with contextlib.suppress(EOFError):
                while ours.poll():
                    finished = ours.recv()
            ours.close()

        newest = publish.newest_whole(tmp_path / "snapshots", verify_hashes=True, log=lambda text: None)
        assert newest is not None
        reached = publish.read_manifest(newest).global_step
        assert reached >= finished - 1
        for kept in (tmp_path / "kept").glob("*.ckpt"):  # whatever is visible is whole
            publish.verify(kept)
        assert {path.name for path in (tmp_path / "kept").glob("*.ckpt")} <= {"only.ckpt", "last.ckpt"}
    assert reached > kills


def snapshots(root: Path) -> dict[int, int]:
    """Global step and commit number of every snapshot."""
    return {one.global_step: one.commit for one in publish.scan(root / "snapshots")}


def fit(root: Path, max_steps: int, ckpt_path: str | None, keep_last: int = 100) -> toy.Toy:
    model = toy.Toy()
    trainer = toy.trainer(
        root,
        HeteroDDP(),
        1,
        max_steps=max_steps,
        max_epochs=-1,
        callbacks=[SnapshotCallback(keep_last=keep_last)],
        plugins=[StripedAsyncCheckpointIO()],
    )
    trainer.fit(model, toy.loader(64, 4), ckpt_path=ckpt_path)
    return model


def test_after_going_back_last_is_the_new_line(tmp_path: Path) -> None:
    fit(tmp_path, 6, None)

    fit(tmp_path, 4, str(tmp_path / "snapshots" / "step=3.ckpt"))  # back to 3, then one step more

    newest = publish.newest_whole(tmp_path / "snapshots", verify_hashes=True, log=lambda text: None)
    assert newest == tmp_path / "snapshots" / "step=4.ckpt"
    assert set(snapshots(tmp_path)) == {
        1,
        2,
        3,
        4,
        5,
        6,
    }  # the abandoned ones stay until retired by newer ones
    parent = publish.read_manifest(newest).parent
    assert parent == publish.read_manifest(tmp_path / "snapshots" / "step=3.ckpt").snapshot_id

    model = fit(tmp_path, 5, "last", keep_last=2)

    assert [batch for _, batch, _ in model.seen] == [4]
    assert set(snapshots(tmp_path)) == {4, 5}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_last_falls_back_past_a_damaged_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    fit(tmp_path, 4, None)
    stripe = next((tmp_path / "snapshots" / "step=4.ckpt").glob("stripe-*-d00.safetensors"))
    data = bytearray(stripe.read_bytes())
    if damage == "flip":
        data[-9] ^= 0x10
        stripe.write_bytes(data)
    elif damage == "cut":
        stripe.write_bytes(data[:-4])
    else:
        stripe.unlink()

    plugin = StripedAsyncCheckpointIO()
    with pytest.raises(Exception, match=stripe.name):
        plugin.load_checkpoint(tmp_path / "snapshots" / "step=4.ckpt")
    model = fit(tmp_path, 5, "last")

    assert [batch for _, batch, _ in model.seen] == [3, 4]
    assert any("step=4.ckpt" in record.getMessage() for record in caplog.records)


def test_last_without_any_snapshot_starts_afresh(tmp_path: Path, recwarn: Any) -> None:
    model = fit(tmp_path, 2, "last")

    assert [batch for _, batch, _ in model.seen] == [0, 1]


def test_none_never_resumes_by_itself(tmp_path: Path) -> None:
    fit(tmp_path, 2, None)

    model = fit(tmp_path, 2, None)

    assert [batch for _, batch, _ in model.seen] == [0, 1]
