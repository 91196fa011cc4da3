"""What this rank's device is, what it may hold, and what it held at most."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from lightning_hetckpt.balance.memory import MemoryStats

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_KIB = 1024


def device_name(device: torch.device) -> str:
    """The model of the device: CUDA's name of it, or the processor with the host it is in."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = _field(_PROC / "cpuinfo", "model name") or device.type
    return f"{model} in {socket.gethostname()}"


class MemoryMeter:
    """Watches how much memory the steps of one rank take.

    Args:
        device: where the model computes.
        local_ranks: ranks in this host; on CPU they share what is free.
    """

    def __init__(self, device: torch.device, local_ranks: int = 1) -> None:
        self._device = device
        self._local_ranks = local_ranks
        self._samples = 0

    def batch_started(self, at_once: int) -> None:
        """A batch begins, of which `at_once` samples run together at most."""
        if at_once != self._samples:
            self._samples = at_once
            self._forget_peak()

    def window(self) -> MemoryStats | None:
        """The most that was held since the number of samples at once changed; None before the first batch."""
        if not self._samples:
            return None
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            limit = free + torch.cuda.memory_reserved(self._device)
            return MemoryStats(self._samples, torch.cuda.max_memory_allocated(self._device), limit)
        held, peak = (_status_bytes(name) for name in ("VmRSS", "VmHWM"))
        left = _free_bytes()
        if held is None or peak is None or left is None:
            return None
        return MemoryStats(self._samples, peak, held + left // self._local_ranks)

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            try:
                (_PROC / "self/clear_refs").write_text("5")  # the kernel forgets the peak of the process
            except OSError:
                pass  # then the peak is that of the whole run: too high, and so on the safe side


def held_by_others(device: torch.device) -> int | None:
    """Bytes that other processes hold on a CUDA device; None where `nvidia-ml-py` is missing or cannot tell."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return sum(one.usedGpuMemory or 0 for one in found if one.pid != os.getpid())


def _free_bytes() -> int | None:
    """What the host and the process's control group leave free, whichever is less."""
    available = _field(_PROC / "meminfo", "MemAvailable")
    found = [] if available is None else [int(available.split()[0]) * _KIB]
    if (within := _cgroup_free_bytes(_PROC, _CGROUP)) is not None:
        found.append(within)
    return min(found, default=None)


def _cgroup_free_bytes(proc: Path, root: Path) -> int | None:
    """What the limit of the process's control group leaves free; None without a limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder = path.lstrip("/")
        if controllers == "":
            names = ("", "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path is often that of the host, and the group itself is mounted as the root.
        for place in (root / names[0] / folder, root / names[0]):
            try:
                limit, used = ((place / name).read_text().strip() for name in names[1:])
            except OSError:
                continue
            # Version 1 spells "no limit" as a number that no machine has.
            if limit != "max" and int(limit) < 1 << 60:
                return max(0, int(limit) - int(used))
            break
    return None


def _status_bytes(name: str) -> int | None:
    value = _field(_PROC / "self/status", name)
    return None if value is None else int(value.split()[0]) * _KIB


def _field(path: Path, name: str) -> str | None:
    """The value of the first line `name: value` of a file in /proc."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next(
        (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None
    )
