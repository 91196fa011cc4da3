"""What a snapshot at every step costs training: blocks of steps with and without, taking turns in one process.

    python -m benchmarks.overlap --mb 10 100 --tensors 100 1000 5000 --step-s 0.5 --repeats 5
    python -m benchmarks.overlap --matrix --busy
    python -m benchmarks.overlap --matrix --device cuda

The state is a model's parameters with AdamW's two moments and its `step`: four tensors per parameter. A step computes
for real (the sum of all parameters, and the optimizer) and takes `--step-s` before its optimizer: asleep, as a CPU
waits for its GPU; with `--busy` in a fixed number of matrix products on every core, so that no core is free for the
copy and whatever the copy takes makes the step longer; with `--device cuda` in such products on the GPU. A step counts
from one batch's start to the next, so it holds everything that the snapshot adds; on a GPU these moments are events in
its compute stream, so they are the device's time, and the host may run ahead as it would without a benchmark.

Of the milliseconds told apart, `dump` is Lightning's and the user's own hooks, `begin` ours, `fence` the wait before
the optimizer, and `wait` the wait for the drives, where they are slower than the steps.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import tempfile
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
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


class Work:
    """What fills a step: nothing, or as many matrix products as take its time on this machine, counted beforehand.

    Args:
        seconds: that it takes when nobody disturbs it.
        device: where it computes.
        busy: on a CPU compute on every core, instead of waiting.
    """

    def __init__(self, seconds: float, device: torch.device, busy: bool) -> None:
        self._seconds = seconds
        on_gpu = device.type == "cuda"
        self._lanes = 1 if on_gpu else len(os.sched_getaffinity(0)) if busy else 0
        self._pool = ThreadPoolExecutor(self._lanes) if self._lanes and not on_gpu else None
        if self._pool is not None:
            torch.set_num_threads(1)  # each product in its own lane's thread
        width = 4096 if on_gpu else 384
        self._factors = [torch.full((width, width), 1e-4, device=device) for _ in range(self._lanes)]
        self._products = [torch.empty_like(factor) for factor in self._factors]
        self._count = 0
        if self._lanes:
            self._calibrate(device)

    def do(self) -> None:
        """Take the time of one step; on a GPU only queue it."""
        if self._pool is not None:
            list(self._pool.map(self._multiply, range(self._lanes)))
        elif self._lanes:
            self._multiply(0)
        else:
            time.sleep(self._seconds)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _multiply(self, lane: int) -> None:
        for _ in range(self._count):
            torch.mm(self._factors[lane], self._factors[lane], out=self._products[lane])

    def _calibrate(self, device: torch.device) -> None:
        taken_s = 0.0
        self._count = 4
        while taken_s < min(0.1, self._seconds):
            self._count *= 2
            began_s = time.perf_counter()
            self.do()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken_s = time.perf_counter() - began_s
        self._count = max(1, round(self._count * self._seconds / taken_s))


class Job(LightningModule):
    """As many parameters as asked for, and steps that take as long as asked for."""

    def __init__(self, nbytes: int, tensors: int, work: Work) -> None:
        super().__init__()
        count = max(1, tensors // TENSORS_PER_PARAMETER)
        self.layers = nn.ParameterList(torch.ones(max(1, nbytes // 12 // count)) for _ in range(count))
        self._work = work

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The sum of all parameters, late."""
        loss = torch.stack([layer.sum() for layer in self.layers]).sum()
        self._work.do()
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
    """Notes when each batch starts: on the host's clock, or on the GPU's where that does the work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: list[tuple[int, Any]] = []  # the steps made before a batch, and the moment

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """One step ends and the next begins."""
        now: Any = time.perf_counter()
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        self._starts.append((trainer.global_step, now))

    def steps_s(self, with_a_snapshot: bool) -> list[float]:
        """Seconds from the start of one batch to that of the next, with or without a snapshot between them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            began.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - began
            for (_, began), (made, ended) in itertools.pairwise(self._starts)
            # The first blocks warm up; the first two steps of each block still feel the one before.
            if made > 2 * BLOCK_STEPS and made % BLOCK_STEPS > 1 and with_snapshots(made) == with_a_snapshot
        ]


def measure(folder: Path, nbytes: int, tensors: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of blocks with and without."""
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    snapshots, watch = EveryOtherBlock(folder / "snapshots"), Stopwatch(device)
    work = Work(options.step_s, device, options.busy)
    buffer_bytes = options.buffer_mib * 2**20 if options.buffer_mib else None
    trainer = Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        strategy=HeteroDDP(policy="even"),
        plugins=[StripedAsyncCheckpointIO(options.dirs, buffer_bytes)],
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
    trainer.fit(Job(nbytes, tensors, work), DataLoader(steps, batch_size=1))
    work.close()
    steps_s = {"without": watch.steps_s(False), "with": watch.steps_s(True)}
    without_s, with_s = median(steps_s["without"]), median(steps_s["with"])
    return {
        "mb": nbytes / 1e6,
        "tensors": tensors,
        "step_ms": 1e3 * without_s,
        "with_ms": 1e3 * with_s,
        "overhead": with_s / without_s - 1,
        **{name: median(values) for name, values in snapshots.parts_ms.items()},
        "steps_s": steps_s,
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
    parser.add_argument(
        "--matrix", action="store_true", help="10, 100 and 500 MB by 100, 1000 and 5000 tensors"
    )
    parser.add_argument("--step-s", type=float, default=0.5, help="that a step takes before its optimizer")
    parser.add_argument("--busy", action="store_true", help="leave no core free")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--buffer-mib", type=int, help="memory that bytes pass through; default: as the plugin"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="pairs of blocks that count; one more warms up"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.matrix:
        options.mb, options.tensors = [10, 100, 500], [100, 1000, 5000]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_hetckpt").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    rows = []
    for mb in options.mb:
        for tensors in options.tensors:
            with tempfile.TemporaryDirectory(prefix="hetckpt-", dir=Path.cwd()) as folder:
                rows.append(measure(Path(folder), int(mb * 1e6), tensors, options))
    result = {
        **describe("benchmarks.overlap"),
        "device": options.device,
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "busy": options.busy,
        "rows": rows,
    }
    write_json(options.json, result)
    Console().print(_table(result))


def _table(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"a snapshot at every step, {result['device']}{', no core free' * result['busy']}",
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
