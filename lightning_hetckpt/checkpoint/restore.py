"""Reads a checkpoint of ours back into the dictionary that was saved, whatever world size it came from."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.destination import targets
from lightning_hetckpt.checkpoint.direct_reads import Memory
from lightning_hetckpt.checkpoint.layout import META_NAME, RANKS_NAME
from lightning_hetckpt.checkpoint.manifest import Manifest, TensorEntry
from lightning_hetckpt.checkpoint.meta import Skeleton, open_meta
from lightning_hetckpt.checkpoint.redirect import redirect
from lightning_hetckpt.checkpoint.span_reader import BUFFER_BYTES, Source, Target, read
from lightning_hetckpt.checkpoint.state_tree import DTYPE_OF, Place
from lightning_hetckpt.checkpoint.verify import check_files, read_manifest
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError

# Given a place, a shape and a dtype: the tensor to fill, a meta tensor where nothing is to be read, or None.
Destination: TypeAlias = Callable[[Place, tuple[int, ...], torch.dtype], Tensor | None]


class Reader(Protocol):
    """A committed checkpoint, open for reading by one process or by all ranks together."""

    folder: Path
    manifest: Manifest

    def small(self, name: str) -> bytes:
        """All bytes of the file `name`, checked."""
        ...

    def fill(self, wanted: Mapping[str, Sequence[Target]]) -> None:
        """Fill all targets, by the file in which they lie, and check every hash on the way."""
        ...


class SoloReader:
    """Reads for this process alone.

    Args:
        path: the checkpoint's folder, or `meta.pt` in it.
        buffer_bytes: memory that a load may use besides what it fills.
        direct: go past the page cache where the drives allow it.

    Attributes:
        bytes_read: from drives so far.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: names the file that is not what the manifest promises.
    """

    def __init__(self, path: Path, buffer_bytes: int = BUFFER_BYTES, direct: bool = True) -> None:
        self.folder = path.parent if path.name == META_NAME else path
        self.manifest = read_manifest(self.folder)
        check_files(self.folder, self.manifest)
        self.bytes_read = 0
        self._buffer_bytes = buffer_bytes
        self._direct = direct

    def small(self, name: str) -> bytes:
        """All bytes of the file `name`, checked."""
        data = bytearray(self.manifest.files[name].nbytes)
        self.fill({name: [Target(0, len(data), memory=_memory(data))]})
        return bytes(data)

    def fill(self, wanted: Mapping[str, Sequence[Target]]) -> None:
        """Fill all targets, by the file in which they lie, and check every hash on the way."""
        led = redirect(self.manifest, wanted)
        self.bytes_read += read(sources(self.folder, self.manifest, led), self._buffer_bytes, self._direct)


def load(
    path: Path,
    weights_only: bool | None = None,
    map_location: Any = None,
    *,
    destination: Destination | None = None,
    reader: Reader | None = None,
) -> dict[Any, Any]:
    """The dictionary that was saved, with every hash checked on the way.

    Args:
        path: the checkpoint's folder, or `meta.pt` in it.
        weights_only: as in `torch.load`; None tries True.
        map_location: as in `torch.load`, but None is the CPU.
        destination: tensors that exist and are filled in place; where it gives None one is made. What was filled
            before an error stays filled.
        reader: an open checkpoint, where it is not this process alone that reads.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: names the file whose bytes are not those that were written.
        CheckpointError: it holds objects that only `weights_only=False` may load.
    """
    reader = reader or SoloReader(path)
    if META_NAME not in reader.manifest.files:
        raise CorruptCheckpointError(
            f"{reader.folder}: its manifest lists no {META_NAME}; use another checkpoint."
        )
    try:
        skeleton = open_meta(reader.small(META_NAME), weights_only, map_location)
        made, given = _homes(skeleton, reader.manifest, map_location, destination)
        wanted: dict[str, list[Target]] = {}
        for name, tensor in [*made.items(), *given.values()]:
            if not tensor.is_meta:
                for file, target in targets(reader.manifest.tensors[name], tensor, reader.manifest.files):
                    wanted.setdefault(file, []).append(target)
        reader.fill(wanted)
        if not isinstance(map_location, str | torch.device):
            made = {name: skeleton.relocated(name, tensor, map_location) for name, tensor in made.items()}
        return skeleton.fill(
            {
                place: given[place][1] if place in given else made[name]
                for place, name in skeleton.places.items()
            }
        )
    except CorruptCheckpointError as error:
        if str(reader.folder) in str(error):
            raise
        raise CorruptCheckpointError(f"{reader.folder / META_NAME}: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"{reader.folder / META_NAME}: {error}") from error


def load_rank_states(path: Path, reader: Reader | None = None) -> list[bytes]:
    """What each rank kept for itself, in the order of the ranks that saved.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: the file is damaged.
    """
    reader = reader or SoloReader(path)
    if RANKS_NAME not in reader.manifest.files:
        return []
    try:
        states = json.loads(reader.small(RANKS_NAME))["rank_states"]
        return [base64.b64decode(state, validate=True) for state in states]
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{reader.folder / RANKS_NAME}: expected the states of {reader.manifest.world_size} ranks "
            f"({error!r:.80})."
        ) from error


def sources(folder: Path, manifest: Manifest, wanted: Mapping[str, Sequence[Target]]) -> list[Source]:
    """What is to be read of which file, in the order of the manifest."""
    return [
        Source(folder / name, entry, wanted[name])
        for name, entry in manifest.files.items()
        if wanted.get(name)
    ]


def logical(entry: TensorEntry) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor as it was saved; complex numbers are stored as pairs of real ones."""
    if entry.complex is not None:
        return entry.shape[:-1], getattr(torch, entry.complex)
    return entry.shape, DTYPE_OF[entry.dtype]


def _homes(
    skeleton: Skeleton, manifest: Manifest, map_location: Any, destination: Destination | None
) -> tuple[dict[str, Tensor], dict[Place, tuple[str, Tensor]]]:
    """The tensors that are made, by name, so that tied places share one; and those that were there, by place."""
    # At once on the device that is wanted, where that needs no question about each tensor.
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    made: dict[str, Tensor] = {}
    given: dict[Place, tuple[str, Tensor]] = {}
    for place, name in skeleton.places.items():
        if name not in manifest.tensors:
            raise CorruptCheckpointError(
                f"meta.pt and the stripes do not fit together (it names {name!r}, which no stripe holds). "
                "Resume from another snapshot."
            )
        shape, dtype = logical(manifest.tensors[name])
        tensor = destination(place, shape, dtype) if destination is not None else None
        if tensor is not None:
            given[place] = name, tensor
        elif name not in made:
            made[name] = skeleton.empty(name, shape, dtype, device)
    return made, given


def _memory(data: bytearray) -> Memory:
    return (
        torch.frombuffer(data, dtype=torch.uint8).numpy()
        if data
        else torch.empty(0, dtype=torch.uint8).numpy()
    )
