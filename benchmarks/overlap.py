"""What a snapshot at every step costs training: blocks of steps with and without, taking turns in one process.

    python -m benchmarks.overlap --mb 10 100 --tensors 100 1000 5000 --step-s 0.5 --repeats 5

The state is a model's parameters with AdamW's two moments and its `step`: four tensors per parameter. A step computes
for real (the sum of all parameters, and the optimizer) and then waits out `--step-s`: asleep, as a CPU waits for
its GPU, or with `--busy` multiplying matrices on every core, so that no core is free for the copy. A step counts
from one batch's start to the next, so it holds everything that the snapshot adds. Of the milliseconds told apart,
`dump` is Lightning's and the user's own hooks, `begin` ours, `fence` the wait before the optimizer, and `wait` the
wait for the drives, where they are slower than the steps.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.machine import describe, write_json
from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO

BLOCK_STEPS = 6  # of which the first is not counted: the block before may still be writing
TENSORS_PER_PARAMETER = 4
PARTS_MS = ("dump_ms", "begin_ms", "fence_ms", "wait_ms")


class Job(LightningModule):
    """As many parameters as asked for, and steps that take as long as asked for."""

    def __init__(self, nbytes: int, tensors: int, step_s: float, busy: bool) -> None:
        super().__init__()
        count = max(1, tensors // TENSORS_PER_PARAMETER)
        self.layers = nn.ParameterList(torch.ones(max(1, nbytes // 12 // count)) for _ in range(count))
        self.step_s, self.busy = step_s, busy
        self.square = torch.ones(256, 256)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The sum of all parameters, late."""
        until_s = time.perf_counter() + self.step_s
        loss = torch.stack([layer.sum() for layer in self.layers]).sum()
        while self.busy and time.perf_counter() < until_s:
            self.square @ self.square
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return loss


class EveryOtherBlock(SnapshotCallback):
    """A snapshot at every step of every second block, and a note of what they cost."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.parts_ms: dict[str, list[float]] = defaultdict(list)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A snapshot, or none."""
        if with_snapshots(trainer.global_step):
            before = self._before
            super().on_train_batch_end(trainer, *args)
            if before is not None:
                for name in PARTS_MS:
                    self.parts_ms[name].append(before.figures.get(name) or 0.0)
        elif with_snapshots(trainer.global_step - 1):
            self._await_durable()


def with_snapshots(step: int) -> bool:
    """Whether the state after `step` steps is one to keep."""
    return (step // BLOCK_STEPS) % 2 == 1


class Stopwatch(Callback):
    """Seconds from the start of one batch to that of the next, by whether there was a snapshot between them."""

    def __init__(self) -> None:
        self.steps_s: dict[bool, list[float]] = {True: [], False: []}
        self._began_s: float | None = None

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """One step ends and the next begins."""
        now_s = time.perf_counter()
        last = trainer.global_step - 1
        # The first block warms up; the first two steps of each block still feel the one before.
        if self._began_s is not None and last >= 2 * BLOCK_STEPS and trainer.global_step % BLOCK_STEPS > 1:
            self.steps_s[with_snapshots(trainer.global_step)].append(now_s - self._began_s)
        self._began_s = now_s


def measure(folder: Path, nbytes: int, tensors: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of blocks with and without."""
    snapshots, watch = EveryOtherBlock(folder / "snapshots"), Stopwatch()
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        strategy=HeteroDDP(policy="even"),
        plugins=[StripedAsyncCheckpointIO(options.dirs)],
        callbacks=[watch, snapshots],
        max_steps=BLOCK_STEPS * 2 * (options.repeats + 1) + 1,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    steps: Any = range(10**6)
    trainer.fit(Job(nbytes, tensors, options.step_s, options.busy), DataLoader(steps, batch_size=1))
    without_s, with_s = median(watch.steps_s[False]), median(watch.steps_s[True])
    return {
        "mb": nbytes / 1e6,
        "tensors": tensors,
        "step_ms": 1e3 * without_s,
        "with_ms": 1e3 * with_s,
        "overhead": with_s / without_s - 1,
        **{name: median(values) for name, values in snapshots.parts_ms.items()},
        "steps_s": {"without": watch.steps_s[False], "with": watch.steps_s[True]},
    }


def main() -> None:
    """Measure every size with every number of tensors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dirs", type=Path, nargs="+", help="one folder on each drive; default: as the plugin"
    )
    parser.add_argument("--mb", type=float, nargs="+", default=[10, 100])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--step-s", type=float, default=0.5, help="that a step takes before its optimizer")
    parser.add_argument("--busy", action="store_true", help="leave no core free")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument(
        "--repeats", type=int, default=5, help="pairs of blocks that count; one more warms up"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_hetckpt").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    rows = []
    for mb in options.mb:
        for tensors in options.tensors:
            with tempfile.TemporaryDirectory(prefix="hetckpt-", dir=Path.cwd()) as folder:
                rows.append(measure(Path(folder), int(mb * 1e6), tensors, options))
    result = {**describe("benchmarks.overlap"), "rows": rows}
    write_json(options.json, result)
    Console().print(_table(result))


def _table(result: dict[str, Any]) -> Table:
    table = Table(
        title="a snapshot at every step",
        caption=f"{result['cpu']}, {result['cores']} cores, {result['date']}",
    )
    headings = ("MB", "tensors", "step", "with", "overhead", "dump", "begin", "fence", "wait")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            f"{row['mb']:.0f}",
            str(row["tensors"]),
            f"{row['step_ms']:.0f} ms",
            f"{row['with_ms']:.0f} ms",
            f"{row['overhead']:+.1%}",
            *(f"{row[name]:.1f} ms" for name in PARTS_MS),
        )
    return table


if __name__ == "__main__":
    main()
