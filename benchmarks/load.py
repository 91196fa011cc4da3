"""How fast a checkpoint comes back, what each rank reads for it, and the memory that takes besides the tensors.

    python -m benchmarks.load --dirs /mnt/a /mnt/b --mib 256 --repeats 5 --processes 1 2 4

Every contestant fills the same tensors, which are there already, on every process at once. Before each turn the
page cache forgets all files, and time runs until the last process has everything. `raw` reads the bytes of our
stripes once, between all processes, with O_DIRECT and two threads per folder: the most that such a reader could
reach. Bytes read are what the kernel fetched from drives for a process; extra memory is how far its resident
memory rose above where it was. Mapped files count there, too, although the kernel may take their pages back.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.machine import describe, write_json
from benchmarks.write import BLOCK_BYTES, make_checkpoint, tensors_of
from lightning_hetckpt.channel import present_channel
from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.dcp import StripedStorageReader
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.together import SharedReader, group_broadcast

Load = Callable[[], None]  # fills the tensors of this process


def main() -> None:
    """Write the files once, let all read them in turns for each number of processes, print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dirs", type=Path, nargs="+", help="one folder on each drive; default: a temporary one"
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count; one more warms up")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="that load together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(
        prefix="hetckpt-", dir=options.dirs[0] if options.dirs else Path.cwd()
    ) as at:
        home = Path(at).absolute()
        write_files(make_checkpoint(options.mib * 2**20), home, options.dirs)
        results = {}
        for processes in options.processes:
            told = home / f"{processes}.pt"
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            mp.spawn(run, (options, home, store.port, processes, told), processes)
            results[str(processes)] = torch.load(told)
    result = {
        **describe("benchmarks.load"),
        "bytes": options.mib * 2**20,
        "folders": len(options.dirs or [home]),
        "processes": results,
    }
    write_json(options.json, result)
    for processes, rows in results.items():
        Console().print(_table(result, processes, rows))


def write_files(checkpoint: dict[str, Any], home: Path, dirs: list[Path] | None) -> None:
    """The same checkpoint in everybody's format."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process on purpose
    with Snapshotter(dirs or None) as engine:
        engine.begin(checkpoint, home / "ours.ckpt", alone=True).wait()
    torch.save(checkpoint, home / "torch.pt")
    dcp.save({"t": named(checkpoint)}, checkpoint_id=home / "dcp", no_dist=True)
    save_file(named(checkpoint), home / "all.safetensors")
    os.sync()


def named(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Its tensors under flat names."""
    return {str(number): tensor for number, tensor in enumerate(tensors_of(checkpoint))}


def run(rank: int, options: argparse.Namespace, home: Path, port: int, processes: int, told: Path) -> None:
    """One process of the contest; the first keeps the figures of all."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        rows = compete(
            contestants(make_checkpoint(options.mib * 2**20), home, processes), home, options.repeats
        )
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(rows, told)


def contestants(checkpoint: dict[str, Any], home: Path, processes: int) -> dict[str, Load]:
    """Everybody who can fill the tensors of `checkpoint`."""
    into = named(checkpoint)

    def place(path: Any, shape: Any, dtype: Any) -> Tensor | None:
        node: Any = checkpoint
        for key in path:
            node = node[key]
        found: Tensor = node
        return found

    def alone() -> None:
        restore.load(home / "ours.ckpt", destination=place)

    def together() -> None:
        reader = SharedReader(home / "ours.ckpt", present_channel(), group_broadcast())
        restore.load(home / "ours.ckpt", destination=place, reader=reader)

    def through_dcp() -> None:
        state = {key: checkpoint[key] for key in ("state_dict", "optimizer_states")}
        dcp.load(state, storage_reader=StripedStorageReader(home / "ours.ckpt"))

    def torch_load(mapped: bool) -> Load:
        def load() -> None:
            found = torch.load(home / "torch.pt", mmap=mapped)
            for one, other in zip(into.values(), tensors_of(found), strict=True):
                one.copy_(other)

        return load

    def stock_dcp() -> None:
        dcp.load({"t": into}, checkpoint_id=home / "dcp")

    def safetensors() -> None:
        found = load_file(home / "all.safetensors")
        for name, tensor in into.items():
            tensor.copy_(found[name])

    def raw() -> None:
        read_raw(sorted(home.glob("ours.ckpt/stripe-*")), dist.get_rank(), processes)

    ours = {"ours, each rank alone": alone, "ours through dcp.load": through_dcp}
    if processes > 1:
        ours["ours, together"] = together
    return {
        **ours,
        "torch.load": torch_load(mapped=False),
        "torch.load, mmap": torch_load(mapped=True),
        "dcp.load": stock_dcp,
        "safetensors": safetensors,
        "raw O_DIRECT": raw,
    }


def compete(loads: dict[str, Load], home: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """Figures of each contestant, the worst rank's where it is not said otherwise."""
    rounds: dict[str, list[list[tuple[float, int, int]]]] = {name: [] for name in loads}
    names, order = list(loads), random.Random(1)  # the same turns in every process
    for turn in range(repeats + 1):
        for name in order.sample(names, len(names)):
            if dist.get_rank() == 0:
                forget(home)
            before, rss = fetched(), resident(peak=False)
            dist.barrier()
            began_s = time.perf_counter()
            loads[name]()
            seconds = time.perf_counter() - began_s
            mine = seconds, fetched() - before, resident(peak=True) - rss
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, mine)
            if turn:
                rounds[name].append(every)
    return {
        name: {
            "median_s": median(max(one[0] for one in every) for every in told),
            "read_bytes_by_rank": [
                int(median(every[rank][1] for every in told)) for rank in range(len(told[0]))
            ],
            "extra_bytes": int(median(max(one[2] for one in every) for every in told)),
        }
        for name, told in rounds.items()
    }


def forget(home: Path) -> None:
    """Let the page cache forget every file, also those behind links."""
    for path in home.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fetched() -> int:
    """Bytes that drives have read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def resident(peak: bool) -> int:
    """Resident memory now, from where the peak is counted anew; or its peak since."""
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    word = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(word))


def read_raw(files: list[Path], rank: int, processes: int) -> None:
    """Read this rank's share of the files past the page cache, two threads per file."""
    work = []
    for path in files:
        nbytes = path.stat().st_size
        for half in range(2):
            at = range(half * BLOCK_BYTES, nbytes, 2 * BLOCK_BYTES)
            work.append((path, at[rank::processes]))
    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(lambda one: _read_blocks(*one), work))


def _read_blocks(path: Path, offsets: range) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        for offset in offsets:
            os.preadv(fd, [buffer], offset)
    finally:
        os.close(fd)


def _table(result: dict[str, Any], processes: str, rows: dict[str, dict[str, Any]]) -> Table:
    raw_s = rows["raw O_DIRECT"]["median_s"]
    table = Table(
        title=f"load of {result['bytes'] / 2**20:.0f} MiB from {result['folders']} folder(s) by {processes} process(es)",
        caption=f"{result['cpu']}, {result['cores']} cores, {result['date']}",
    )
    for heading in ("", "median", "of raw", "MiB read by each rank", "extra MiB"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["median_s"]):
        table.add_row(
            name,
            f"{row['median_s']:.3f} s",
            f"{raw_s / row['median_s']:.2f}",
            " ".join(f"{one / 2**20:.0f}" for one in row["read_bytes_by_rank"]),
            f"{row['extra_bytes'] / 2**20:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
