"""How close the live balancer comes to the best fixed split, on two real gloo processes.

    python -m benchmarks.balance --speeds 1 2 3 --repeats 3

For each ratio of speeds the same two processes train the same model under every policy, taking turns:

- `stock DDP`  Lightning's own strategy
- `even`       HeteroDDP(policy="even")
- `static`     HeteroDDP(policy="static") with the best of all splits, found by search in this run
- `live`       HeteroDDP(), which starts even and knows nothing

With `--devices sleep` a rank's step sleeps a fixed time per sample: exact and quiet, so the figure is the balancer's
own. With `--devices cpu` each rank computes on a core of its own and the slow one is held to its share by
the kernel (root, cgroup v1). `--devices compute` is the same without any slow one: what HeteroDDP costs.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import describe, write_json
from examples.slow_device import CpuShare, OneCore, SlowDevice
from lightning_hetckpt import HeteroDDP
from tests.ranks import run_ranks

REPLAN_EVERY = 20
SETTLED_AFTER = 3 * REPLAN_EVERY  # steps in which the live policy has to get there
SAMPLE_S = 0.003  # a fast device's time per sample, where it sleeps
FIXED_S = 0.004  # and its time per step, whatever the samples
WIDTH = 512  # of the model, where it computes
TOKENS = 32  # rows of a sample there, so that the samples and not the weights are the work


class Job(LightningModule):
    """A model whose step takes a known time per sample, or as long as its layers do.

    Args:
        width: of its layers; small where it sleeps.
        sample_s: seconds that this rank sleeps per sample of a step, 0 to compute only.
        fixed_s: seconds that it sleeps per step.
    """

    def __init__(self, width: int, sample_s: float, fixed_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.sample_s = sample_s
        self.fixed_s = fixed_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Sleep, then compute a loss."""
        rows = batch[0]
        if self.sample_s:
            time.sleep(self.sample_s * len(rows) + self.fixed_s)
        else:
            rows = rows.unsqueeze(1).expand(-1, TOKENS, -1)
        return self.layers(rows).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the optimizer is not what is measured."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Keeps the seconds from each step's end to the next one's, and this rank's samples."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self._last_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._last_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: list[Tensor], batch_idx: int
    ) -> None:
        """Note one step."""
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._last_s)
        self.samples.append(len(batch[0]))
        self._last_s = now_s


def main() -> None:
    """Measure each ratio of speeds, print the medians and keep every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", choices=["sleep", "cpu", "compute"], nargs="+", default=["sleep", "compute"]
    )
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="fast over slow")
    parser.add_argument("--batch", type=int, default=32, help="samples of both ranks in a step")
    parser.add_argument("--steps", type=int, default=40, help="steps that count, after settling")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    cases = []
    console = Console()
    for devices in options.devices:
        for factor in [1.0] if devices == "compute" else options.speeds:
            share = CpuShare(f"bench-{os.getpid()}", factor) if devices == "cpu" and factor > 1 else None
            with console.status(f"{devices}, {factor:g}:1"), share or nullcontext():
                group = share.folder if share else None
                args = (devices, factor, group, options.batch, options.steps, options.repeats)
                cases.append(run_ranks(measure, 2, *args, group=False, timeout_s=1800)[0])
    result = {**describe("benchmarks.balance"), "global_batch": options.batch, "cases": cases}
    write_json(options.json, result)
    console.print(_table(result))


def measure(
    rank: int, devices: str, factor: float, group: Path | None, batch: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Everything about one ratio of speeds, measured in this process and its peer."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    slower = factor if rank == 1 else 1.0

    def run(strategy: Strategy, until: int) -> Clock:
        model = Job(16, SAMPLE_S * slower, FIXED_S * slower) if devices == "sleep" else Job(WIDTH, 0.0, 0.0)
        return _fit(model, strategy, group, batch, until)

    def static(share: int) -> HeteroDDP:
        return HeteroDDP(policy="static", shares=(share, batch - share))

    # Every split near the ratio of speeds, each for a few steps; rank 0 decides for both.
    likely = round(batch * factor / (1 + factor))
    tried = {
        share: median(run(static(share), 14).seconds[4:])
        for share in range(max(1, likely - 3), min(batch, likely + 4))
    }
    found: list[int] = [min(tried, key=lambda share: tried[share])]
    torch.distributed.broadcast_object_list(found, src=0)
    best = found[0]

    contestants = {
        "stock DDP": DDPStrategy,
        "even": lambda: HeteroDDP(policy="even"),
        "static": lambda: static(best),
        "live": lambda: HeteroDDP(replan_every=REPLAN_EVERY),
    }
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    settled: list[int] = []
    names = list(contestants)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            # The live one has to settle first; the others only have to warm up.
            skip = SETTLED_AFTER if name == "live" else 5
            clock = run(contestants[name](), skip + steps)
            rounds[name].append(median(clock.seconds[skip:]))
            if name == "live":
                settled.append(clock.samples[-1])
    medians = {name: median(seconds) for name, seconds in rounds.items()}
    return {
        "devices": devices,
        "speeds": f"{factor:g}:1",
        "best_split": [best, batch - best],
        "live_splits": [[share, batch - share] for share in settled],
        "median_s": medians,
        "rounds_s": rounds,
        "live_of_best_static": medians["live"] / medians["static"],
        "live_of_stock": medians["live"] / medians["stock DDP"],
        "gain_over_even": medians["even"] / medians["live"],
    }


def _fit(model: Job, strategy: Strategy, group: Path | None, batch: int, steps: int) -> Clock:
    clock = Clock()
    width = model.layers[0].in_features
    data = TensorDataset(torch.randn(batch * steps, width))
    callbacks: list[Callback] = [clock]
    if width == WIDTH:
        callbacks.append(OneCore())
    if group is not None:
        callbacks.append(SlowDevice(0.0, group, rank=1))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=batch // 2, shuffle=True))
    return clock


def _table(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"two ranks, {result['global_batch']} samples per step: medians of the step time",
        caption=f"{result['cpu']}, {result['cores']} cores, {result['date']}",
    )
    table.add_column("")
    cases = result["cases"]
    for case in cases:
        table.add_column(f"{case['devices']} {case['speeds']}", justify="right")
    for name in cases[0]["median_s"]:
        table.add_row(name, *(f"{1e3 * case['median_s'][name]:.1f} ms" for case in cases))
    table.add_section()
    table.add_row("best split", *("/".join(map(str, case["best_split"])) for case in cases))
    table.add_row("live split", *("/".join(map(str, case["live_splits"][-1])) for case in cases))
    table.add_section()
    table.add_row("live / best static", *(f"{case['live_of_best_static']:.3f}" for case in cases))
    table.add_row("live / stock DDP", *(f"{case['live_of_stock']:.3f}" for case in cases))
    table.add_row("even / live", *(f"{case['gain_over_even']:.2f}x" for case in cases))
    return table


if __name__ == "__main__":
    main()
