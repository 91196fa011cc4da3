"""The main job: two unequal processes train together, every step is on disk, a kill costs nothing.

    python examples/main_job.py

A byte-level GPT learns the standard library's own source in five acts:

1. even       two processes, one about 3 times slower, equal shares: the time to beat
2. balanced   the same two, shares learnt while training; killed with SIGKILL in the middle of a step
3. resumed    two processes go on from the newest whole snapshot
4. one        one process goes on
5. three      three processes go on

Takes about three minutes on two cores. Prints a table and draws `demo_out/main_job.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from main_job_report import draw, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from slow_device import CpuShare

WORKER = Path(__file__).with_name("main_job_worker.py")
GLOBAL_BATCH = 16
SLOWER = 3.0
ACT_LIMIT_S = 120.0


@dataclass
class Act:
    """One training run of the job, and what its ranks wrote down.

    Args:
        name: what the table calls it.
        devices: processes.
        until: the global step to stop at, or to be killed at.
        slow: whether the last process is the slow device.
        killed: whether it ends by SIGKILL.
    """

    name: str
    devices: int
    until: int
    slow: bool = False
    killed: bool = False
    policy: str = "live"
    records: list[dict[str, float]] = field(default_factory=list)

    @property
    def steps(self) -> list[dict[str, float]]:
        """Rank 0's line of each step, in order."""
        return [record for record in self.records if record["rank"] == 0 and "step" in record]


def main() -> int:
    """Play the five acts, then report."""
    parser = argparse.ArgumentParser(description="Two unequal processes, a snapshot at every step, a kill.")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="where the picture goes")
    parser.add_argument("--steps", type=int, default=36, help="steps of the balanced act before the kill")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    n = options.steps
    even = Act("even", devices=2, until=n // 3, slow=True, policy="even")
    rest = [
        Act("balanced", devices=2, until=n, slow=True, killed=True),
        Act("resumed", devices=2, until=n + 12, slow=True),
        Act("one", devices=1, until=n + 18),
        Act("three", devices=3, until=n + 24),
    ]
    console = Console()
    share = CpuShare(f"demo-{os.getpid()}", SLOWER) if CpuShare.works_here() else None
    how = (
        f"the last process is held to {1 / SLOWER:.0%} of one core by the kernel (cgroup v1)"
        if share
        else f"the last process sleeps {SLOWER - 1:g} times as long as its forward and backward take"
    )
    console.print(f"[bold]lightning_hetckpt[/]: {how}; a snapshot at every step over two folders")
    with (
        tempfile.TemporaryDirectory(prefix="hetckpt-") as folder,
        share or nullcontext(),
        _bars(console) as bars,
    ):
        group = share.folder if share else None
        for act in [even, *rest]:
            # The even run has a home of its own; the other acts are one story.
            home = Path(folder) / ("even" if act is even else "run")
            _play(act, home, group, bars)
        snapshot_bytes = sum(f.stat().st_size for f in (home / "alone.ckpt").iterdir())
    console.print(table(even, rest, snapshot_bytes, how))
    console.print(f"picture: {draw(even, rest, options.out / 'main_job.png')}")
    return 0


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield bars


def _play(act: Act, home: Path, group: Path | None, bars: Progress) -> None:
    """Run one act to its end and collect its records."""
    log = home / "logs" / act.name
    log.mkdir(parents=True)
    command = [sys.executable, str(WORKER), f"--root={home}", f"--log={log}", f"--policy={act.policy}"]
    command += ["--dirs", str(home / "drive-a"), str(home / "drive-b"), f"--devices={act.devices}"]
    # A run that is to be killed has no end of its own.
    command += [
        f"--batch-size={GLOBAL_BATCH // act.devices}",
        f"--max-steps={10**6 if act.killed else act.until}",
    ]
    if act.slow:
        command += [f"--slow={SLOWER}"] + ([f"--group={group}"] if group else [])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    bar = bars.add_task(act.name, total=None, note="starting")
    output = log / "output.txt"
    deadline_s = time.monotonic() + ACT_LIMIT_S
    with output.open("w") as stream:
        # A session of its own, so that one signal reaches every process of the act and nobody else.
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=env, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(0.05)
                act.records = _read(log)
                steps = act.steps
                if steps:
                    first = int(steps[0]["step"])
                    note = (
                        f"{len(steps)} steps, loss {steps[-1]['loss']:.2f}, {steps[-1]['seconds']:.2f} s/step"
                    )
                    bars.update(bar, total=act.until - first + 1, completed=len(steps), note=note)
                    if act.killed and steps[-1]["step"] >= act.until:
                        time.sleep(steps[-1]["seconds"] / 2)
                        break
                if time.monotonic() > deadline_s:
                    raise SystemExit(
                        f"act {act.name!r} took more than {ACT_LIMIT_S:.0f} s\n{output.read_text()[-4000:]}"
                    )
        finally:
            if process.poll() is None or act.killed:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    act.records = _read(log)
    if process.returncode != (-signal.SIGKILL if act.killed else 0):
        raise SystemExit(f"act {act.name!r} ended with {process.returncode}\n{output.read_text()[-4000:]}")
    bars.update(bar, note=bars.tasks[bar].fields["note"] + (", killed" if act.killed else ""))
    bars.stop_task(bar)


def _read(log: Path) -> list[dict[str, float]]:
    """Every whole line of every rank; a killed rank may have left half a line."""
    lines = [
        line
        for path in sorted(log.glob("rank*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    sys.exit(main())
