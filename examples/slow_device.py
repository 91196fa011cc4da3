"""Makes one process a slower "device", for examples and benchmarks on a machine whose cores are all alike."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

CGROUP_V1 = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000  # short, so that the slowness is even within one training step


class CpuShare:
    """A control group that holds whoever enters it to 1/`factor` of one CPU; needs root and cgroup v1."""

    def __init__(self, name: str, factor: float) -> None:
        self.folder = CGROUP_V1 / f"hetckpt-{name}"
        self.factor = factor

    @classmethod
    def works_here(cls) -> bool:
        """Whether this user may make such a group on this machine; found out by making one."""
        try:
            with cls(f"probe-{os.getpid()}", 1.0):
                return True
        except OSError:
            return False

    def __enter__(self) -> CpuShare:
        self.folder.mkdir()
        (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self.folder / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US / self.factor)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A group can only go once its last process has ended, which a kill does not wait for.
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)


class SlowDevice(Callback):
    """Makes one rank about `factor` times slower from the first batch on.

    With a control group the kernel takes the CPU time away; without one, the process sleeps in each
    batch for (factor - 1) times what forward and backward take.

    Args:
        factor: how many times slower.
        group: folder of the control group to enter, or None to sleep.
        rank: who is the slow one.
    """

    def __init__(self, factor: float, group: Path | None, rank: int) -> None:
        self.factor = factor
        self.group = group
        self.rank = rank
        self._started_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the group only now, else the imports would be slow as well."""
        if self.group is not None and trainer.global_rank == self.rank:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when the forward pass begins."""
        self._started_s = time.perf_counter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Sleep in proportion to the samples; a forward pass is about a third of the whole."""
        if self.group is None and trainer.global_rank == self.rank:
            time.sleep((self.factor - 1) * 3 * (time.perf_counter() - self._started_s))


class OneCore(Callback):
    """Keeps each process of a Trainer on a core of its own, so that the "devices" do not share."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move every thread there is; later ones inherit the core."""
        if not hasattr(os, "sched_setaffinity"):
            return
        cores = sorted(os.sched_getaffinity(0))
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[trainer.local_rank % len(cores)]})
