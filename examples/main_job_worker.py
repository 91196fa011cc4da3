"""The training processes of the main job: one JSON line per step and rank. Started by main_job.py."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from byte_gpt import ByteGPT, SourceBytes
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from slow_device import OneCore, SlowDevice
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetckpt import HeteroDDP, SnapshotCallback, StripedAsyncCheckpointIO


class StepLog(Callback):
    """Appends what this rank saw of each step to `<folder>/rank<r>.jsonl`."""

    def __init__(self, folder: Path, snapshots: SnapshotCallback) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._last_s = 0.0
        self._rank = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count the time of the first step."""
        self._rank = trainer.global_rank
        self._last_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        """Write the step's line; runs before the snapshot of this step begins."""
        now_s = time.perf_counter()
        self.write(
            step=trainer.global_step,
            samples=len(batch),
            seconds=now_s - self._last_s,
            loss=float(trainer.callback_metrics["loss"]),  # of the global batch
            stall_s=self._snapshots.last_stall_s,  # what the snapshot of the step before cost this thread
        )
        self._last_s = now_s

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time one save with nothing else to do."""
        plugin = trainer.strategy.checkpoint_io
        plugin.wait()
        trainer.strategy.barrier()
        began_s = time.perf_counter()
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "alone.ckpt")
        plugin.wait()
        self.write(save_s=time.perf_counter() - began_s)

    def write(self, **record: Any) -> None:
        """Append one line at once: the next moment may be the last."""
        with (self._folder / f"rank{self._rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({"rank": self._rank, **record}) + "\n")


def main() -> None:
    """Train as the parent says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--dirs", type=Path, nargs="+", required=True)
    parser.add_argument("--policy", choices=["live", "even"], required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per process of an even split")
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--slow", type=float, help="make the last process this many times slower")
    parser.add_argument("--group", type=Path, help="control group that makes it slow; else it sleeps")
    options = parser.parse_args()

    seed_everything(1, verbose=False)
    snapshots = SnapshotCallback()
    callbacks: list[Callback] = [snapshots, StepLog(options.log, snapshots)]
    if options.slow:
        callbacks += [OneCore(), SlowDevice(options.slow, options.group, rank=options.devices - 1)]
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=HeteroDDP(policy=options.policy, replan_every=8),
        plugins=[StripedAsyncCheckpointIO(dirs=options.dirs)],
        callbacks=callbacks,
        max_steps=options.max_steps,
        default_root_dir=options.root,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loader = DataLoader(SourceBytes(), batch_size=options.batch_size, shuffle=True)
    trainer.fit(ByteGPT(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
