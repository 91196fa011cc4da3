"""The weights move only when no snapshot reads them, or the snapshot hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetckpt.checkpoint.step_guard import StepGuard, Versions

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "for-loop": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 3}),
}


class Reader:
    """Reads the weights until somebody settles it, and remembers what it was told."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.fenced = False
        self.held = False
        self.torn: str | None = None
        self.weights_at_settle: list[torch.Tensor] = []

    def settle(self) -> None:
        if not self.fenced:
            self.fenced = True
            self.weights_at_settle = [parameter.detach().clone() for parameter in self.model.parameters()]

    def hold(self) -> None:
        self.held = True

    def mark_torn(self, reason: str) -> bool:
        self.torn = reason
        self.fenced = True
        return True


@pytest.fixture
def guard() -> Iterator[StepGuard]:
    guard = StepGuard()
    yield guard
    guard.close()


def make(kind: str = "SGD") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).sum().backward()
    make_one, options = OPTIMIZERS[kind]
    return model, make_one(model.parameters(), **options)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "LBFGS"])
def test_a_step_without_closure_waits_until_nothing_reads_the_weights(guard: StepGuard, kind: str) -> None:
    model, optimizer = make(kind)
    reader, before = Reader(model), [parameter.detach().clone() for parameter in model.parameters()]
    guard.watch(reader, frozenset(p.data_ptr() for p in model.parameters()))

    optimizer.step()

    assert reader.fenced
    assert reader.torn is None
    assert all(map(torch.equal, reader.weights_at_settle, before))
    assert not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_with_a_closure_that_nobody_fenced_tears_the_snapshot(guard: StepGuard, kind: str) -> None:
    model, optimizer = make(kind)
    reader = Reader(model)
    guard.watch(reader, frozenset(p.data_ptr() for p in model.parameters()))

    optimizer.step(lambda: torch.tensor(1.0))

    assert reader.held
    assert reader.torn is not None
    assert type(optimizer).__name__ in reader.torn


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fence_at_the_end_of_the_closure_keeps_the_snapshot(guard: StepGuard, kind: str) -> None:
    model, optimizer = make(kind)
    reader = Reader(model)
    guard.watch(reader, frozenset(p.data_ptr() for p in model.parameters()))

    def closure() -> torch.Tensor:
        reader.settle()
        return torch.tensor(1.0)

    optimizer.step(closure=closure)

    assert reader.torn is None


def test_an_optimizer_of_other_weights_does_not_count(guard: StepGuard) -> None:
    model, _ = make()
    _, stranger = make()
    reader = Reader(model)
    guard.watch(reader, frozenset(p.data_ptr() for p in model.parameters()))

    stranger.step()
    stranger.step(lambda: None)

    assert not reader.fenced
    assert not reader.held


def test_a_snapshot_watches_the_weights_through_the_copies_of_a_state_dict(guard: StepGuard) -> None:
    model, optimizer = make()
    reader = Reader(model)
    guard.watch(reader, frozenset(t.data_ptr() for t in model.state_dict().values()))

    optimizer.step()

    assert reader.fenced


def test_every_snapshot_under_way_is_guarded(guard: StepGuard) -> None:
    model, optimizer = make()
    readers = [Reader(model), Reader(model)]
    for reader in readers:
        guard.watch(reader, frozenset(p.data_ptr() for p in model.parameters()))

    optimizer.step()

    assert all(reader.fenced for reader in readers)


def test_a_closed_guard_leaves_no_hook_behind() -> None:
    model, optimizer = make()
    reader = Reader(model)
    guard = StepGuard()
    guard.watch(reader, frozenset(p.data_ptr() for p in model.parameters()))
    guard.close()
    guard.close()

    optimizer.step()

    assert not reader.fenced


def test_versions_name_what_moved_in_place() -> None:
    model, optimizer = make("foreach")
    versions = Versions(dict(model.state_dict()))
    assert versions.moved() == []

    optimizer.step()

    assert versions.moved() == ["weight", "bias"]


def test_versions_pass_over_inference_tensors() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert Versions({"t": tensor}).moved() == []
