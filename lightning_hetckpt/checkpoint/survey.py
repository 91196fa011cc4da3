"""What a checkpoint holds and which part of it stays live, worked out anew only where more than values changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_hetckpt.checkpoint.imprint import imprint
from lightning_hetckpt.checkpoint.meta import pack_part, pack_places
from lightning_hetckpt.checkpoint.state_tree import (
    FlatState,
    Place,
    fits_a_stripe,
    identity,
    name_tensors,
    strip,
)

_dtype, _device = attrgetter("dtype"), attrgetter("device")
_shape, _requires_grad = attrgetter("shape"), attrgetter("requires_grad")

_BLOCK = 128  # tensors that are asked one question after the other while they are in the CPU's nearest cache

# A state dict and the state of an optimizer show the same memory at every step, in new tensors and dictionaries. The
# same places with tensors of the same dtype, shape and strides, tied in the same way, have the same names, plan and
# bytes in meta.pt. To see that, everything is looked at in every save, but in C: the two parts that hold nearly all
# tensors of a checkpoint are not even walked while their imprints are equal. No tensor is held between saves.


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint taken apart."""

    flat: FlatState  # without its tensors
    places: bytes  # for meta.pt
    parts: tuple[tuple[Place, bytes], ...]  # of the skeleton, as `pack_meta` takes them
    live: dict[str, Tensor]  # read until the fence
    owned: dict[str, Tensor]  # all others
    addresses: frozenset[int]  # of what is live
    devices: frozenset[torch.device]  # of what is live
    likeness: object  # the same object as in the survey before, where nothing but values differs


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a checkpoint that is mostly tensors, without these."""

    imprint: bytes
    packed: bytes  # for meta.pt
    places: list[Place]
    picks: list[int]  # for each place, which of the imprint's tensors stands there


@dataclass(frozen=True, slots=True)
class _Look:
    """All that decides on names, ties, plan and places, but for the values."""

    places: list[Place]
    ties: list[int]  # for each tensor the number of the first one at the same address
    dtypes: list[Any]
    shapes: list[Any]
    strides: list[tuple[int, ...]]
    grads: list[bool]
    addresses: list[int] = field(compare=False)
    devices: list[Any] = field(compare=False)

    @classmethod
    def at(cls, places: list[Place], tensors: Sequence[Tensor]) -> _Look | None:
        """How these tensors look; None where one of them may have no place in a stripe."""
        look = cls(places, [], [], [], [], [], [], [])
        try:
            for start in range(0, len(tensors), _BLOCK):
                if not look._add(tensors[start : start + _BLOCK]):
                    return None
        except RuntimeError:  # sparse, or without memory
            return None
        addresses = look.addresses
        first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1), strict=True))
        look.ties.extend(map(first.__getitem__, addresses))
        return look

    def _add(self, block: Sequence[Tensor]) -> bool:
        self.addresses.extend(map(Tensor.data_ptr, block))
        self.strides.extend(map(Tensor.stride, block))
        self.dtypes.extend(map(_dtype, block))
        self.shapes.extend(map(_shape, block))
        self.grads.extend(map(_requires_grad, block))
        self.devices.extend(map(_device, block))
        return not (
            any(map(Tensor.is_conj, block)) or any(map(Tensor.is_neg, block)) or any(map(vars, block))
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """A survey without its tensors."""

    look: _Look | None
    stable: frozenset[int] | None  # addresses; None is all
    flat: FlatState  # without skeleton and tensors
    packed: bytes  # its places, for meta.pt
    live: dict[str, int]  # name -> which of the tensors it is
    owned: dict[str, int]
    addresses: frozenset[int]
    devices: frozenset[torch.device]
    likeness: object

    def fits(self, look: _Look, stable: frozenset[int] | None) -> bool:
        """Whether a state that looks so differs from this one in values only."""
        if self.look != look or self.stable != stable:
            return False
        assert self.look is not None
        if self.look.addresses == look.addresses:
            return True
        # Metrics are new tensors at every step: no harm where they are copied at once, before and now.
        moved = [
            n
            for n, pair in enumerate(zip(self.look.addresses, look.addresses, strict=True))
            if len({*pair}) > 1
        ]
        names = {self.flat.index[number][1] for number in moved}
        return (
            all(self.look.devices[number] == look.devices[number] for number in moved)
            and names.issubset(self.owned)
            and stable is not None
            and stable.isdisjoint(look.addresses[number] for number in moved)
        )


class Surveyor:
    """Takes one checkpoint after the other apart."""

    def __init__(self) -> None:
        self._parts: dict[Place, _Part] = {}
        self._known: _Known | None = None

    def survey(self, tree: Mapping[Any, Any], stable: Collection[Tensor] | None) -> Survey:
        """What `tree` holds.

        Args:
            stable: tensors that may be read until the fence; None is all.
        """
        places, tensors, skeleton, parts = self._take_apart(tree)
        look = _Look.at(places, tensors)
        addresses = None if stable is None else frozenset(map(Tensor.data_ptr, stable))
        known = self._known
        if known is None or look is None or not known.fits(look, addresses):
            if look is None or not all(map(fits_a_stripe, tensors)):
                plain = strip(_root(tree), fits_a_stripe)  # the others stay where they are
                places, tensors, skeleton, parts, look = plain.places, plain.tensors, plain.tree, (), None
            known = _compare(look, addresses, name_tensors({}, places, tensors), tensors, stable)
            self._known = None if look is None else known
        pick = tensors.__getitem__
        return Survey(
            replace(known.flat, skeleton=skeleton),
            known.packed,
            parts,
            dict(zip(known.live, map(pick, known.live.values()), strict=True)),
            dict(zip(known.owned, map(pick, known.owned.values()), strict=True)),
            known.addresses,
            known.devices,
            known.likeness,
        )

    def _take_apart(
        self, tree: Mapping[Any, Any]
    ) -> tuple[list[Place], list[Tensor], Any, tuple[tuple[Place, bytes], ...]]:
        """All places, their tensors, the skeleton without its heavy parts, and these."""
        found: dict[Place, tuple[_Part, list[Tensor]]] = {}
        nodes = dict(_heavy_parts(tree))
        for place, node in nodes.items():
            printed = imprint(node)
            part = None if printed is None else self._part(place, node, *printed)
            if part is not None and printed is not None:
                found[place] = part, [printed[1][pick] for pick in part.picks]
        root = _root(tree)
        rest = strip(_without(root, found))
        ids = {id(nodes[place]) for place in found}
        if len(ids) < len(found) or not ids.isdisjoint(rest.containers):
            # One of them stands in a second place, too, and is to come back as one.
            found, rest = {}, strip(root)
        return (
            [*chain.from_iterable(part.places for part, _ in found.values()), *rest.places],
            [*chain.from_iterable(tensors for _, tensors in found.values()), *rest.tensors],
            rest.tree,
            tuple((place, part.packed) for place, (part, _) in found.items()),
        )

    def _part(self, place: Place, node: Any, printed: bytes, tensors: list[Tensor]) -> _Part | None:
        known = self._parts.get(place)
        if known is None or known.imprint != printed:
            stripped = strip(node, at=place)
            numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
            if not all(id(tensor) in numbers for tensor in stripped.tensors):
                return None
            picks = [numbers[id(tensor)] for tensor in stripped.tensors]
            if len({*picks}) < len(
                tensors
            ):  # one hides where nobody walks, such as in an OrderedDict's attributes
                return None
            known = self._parts[place] = _Part(printed, pack_part(stripped.tree), stripped.places, picks)
        return known


def _root(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return tree if type(tree) in (dict, OrderedDict) else dict(tree)


def _heavy_parts(tree: Mapping[Any, Any]) -> Iterator[tuple[Place, Any]]:
    """Where Lightning keeps nearly all tensors of a checkpoint."""
    if isinstance(tree.get("state_dict"), dict):
        yield ("state_dict",), tree["state_dict"]
    optimizers = tree.get("optimizer_states")
    if type(optimizers) is list:
        for number, optimizer in enumerate(optimizers):
            if type(optimizer) is dict and isinstance(optimizer.get("state"), dict):
                yield ("optimizer_states", number, "state"), optimizer["state"]


def _without(tree: Mapping[Any, Any], parts: Collection[Place]) -> Mapping[Any, Any]:
    """A copy of `tree` with None for some of its heavy parts; what does not change is not copied."""
    if not parts:
        return tree
    copy: dict[Any, Any] = dict(tree)
    if type(tree) is OrderedDict:
        copy = OrderedDict(tree)
        vars(copy).update(vars(tree))
    if ("state_dict",) in parts:
        copy["state_dict"] = None
    numbers = {place[1] for place in parts if len(place) > 1}
    if numbers:
        copy["optimizer_states"] = [
            {**optimizer, "state": None} if number in numbers else optimizer
            for number, optimizer in enumerate(tree["optimizer_states"])
        ]
    return copy


def _compare(
    look: _Look | None,
    addresses: frozenset[int] | None,
    flat: FlatState,
    tensors: Sequence[Tensor],
    stable: Collection[Tensor] | None,
) -> _Known:
    names = (
        flat.tensors.keys() if stable is None else {flat.memory.get(identity(tensor)) for tensor in stable}
    )
    numbers: dict[str, int] = {}
    for number, (_, name) in enumerate(flat.index):
        numbers.setdefault(name, number)  # of tied ones the first place counts
    live = {name: number for name, number in numbers.items() if name in names}
    owned = {name: number for name, number in numbers.items() if name not in names}
    return _Known(
        look,
        addresses,
        replace(flat, tensors={}),
        pack_places(flat),
        live,
        owned,
        frozenset(tensors[number].data_ptr() for number in live.values()),
        frozenset(tensors[number].device for number in live.values()),
        object(),
    )
