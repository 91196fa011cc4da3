"""How far snapshots raise a process's memory: the peak over many of them, against `buffer_bytes`.

    python -m benchmarks.memory --mb 20 200 2000 --buffer-mb 64 --snapshots 100

Each size runs in a process of its own. Counted is the growth of the peak resident memory from the moment before the
first snapshot on; the aim is the bound plus 32 MiB, whatever the size of the state.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, write_json
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter

MIB = 2**20
SPARE_BYTES = 32 * MIB  # for all but the buffers


def peak_bytes() -> int:
    """The most memory that this process has had resident at once."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


def growth_bytes(nbytes: int, buffer_bytes: int, snapshots: int, folder: Path) -> int:
    """How much the peak grows while a state of `nbytes` is saved again and again, its optimizer stepping between."""
    model = torch.nn.ParameterList(torch.ones(nbytes // 12 // 20) for _ in range(20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            parameter.grad = None

    step()
    stable = [*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())]
    before = peak_bytes()
    with Snapshotter(buffer_bytes=buffer_bytes) as engine:
        for number in range(snapshots):
            tree = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
            snapshot = engine.begin(tree, folder / f"{number % 2}.ckpt", stable)
            snapshot.fence()
            step()
            snapshot.wait()
    return peak_bytes() - before


def main() -> None:
    """Measure every size in a process of its own and print a table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--mb", type=int, nargs="+", default=[20, 200])
    options.add_argument("--buffer-mb", type=int, default=64, help="MiB of `buffer_bytes`")
    options.add_argument("--snapshots", type=int, default=100)
    options.add_argument("--folder", type=Path, default=None)
    options.add_argument("--json", type=Path, default=None)
    options.add_argument("--one", action="store_true", help="print the growth of one size in this process")
    given = options.parse_args()
    if given.one:
        print(growth_bytes(given.mb[0] * 10**6, given.buffer_mb * MIB, given.snapshots, given.folder))
        return
    table = Table("MB of state", "bound MiB", "peak grew by MiB", "within bound + 32 MiB")
    rows = []
    for mb in given.mb:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            command = [
                sys.executable,
                "-m",
                "benchmarks.memory",
                "--one",
                "--mb",
                str(mb),
                "--folder",
                folder,
            ]
            command += ["--buffer-mb", str(given.buffer_mb), "--snapshots", str(given.snapshots)]
            grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        fits = grown <= given.buffer_mb * MIB + SPARE_BYTES
        table.add_row(str(mb), str(given.buffer_mb), f"{grown / MIB:.1f}", "yes" if fits else "no")
        rows.append({"mb": mb, "buffer_mb": given.buffer_mb, "grown_mib": grown / MIB})
    console = Console()
    console.print(f"{given.snapshots} snapshots of each size")
    console.print(table)
    write_json(given.json, describe("memory") | {"rows": rows})


if __name__ == "__main__":
    main()
