"""What a checkpoint holds and which part of it stays live, worked out anew only where more than values changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch import Tensor

from lightning_hetckpt.checkpoint.meta import pack_meta, pack_places
from lightning_hetckpt.checkpoint.state_tree import FlatState, Place, flatten, identity, strip

_traits = attrgetter("dtype", "device", "shape", "requires_grad", "layout")

# A state dict and the state of an optimizer show the same memory at every step, in new tensors and dictionaries. The
# same places with tensors of the same dtype, shape and strides, tied in the same way, have the same names, plan and
# bytes in meta.pt. To see that, everything is looked at in every save, but mostly in C. No tensor is held between saves.


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint taken apart."""

    flat: FlatState
    live: dict[str, Tensor]  # read until the fence
    owned: dict[str, Tensor]  # all others
    likeness: object  # the same object as in the survey before, where nothing but values differs


@dataclass(frozen=True, slots=True)
class _Look:
    """All that decides on names, ties, plan and places, but for the values."""

    places: list[Place]
    ties: list[int]  # for each tensor the number of the first one at the same address
    traits: list[tuple[Any, ...]]
    strides: list[tuple[int, ...]]
    addresses: list[int] = field(compare=False)

    @classmethod
    def at(cls, places: list[Place], tensors: Sequence[Tensor]) -> _Look | None:
        """How these tensors look; None where one of them may have no place in a stripe."""
        if any(map(Tensor.is_conj, tensors)) or any(map(Tensor.is_neg, tensors)) or any(map(vars, tensors)):
            return None
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
            strides = list(map(Tensor.stride, tensors))
        except RuntimeError:  # sparse, or without memory
            return None
        first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1), strict=True))
        return cls(places, [first[one] for one in addresses], list(map(_traits, tensors)), strides, addresses)


@dataclass(frozen=True, slots=True)
class _Known:
    """A survey without its tensors."""

    look: _Look | None
    stable: frozenset[int] | None  # addresses; None is all
    flat: FlatState
    live: tuple[str, ...]
    owned: tuple[str, ...]
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
        return names.issubset(self.owned) and (
            stable is not None and stable.isdisjoint(look.addresses[number] for number in moved)
        )


class Surveyor:
    """Takes one checkpoint after the other apart."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._packed: tuple[object, bytes] | None = None

    def survey(self, tree: Mapping[Any, Any], stable: Collection[Tensor] | None) -> Survey:
        """What `tree` holds.

        Args:
            stable: tensors that may be read until the fence; None is all.
        """
        skeleton, places, tensors = strip(tree)
        look = _Look.at(places, tensors)
        addresses = None if stable is None else frozenset(map(Tensor.data_ptr, stable))
        known = self._known
        if known is not None and look is not None and known.fits(look, addresses):
            names = [name for _, name in known.flat.index]
            by_name: dict[str, Any] = dict.fromkeys(names)
            by_name.update(
                zip(reversed(names), reversed(tensors), strict=True)
            )  # of tied ones the first place counts
            flat = replace(known.flat, skeleton=skeleton, tensors=by_name)
        else:
            flat = flatten(tree)
            known = _compare(look, addresses, flat, stable)
            self._known = known if look is not None and len(flat.index) == len(tensors) else None
        return Survey(
            flat,
            {name: flat.tensors[name] for name in known.live},
            {name: flat.tensors[name] for name in known.owned},
            known.likeness,
        )

    def meta(self, survey: Survey) -> bytes:
        """The bytes of meta.pt.

        Raises:
            CheckpointError: something in the checkpoint cannot be pickled.
        """
        if self._packed is None or self._packed[0] is not survey.likeness:
            self._packed = survey.likeness, pack_places(survey.flat)
        return pack_meta(survey.flat, self._packed[1])


def _compare(
    look: _Look | None, addresses: frozenset[int] | None, flat: FlatState, stable: Collection[Tensor] | None
) -> _Known:
    names = (
        flat.tensors.keys() if stable is None else {flat.memory.get(identity(tensor)) for tensor in stable}
    )
    live = tuple(name for name in flat.tensors if name in names)
    owned = tuple(name for name in flat.tensors if name not in names)
    return _Known(look, addresses, replace(flat, skeleton={}, tensors={}), live, owned, object())
