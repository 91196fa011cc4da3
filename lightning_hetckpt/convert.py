"""Out of our folders and into them: files that stock Lightning reads and writes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_hetckpt import host
from lightning_hetckpt.checkpoint.export import new_file, write_ckpt, write_safetensors
from lightning_hetckpt.checkpoint.restore import SoloReader
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.verify import is_checkpoint
from lightning_hetckpt.errors import ConfigurationError

M = TypeVar("M", LightningModule, LightningDataModule)


def export_checkpoint(path: str | Path, out: str | Path, weights_only: bool | None = None) -> None:
    """Make one file of a checkpoint folder: `.safetensors` holds the weights, any other name is a stock checkpoint.

    The stock file is what Lightning itself would have saved: `load_from_checkpoint`, `ckpt_path=` and
    `torch.load(weights_only=True)` read it. The position in HeteroDDP's loaders stays behind, since a stock Trainer
    could not take it; it goes on at the same batch as with its own checkpoints.

    Args:
        weights_only: as in `torch.load`; False where the checkpoint is trusted and holds objects.

    Raises:
        CheckpointNotFoundError: `path` is no checkpoint of ours.
        CorruptCheckpointError: names the file that is damaged; nothing appears at `out`.
    """
    reader = SoloReader(Path(path))
    with new_file(Path(out)) as file:
        if Path(out).suffix == ".safetensors":
            write_safetensors(reader, file)
        else:
            write_ckpt(reader, file, weights_only, host.forget_our_loaders)


def import_checkpoint(
    file: str | Path,
    folder: str | Path,
    dirs: Sequence[str | Path] | None = None,
    weights_only: bool | None = None,
) -> None:
    """Make a checkpoint folder of a file that stock Lightning, or `torch.save`, has written.

    The file is mapped, not read into memory.

    Args:
        dirs: one folder on each drive that shares the bytes; None is the folder's own drive.
        weights_only: as in `torch.load`; False where the file is trusted and holds objects.
    """
    tree = torch.load(file, map_location="cpu", weights_only=weights_only is not False, mmap=True)
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{file}: holds a {type(tree).__name__}, expected a dictionary.")
    drives = None if dirs is None else [Path(one) for one in dirs]
    with Snapshotter(drives) as engine:
        engine.begin(tree, Path(folder), alone=True).wait()


def open_checkpoint(path: str | Path, optimizers: bool = False, weights_only: bool | None = None) -> BinaryIO:
    """A checkpoint folder as an open file, for whatever reads files: `Model.load_from_checkpoint(open_checkpoint(path))`.

    The file lies in the folder for temporary files (TMPDIR), without a name, until it is closed.

    Args:
        optimizers: also what only a resumed fit needs.
    """

    def edit(tree: dict[Any, Any]) -> None:
        host.forget_our_loaders(tree)
        if not optimizers:
            tree.pop("optimizer_states", None)

    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        write_ckpt(SoloReader(Path(path)), file, weights_only, edit)  # type: ignore[arg-type]
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[return-value]


def load_from_checkpoint(model: type[M], path: str | Path, **options: Any) -> M:
    """`model.load_from_checkpoint(path)` for a folder of ours as for any file of stock Lightning.

    Optimizer state is not read, unless the model has an `on_load_checkpoint` that may look at it.

    Args:
        **options: as `load_from_checkpoint` takes them.
    """
    looks = getattr(model, "on_load_checkpoint", None) is not getattr(
        LightningModule, "on_load_checkpoint", None
    )
    if looks or not is_checkpoint(Path(path)):
        return model.load_from_checkpoint(path, **options)
    with host.without_optimizers():
        return model.load_from_checkpoint(path, **options)
