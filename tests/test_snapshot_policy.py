"""How often snapshots are taken, what happens while one is not durable yet, and what is told about each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO, callbacks
from lightning_hetckpt.checkpoint import snapshotter, verify
from lightning_hetckpt.checkpoint.publish import read_manifest
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.errors import ConfigurationError
from tests import toy
from tests.doubles import Gate, ManualClock

Ranks = Callable[..., list[Any]]
STEP_S = 0.1


class TimedToy(toy.Toy):
    """A step takes `STEP_S` on a clock of its own."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.advance(STEP_S)
        return super().training_step(batch, batch_idx)


class ValidatedToy(TimedToy):
    """Validation takes a thousand times longer."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.advance(1000 * STEP_S)

    def val_dataloader(self) -> Any:
        return toy.loader(4, 4)


class TimedPlugin(StripedAsyncCheckpointIO):
    """A snapshot of step s keeps the training thread for `cost_s(s)` and is durable after `durable_s(s)`."""

    def __init__(
        self, clock: ManualClock, cost_s: Callable[[int], float], durable_s: Callable[[int], float]
    ) -> None:
        super().__init__()
        self.clock, self.cost_s, self.durable_s = clock, cost_s, durable_s

    def begin(self, checkpoint: Any, path: Any, **more: Any) -> Any:
        snapshot = super().begin(checkpoint, path, **more)
        snapshot.wait()
        snapshot.figures.add("fence_ms", 0.0)
        snapshot.figures.add("durable_ms", 1e3 * self.durable_s(checkpoint["global_step"]))
        self.clock.advance(self.cost_s(checkpoint["global_step"]))
        return snapshot


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step=")) for path in folder.glob("step=*.ckpt"))


def fit(
    root: Path,
    callback: SnapshotCallback,
    cost_s: Callable[[int], float],
    durable_s: Callable[[int], float] = lambda step: 0.0,
    strategy: Any = "auto",
    devices: int = 1,
    batches: int = 24,
    model: type[TimedToy] = TimedToy,
    **options: Any,
) -> list[int]:
    """The steps of which there are snapshots."""
    clock = ManualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "perf_counter", clock)
        trainer = toy.trainer(
            root,
            strategy,
            devices,
            max_epochs=1,
            callbacks=[callback],
            plugins=[TimedPlugin(clock, cost_s, durable_s)],
            **options,
        )
        trainer.fit(
            model(clock),
            toy.loader(4 * devices * batches, 4),
        )
    return steps_in(root / "snapshots")


def callback_for(root: Path, **options: Any) -> SnapshotCallback:
    return SnapshotCallback(root / "snapshots", keep_last=1000, **options)


def test_the_interval_grows_to_what_the_stall_allows_and_shrinks_when_snapshots_are_cheap_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    taken = fit(tmp_path, callback_for(tmp_path, max_overhead=0.5), lambda step: 0.19 if step < 8 else 0.001)

    # 0.19 s may be half of 3.8, so 4 steps of 0.1 s. The first look is after 5 snapshots (the first counts for nothing),
    # the second 4 snapshots later.
    assert taken == [1, 2, 3, 4, 5, 8, 12, 16, 20, 21, 22, 23, 24]
    changes = [text for text in caplog.messages if "instead of every" in text]
    assert len(changes) == 2
    assert "from step 5 on a snapshot every 4 steps instead of every 1: one takes 190 ms" in changes[0]
    assert "from step 20 on a snapshot every 1 steps instead of every 4: one takes 1 ms" in changes[1]


def test_waiting_for_the_drives_counts_unless_nobody_waits(tmp_path: Path) -> None:
    slow_drives: Any = {"cost_s": lambda step: 0.0, "durable_s": lambda step: 0.39, "batches": 12}

    waiting = fit(tmp_path / "a", callback_for(tmp_path / "a", max_overhead=0.5), **slow_drives)
    skipping = fit(
        tmp_path / "b", callback_for(tmp_path / "b", max_overhead=0.5, when_busy="skip"), **slow_drives
    )

    # 0.39 s - n·0.1 s of waiting may be half of n·0.1 s: 2.6 steps, so 3.
    assert waiting == [1, 2, 3, 4, 5, 6, 9, 12]
    assert skipping == list(range(1, 13))


def test_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    callback = callback_for(tmp_path, max_overhead=0.5)

    taken = fit(
        tmp_path,
        callback,
        lambda step: 0.19,
        batches=12,
        model=ValidatedToy,
        val_check_interval=1,
        num_sanity_val_steps=0,
    )

    assert taken == [1, 2, 3, 4, 5, 8, 12]


def test_without_a_limit_every_snapshot_is_taken_whatever_it_costs(tmp_path: Path) -> None:
    assert fit(tmp_path, callback_for(tmp_path), lambda step: 9.0, batches=8) == list(range(1, 9))


def test_a_second_fit_starts_with_the_users_interval(tmp_path: Path) -> None:
    callback = callback_for(tmp_path, max_overhead=0.5)

    fit(tmp_path, callback, lambda step: 0.19, batches=6)

    assert fit(tmp_path, callback, lambda step: 0.0, batches=7) == list(range(1, 8))


def fit_one_slow_rank(rank: int, root: str, hetero: bool) -> int:
    callback = callback_for(Path(root), max_overhead=0.5)
    fit(
        Path(root),
        callback,
        lambda step: 0.19 * rank,
        strategy=HeteroDDP() if hetero else "ddp",
        devices=2,
        batches=12,
    )
    return callback._cadence.interval


@pytest.mark.parametrize("hetero", [False, True])
def test_the_rank_that_stalls_longest_sets_the_interval_of_all(
    run_ranks: Ranks, tmp_path: Path, hetero: bool
) -> None:
    assert run_ranks(fit_one_slow_rank, 2, str(tmp_path), hetero, group=False) == [4, 4]
    assert steps_in(tmp_path / "snapshots") == [1, 2, 3, 4, 5, 8, 12]


class BusyToy(toy.Toy):
    """Opens the gate to the drives in the fourth step, and from then on gives every snapshot its time."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        callback = next(one for one in self.trainer.callbacks if isinstance(one, SnapshotCallback))
        if batch_idx >= 3:
            self.gate.open()
            assert callback.last_snapshot is not None
            callback.last_snapshot.wait()
        return super().training_step(batch, batch_idx)


def fit_with_busy_drives(rank: int, root: str, devices: int, every_n_steps: int) -> list[int]:
    gate = Gate()
    if rank != 0:
        gate.open()  # rank 0's drives are busy, and rank 0's view counts

    class Writer(StripeWriter):
        def open(self, *args: Any, **more: Any) -> Any:
            self._submit(gate.pass_through)
            return super().open(*args, **more)

    logged = Records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshotter, "StripeWriter", Writer)
        trainer = toy.trainer(
            root,
            "ddp" if devices > 1 else "auto",
            devices,
            max_epochs=1,
            callbacks=[callback_for(Path(root), when_busy="skip", every_n_steps=every_n_steps)],
            plugins=[StripedAsyncCheckpointIO()],
            logger=logged,
        )
        trainer.fit(BusyToy(gate), toy.loader(4 * devices * 6, 4))
    return [int(one["hetckpt/skipped"]) for _, one in logged.found]


class Records(Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "records"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = {name: value for name, value in metrics.items() if name.startswith("hetckpt/")}
        if ours:
            self.found.append((step, ours))


@pytest.mark.parametrize(
    ("devices", "every", "taken", "skipped"),
    [(1, 1, [1, 4, 5, 6], [0, 2, 0, 0]), (2, 1, [1, 4, 5, 6], [0, 2, 0, 0]), (1, 2, [2, 4, 6], [0, 0, 0])],
)
def test_while_a_snapshot_is_not_durable_the_next_ones_are_skipped_on_all_ranks(
    run_ranks: Ranks, tmp_path: Path, devices: int, every: int, taken: list[int], skipped: list[int]
) -> None:
    found = run_ranks(fit_with_busy_drives, devices, str(tmp_path), devices, every, group=False)

    assert steps_in(tmp_path / "snapshots") == taken
    assert found[0] == skipped


def fit_with_figures(
    root: Path, plugin: StripedAsyncCheckpointIO, **options: Any
) -> list[tuple[int | None, dict[str, float]]]:
    logged = Records()
    trainer = toy.trainer(
        root,
        HeteroDDP(),
        1,
        max_epochs=1,
        callbacks=[callback_for(root, **options)],
        plugins=[plugin],
        logger=logged,
    )
    trainer.fit(toy.Toy(), toy.loader(32, 4))
    return logged.found


def test_every_snapshot_tells_loggers_and_manifest_what_it_cost(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()

    began_s = time.perf_counter()
    logged = fit_with_figures(tmp_path, StripedAsyncCheckpointIO(drives), every_n_steps=2)
    took_ms = 1e3 * (time.perf_counter() - began_s)

    assert [step for step, _ in logged] == [2, 4, 6, 8]  # each under its own step, and nothing in between
    for number, (step, told) in enumerate(logged):
        path = tmp_path / "snapshots" / f"step={step}.ckpt"
        written = read_manifest(path).figures
        files = sum(file.stat().st_size for file in path.iterdir()) - (path / "manifest.json").stat().st_size
        assert written["nbytes"] == told["hetckpt/nbytes"] == files
        assert written["interval_steps"] == told["hetckpt/interval_steps"] == 2
        assert set(written["gb_per_s"]) == {str(drive.resolve()) for drive in drives}
        assert told[f"hetckpt/gb_per_s/{str(drives[0].resolve()).strip('/')}"] > 0
        for name in ("begin_ms", "fence_ms", "dump_ms", "wait_ms"):
            assert written[name] == told[f"hetckpt/{name}"]
            assert 0 <= told[f"hetckpt/{name}"] < took_ms
        # The manifest is written before it can be published, and that before anybody is told.
        assert 0 < written["durable_ms"] <= told["hetckpt/durable_ms"] < took_ms
        if number == 0:
            assert "bytes_per_day" not in written
        else:
            assert written["bytes_per_day"] == pytest.approx(files * 86_400 / written["period_s"])


def test_a_snapshot_that_failed_is_not_told_of_as_if_it_had_cost_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plugin(StripedAsyncCheckpointIO):
        def begin(self, checkpoint: Any, path: Any, **more: Any) -> Any:
            if checkpoint["global_step"] == 2:
                (Path(path) / "mine").mkdir(parents=True)  # publishing over it is refused
            return super().begin(checkpoint, path, **more)

    logged = fit_with_figures(tmp_path, Plugin())

    assert [step for step, _ in logged] == [1, 3, 4, 5, 6, 7, 8]


def test_other_saves_have_figures_in_their_manifest_too(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, "auto", 1, max_steps=2, plugins=[StripedAsyncCheckpointIO()])
    trainer.fit(toy.Toy(), toy.loader(32, 4))
    trainer.save_checkpoint(tmp_path / "own.ckpt")

    figures = read_manifest(tmp_path / "own.ckpt").figures

    assert {"begin_ms", "fence_ms", "durable_ms", "nbytes", "gb_per_s"} == set(figures)


def test_nothing_is_agreed_on_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = HeteroDDP()
    calls: list[str] = []
    trainer = toy.trainer(
        tmp_path,
        strategy,
        1,
        max_epochs=1,
        callbacks=[callback_for(tmp_path)],
        plugins=[StripedAsyncCheckpointIO()],
    )
    model = toy.Toy()
    model.on_train_start = lambda: [  # type: ignore[method-assign]
        monkeypatch.setattr(strategy, name, lambda *args, name=name, **more: calls.append(name))
        for name in ("broadcast", "reduce")
    ]
    trainer.fit(model, toy.loader(32, 4))

    assert len(steps_in(tmp_path / "snapshots")) == 8
    assert calls == []


@pytest.mark.parametrize(
    "options", [{"max_overhead": 0}, {"max_overhead": -1.0}, {"max_overhead": 5}, {"when_busy": "panic"}]
)
def test_an_option_that_cannot_work_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        SnapshotCallback(**options)


def test_the_last_checkpoint_of_a_step_shares_the_bytes_of_its_snapshot(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "best", every_n_train_steps=1, save_last=True)
    trainer = toy.trainer(
        tmp_path,
        HeteroDDP(),
        1,
        max_steps=4,
        enable_checkpointing=True,
        plugins=[StripedAsyncCheckpointIO([tmp_path / "ssd"])],
        callbacks=[SnapshotCallback(), saver],
    )
    trainer.fit(toy.Toy(), toy.loader(16, 4))
    snapshot, last = tmp_path / "snapshots" / "step=4.ckpt", tmp_path / "best" / "last.ckpt"
    (stripe,) = snapshot.glob("stripe-*-d*")
    assert stripe.stat().st_nlink == 3  # and the best one
    for path in (snapshot, last):
        verify.verify(path)
        assert (path / stripe.name).stat().st_ino == stripe.stat().st_ino
