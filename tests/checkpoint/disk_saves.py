"""Small real checkpoints for tests of the engine, and a process that makes one after the other until it dies."""

from __future__ import annotations

import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_hetckpt.checkpoint import publish
from lightning_hetckpt.checkpoint.folders import run_of, write_owner
from lightning_hetckpt.checkpoint.layout import (
    CHUNK_BYTES,
    META_NAME,
    PARTIAL_NAME,
    build_folder,
    drive_folder,
    new_id,
    padded,
    stripe_name,
)
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest
from lightning_hetckpt.checkpoint.shard_plan import StripePlan
from lightning_hetckpt.checkpoint.spares import Spares
from lightning_hetckpt.checkpoint.stripe_header import build_header
from lightning_hetckpt.checkpoint.stripe_writer import StripeFile, StripeWriter


def manifest(files: Sequence[FileEntry], snapshot_id: str, commit: int = 1, run: str = "0" * 16) -> Manifest:
    """A manifest of files that hold no tensors."""
    return Manifest(
        snapshot_id=snapshot_id,
        run=run,
        parent=None,
        commit=commit,
        kind="full",
        global_step=10 * commit,
        epoch=0,
        world_size=1,
        created_unix_s=time.time(),
        files={entry.name: entry for entry in files},
        tensors={},
        aliases={},
    )


def open_build(path: Path, snapshot_id: str) -> Path:
    """An empty build folder for `path`."""
    folder = build_folder(path, snapshot_id)
    folder.mkdir(parents=True)
    return folder


def open_drive(drive: Path, run: str, snapshot_id: str, path: Path) -> Path:
    """A drive's folder for one snapshot, marked as a save marks it."""
    folder = drive_folder(drive, run, snapshot_id)
    folder.mkdir(parents=True)
    (folder / PARTIAL_NAME).touch()
    write_owner(folder, snapshot_id, path)
    return folder


def write_files(contents: Mapping[Path, bytes]) -> list[FileEntry]:
    """Write whole files through a `StripeWriter`."""
    writer = StripeWriter("test")
    try:
        futures = []
        for path, data in contents.items():
            stripe = writer.open(path, len(data), direct=True, checksum=True)
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                put(writer, stripe, start, chunk)
            futures.append(writer.close(stripe))
        return [future.result(timeout=60) for future in futures]
    finally:
        writer.shutdown()


def put(writer: StripeWriter, stripe: StripeFile, offset: int, data: bytes) -> threading.Event:
    """Put `data` out of a buffer of its own that is full of ones; the event tells its release."""
    view = memoryview(mmap.mmap(-1, padded(max(len(data), 1))))
    view[:] = b"\xff" * len(view)
    view[: len(data)] = data
    released = threading.Event()
    writer.put(stripe, offset, view, len(data), None, released.set)
    return released


def stripe_bytes(snapshot_id: str, nbytes: int) -> bytes:
    """A stripe of that snapshot, without tensors but with random data, at least as long as its header."""
    header = build_header(StripePlan(stripe_name(0, 0), 0, 0, (), 0), {}, snapshot_id)
    return header + os.urandom(max(0, nbytes - len(header)))


def build(path: Path, commit: int = 1, drives: Sequence[Path] = (), nbytes: int = 5000) -> Path:
    """A sealed build folder for `path`, with its stripes on `drives`, or in it where there are none."""
    snapshot_id, run = new_id(), run_of(path.parent)
    folder = open_build(path, snapshot_id)
    contents = {folder / META_NAME: os.urandom(100)}
    links = {}
    for number, drive in enumerate(drives):
        stripe = open_drive(drive, run, snapshot_id, path) / stripe_name(0, number)
        contents[stripe] = stripe_bytes(snapshot_id, nbytes)
        links[folder / stripe.name] = stripe
    if not drives:
        contents[folder / stripe_name(0, 0)] = stripe_bytes(snapshot_id, nbytes)
    entries = write_files(contents)
    for link, stripe in links.items():
        link.symlink_to(stripe)
    publish.write_manifest(folder, manifest(entries, snapshot_id, commit, run))
    return folder


def save(
    path: Path,
    commit: int = 1,
    drives: Sequence[Path] = (),
    nbytes: int = 5000,
    spares: Spares | None = None,
) -> Path:
    """A published checkpoint; `spares` gets the stripes of the one that lay there before."""
    displaced = publish.put_in_place(build(path, commit, drives, nbytes), path)
    if displaced is not None:
        publish.remove_tree(displaced, None, spares)
    return path


def main(folder: Path, how: str) -> None:
    """Save over `folder/last.ckpt` for ever and print each commit once it is durable."""
    if how == "two steps":
        publish._exchange = lambda one, other: False
    drives = [folder / "drive0", folder / "drive1"]
    snapshots = folder / "snapshots"
    publish.sweep(snapshots, drives, run_of(snapshots))
    commit = max((info.commit for info in publish.scan(snapshots)), default=0)
    spares = Spares()
    while True:
        commit += 1
        save(snapshots / "last.ckpt", commit, drives, random.randrange(1, 100_000), spares)
        print(commit, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
