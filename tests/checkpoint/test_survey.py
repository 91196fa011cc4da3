"""What is remembered between saves never shows: every survey equals one that remembers nothing."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetckpt.checkpoint.meta import pack_meta
from lightning_hetckpt.checkpoint.state_tree import flatten, identity
from lightning_hetckpt.checkpoint.survey import Surveyor
from tests.checkpoint.trees import assert_same, checkpoint, training_state, trees


def assert_as_if_new(surveyor: Surveyor, tree: dict[str, Any], stable: list[Tensor]) -> object:
    """Survey `tree` and compare with `flatten`; returns the likeness."""
    found, truth = surveyor.survey(tree, stable), flatten(tree)
    names = {truth.memory[identity(t)] for t in stable if identity(t) in truth.memory}
    assert_same(found.flat.skeleton, truth.skeleton)
    assert found.flat.aliases == truth.aliases
    assert found.flat.index == truth.index
    both = {**found.live, **found.owned}
    assert {name: id(tensor) for name, tensor in both.items()} == {
        name: id(t) for name, t in truth.tensors.items()
    }
    assert list(found.flat.tensors) == list(truth.tensors)
    assert set(found.live) == names
    assert surveyor.meta(found) == pack_meta(truth)
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
def test_whatever_changes_is_seen(change: Any) -> None:
    tree, tensors = base()
    surveyor = Surveyor()
    before = assert_as_if_new(surveyor, tree, tensors[:2])
    assert assert_as_if_new(surveyor, tree, tensors[:2]) is before
    change(tree)
    assert assert_as_if_new(surveyor, tree, tensors[:2]) is not before
    assert_as_if_new(surveyor, tree, tensors[:2])


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
        found, truth = surveyor.survey(tree, None), flatten(tree)
        assert found.flat.index == truth.index
        assert found.flat.aliases == truth.aliases
        assert_same(found.flat.skeleton, truth.skeleton)
        assert list(map(id, found.flat.tensors.values())) == list(map(id, truth.tensors.values()))
        assert surveyor.meta(found) == pack_meta(truth)
