"""Lightning's nested checkpoint, taken apart into named tensors and a skeleton of everything else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.manifest import COMPLEX_PARTS
from lightning_hetckpt.checkpoint.shard_plan import TensorSpec
from lightning_hetckpt.errors import CheckpointError

DTYPE_OF: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_CODE_OF = {dtype: code for code, dtype in DTYPE_OF.items()}
_COMPLEX_NAME = {getattr(torch, name): name for name in COMPLEX_PARTS}

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_LEAVES = frozenset({int, float, str, bool, type(None)})  # the most frequent ones, for speed

Place = tuple[Hashable, ...]  # dictionary keys and list positions, from the root


@dataclass(frozen=True, slots=True)
class FlatState:
    """A checkpoint taken apart: every tensor that a stripe can hold by name, and the rest in place."""

    skeleton: dict[Any, Any]  # the tree, with None where a tensor was
    tensors: dict[str, Tensor]  # the live tensors, each memory once
    aliases: dict[str, str]  # name of a further place -> name under which the same memory is stored
    index: list[tuple[Place, str]]  # every place that held a tensor, and the name under which it is stored
    memory: dict[Hashable, str]  # `identity` of each tensor that has memory -> its name


def flatten(tree: Mapping[Any, Any]) -> FlatState:
    """Take every plain tensor out of `tree`; neither the tree nor a tensor is copied or changed.

    Walks dict, OrderedDict (with its attributes, such as a state dict's `_metadata`), list and tuple. Any
    other object stays in the skeleton as it is, and so does a tensor that a stripe could not bring back
    exactly: a subclass, sparse, quantized, requiring grad. A container that stands in two places stays one.
    Names are dotted paths, as `torch.distributed.checkpoint` makes them.
    """
    found = strip(tree if type(tree) in _CONTAINERS else dict(tree), fits_a_stripe)
    return name_tensors(found.tree, found.places, found.tensors)


def name_tensors(skeleton: dict[Any, Any], places: list[Place], found: list[Tensor]) -> FlatState:
    """Give each tensor its name, and those that are the same memory one between them."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    index: list[tuple[Place, str]] = []
    taken = {"__metadata__"}  # safetensors keeps this one for itself
    memory: dict[Hashable, str] = {}
    for path, tensor in zip(places, found, strict=True):
        name = _free_name(path, taken)
        taken.add(name)
        same = identity(tensor)
        home = name if same is None else memory.setdefault(same, name)
        if home == name:
            tensors[name] = tensor
        else:
            aliases[name] = home
        index.append((path, home))
    return FlatState(skeleton, tensors, aliases, index, memory)


@dataclass(frozen=True, slots=True)
class Stripped:
    """A tree without its tensors, and these."""

    tree: Any  # a copy of the containers, with None for each tensor
    places: list[Place]
    tensors: list[Tensor]
    containers: Collection[int]  # ids of those that were met


def strip(tree: Any, fits: Callable[[Tensor], bool] | None = None, at: Place = ()) -> Stripped:
    """Take the tensors out of a copy of the containers of `tree`.

    Args:
        fits: which tensors are taken out; None is all but subclasses.
        at: the place of `tree` itself in something larger.
    """
    walk = _Walk(fits)
    return Stripped(walk.copy(tree, at), walk.places, walk.tensors, walk.copies)


class _Walk:
    """One pass over a tree. No closure: one that calls itself would hold every tensor until the next collection."""

    def __init__(self, fits: Callable[[Tensor], bool] | None) -> None:
        self.places: list[Place] = []
        self.tensors: list[Tensor] = []
        self._fits = fits
        self.copies: dict[int, Any] = {}

    def copy(self, node: Any, path: Place) -> Any:
        kind = type(node)
        if kind is Tensor and (self._fits is None or self._fits(node)):
            self.places.append(path)
            self.tensors.append(node)
            return None
        if kind not in _CONTAINERS:
            return node
        copies = self.copies
        if id(node) in copies:
            return copies[id(node)]
        if kind is tuple:
            copies[id(node)] = tuple([self.copy(value, (*path, at)) for at, value in enumerate(node)])
        elif kind is list:
            new_list: list[Any] = []
            copies[id(node)] = new_list
            for at, value in enumerate(node):
                new_list.append(value if type(value) in _LEAVES else self.copy(value, (*path, at)))
        else:
            copies[id(node)] = new_dict = kind()
            if kind is OrderedDict:
                vars(new_dict).update(vars(node))
            for key, value in node.items():
                new_dict[key] = value if type(value) in _LEAVES else self.copy(value, (*path, key))
        return copies[id(node)]


def identity(tensor: Tensor) -> Hashable | None:
    """The memory that `tensor` shows, and how; equal for two tensors that are the same bytes. None if it has none."""
    if tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def spec(name: str, tensor: Tensor) -> TensorSpec:
    """What the plan needs to know of `tensor`; complex numbers are stored as pairs of real ones."""
    return spec_of(name, tensor.dtype, tuple(tensor.shape))


def spec_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    """The same without the tensor.

    Raises:
        CheckpointError: no stripe can hold this dtype.
    """
    parts = _COMPLEX_NAME.get(dtype)
    if parts is not None:
        return TensorSpec(name, COMPLEX_PARTS[parts], (*shape, 2), parts)
    if dtype not in _CODE_OF:
        raise CheckpointError(f"{name}: a stripe cannot hold {dtype}; convert the tensor before saving it.")
    return TensorSpec(name, _CODE_OF[dtype], shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a vector of uint8 on its device; nothing is copied."""
    # Not `view`: a tensor of one element is contiguous whatever its strides are, and `view` minds them.
    item_bytes = tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(
        tensor.untyped_storage(), tensor.storage_offset() * item_bytes, (tensor.numel() * item_bytes,), (1,)
    )


def fits_a_stripe(tensor: Tensor) -> bool:
    """Whether a stripe can bring `tensor` back exactly."""
    return (
        tensor.layout is torch.strided
        and (tensor.dtype in _CODE_OF or tensor.dtype in _COMPLEX_NAME)
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_meta)
        # torch.save keeps a lazy conjugate or negation and attributes of the tensor; a stripe has no room for them.
        and not (tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _free_name(path: Place, taken: set[str]) -> str:
    name = plain = ".".join(map(str, path)).encode("utf-8", "backslashreplace").decode()
    number = 1
    while name in taken:
        number += 1
        name = f"{plain}#{number}"
    return name
