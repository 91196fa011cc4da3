"""The examples run as they stand there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(name: str, cwd: Path, *options: str, limit_s: float = 100.0) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_plain_training_goes_on_where_it_was_when_started_again(tmp_path: Path) -> None:
    snapshots = tmp_path / "demo_out" / "train" / "snapshots"

    _run("train.py", tmp_path, "--devices=1", "--max-steps=2")
    first = {path.name for path in snapshots.glob("*.ckpt")}
    again = _run("train.py", tmp_path, "--devices=1", "--max-steps=3")

    assert first == {"step=1.ckpt", "step=2.ckpt"}
    assert "step=2.ckpt" in again  # Lightning names what it restored from
    assert {path.name for path in snapshots.glob("*.ckpt")} == {"step=2.ckpt", "step=3.ckpt"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_main_job_prints_its_table_and_draws_its_picture(tmp_path: Path) -> None:
    printed = _run("main_job.py", tmp_path, "--steps=24", limit_s=380)

    assert "killed (SIGKILL) at step" in printed
    assert (tmp_path / "demo_out" / "main_job.png").stat().st_size > 10_000
