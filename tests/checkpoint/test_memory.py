"""Snapshots take no more memory than their buffers, however large the state is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("mb", [12, 120])
def test_the_peak_grows_by_the_bound_and_little_else(tmp_path: Path, mb: int) -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--one", "--mb", str(mb), "--buffer-mb", "16"]
    done = subprocess.run(
        [*command, "--snapshots", "8", "--folder", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) <= (16 + 32) * MIB
