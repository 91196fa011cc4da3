"""Lightning's own ways to start processes, each in a script of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys
import torch
import lightning_hetckpt
from lightning_hetckpt import StripedAsyncCheckpointIO
from tests import toy

if __name__ == "__main__":
    torch.set_num_threads(1)
    root, strategy, until = sys.argv[1], sys.argv[2], int(sys.argv[3])
    trainer = toy.trainer(
        root, strategy, 2, max_steps=until, max_epochs=-1, plugins=[StripedAsyncCheckpointIO(dirs=[root + "/a"])]
    )
    model = toy.Toy()
    trainer.fit(model, toy.loader(32, 4), ckpt_path="last")
    if trainer.is_global_zero:
        print("weight", float(model.net[0].weight.detach().sum()))
"""


def run(tmp_path: Path, strategy: str, until: int) -> float:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    # Without a rendezvous of its own Lightning picks a free port.
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run", strategy, str(until)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("weight")]
    return float(line.split()[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", ["hetero_ddp", "hetero_ddp_fork", pytest.param("hetero_ddp_spawn", marks=pytest.mark.slow)]
)
def test_a_launcher_trains_saves_and_resumes(tmp_path: Path, strategy: str) -> None:
    from lightning_hetckpt.checkpoint import restore

    for until in (3, 5):
        weight = run(tmp_path, strategy, until)

        saved = restore.load(tmp_path / "run" / "snapshots" / f"step={until}.ckpt")["state_dict"][
            "net.0.weight"
        ]
        assert weight == pytest.approx(float(saved.sum()), rel=1e-12)
