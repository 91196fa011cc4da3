"""Does the loss fall as it does on one process, and does an adapting batch get to the same loss sooner?

    python -m benchmarks.converge
    python -m benchmarks.converge --quick

The byte-level GPT of examples/ learns the standard library's source, without dropout, three times:

- `one process`  plain Lightning, the whole batch at once
- `fixed`        HeteroDDP() on two gloo processes, of which one is slower, at the same global batch
- `adaptive`     the same with AdaptiveBatch, until it has the loss with which `fixed` ended

The two devices compute for real, and a step also sleeps `--step-ms`, whatever its samples, and `--sample-ms` for each of
them (twice that on the slower one): as a GPU that a small batch leaves half idle. The time to a loss therefore says what
the choice of a batch is worth on devices of that shape, and nothing about this machine's own speed.

The loss is the mean over all ranks, averaged over the last `32 x batch` samples, which is the same span at every batch.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from torch.utils.data import DataLoader

from benchmarks.machine import describe, write_json
from examples.byte_gpt import ByteGPT, SourceBytes
from lightning_hetckpt import AdaptiveBatch, HeteroDDP
from tests.ranks import run_ranks

SPAN = 32  # batches of the start, over which the loss is averaged
SLOWER = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and on which devices."""

    batch: int
    most: int
    epochs: int
    windows: int
    width: int
    rule: str
    step_s: float
    sample_s: float


class Curve(Callback):
    """Sleeps as the device would, notes the loss, and stops where it is low enough.

    Args:
        job: for the device's times and the span of the average.
        target: loss in nats at which to stop; None never does.
    """

    def __init__(self, job: Job, target: float | None) -> None:
        self.job, self.target = job, target
        self.losses: list[float] = []  # of every step
        self.smooth = math.nan
        self.seconds: list[float] = []  # since the first batch began
        self.averages: list[float] = []
        self.totals: list[int] = []
        self._began_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._began_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: torch.Tensor, batch_idx: int
    ) -> None:
        """Note one step."""
        loss = float(trainer.callback_metrics["loss"])
        plan = getattr(trainer.strategy, "plan", None)
        total = plan.global_batch_size if plan is not None else self.job.batch
        weight = 1 - math.exp(-total / (SPAN * self.job.batch))
        self.smooth = loss if not self.losses else self.smooth + weight * (loss - self.smooth)
        self.losses.append(loss)
        self.averages.append(self.smooth)
        self.totals.append(total)
        self.seconds.append(time.perf_counter() - self._began_s)
        enough = len(self.losses) >= SPAN and self.target is not None and self.smooth <= self.target
        if enough:  # every rank has the same reduced loss, so all stop
            trainer.should_stop = True


class Paced(ByteGPT):
    """The byte-level GPT on a device that needs so long for a step and for each sample besides computing."""

    def __init__(self, job: Job, slower: float) -> None:
        super().__init__(width=job.width, depth=2, heads=4, window=32, dropout=0.0)
        self.step_s, self.sample_s = job.step_s, job.sample_s * slower

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Sleep, then compute."""
        time.sleep(self.step_s + self.sample_s * len(batch))
        return super().training_step(batch, batch_idx)


def main() -> None:
    """Train three times, print a row and keep the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of both ranks in a step at the start")
    parser.add_argument("--most", type=int, default=128, help="samples that AdaptiveBatch may go up to")
    parser.add_argument(
        "--epochs", type=int, default=5, help="of the fixed run; the adaptive one may take twice as many"
    )
    parser.add_argument("--windows", type=int, default=4096, help="samples in an epoch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rule", choices=["adascale", "sqrt", "linear", "none"], default="sqrt")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--sample-ms", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    job = Job(
        options.batch,
        options.most,
        options.epochs,
        options.windows,
        options.width,
        options.rule,
        options.step_ms / 1e3,
        options.sample_ms / 1e3,
    )
    if options.quick:
        job = Job(16, 64, 3, 512, 32, options.rule, job.step_s, job.sample_s)
        options.repeats = 1

    console = Console()
    with console.status("one process"):
        alone = run_ranks(train_alone, 1, job, group=False, timeout_s=3600)[0]
    rounds = []
    for turn in range(options.repeats):
        with console.status(f"two processes, round {turn + 1}"):
            rounds.append(run_ranks(train_both, 2, job, group=False, timeout_s=7200)[0])
    apart = max(
        abs(a - b) for one in rounds for a, b in zip(alone["losses"], one["fixed"]["losses"], strict=True)
    )
    fixed_s = median(one["fixed"]["seconds"][-1] for one in rounds)
    adaptive_s = median(one["adaptive"]["seconds"][-1] for one in rounds)
    result = {
        **describe("benchmarks.converge"),
        "one_process": alone,
        "rounds": rounds,
        "curves_differ_by_nats": apart,
        "fixed_s": fixed_s,
        "adaptive_s": adaptive_s,
        "reached": all(one["reached"] for one in rounds),
    }
    write_json(options.json, result)
    print(row(job, result))


def train_alone(rank: int, job: Job) -> dict[str, Any]:
    """One process with the whole batch."""
    return _fit(job, 0.0, "auto", job.epochs, None, 1)


def train_both(rank: int, job: Job) -> dict[str, Any]:
    """The fixed batch, and then the adapting one up to the same loss; this rank and its peer."""
    slower = SLOWER if rank == 1 else 1.0
    fixed = _fit(job, slower, HeteroDDP(), job.epochs, None, 2)
    adaptive = AdaptiveBatch(job.most, lr_scaling=job.rule)  # type: ignore[arg-type]
    target = fixed["averages"][-1]
    strategy = HeteroDDP(adaptive_batch=adaptive)
    found = _fit(job, slower, strategy, 2 * job.epochs, target, 2)
    return {
        "fixed": fixed,
        "adaptive": found,
        "target": target,
        "reached": found["averages"][-1] <= target,
        "noise_scale": adaptive.noise_scale,
        "lr_factor": adaptive.lr_factor,
    }


def _fit(
    job: Job, slower: float, strategy: Any, epochs: int, target: float | None, devices: int
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(1, verbose=False)
    curve = Curve(job, target)
    own = job if slower else Job(job.batch, job.most, job.epochs, job.windows, job.width, job.rule, 0.0, 0.0)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = SourceBytes(window=32, limit_bytes=32 * job.windows + 1)
    # One process would shuffle by its own generator; this sampler is the one that Lightning gives to the ranks.
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, shuffle=True, seed=1) if devices == 1 else None
    trainer.fit(
        Paced(own, slower),
        DataLoader(data, batch_size=job.batch // devices, shuffle=sampler is None, sampler=sampler),
    )
    return {
        "losses": curve.losses,
        "averages": curve.averages,
        "seconds": curve.seconds,
        "totals": curve.totals,
    }


def row(job: Job, result: dict[str, Any]) -> str:
    """A row for RESULTS.md, with its head."""
    last = result["rounds"][-1]
    path = " ".join(str(total) for total in dict.fromkeys(last["adaptive"]["totals"]))
    gain = result["fixed_s"] / result["adaptive_s"]
    told = f"{gain:.2f}x" if result["reached"] else "not reached"
    cells = [
        job.rule,
        f"{result['curves_differ_by_nats']:.1e}",
        f"{last['target']:.3f}",
        f"{result['fixed_s']:.1f}",
        f"{result['adaptive_s']:.1f}",
        told,
        path,
        f"{last['noise_scale'] or 0:.0f}",
        f"{last['lr_factor']:.2f}",
    ]
    head = [
        "rule",
        "one process, largest difference (nats)",
        "target (nats)",
        f"fixed {job.batch} (s)",
        "adaptive (s)",
        "sooner",
        "batches",
        "noise scale",
        "LR factor",
    ]
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, cells))


if __name__ == "__main__":
    main()
