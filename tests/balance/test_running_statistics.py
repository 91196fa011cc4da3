from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetckpt.balance.running_statistics import RunningStatistics

Ranks = Callable[..., list[Any]]
BATCHES = [
    torch.randn(9, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(6)
]


def make(momentum: float | None) -> nn.Module:
    """Two layers side by side, so that what the second sees does not depend on how the first normalises."""
    return nn.ModuleList([nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(4, momentum=0.3)]).double()


def run(net: Any, batch: torch.Tensor) -> None:
    net[0](batch)
    net[1](100 + 5 * batch.transpose(1, 2))


def merged(rank: int, splits: list[list[int]], momentum: float | None, frozen: bool) -> Any:
    net = make(momentum)
    net[1].train(not frozen)
    statistics = RunningStatistics(net, dist.all_reduce)
    handles = statistics.watch()
    for batch, split in zip(BATCHES, splits, strict=True):
        statistics.begin()
        begin = sum(split[:rank])
        run(net, batch[begin : begin + split[rank]] if split[rank] else batch[:1])
        statistics.merge(split[rank] > 0)
    for handle in handles:
        handle.remove()
    return net.state_dict()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_ranks_keep_the_statistics_of_the_whole_batch(
    run_ranks: Ranks, momentum: float | None, frozen: bool
) -> None:
    splits = [[6, 2, 1], [3, 3, 3], [1, 7, 1], [8, 1, 0], [2, 2, 5], [6, 2, 1]]

    found = run_ranks(merged, 3, splits, momentum, frozen)

    alone: Any = make(momentum)
    alone[1].train(not frozen)
    for batch in BATCHES:
        run(alone, batch)
    for state in found:
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-10, atol=1e-12)


def test_layers_that_keep_nothing_or_are_synchronised_are_left_alone() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.SyncBatchNorm(3), nn.Linear(3, 3))
    before = copy.deepcopy(net.state_dict())
    statistics = RunningStatistics(net, lambda tensor: None)
    assert not statistics
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
