"""How fast a checkpoint becomes durable: our writer, its rivals, and what the drives allow.

    python -m benchmarks.write --dirs /mnt/a /mnt/b --mib 512 --repeats 7 --processes 1

Every contestant writes the same tensors and ends durable (fsync or fdatasync of data and folder). They take
turns, in another order each round, so that a slow minute of the machine hits all of them. `raw` writes the same
bytes, laid out in aligned memory beforehand, with O_DIRECT and one thread per folder, each with a part as large as
its drive is fast: no copy, no hash, no header, the most that such a writer could reach. With several processes each
holds all tensors, as under DDP; those who can write together do, the others write from the first process. Rivals that
know one folder only get the first. torchsnapshot and DeepSpeed take part where `benchmarks.peers` can have them, which
also says how they are installed; who is missing is named with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import random
import shutil
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe, write_json
from benchmarks.peers import Save, fsync, fsync_tree, peers
from lightning_hetckpt import StripedAsyncCheckpointIO
from lightning_hetckpt.checkpoint.layout import DRIVE_FOLDER

BLOCK_BYTES = 8 * 2**20
ALIGN_BYTES = 4096
PROBE_BYTES = 64 * 2**20
RAW_NAME = "raw.bin"


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
    parser.add_argument("--processes", type=int, default=1, help="that save together")
    parser.add_argument("--device", default="cpu", help="on which the tensors lie, such as cuda")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="hetckpt-", dir=Path.cwd()) as here:
        dirs = [path.absolute() for path in options.dirs or [Path(here)]]
        for place in dirs:
            place.mkdir(parents=True, exist_ok=True)
        if options.processes == 1:
            run(0, options, dirs, 0)
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            mp.spawn(run, (options, dirs, store.port), options.processes)


def run(rank: int, options: argparse.Namespace, dirs: list[Path], port: int) -> None:
    """One process of the contest; the first prints."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process on purpose
    if port:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    try:
        checkpoint = make_checkpoint(options.mib * 2**20, options.device)
        rivals, skipped = peers(checkpoint, tensors_of(checkpoint), rank, options.processes)
        saves = {**contestants(checkpoint, dirs, rank, options.processes), **rivals}
        seconds = compete(saves, dirs, options.repeats, rank)
    finally:
        if port:
            dist.destroy_process_group()
    if rank:
        return
    nbytes = sum(tensor.nbytes for tensor in tensors_of(checkpoint))
    raw_s = median(seconds["raw O_DIRECT"])
    result = {
        **describe("benchmarks.write"),
        "bytes": nbytes,
        "tensors": len(tensors_of(checkpoint)),
        "folders": len(dirs),
        "processes": options.processes,
        "device": options.device,
        "skipped": skipped,
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
    console = Console()
    console.print(_table(result))
    for name, reason in skipped.items():
        console.print(f"skipped: {name}: {reason}", markup=False)


def contestants(checkpoint: dict[str, Any], dirs: list[Path], rank: int, processes: int) -> dict[str, Save]:
    """Everybody who can make `checkpoint` durable below a folder; all processes call each."""
    striped = StripedAsyncCheckpointIO(dirs=dirs)

    def hetckpt(folder: Path) -> None:
        if processes == 1:
            striped.save_checkpoint(checkpoint, folder / "hetckpt.ckpt")
        else:
            striped.begin(checkpoint, folder / "hetckpt.ckpt", stable=tensors_of(checkpoint)).fence()
        striped.wait()

    def torch_save(folder: Path) -> None:
        if rank == 0:
            with (folder / "torch.pt").open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            fsync(folder)

    def lightning(folder: Path) -> None:
        if rank == 0:
            TorchCheckpointIO().save_checkpoint(checkpoint, folder / "lightning.ckpt")
            fsync_tree(folder)

    def lightning_async(folder: Path) -> None:
        if rank == 0:
            plugin = AsyncCheckpointIO(TorchCheckpointIO())
            plugin.save_checkpoint(checkpoint, folder / "lightning.ckpt")
            plugin.teardown()
            fsync_tree(folder)

    def dcp_with(threads: int) -> Save:
        def save(folder: Path) -> None:
            writer = dcp.FileSystemWriter(
                folder / "dcp", sync_files=True, thread_count=threads, overwrite=True
            )
            dcp.save(checkpoint, storage_writer=writer, no_dist=processes == 1)
            fsync(folder / "dcp")

        return save

    weights = drive_speeds(dirs) if rank == 0 else []
    if processes > 1:
        told = [weights]
        dist.broadcast_object_list(told)
        weights = told[0]
    every = [share for share in weights for _ in range(processes)]  # of each folder and process
    views = [memoryview(part) for part in aligned_parts(checkpoint, every)][rank::processes]

    def raw(folder: Path) -> None:
        with ThreadPoolExecutor(len(dirs)) as pool:
            list(pool.map(lambda place, part: write_raw(place / f"{rank}-{RAW_NAME}", part), dirs, views))

    return {
        "lightning_hetckpt": hetckpt,
        "torch.save + fsync": torch_save,
        "Lightning's TorchCheckpointIO + fsync": lightning,
        "Lightning's AsyncCheckpointIO + fsync": lightning_async,
        "DCP, 1 thread": dcp_with(1),
        "DCP, 4 threads": dcp_with(4),
        "raw O_DIRECT": raw,
    }


def drive_speeds(dirs: list[Path]) -> list[float]:
    """Bytes per second of each folder's drive, one after the other."""
    if len(dirs) == 1:
        return [1.0]
    data = mmap.mmap(-1, PROBE_BYTES)
    data.write(os.urandom(BLOCK_BYTES) * (PROBE_BYTES // BLOCK_BYTES))
    speeds = []
    for place in dirs:
        for _ in range(2):  # the second counts: the first may ride on a throttled drive's credit
            began_s = time.perf_counter()
            write_raw(place / RAW_NAME, memoryview(data))
            seconds = time.perf_counter() - began_s
            (place / RAW_NAME).unlink()
        speeds.append(PROBE_BYTES / seconds)
    return speeds


def compete(saves: dict[str, Save], dirs: list[Path], repeats: int, rank: int) -> dict[str, list[float]]:
    """Seconds until durable of each contestant, round by round; cleaning up is not counted."""
    rounds: dict[str, list[float]] = {name: [] for name in saves}
    names, order = list(saves), random.Random(1)  # the same turns in every process
    folder = dirs[0] / "contest"
    for turn in track(range(repeats + 1), description="rounds", transient=True, disable=rank > 0):
        for name in order.sample(names, len(names)):  # so that nobody always follows the same one
            if rank == 0:
                folder.mkdir()
                os.sync()  # nobody pays for what the one before left in the page cache
            _meet()
            began_s = time.perf_counter()
            saves[name](folder)
            _meet()
            if turn:
                rounds[name].append(time.perf_counter() - began_s)
            if rank == 0:
                shutil.rmtree(folder)
                for place in dirs:
                    for file in place.glob(f"*{RAW_NAME}"):
                        file.unlink()
                    shutil.rmtree(place / DRIVE_FOLDER, ignore_errors=True)
    return rounds


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def make_checkpoint(nbytes: int, device: str = "cpu") -> dict[str, Any]:
    """A checkpoint as Lightning makes it: a transformer's parameters on `device` and AdamW's two copies of them."""
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
                tensor = torch.randn(rows, *shape[1:], generator=generator).to(device)
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


def aligned_parts(checkpoint: dict[str, Any], weights: list[float]) -> list[mmap.mmap]:
    """The bytes of all tensors, cut into page-aligned parts of whole pages in proportion to `weights`."""
    parts_of = [tensor.cpu().reshape(-1).view(torch.uint8) for tensor in tensors_of(checkpoint)]
    data = torch.cat(parts_of).numpy()
    pages = -(-len(data) // ALIGN_BYTES)
    ends = [round(pages * sum(weights[: k + 1]) / sum(weights)) * ALIGN_BYTES for k in range(len(weights))]
    parts = []
    for start, end in itertools.pairwise([0, *ends]):
        part = mmap.mmap(-1, end - start)
        part.write(data[start:end])
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
    fsync(path.parent)


def _table(result: dict[str, Any]) -> Table:
    size = (
        f"{result['bytes'] / 2**20:.0f} MiB in {result['tensors']} tensors, {result['folders']} folder(s), "
    )
    size += f"{result['processes']} process(es)"
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
