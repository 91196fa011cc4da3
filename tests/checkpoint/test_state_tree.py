"""A tree that is taken apart and put together again is the tree that torch.save and torch.load give."""

from __future__ import annotations

import copy
import functools
import io
import operator
from collections import OrderedDict, defaultdict
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.distributed.checkpoint import _nested_dict

from lightning_hetckpt.checkpoint.meta import KEY, pack_meta, unpack_meta
from lightning_hetckpt.checkpoint.state_tree import as_bytes, flatten, spec
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.trees import DTYPES, assert_same, bits, checkpoint, tensors, training_state, trees


class Pair(NamedTuple):
    left: Any
    right: Any


def through_stripes(tree: Any, weights_only: bool | None = None, map_location: Any = None) -> dict[Any, Any]:
    """What is read back if a stripe keeps the raw rows of each tensor."""
    flat = flatten(tree)
    stored = {}
    for name, tensor in flat.tensors.items():
        stored[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return unpack_meta(pack_meta(flat), stored, weights_only, map_location)


def through_torch(tree: Any, weights_only: bool = True, map_location: Any = None) -> Any:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only, map_location=map_location)


@given(trees())
def test_any_tree_comes_back_as_torch_load_would_give_it(tree: dict[Any, Any]) -> None:
    assert_same(through_stripes(tree), through_torch(tree))


@given(trees())
def test_flattening_leaves_the_tree_as_it_is(tree: dict[Any, Any]) -> None:
    before = copy.copy(tree)
    flatten(tree)
    assert_same(tree, before)
    assert all(one is other for one, other in zip(tree.values(), before.values(), strict=True))


@given(tensors())
def test_a_spec_counts_the_bytes_of_its_tensor(tensor: torch.Tensor) -> None:
    if flatten({"t": tensor}).tensors:
        found = spec("t", tensor)
        assert found.nbytes == tensor.numel() * tensor.element_size()
        assert found.shape[: tensor.dim()] == tuple(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_the_bytes_of_a_tensor_are_its_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype)
    view = as_bytes(tensor[1:])
    assert view.numpy().tobytes() == bits(tensor[1:])
    view.zero_()
    assert bits(tensor[1:]) == bytes(8 * tensor.element_size())
    assert as_bytes(torch.ones((), dtype=dtype)).numel() == tensor.element_size()
    assert as_bytes(torch.ones(0, 3, dtype=dtype)).numel() == 0
    assert as_bytes(tensor.view(-1)[3:5:2]).numpy().tobytes() == bits(tensor.view(-1)[3:4])


def test_names_are_those_that_torch_distributed_checkpoint_makes() -> None:
    tree = checkpoint(*training_state())
    ours = flatten(tree)
    theirs, _ = _nested_dict.flatten_state_dict(tree)
    expected = {name for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    assert set(ours.tensors) | set(ours.aliases) == expected


def test_names_that_collide_are_told_apart() -> None:
    tree = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "a.b#2": torch.ones(2),
        "__metadata__": torch.ones(3),
    }
    flat = flatten(tree)
    assert list(flat.tensors) == ["a.b", "a.b#2", "a.b#2#2", "__metadata__#2"]
    assert_same(through_stripes(tree), through_torch(tree))


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.randn(3, 3)
    tree = {"in": weight, "out": weight.detach(), "row": weight[0], "turned": weight.T}
    flat = flatten(tree)
    assert list(flat.tensors) == ["in", "row", "turned"]
    assert flat.aliases == {"out": "in"}
    back = through_stripes(tree)
    back["in"][0, 0] = 7.0
    assert back["out"][0, 0] == 7.0


def test_empty_tensors_are_never_taken_for_tied() -> None:
    flat = flatten({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 4)})
    assert list(flat.tensors) == ["a", "b", "c"]
    assert not flat.aliases


class Marked(torch.Tensor):
    pass


def unstripable() -> dict[str, Any]:
    named = torch.ones(2)
    named.note = "kept"
    return {
        "parameter": nn.Parameter(torch.ones(2)),
        "grad": torch.ones(2, requires_grad=True),
        "sparse": torch.ones(2, 2).to_sparse(),
        "conjugate": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
        "negative": torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag,
        "half complex": torch.ones(2, dtype=torch.complex32),
        "meta": torch.ones(2, device="meta"),
        "attribute": named,
        "pair": Pair(torch.ones(1), 2),
        "default": defaultdict(list, {"x": [torch.ones(1)]}),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_a_stripe_cannot_hold_exactly_stays_in_meta_pt() -> None:
    tree = unstripable()
    assert not flatten(tree).tensors
    back = through_stripes(tree, weights_only=False)
    assert_same(back, through_torch(tree, weights_only=False))
    assert back["attribute"].note == "kept"
    assert back["conjugate"].is_conj()


def test_a_tensor_subclass_stays_in_meta_pt() -> None:
    assert not flatten({"t": torch.ones(2).as_subclass(Marked)}).tensors


def test_a_state_dict_keeps_its_type_and_versions() -> None:
    model, _ = training_state()
    back = through_stripes({"state_dict": model.state_dict()})["state_dict"]
    assert type(back) is OrderedDict
    assert back._metadata == model.state_dict()._metadata
    model.load_state_dict(back)


def test_a_container_that_stands_in_two_places_stays_one() -> None:
    shared = {"t": torch.ones(2)}
    pair = (torch.zeros(1), shared)
    tree = {"one": shared, "two": [shared, pair], "three": pair}
    back = through_stripes(tree)
    assert back["one"] is back["two"][0] is back["three"][1]
    assert back["two"][1] is back["three"]
    assert_same(back, through_torch(tree))


def test_a_list_that_holds_itself_survives() -> None:
    tree: dict[str, Any] = {"loop": [torch.ones(1)]}
    tree["loop"].append(tree["loop"])
    back = through_stripes(tree)
    assert back["loop"][1] is back["loop"]
    assert torch.equal(back["loop"][0], torch.ones(1))


def test_a_key_of_the_user_named_like_ours_survives() -> None:
    tree = {KEY: {"mine": torch.ones(1)}, "x": 1}
    assert_same(through_stripes(tree), through_torch(tree))


def test_channels_last_stays_channels_last() -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    back = through_stripes({"w": weight, "gap": torch.randn(4, 4)[:, :2]})
    assert back["w"].stride() == weight.stride()
    assert back["gap"].is_contiguous()


def test_objects_need_weights_only_false_and_the_error_says_so() -> None:
    tree = {"path": PurePosixPath("/x"), "t": torch.ones(1)}
    for weights_only in (None, True):
        with pytest.raises(CheckpointError, match=r"weights_only=False.*trainer\.fit"):
            through_stripes(tree, weights_only)
    assert_same(through_stripes(tree, weights_only=False), tree)


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"cannot be pickled.*lambda"):
        pack_meta(flatten({"hook": lambda: None}))


def test_a_meta_file_that_names_a_tensor_nobody_has_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"state\.w"):
        unpack_meta(pack_meta(flatten({"state": {"w": torch.ones(1)}})), {}, True)


def test_a_place_that_cannot_be_found_again_is_an_error_and_no_silent_none() -> None:
    nan = float("nan")
    with pytest.raises(CorruptCheckpointError, match="1 places of tensors, 0 of them"):
        through_stripes({"x": {nan: torch.ones(1)}})


def test_a_file_that_is_no_meta_file_is_corrupt() -> None:
    buffer = io.BytesIO()
    torch.save({"x": 1}, buffer)
    with pytest.raises(CorruptCheckpointError):
        unpack_meta(buffer.getvalue(), {}, True)


def storage_moved_to_meta(storage: Any, location: str) -> Any:
    assert location == "cpu"
    return torch.UntypedStorage(storage.nbytes(), device="meta")


@pytest.mark.parametrize(
    "map_location",
    [
        "cpu",
        "meta",
        torch.device("meta"),
        {"cpu": "meta"},
        lambda storage, location: storage,
        lambda *_: None,
    ],
    ids=["cpu", "meta", "device", "mapping", "stay", "default"],
)
def test_map_location_means_what_it_means_to_torch_load(map_location: Any) -> None:
    tree = {
        "t": torch.arange(6.0).view(2, 3),
        "z": torch.ones(2, dtype=torch.complex64),
        "p": nn.Parameter(torch.ones(2)),
    }
    assert_same(
        through_stripes(tree, map_location=map_location), through_torch(tree, map_location=map_location)
    )


def test_a_storage_that_map_location_made_is_used() -> None:
    assert through_stripes({"t": torch.ones(2, 3)}, map_location=storage_moved_to_meta)["t"].is_meta


def test_deep_trees_are_walked_to_the_end() -> None:
    tree = functools.reduce(lambda inner, _: {"x": [inner]}, range(50), {"x": torch.ones(1)})
    back = through_stripes(tree)
    leaf = functools.reduce(lambda node, _: operator.getitem(node["x"], 0), range(50), back)
    assert torch.equal(leaf["x"], torch.ones(1))
