"""Rivals of `benchmarks.write` that are no dependency of ours: they take part where they can be imported.

    apt-get install libaio-dev g++
    python -m venv .peers
    .peers/bin/pip install '.[peers]'
    .peers/bin/python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()'
    .peers/bin/python -m benchmarks.write

The fourth line builds DeepSpeed's op, in minutes, into ~/.cache/torch_extensions; the first save would do it, too. A
build that was killed leaves a file `lock` there, for which every later one waits for ever: delete the folder then.

torchsnapshot makes nothing durable itself, so its files are fsynced afterwards. FastFileWriter is what DeepSpeed
released of FastPersist. It asks for a torch whose serializer is patched; here it gets what that one would give it,
first the pickled skeleton and then every storage, and the buffer, block and queue sizes that DeepSpeed defaults to.
With several processes both share the bytes out over them, and all write below the first folder.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Save = Callable[[Path], None]  # makes the checkpoint durable below a folder

DEEPSPEED_BUFFER_BYTES = 64 * 2**20
DEEPSPEED_BLOCK_BYTES = 2**20
DEEPSPEED_QUEUE_DEPTH = 8


class NotHereError(Exception):
    """A rival that cannot take part, and why."""


def peers(
    checkpoint: Mapping[str, Any], tensors: Iterable[torch.Tensor], rank: int, processes: int
) -> tuple[dict[str, Save], dict[str, str]]:
    """The saves of all rivals that are here, and for each of the others the reason why it is not."""
    makers: dict[str, Callable[[], Save]] = {
        "torchsnapshot + fsync": lambda: _torchsnapshot(checkpoint, rank, processes),
        "DeepSpeed FastFileWriter": lambda: _fast_file_writer(checkpoint, list(tensors), rank, processes),
    }
    here: dict[str, Save] = {}
    skipped: dict[str, str] = {}
    for name, make in makers.items():
        try:
            here[name] = make()
        except NotHereError as reason:
            skipped[name] = str(reason)
    return here, skipped


def _torchsnapshot(checkpoint: Mapping[str, Any], rank: int, processes: int) -> Save:
    torchsnapshot = _module("torchsnapshot")
    app_state = {"checkpoint": torchsnapshot.StateDict(**checkpoint)}

    def save(folder: Path) -> None:
        torchsnapshot.Snapshot.take(
            str(folder / "torchsnapshot"), app_state, replicated=["**"] if processes > 1 else None
        )
        if rank == 0:  # `take` returns when every rank has written
            fsync_tree(folder / "torchsnapshot")

    return save


def _fast_file_writer(
    checkpoint: Mapping[str, Any], tensors: list[torch.Tensor], rank: int, processes: int
) -> Save:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    io, builder = _module("deepspeed.io.fast_file_writer"), _module("deepspeed.ops.op_builder")
    io.UtilsBuilder = _ByteViews
    try:
        aio = builder.AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # a missing compiler, header or library, each in its own words
        raise NotHereError(
            f"its async_io op does not build: {_first_line(error)} (libaio-dev, g++ and ninja are needed)"
        ) from error
    handle = aio.aio_handle(DEEPSPEED_BLOCK_BYTES, DEEPSPEED_QUEUE_DEPTH, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(DEEPSPEED_BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
    skeleton = pickle.dumps(_without_tensors(checkpoint))
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]

    def save(folder: Path) -> None:
        config = io.FastFileWriterConfig(
            handle, buffer, num_parallel_writers=processes, writer_rank=rank, global_rank=rank
        )
        writer = io.FastFileWriter(str(folder / f"deepspeed.pt-{rank}.{processes}"), config)
        writer.write(skeleton)
        writer.save_torch_storage_object_list(storages, save_size=True)
        writer.close()  # fsyncs
        fsync(folder)

    return save


class _ByteViews:
    """What FastFileWriter wants of DeepSpeed's `utils` op, which is not built for CPUs: tensors as bytes, uncopied."""

    def load(self) -> _ByteViews:
        """It needs no building."""
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The memory of each."""
        return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # an old package may break on a new torch in any way
        raise NotHereError(f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _without_tensors(node: Any) -> Any:
    """The containers of a checkpoint with each tensor's shape in its place."""
    if isinstance(node, torch.Tensor):
        return tuple(node.shape)
    if isinstance(node, Mapping):
        return {key: _without_tensors(value) for key, value in node.items()}
    return [_without_tensors(value) for value in node] if isinstance(node, list) else node


def fsync(path: Path) -> None:
    """Make a file or the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder below `folder` durable, and its own name."""
    for place, _, files in os.walk(folder):
        for name in files:
            fsync(Path(place) / name)
        fsync(Path(place))
    fsync(folder.parent)
