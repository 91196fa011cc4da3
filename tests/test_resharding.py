"""One checkpoint, several ways to be parallel: what goes on is what would have gone on, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lightning_hetckpt.checkpoint.dcp import StripedStorageReader, StripedStorageWriter
from lightning_hetckpt.checkpoint.parameter_names import (
    KEY,
    by_name,
    fitted,
    group_sizes,
    parameter_names,
    spelled,
)
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.errors import CheckpointError

Ranks = Callable[..., list[Any]]
STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.up = nn.Linear(6, 12).double()
            self.down = nn.Linear(12, 5).double()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(inputs).tanh())
        return found


def optimizer_of(net: nn.Module, turned: bool = False) -> torch.optim.Optimizer:
    """AdamW in two groups; their order, and so the numbers of all parameters, can be turned."""
    weights = [one for name, one in net.named_parameters() if name.endswith("weight")]
    biases = [one for name, one in net.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if turned else groups, lr=0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
    return [_whole(parameter) for parameter in net.parameters()]


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def parallel(kind: str, world: int) -> nn.Module:
    net = Net()
    mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp":
        for layer in (net.up, net.down, net):
            fully_shard(layer, mesh=mesh)
        return net
    if kind == "tensor":
        return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return DistributedDataParallel(net)


def saved_as_lightning_does(folder: Path) -> tuple[Path, list[Tensor]]:
    net = Net()
    optimizer = optimizer_of(net)
    train(net, optimizer, range(3))
    tree = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        KEY: [spelled(parameter_names(net, optimizer))],
    }
    with Snapshotter([folder / "ssd0", folder / "ssd1"]) as engine:
        engine.begin(tree, folder / "a.ckpt", alone=True).wait()
    return folder / "a.ckpt", train(net, optimizer, range(3, 3 + STEPS))


def go_on(rank: int, kind: str, world: int, path: str, by_name: bool, first: int) -> list[Tensor]:
    net = parallel(kind, world)
    optimizer = optimizer_of(net, turned=True)
    load(net, optimizer, path, by_name)
    return train(net, optimizer, range(first, first + STEPS))


def load(net: nn.Module, optimizer: torch.optim.Optimizer, path: str, by_name: bool) -> None:
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"state_dict": model_state, "optimizer_states": [optimizer_state]}
    dcp.load(state, storage_reader=StripedStorageReader(path, by_name=by_name))
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["fsdp", "tensor", "ddp"])
def test_a_trainers_checkpoint_goes_on_sharded(
    run_ranks: Ranks, tmp_path: Path, kind: str, world: int
) -> None:
    path, truth = saved_as_lightning_does(tmp_path)
    for found in run_ranks(go_on, world, kind, world, str(path), True, 3):
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def save_sharded(rank: int, kind: str, world: int, path: str) -> list[Tensor]:
    net = parallel(kind, world)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"state_dict": model_state, "optimizer_states": [optimizer_state]}
    dcp.save(state, storage_writer=StripedStorageWriter(path))
    return train(net, optimizer, range(3, 3 + STEPS))


@pytest.mark.parametrize(("kind", "world", "later"), [("fsdp", 4, 2), ("tensor", 2, 4)])
def test_a_sharded_checkpoint_goes_on_replicated(
    run_ranks: Ranks, tmp_path: Path, kind: str, world: int, later: int
) -> None:
    path = str(tmp_path / "a.ckpt")
    truth = run_ranks(save_sharded, world, kind, world, path)[0]
    other = {"fsdp": "tensor", "tensor": "fsdp"}[kind]
    for way in ("ddp", other):
        for found in run_ranks(go_on, later, way, later, path, False, 3):
            for one, expected in zip(found, truth, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-13)


def test_numbers_follow_the_names() -> None:
    net = Net()
    saved = optimizer_of(net)
    train(net, saved, range(2))
    other = optimizer_of(net, turned=True)
    names = parameter_names(net, other)
    other.load_state_dict(fitted(saved.state_dict(), parameter_names(net, saved), names, group_sizes(other)))
    for parameter in net.parameters():
        assert torch.equal(saved.state[parameter]["exp_avg"], other.state[parameter]["exp_avg"])
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]


def test_a_state_by_name_fits_any_order() -> None:
    net = Net()
    saved = optimizer_of(net)
    train(net, saved, range(2))
    named = by_name(saved.state_dict(), parameter_names(net, saved))
    assert list(named["state"]) == ["up.weight", "down.weight", "up.bias", "down.bias"]
    other = optimizer_of(net, turned=True)
    other.load_state_dict(fitted(named, None, parameter_names(net, other), group_sizes(other)))
    assert torch.equal(saved.state[net.up.bias]["exp_avg"], other.state[net.up.bias]["exp_avg"])


def test_renamed_parameters_go_by_their_order() -> None:
    net = Net()
    saved = optimizer_of(net)
    train(net, saved, range(1))
    state = saved.state_dict()
    assert fitted(state, ["a", "b", "c", "d"], parameter_names(net, saved), [2, 2]) is state


def test_parameters_that_the_state_lacks_are_listed() -> None:
    net = Net()
    saved = optimizer_of(net)
    named = by_name(saved.state_dict(), parameter_names(net, saved))
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 parameters: head\.weight"):
        fitted(named, None, ["up.weight", "head.weight"], [2])


def unnamed(rank: int, path: str) -> str:
    net = Net()
    optimizer = optimizer_of(net)
    try:
        load(net, optimizer, path, by_name=True)
    except BaseException as error:  # noqa: BLE001 (CheckpointException is no Exception)
        return str(error)
    return ""


def test_names_that_were_not_saved_are_asked_for(run_ranks: Ranks, tmp_path: Path) -> None:
    net = Net()
    tree = {"state_dict": net.state_dict(), "optimizer_states": [optimizer_of(net).state_dict()]}
    with Snapshotter() as engine:
        engine.begin(tree, tmp_path / "a.ckpt", alone=True).wait()
    assert all(
        "parameter_names(model, optimizer)" in told
        for told in run_ranks(unnamed, 2, str(tmp_path / "a.ckpt"))
    )
