"""How much memory a rank lends to its snapshots, pinned for its GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from lightning_hetckpt.checkpoint.buffer_pool import BufferPool
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES

_LEAST_BYTES = 64 * 2**20
_MOST_OF_FREE_MEMORY = 0.25


class StagingPool:
    """Keeps the buffer pool of one rank, made at the first save and made anew only for a larger one.

    Args:
        buffer_bytes: its size; None is what the largest save so far needs, at most a quarter of the host's free
            memory divided by its ranks, and at least 64 MiB.
        local_ranks: ranks that share the host, where the launcher does not say so in LOCAL_WORLD_SIZE.
    """

    def __init__(self, buffer_bytes: int | None, local_ranks: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_ranks))
        self._pool: BufferPool | None = None
        self._made_for_bytes = 0
        self._pinned = False

    def ready(self, wanted_bytes: int, drain: Callable[[], None]) -> BufferPool:
        """The pool for a save of `wanted_bytes`.

        Args:
            drain: returns when no earlier save uses the pool any more; called before it is replaced.
        """
        if self._pool is not None and (
            self._buffer_bytes is not None or wanted_bytes <= self._made_for_bytes
        ):
            return self._pool
        # Optimizer state appears at the first step: a save before it is a third of those behind it.
        if self._pool is not None:
            drain()
            self.close()
        self._made_for_bytes = wanted_bytes
        self._pool = BufferPool(self._buffer_bytes or self._fair_bytes(wanted_bytes), CHUNK_BYTES)
        self._pinned = torch.cuda.is_initialized() and _pin(self._pool)  # type: ignore[no-untyped-call]
        return self._pool

    def close(self) -> None:
        """Give the memory back; nobody may use it any more. May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            if self._pinned:
                torch.cuda.cudart().cudaHostUnregister(_address(pool))  # type: ignore[no-untyped-call]
            pool.close()

    def _fair_bytes(self, wanted_bytes: int) -> int:
        most_bytes = int(_MOST_OF_FREE_MEMORY * _free_memory_bytes() / self._local_ranks)
        return max(_LEAST_BYTES, min(wanted_bytes, most_bytes))


def _free_memory_bytes() -> int:
    """What the host could give away without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: half of all memory is a guess on the safe side of a quarter
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _pin(pool: BufferPool) -> bool:
    """Let GPUs copy into the pool by themselves; False if the driver refuses, and copies then wait for a CPU."""
    # In a thread that ends: CUDA keeps a refusal as its thread's last error, and the next kernel would raise it.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_register, pool, torch.cuda.current_device()).result()


def _register(pool: BufferPool, device: int) -> bool:
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(_address(pool), len(pool.memory), 0)  # type: ignore[no-untyped-call]
    return int(code) == 0


def _address(pool: BufferPool) -> int:
    return int(np.frombuffer(pool.memory, np.uint8).ctypes.data)
