"""How fast a checkpoint becomes durable: our writer, its rivals, and what the drives allow.

    python -m benchmarks.write --dirs /mnt/a /mnt/b --mib 512 --repeats 7

Every contestant writes the same tensors and ends durable (fsync or fdatasync of data and folder). They take
turns, in another order each round, so that a slow minute of the machine hits all of them. `raw` writes as many
bytes with O_DIRECT, one thread per folder, and no meaning: the most that any writer could reach. Rivals
that know one folder only get the first.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe, write_json
from lightning_hetckpt import StripedAsyncCheckpointIO

BLOCK_BYTES = 8 * 2**20
Save = Callable[
    [Path], float | None
]  # writes below a folder; may tell after how many seconds training went on


def main() -> None:
    """Take turns, then print the medians and keep every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dirs", type=Path, nargs="+", help="one folder on each drive; default: a temporary one"
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count; one more warms up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="hetckpt-", dir=Path.cwd()) as here:
        dirs = [path.absolute() for path in options.dirs or [Path(here)]]
        checkpoint = make_checkpoint(options.mib * 2**20)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(checkpoint))
        seconds = compete(contestants(checkpoint, nbytes, dirs), dirs[0], options.repeats)
    raw_s = median(total for total, _ in seconds["raw O_DIRECT"])
    result = {
        **describe("benchmarks.write"),
        "bytes": nbytes,
        "tensors": len(tensors_of(checkpoint)),
        "folders": len(dirs),
        "contestants": {
            name: {
                "median_s": median(total for total, _ in rounds),
                "gb_per_s": nbytes / 1e9 / median(total for total, _ in rounds),
                "of_raw": raw_s / median(total for total, _ in rounds),
                "training_waits_s": median(waits for _, waits in rounds),
                "rounds_s": [total for total, _ in rounds],
            }
            for name, rounds in seconds.items()
        },
    }
    write_json(options.json, result)
    Console().print(_table(result))


def contestants(checkpoint: dict[str, Any], nbytes: int, dirs: list[Path]) -> dict[str, Save]:
    """Everybody who can make `checkpoint` durable below a folder."""
    striped = StripedAsyncCheckpointIO(dirs=dirs)

    def hetckpt(folder: Path) -> float:
        began_s = time.perf_counter()
        path = folder / "hetckpt.ckpt"
        striped.save_checkpoint(checkpoint, path)
        waits_s = time.perf_counter() - began_s
        striped.wait()
        return waits_s

    def torch_save(folder: Path) -> None:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _fsync(folder)

    def lightning(folder: Path) -> None:
        path = folder / "lightning.ckpt"
        TorchCheckpointIO().save_checkpoint(checkpoint, path)
        _fsync(path)
        _fsync(folder)

    def dcp_with(threads: int) -> Save:
        def save(folder: Path) -> None:
            writer = dcp.FileSystemWriter(
                folder / "dcp", sync_files=True, thread_count=threads, overwrite=True
            )
            dcp.save(checkpoint, storage_writer=writer, no_dist=True)
            _fsync(folder / "dcp")

        return save

    def raw(folder: Path) -> None:
        part = -(-nbytes // len(dirs))
        files = [place / f"raw-{i}" for i, place in enumerate(dirs)]
        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(lambda file: write_raw(file, part), files))
        for file in files:
            file.unlink()

    return {
        "lightning_hetckpt": hetckpt,
        "torch.save + fsync": torch_save,
        "Lightning's TorchCheckpointIO + fsync": lightning,
        "DCP, 1 thread": dcp_with(1),
        "DCP, 4 threads": dcp_with(4),
        "raw O_DIRECT": raw,
    }


def compete(saves: dict[str, Save], home: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """The rounds of each contestant as (seconds until durable, seconds that training waits)."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    names = list(saves)
    for turn in track(range(repeats + 1), description="rounds", transient=True):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            folder = home / "contest"
            folder.mkdir()
            os.sync()  # nobody pays for what the one before left in the page cache
            began_s = time.perf_counter()
            waits_s = saves[name](folder)
            total_s = time.perf_counter() - began_s
            if turn:
                rounds[name].append((total_s, total_s if waits_s is None else waits_s))
            shutil.rmtree(folder)
    return rounds


def make_checkpoint(nbytes: int) -> dict[str, Any]:
    """A checkpoint as Lightning makes it: a transformer's parameters and AdamW's two copies of them."""
    width = 1024
    shapes = [
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (width,),
        (width,),
    ]
    generator = torch.Generator().manual_seed(1)
    parameters: dict[str, torch.Tensor] = {}
    left = nbytes // 12  # float32 elements for each of the three copies
    while left > 0:
        for shape in shapes:
            rows = min(shape[0], max(1, left * shape[0] // torch.Size(shape).numel())) if left > 0 else 0
            if rows:
                tensor = torch.randn(rows, *shape[1:], generator=generator)
                parameters[f"layer.{len(parameters)}.weight"] = tensor
                left -= tensor.numel()
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": tensor.clone(), "exp_avg_sq": tensor.square()}
        for i, tensor in enumerate(parameters.values())
    }
    return {
        "epoch": 0,
        "global_step": 1,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": parameters,
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 1e-3, "params": list(state)}]}],
        "lr_schedulers": [],
        "loops": {},
        "callbacks": {},
    }


def tensors_of(checkpoint: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor in it."""
    moments = checkpoint["optimizer_states"][0]["state"].values()
    return [*checkpoint["state_dict"].values(), *(tensor for one in moments for tensor in one.values())]


def write_raw(path: Path, nbytes: int) -> None:
    """Write `nbytes` (rounded up to whole blocks of 4096) past the page cache, then make them durable."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block.write(os.urandom(BLOCK_BYTES))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        except OSError as error:
            raise SystemExit(
                f"{path}: no O_DIRECT there ({error}); choose --dirs on a local drive"
            ) from error
        view = memoryview(block)
        try:
            offset = 0
            while offset < nbytes:
                want = min(BLOCK_BYTES, -(-(nbytes - offset) // 4096) * 4096)
                offset += os.pwrite(fd, view[:want], offset)
            os.fdatasync(fd)
        finally:
            view.release()
            os.close(fd)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _table(result: dict[str, Any]) -> Table:
    size = f"{result['bytes'] / 2**20:.0f} MiB in {result['tensors']} tensors, {result['folders']} folder(s)"
    table = Table(
        title=f"durable save of {size}", caption=f"{result['cpu']}, {result['cores']} cores, {result['date']}"
    )
    for heading in ("", "median", "GB/s", "of raw", "training waits"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in sorted(result["contestants"].items(), key=lambda item: item[1]["median_s"]):
        table.add_row(
            name,
            f"{row['median_s']:.3f} s",
            f"{row['gb_per_s']:.2f}",
            f"{row['of_raw']:.2f}",
            f"{row['training_waits_s']:.3f} s",
        )
    return table


if __name__ == "__main__":
    main()
