"""The fixtures that guard every test do guard, and ranks that fail are named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError

LEAKS = {
    "thread": "threading.Thread(target=time.sleep, args=(8,), daemon=True, name='forgotten').start()",
    "descriptor": "os.open('/', os.O_RDONLY)",
    "child process": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'])",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_test_that_leaks_fails_and_names_the_leak(leak: str, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_leaky.py").write_text(
        f"import os, subprocess, sys, threading, time\nkept = []\ndef test_leaky():\n    kept.append({LEAKS[leak]})\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_leaky.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 1
    assert f"the test left behind: {leak}" in done.stdout


def _sum_of_ranks(rank: int, more: float) -> torch.Tensor:
    total = torch.tensor([rank + more])
    dist.all_reduce(total)
    return total


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("out of cheese")
    dist.barrier()


def _one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def _nobody_comes(rank: int) -> None:
    time.sleep(30)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_meet_and_answer_in_order(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    expected = [sum(range(world_size)) + 0.5 * world_size] * world_size

    assert [float(total) for total in run_ranks(_sum_of_ranks, world_size, 0.5)] == expected


def test_a_rank_that_raises_is_named_with_its_traceback(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised[\s\S]*out of cheese"):
        run_ranks(_one_raises, 2)


def test_a_rank_that_dies_is_named_and_the_others_are_ended(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(_one_dies, 2)


def test_ranks_that_hang_are_ended(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankError, match=r"rank [01] (did not finish in time|died with exit code 1)"):
        run_ranks(_nobody_comes, 2, timeout_s=2)
