"""What meta.pt holds: everything that is not in a stripe, and how to put the tensors back in."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.state_tree import FlatState, Place
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError

KEY = "lightning_hetckpt"  # in the dictionary that meta.pt holds, beside the user's own keys


def pack_places(flat: FlatState) -> bytes:
    """Where each tensor belongs and how it lay in memory, for `pack_meta`."""
    return _saved(
        {
            "tensors": [[path, name] for path, name in flat.index],
            # A permuted tensor (channels_last) is stored row by row; its strides decide the speed of the next
            # step and, where something is summed, the last bit.
            "strides": {
                name: tuple(tensor.stride())
                for name, tensor in flat.tensors.items()
                if not tensor.is_contiguous() and _is_dense(tensor.shape, tensor.stride())
            },
            "devices": {name: str(t.device) for name, t in flat.tensors.items() if not t.is_cpu},
        }
    )


def pack_part(skeleton: Any) -> bytes:
    """A part of the skeleton that `pack_meta` takes as it is; made once where it stays the same."""
    return _saved({"part": skeleton})


def pack_meta(
    flat: FlatState, places: bytes | None = None, parts: Sequence[tuple[Place, bytes]] = ()
) -> bytes:
    """The bytes of meta.pt: the skeleton, and where each tensor belongs.

    `torch.load(..., weights_only=True)` reads them unless the user put own objects in.

    Args:
        places: what `pack_places` gave for `flat`, or for a state that differs in values only.
        parts: where the skeleton has None instead of a part, and what `pack_part` made of it.

    Raises:
        CheckpointError: something in the checkpoint cannot be pickled.
    """
    skeleton = copy.copy(flat.skeleton)
    # In bytes of their own: they are most of the work, and the same for every snapshot of a run.
    about: dict[str, Any] = {"places": pack_places(flat) if places is None else places}
    if parts:
        about["parts"] = [[path, part] for path, part in parts]
    if KEY in skeleton:
        about["user"] = skeleton[KEY]
    skeleton[KEY] = about
    return _saved(skeleton)


def _saved(plain: dict[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint holds an object that cannot be pickled: {error}. Look at what callbacks, "
            "`on_save_checkpoint` and `save_hyperparameters` put in."
        ) from error
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A checkpoint without its tensors, and what is known of them besides their bytes."""

    tree: dict[Any, Any]  # None stands where a tensor was
    places: dict[Place, str]  # of every tensor, and the name under which it is stored
    strides: dict[str, tuple[int, ...]]  # of those that were not row-major in memory
    devices: dict[str, str]  # of those that were not on the CPU

    def fill(self, tensors: Mapping[Place, Tensor]) -> dict[Any, Any]:
        """The tree with a tensor at every place: the same types, keys, order and empty containers. Once only.

        Raises:
            CorruptCheckpointError: a place is not in the tree.
        """
        walk = _Refill(tensors)
        tree: dict[Any, Any] = walk.fill(self.tree, ())
        if walk.filled != len(self.places):
            raise CorruptCheckpointError(
                f"meta.pt names {len(self.places)} places of tensors, {walk.filled} of them were found. "
                "Resume from another snapshot."
            )
        return tree

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """A tensor without values that lies in memory as the saved one did.

        Raises:
            CorruptCheckpointError: its strides do not fit its shape.
        """
        strides = self.strides.get(name)
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        if len(strides) != len(shape) or not _is_dense(shape, strides):
            raise CorruptCheckpointError(
                f"meta.pt and the stripes do not fit together (strides {strides} of {name} for the shape "
                f"{tuple(shape)}). Resume from another snapshot."
            )
        return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)

    def relocated(self, name: str, tensor: Tensor, map_location: Any) -> Tensor:
        """`tensor`, which was read to the CPU, where `torch.load` would have put it; None is the CPU."""
        return _relocated(
            tensor, self.devices.get(name, "cpu"), "cpu" if map_location is None else map_location
        )


def open_meta(data: bytes, weights_only: bool | None, map_location: Any = None) -> Skeleton:
    """What `pack_meta` made of a checkpoint.

    Args:
        weights_only: as in `torch.load`; None is True.
        map_location: as in `torch.load`, but None is the CPU; for the tensors that no stripe could hold.

    Raises:
        CheckpointError: it holds objects that only `weights_only=False` may load.
        CorruptCheckpointError: it is something else.
    """
    location = "cpu" if map_location is None else map_location
    try:
        tree = torch.load(io.BytesIO(data), map_location=location, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"meta.pt holds objects that are not plain data ({str(error).partition(chr(10))[0]:.200}). If you "
            "trust the checkpoint, pass weights_only=False to `trainer.fit` or to `load_checkpoint`."
        ) from error
    try:
        user = tree[KEY]
        about = torch.load(io.BytesIO(user["places"]), weights_only=weights_only is not False)
        for path, part in user.get("parts", ()):
            _put(tree, path, torch.load(io.BytesIO(part), weights_only=weights_only is not False)["part"])
        skeleton = Skeleton(
            tree,
            {tuple(path): str(name) for path, name in about["tensors"]},
            dict(about["strides"]),
            dict(about["devices"]),
        )
    except (LookupError, TypeError, ValueError, EOFError, RuntimeError) as error:
        raise _unfit(error) from error
    if "user" in user:
        tree[KEY] = user["user"]
    else:
        del tree[KEY]
    return skeleton


def unpack_meta(
    data: bytes, tensors: Mapping[str, Tensor], weights_only: bool | None, map_location: Any = None
) -> dict[Any, Any]:
    """The checkpoint as it was flattened: the same types, keys, order, empty containers and ties.

    Args:
        data: what `pack_meta` made.
        tensors: on the CPU, row by row, by the name under which each is stored.
        weights_only: as in `torch.load`; None is True.
        map_location: as in `torch.load`, but None is the CPU.

    Raises:
        CheckpointError: it holds objects that only `weights_only=False` may load.
        CorruptCheckpointError: its places and `tensors` do not fit together.
    """
    skeleton = open_meta(data, weights_only, map_location)
    try:
        ready = {
            name: skeleton.relocated(
                name,
                skeleton.empty(name, tensors[name].shape, tensors[name].dtype, "cpu").copy_(tensors[name]),
                map_location,
            )
            for name in dict.fromkeys(skeleton.places.values())
        }
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _unfit(error) from error
    return skeleton.fill({place: ready[name] for place, name in skeleton.places.items()})


def _put(skeleton: Any, path: Sequence[Hashable], part: Any) -> None:
    *way, last = path
    for key in way:
        skeleton = skeleton[key]
    if skeleton[last] is not None:
        raise ValueError(f"a part for {tuple(path)}, where something is already")
    skeleton[last] = part


def _unfit(error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"meta.pt and the stripes do not fit together ({error!r:.200}). Resume from another snapshot."
    )


class _Refill:
    """One pass over a skeleton. No closure: one that calls itself would hold every tensor until the next collection."""

    def __init__(self, tensors: Mapping[Place, Tensor]) -> None:
        self.filled = 0
        self._tensors = tensors
        self._done: dict[int, tuple[Any, Any]] = {}  # holds each old node too, so that no id comes up twice

    def fill(self, node: Any, path: Place) -> Any:
        if node is None and path in self._tensors:
            self.filled += 1
            return self._tensors[path]
        kind = type(node)
        if kind not in (dict, OrderedDict, list, tuple):
            return node
        done = self._done
        if id(node) in done:
            return done[id(node)][1]
        if kind is tuple:
            done[id(node)] = node, tuple([self.fill(value, (*path, at)) for at, value in enumerate(node)])
        else:
            done[id(node)] = node, node
            for key, value in node.items() if kind is not list else enumerate(node):
                node[key] = self.fill(value, (*path, key))
        return done[id(node)][1]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides are rows in another order of dimensions, without gap or overlap."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _relocated(tensor: Tensor, saved_on: str, map_location: Any) -> Tensor:
    """`tensor`, which was read to the CPU, where `torch.load` would have put it."""
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get(saved_on, saved_on))
    if not callable(map_location):
        return tensor.to(map_location)
    storage = map_location(tensor.untyped_storage(), saved_on)
    if storage is None:
        return tensor.to(saved_on)
    moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return moved.set_(storage, 0, tensor.shape, tensor.stride())
