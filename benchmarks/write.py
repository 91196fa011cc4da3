"""How fast a checkpoint becomes durable: our writer, its rivals, and what the drives allow.

    python -m benchmarks.write --dirs /mnt/a /mnt/b --mib 512 --repeats 7

Every contestant writes the same tensors and ends durable (fsync or fdatasync of data and folder). They take
turns, in another order each round, so that a slow minute of the machine hits all of them. `raw` writes the same
bytes, laid out in aligned memory beforehand, with O_DIRECT and one thread per folder: no copy, no hash, no
header, the most that such a writer could reach. Rivals that know one folder only get the first.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import tempfile
import time
import warnings
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
from lightning_hetckpt.checkpoint.layout import DRIVE_FOLDER

BLOCK_BYTES = 8 * 2**20
ALIGN_BYTES = 4096
RAW_NAME = "raw.bin"
Save = Callable[[Path], None]  # makes the checkpoint durable below a folder


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

    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process on purpose
    with tempfile.TemporaryDirectory(prefix="hetckpt-", dir=Path.cwd()) as here:
        dirs = [path.absolute() for path in options.dirs or [Path(here)]]
        checkpoint = make_checkpoint(options.mib * 2**20)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(checkpoint))
        seconds = compete(contestants(checkpoint, dirs), dirs, options.repeats)
    raw_s = median(seconds["raw O_DIRECT"])
    result = {
        **describe("benchmarks.write"),
        "bytes": nbytes,
        "tensors": len(tensors_of(checkpoint)),
        "folders": len(dirs),
        "contestants": {
            name: {
                "median_s": median(rounds),
                "gb_per_s": nbytes / 1e9 / median(rounds),
                "of_raw": raw_s / median(rounds),
                "rounds_s": rounds,
            }
            for name, rounds in seconds.items()
        },
    }
    write_json(options.json, result)
    Console().print(_table(result))


def contestants(checkpoint: dict[str, Any], dirs: list[Path]) -> dict[str, Save]:
    """Everybody who can make `checkpoint` durable below a folder."""
    striped = StripedAsyncCheckpointIO(dirs=dirs)

    def hetckpt(folder: Path) -> None:
        striped.save_checkpoint(checkpoint, folder / "hetckpt.ckpt")
        striped.wait()

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

    parts = [memoryview(part) for part in aligned_parts(checkpoint, len(dirs))]

    def raw(folder: Path) -> None:
        with ThreadPoolExecutor(len(dirs)) as pool:
            list(pool.map(lambda place, part: write_raw(place / RAW_NAME, part), dirs, parts))

    return {
        "lightning_hetckpt": hetckpt,
        "torch.save + fsync": torch_save,
        "Lightning's TorchCheckpointIO + fsync": lightning,
        "DCP, 1 thread": dcp_with(1),
        "DCP, 4 threads": dcp_with(4),
        "raw O_DIRECT": raw,
    }


def compete(saves: dict[str, Save], dirs: list[Path], repeats: int) -> dict[str, list[float]]:
    """Seconds until durable of each contestant, round by round; cleaning up is not counted."""
    rounds: dict[str, list[float]] = {name: [] for name in saves}
    names, order = list(saves), random.Random(1)
    folder = dirs[0] / "contest"
    for turn in track(range(repeats + 1), description="rounds", transient=True):
        for name in order.sample(names, len(names)):  # so that nobody always follows the same one
            folder.mkdir()
            os.sync()  # nobody pays for what the one before left in the page cache
            began_s = time.perf_counter()
            saves[name](folder)
            if turn:
                rounds[name].append(time.perf_counter() - began_s)
            shutil.rmtree(folder)
            for place in dirs:
                (place / RAW_NAME).unlink(missing_ok=True)
                shutil.rmtree(place / DRIVE_FOLDER, ignore_errors=True)
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


def aligned_parts(checkpoint: dict[str, Any], folders: int) -> list[mmap.mmap]:
    """The bytes of all tensors, cut into page-aligned parts of whole blocks, one for each folder."""
    data = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors_of(checkpoint)]).numpy()
    size = -(-len(data) // (folders * ALIGN_BYTES)) * ALIGN_BYTES
    parts = []
    for start in range(0, folders * size, size):
        part = mmap.mmap(-1, size)
        part.write(data[start : start + size])
        parts.append(part)
    return parts


def write_raw(path: Path, data: memoryview) -> None:
    """Write `data` past the page cache, a block at a time, and make it durable."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    except OSError as error:
        raise SystemExit(f"{path}: no O_DIRECT there ({error}); choose --dirs on a local drive") from error
    try:
        offset = 0
        while offset < len(data):
            offset += os.pwrite(fd, data[offset : offset + BLOCK_BYTES], offset)
        os.fdatasync(fd)
    finally:
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
    for heading in ("", "median", "GB/s", "of raw"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in sorted(result["contestants"].items(), key=lambda item: item[1]["median_s"]):
        table.add_row(
            name,
            f"{row['median_s']:.3f} s",
            f"{row['gb_per_s']:.2f}",
            f"{row['of_raw']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
