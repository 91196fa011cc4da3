"""What is remembered between saves never shows: every survey equals one that remembers nothing."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetckpt.checkpoint.meta import pack_meta, unpack_meta
from lightning_hetckpt.checkpoint.state_tree import flatten, identity
from lightning_hetckpt.checkpoint.survey import Survey, Surveyor
from tests.checkpoint.trees import assert_same, checkpoint, training_state, trees


def meta_of(found: Survey) -> bytes:
    return pack_meta(found.flat, found.places, found.parts)


def assert_as_if_new(surveyor: Surveyor, tree: dict[str, Any], stable: list[Tensor] | None) -> object:
    """Survey `tree` and compare with what was put in; returns the likeness."""
    found, truth = surveyor.survey(tree, stable), flatten(tree)
    both = {**found.live, **found.owned}
    assert {*map(identity, both.values())} == {*map(identity, truth.tensors.values())}
    assert len(both) == len(truth.tensors)
    if stable is not None:
        steady = {identity(t) for t in stable} - {None}
        assert {identity(t) for t in found.live.values()} == steady & set(truth.memory)
    stored = {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in both.items()}
    assert {**dict(found.flat.index)}.keys() == dict(truth.index).keys()
    assert_same(unpack_meta(meta_of(found), stored, weights_only=False), tree)
    return found.likeness


def test_steps_of_training_look_alike_and_differ_in_values_and_in_what_is_no_tensor() -> None:
    model, optimizer = training_state()
    stable = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    surveyor = Surveyor()
    likes = set()
    for step in range(3):
        tree = {**checkpoint(model, optimizer), "global_step": step, "loops": {"seen": [step] * step}}
        likes.add(assert_as_if_new(surveyor, tree, stable))
        for tensor in stable:
            tensor.data.add_(1)
    assert len(likes) == 1


def base() -> tuple[dict[str, Any], list[Tensor]]:
    tensors = [torch.zeros(3, 4), torch.zeros(4, 4), torch.zeros(2)]
    return {"a": {"x": tensors[0], "y": tensors[1]}, "b": [tensors[2], 5]}, tensors


def renamed(tree: dict[str, Any]) -> None:
    tree["a"] = {"x": tree["a"]["x"], "z": tree["a"]["y"]}


def reordered(tree: dict[str, Any]) -> None:
    tree["a"] = {"y": tree["a"]["y"], "x": tree["a"]["x"]}


def tied(tree: dict[str, Any]) -> None:
    tree["b"][0] = tree["a"]["x"]


def untied_view(tree: dict[str, Any]) -> None:
    tree["a"]["y"] = tree["a"]["y"].t()


def retyped(tree: dict[str, Any]) -> None:
    tree["a"]["y"] = tree["a"]["y"].view(torch.int32)


def reshaped(tree: dict[str, Any]) -> None:
    tree["a"]["x"] = tree["a"]["x"].view(4, 3)


def moved_weight(tree: dict[str, Any]) -> None:
    tree["a"]["x"] = tree["a"]["x"].clone()


def noted(tree: dict[str, Any]) -> None:
    tree["a"]["x"].note = "mine"


def grown(tree: dict[str, Any]) -> None:
    tree["b"].append(torch.ones(1))


def shrunk(tree: dict[str, Any]) -> None:
    del tree["a"]["x"]


def learning(tree: dict[str, Any]) -> None:
    tree["a"]["x"] = nn.Parameter(tree["a"]["x"])


def required(tree: dict[str, Any]) -> None:
    tree["a"]["x"] = tree["a"]["x"].view(3, 4).requires_grad_()


def emptied(tree: dict[str, Any]) -> None:
    tree["a"]["x"] = torch.empty(0)


@pytest.mark.parametrize(
    "change",
    [
        renamed,
        reordered,
        tied,
        untied_view,
        retyped,
        reshaped,
        moved_weight,
        noted,
        grown,
        shrunk,
        learning,
        required,
        emptied,
    ],
)
@pytest.mark.parametrize("home", [None, "state_dict", "optimizer"])
def test_whatever_changes_is_seen(change: Any, home: str | None) -> None:
    part, tensors = base()

    def tree() -> dict[str, Any]:
        if home is None:
            return part
        return (
            {"state_dict": part} if home == "state_dict" else {"optimizer_states": [{"state": part, "lr": 1}]}
        )

    surveyor = Surveyor()
    before = assert_as_if_new(surveyor, tree(), tensors[:2])
    assert assert_as_if_new(surveyor, tree(), tensors[:2]) is before
    change(part)
    assert assert_as_if_new(surveyor, tree(), tensors[:2]) is not before
    assert_as_if_new(surveyor, tree(), tensors[:2])


def numbered(part: dict[str, Any]) -> None:
    part["b"][1] = 6


def told_twice(part: dict[str, Any]) -> None:
    part["a"]["same"] = part["b"]


def of_a_kind_of_its_own(part: dict[str, Any]) -> None:
    part["b"][1] = Own()


class Own:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("change", [numbered, told_twice, of_a_kind_of_its_own])
def test_what_is_no_tensor_is_kept_from_heavy_parts_too(change: Any) -> None:
    part, tensors = base()
    surveyor = Surveyor()
    for _ in range(2):
        assert_as_if_new(surveyor, {"state_dict": part, "epoch": 1}, tensors[:2])
    change(part)
    for _ in range(2):
        assert_as_if_new(surveyor, {"state_dict": part, "epoch": 1}, tensors[:2])


def test_a_state_dict_that_stands_in_two_places_comes_back_as_one() -> None:
    part, tensors = base()
    tree = {"state_dict": part, "averaged": {"weights": part}}
    surveyor = Surveyor()
    for _ in range(2):
        found = surveyor.survey(tree, tensors)
        back = unpack_meta(meta_of(found), {**found.live, **found.owned}, weights_only=None)
        assert back["state_dict"] is back["averaged"]["weights"]


def test_attributes_of_a_state_dict_come_back_and_a_tensor_among_them_too() -> None:
    module = nn.Linear(2, 3)
    surveyor = Surveyor()
    for hidden in (None, torch.ones(3), torch.zeros(3)):
        state = module.state_dict()
        state._metadata["hidden"] = hidden  # type: ignore[attr-defined]
        found = surveyor.survey({"state_dict": state}, None)
        back = unpack_meta(meta_of(found), {**found.live, **found.owned}, weights_only=None)
        assert back["state_dict"]._metadata.keys() == state._metadata.keys()  # type: ignore[attr-defined]
        if hidden is not None:
            assert torch.equal(back["state_dict"]._metadata["hidden"], hidden)


def test_metrics_that_are_new_at_every_step_look_alike_until_one_is_stable() -> None:
    tree, tensors = base()
    surveyor = Surveyor()
    before = assert_as_if_new(surveyor, tree, tensors[:2])
    tree["b"][0] = torch.ones(2)
    assert assert_as_if_new(surveyor, tree, tensors[:2]) is before
    metric = tree["b"][0] = torch.ones(2)
    assert assert_as_if_new(surveyor, tree, [*tensors[:2], metric]) is not before
    tree["b"][0] = tensors[1].view(-1)[:2]  # within stable memory, though not the same tensor
    assert_as_if_new(surveyor, tree, tensors[:2])


def test_what_is_stable_may_change_alone() -> None:
    tree, tensors = base()
    surveyor = Surveyor()
    before = assert_as_if_new(surveyor, tree, tensors[:2])
    assert assert_as_if_new(surveyor, tree, tensors[1:]) is not before


def test_no_tensor_is_held_between_saves() -> None:

    tree, tensors = base()
    surveyor = Surveyor()
    surveyor.survey(tree, tensors)
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tree, tensors
    assert [one() for one in gone] == [None] * 3


@given(st.lists(trees(), min_size=2, max_size=4))
def test_any_trees_one_after_the_other_come_out_as_if_alone(several: list[dict[Any, Any]]) -> None:
    surveyor = Surveyor()
    for tree in (*several, *several):
        assert_as_if_new(surveyor, tree, None)
        assert_as_if_new(
            surveyor, {"epoch": 3, "state_dict": tree, "optimizer_states": [{"state": tree}, {}]}, None
        )


def test_state_dicts_and_optimizers_are_not_walked_again() -> None:
    model, optimizer = training_state()
    found = Surveyor().survey(checkpoint(model, optimizer), None)
    assert [place for place, _ in found.parts] == [("state_dict",), ("optimizer_states", 0, "state")]
