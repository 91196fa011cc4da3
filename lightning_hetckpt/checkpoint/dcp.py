"""The doors of torch.distributed.checkpoint: its `save`, `async_save` and `load` through our stripes and manifests.

    dcp.save(state, storage_writer=StripedStorageWriter("/data/step=7.ckpt", dirs=["/ssd0", "/ssd1"]))
    dcp.load(state, storage_reader=StripedStorageReader("/data/step=7.ckpt"))

The stock planners decide who has what. Shards keep their offsets; what several ranks hold alike is divided over them
by rows, so that each writes its part of the bytes. The result is a checkpoint like any other of ours.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future as Outcome
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.commit import RankReport
from lightning_hetckpt.checkpoint.destination import Box, targets
from lightning_hetckpt.checkpoint.figures import Figures
from lightning_hetckpt.checkpoint.folders import run_of
from lightning_hetckpt.checkpoint.layout import META_NAME, build_folder, new_id
from lightning_hetckpt.checkpoint.ledger import Ledger, Record
from lightning_hetckpt.checkpoint.manifest import FileEntry, TensorEntry
from lightning_hetckpt.checkpoint.meta import open_meta, pack_meta
from lightning_hetckpt.checkpoint.parameter_names import by_name, is_by_name, parameter_names, saved_names
from lightning_hetckpt.checkpoint.sharded_plan import Held, RankPlan, plan_shards
from lightning_hetckpt.checkpoint.span_reader import BUFFER_BYTES, Target
from lightning_hetckpt.checkpoint.state_tree import FlatState, Place
from lightning_hetckpt.checkpoint.stripe_files import StripeFiles, write_small
from lightning_hetckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError

__all__ = ["StripedStorageReader", "StripedStorageWriter", "parameter_names"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """What one rank tells the coordinator of its part."""

    rank: int
    files: tuple[FileEntry, ...]
    objects: dict[str, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class _Orders:
    """What the coordinator tells one rank to write, and as what."""

    snapshot_id: str
    run: str
    plan: RankPlan


class StripedStorageWriter(StorageWriter):
    """Writes what `torch.distributed.checkpoint` saves as one of our checkpoints, committed by its manifest.

    Args:
        path: the checkpoint to be, where `save` names no `checkpoint_id`. What is there is replaced in one step.
        dirs: one folder on each drive that shares the bytes, the same on every rank; None is the checkpoint's own.
        checksum: keep a hash of every 8 MiB.
        direct: go past the page cache; "auto" where a drive allows it, False never.

    Attributes:
        beside: what the checkpoint holds at its top besides the saved state, as it is; the coordinator's counts.

    Raises:
        ConfigurationError: planners with plan caching and `use_collectives=False`, which keep back what ranks hold.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        dirs: Sequence[str | Path] | None = None,
        checksum: bool = True,
        direct: bool | Literal["auto"] = "auto",
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.beside: Mapping[str, Any] = {}
        self._dirs = [Path(one).absolute() for one in dirs] if dirs is not None else None
        self._files = StripeFiles(checksum, direct is not False)
        self._ledger = Ledger(reuse=False)
        self._save_id = ""
        self._rank = 0
        self._record: Record | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._save_id = new_id()
        self._record = None

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "StripedStorageWriter commits one checkpoint for all ranks, which needs use_collectives=True."
            )
        self._rank = int(kwargs.get("rank", 0))

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:
            raise ConfigurationError(
                "StripedStorageWriter has to see the plan of every save: use a planner with enable_plan_caching=False."
            )
        # The planner is about to leave each item to one rank; who else holds it is only known here.
        return dataclasses.replace(plan, storage_data=list(plan.items))

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        path = _absolute(self.path)
        held = [_held(item, rank) for rank, plan in enumerate(plans) for item in plan.storage_data]
        layout = plan_shards([one for one in held if one is not None], len(plans), len(self._dirs or [None]))
        snapshot_id, run = new_id(), run_of(path.parent)
        build = build_folder(path, snapshot_id)
        folders = self._files.folders(self._dirs, build, run, snapshot_id)
        self._record = Record(
            path,
            build,
            snapshot_id,
            run,
            len(plans),
            _whole_number(self.beside.get("global_step")),
            _whole_number(self.beside.get("epoch")),
            layout.tensors,
            {},
            {
                stripe.file: folders[stripe.drive % len(folders)]
                for one in layout.ranks
                for stripe in one.stripes
            },
            lambda name, data: _done(write_small(build / name, data)),
        )
        return [
            dataclasses.replace(plan, storage_data=_Orders(snapshot_id, run, orders))
            for plan, orders in zip(plans, layout.ranks, strict=True)
        ]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        orders: _Orders = plan.storage_data
        path = _absolute(self.path)
        build = build_folder(path, orders.snapshot_id)
        folders = self._files.folders(self._dirs, build, orders.run, orders.snapshot_id)

        def data_of(item: WriteItem) -> Tensor:
            found = planner.resolve_data(item)
            if not isinstance(found, Tensor):
                raise CheckpointError(
                    f"{item.index.fqn}: the planner gave a {type(found).__name__} for a tensor."
                )
            return found.detach()

        files = self._files.write(orders.plan, folders, build, path, orders.snapshot_id, data_of)
        objects = {
            item.index.fqn: _bytes_of(planner, item)
            for item in plan.items
            if item.type is WriteItemType.BYTE_IO
        }
        nbytes = sum(entry.nbytes for entry in files)
        told = WriteResult(
            MetadataIndex(f"rank {self._rank}"), nbytes, _Written(self._rank, tuple(files), objects)
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([told])
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        record = self._record
        assert record is not None
        written: list[_Written] = sorted((one.storage_data for [one] in results), key=lambda one: one.rank)
        # What this very job has just pickled, not what somebody may have put on a drive.
        objects = {
            name: torch.load(io.BytesIO(data), weights_only=False)
            for one in written
            for name, data in one.objects.items()
        }
        paths = {name: _path(metadata, name) for name in metadata.state_dict_metadata}
        index: list[tuple[Place, str]] = [(paths[name], name) for name in record.tensors]
        tree = _tree((path, objects.get(name)) for name, path in paths.items())
        tree = {**self.beside, **tree}
        meta = write_small(record.build / META_NAME, pack_meta(FlatState(tree, {}, {}, index, {})))
        reports = [
            RankReport(one.rank, (*one.files, meta) if one.rank == 0 else one.files, "") for one in written
        ]
        self._ledger.publish(record, reports, Figures(None))
        self._ledger.clear_away()

    @override
    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=self._save_id)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)


class StripedStorageReader(StorageReader):
    """Reads any checkpoint of ours for `torch.distributed.checkpoint.load`, straight into the tensors that are there.

    Each rank reads what its shards need, whole chunks of 8 MiB where there are hashes to check.

    Args:
        path: the checkpoint, where `load` names no `checkpoint_id`.
        weights_only: as in `torch.load`, for what is no tensor; None is True.
        by_name: show the optimizer states of a Trainer by the names of their parameters, as
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has them. True takes the names that
            HeteroDDP and SnapshotCallback saved; else give what `parameter_names` says of each optimizer.
        buffer_bytes: memory that a load may use besides what it fills.
        direct: go past the page cache where the drives allow it.

    Attributes:
        bytes_read: from drives by this rank in the last load.
        tree: all of the checkpoint that was opened last, with meta tensors for its tensors.

    Raises:
        CheckpointNotFoundError: no committed checkpoint lies there.
        CorruptCheckpointError: names the file whose bytes are not those that were written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        by_name: bool | Sequence[Sequence[str]] = False,
        buffer_bytes: int = BUFFER_BYTES,
        direct: bool = True,
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.bytes_read = 0
        self.tree: dict[Any, Any] = {}
        self._by_name = by_name
        self._weights_only = weights_only
        self._buffer_bytes = buffer_bytes
        self._direct = direct
        self._reader: restore.SoloReader | None = None
        self._stored: dict[str, TensorEntry] = {}
        self._objects: dict[str, Any] = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._reader = None

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.path is None:
            raise CheckpointNotFoundError(
                "no path: give one to StripedStorageReader or a checkpoint_id to load"
            )
        self._reader = reader = restore.SoloReader(self.path, self._buffer_bytes, self._direct)
        skeleton = open_meta(reader.small(META_NAME), self._weights_only)
        entries = reader.manifest.tensors
        stand_ins = {place: _stand_in(entries[name]) for place, name in skeleton.places.items()}
        names = {id(stand_ins[place]): name for place, name in skeleton.places.items()}
        self.tree = self._named(skeleton.fill(stand_ins))
        flat, mappings = flatten_state_dict(self.tree)
        self._stored = {fqn: entries[names[id(leaf)]] for fqn, leaf in flat.items() if id(leaf) in names}
        self._objects = {fqn: leaf for fqn, leaf in flat.items() if fqn not in self._stored}
        known: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in self._objects}
        for fqn, entry in self._stored.items():
            shape, dtype = restore.logical(entry)
            size = torch.Size(shape)
            # One chunk of everything: which piece lies in which file is our own business.
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            known[fqn] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
        return Metadata(known, planner_data=mappings, storage_meta=StorageMeta(checkpoint_id=self.path))

    def _named(self, tree: dict[Any, Any]) -> dict[Any, Any]:
        """`tree`, with the optimizer states by name if that is wanted."""
        if self._by_name is False:
            return tree
        states = []
        for number, state in enumerate(tree.get("optimizer_states", ())):
            if is_by_name(state):
                states.append(state)
                continue
            names = saved_names(tree, number) if self._by_name is True else self._by_name[number]
            if names is None:
                raise CheckpointError(
                    f"{self.path}: the names of the optimizers' parameters were not saved. Give them: "
                    "StripedStorageReader(by_name=[parameter_names(model, optimizer)]) with both as they were."
                )
            states.append(by_name(state, names))
        return {**tree, "optimizer_states": states}

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is left to do: `read_metadata` has looked at every file."""

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reader = self._reader
        assert reader is not None
        wanted: dict[str, list[Target]] = defaultdict(list)
        filled = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(self._objects[name], buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            into = planner.resolve_tensor(item).detach()
            entry = self._stored[name]
            pair = ((0,), (2,)) if entry.complex is not None else ((), ())
            part = Box((*item.storage_offsets, *pair[0]), (*item.lengths, *pair[1]))
            for file, target in targets(entry, into, reader.manifest.files, part):
                wanted[file].append(target)
            filled.append((item, into))
        before = reader.bytes_read
        reader.fill(wanted)
        self.bytes_read = reader.bytes_read - before
        for item, into in filled:
            planner.commit_tensor(item, into)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)


def _absolute(path: Path | None) -> Path:
    if path is None:
        raise ConfigurationError("no path: give one to StripedStorageWriter or a checkpoint_id to save.")
    return path.parent.resolve() / path.name


def _held(item: WriteItem, rank: int) -> Held | None:
    """A tensor item of one rank's plan; None for any other item, and for a shard of nothing."""
    data = item.tensor_data
    if data is None:
        return None
    if data.size.numel() and not data.chunk.sizes.numel():
        return None  # more ranks than rows
    return Held(
        rank,
        item,
        item.index.fqn,
        data.properties.dtype,
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
    )


def _bytes_of(planner: SavePlanner, item: WriteItem) -> bytes:
    found = planner.resolve_data(item)
    if not isinstance(found, io.BytesIO):
        raise CheckpointError(f"{item.index.fqn}: the planner gave a {type(found).__name__} for an object.")
    return found.getvalue()


def _path(metadata: Metadata, name: str) -> Place:
    """Where in the nested dictionary the planner found `name`."""
    paths: Mapping[str, Any] = metadata.planner_data or {}
    return tuple(paths.get(name, (name,)))


def _tree(leaves: Iterable[tuple[Place, Any]]) -> Any:
    """Nested dictionaries, and lists where the paths have numbers, with these leaves."""
    children: dict[Any, list[tuple[Place, Any]]] = defaultdict(list)
    for path, leaf in leaves:
        if not path:
            return leaf
        children[path[0]].append((path[1:], leaf))
    made = {key: _tree(inner) for key, inner in children.items()}
    is_list = made and all(isinstance(key, int) for key in made)
    return [made[key] for key in sorted(made)] if is_list else made


def _stand_in(entry: TensorEntry) -> Tensor:
    shape, dtype = restore.logical(entry)
    return torch.empty(shape, dtype=dtype, device="meta")


def _whole_number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _done(entry: FileEntry) -> Outcome[FileEntry]:
    outcome: Outcome[FileEntry] = Outcome()
    outcome.set_result(entry)
    return outcome
