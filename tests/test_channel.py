"""Every channel keeps the same promises, whether there is one rank or more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hetckpt import channel
from lightning_hetckpt.channel import Channel, GroupChannel, SoloChannel, present_channel
from lightning_hetckpt.errors import ConfigurationError

Ranks = Callable[..., list[Any]]


def swap(mine: Channel) -> Any:
    gathered = mine.all_gather({"rank": mine.rank, "payload": "x" * (1 + 1000 * mine.rank)})
    return mine.size, mine.rank, gathered, mine.broadcast(("from", mine.rank)), mine.broadcast(None)


def swap_in_default_group(rank: int) -> Any:
    assert isinstance(present_channel(), GroupChannel)
    return swap(present_channel())


def swap_in_subgroup(rank: int) -> Any:
    group = dist.new_group([1, 2])
    return None if rank == 0 else swap(GroupChannel(group))


def expected(size: int, rank: int) -> Any:
    gathered = [{"rank": r, "payload": "x" * (1 + 1000 * r)} for r in range(size)]
    return size, rank, gathered, ("from", 0), None


def test_one_process_hears_itself() -> None:
    assert isinstance(present_channel(), SoloChannel)
    assert swap(present_channel()) == expected(1, 0)


def test_ranks_hear_each_other_in_rank_order(run_ranks: Ranks) -> None:
    assert run_ranks(swap_in_default_group, 2) == [expected(2, 0), expected(2, 1)]


def test_a_subgroup_counts_its_own_ranks(run_ranks: Ranks) -> None:
    assert run_ranks(swap_in_subgroup, 3) == [None, expected(2, 0), expected(2, 1)]


def wait_in_background(rank: int, reconnect: bool) -> Any:
    """A thread waits for a key that comes only after the main threads have met many times."""
    default = dist.distributed_c10d._get_default_store()
    store = channel._reconnected(default) if reconnect else channel.background_store()
    heard: list[bytes] = []
    thread = threading.Thread(target=lambda: heard.append(store.get("test/late")))
    thread.start()
    total = torch.zeros(1)
    for _ in range(20):
        one = torch.ones(1)
        dist.all_reduce(one)
        total += one
        default.set(f"test/main/{rank}", "the main thread still gets through")
    if rank == 0:
        store_of_main = channel._reconnected(default) if reconnect else channel.background_store()
        store_of_main.set("test/late", b"here")
    thread.join(20)
    return heard, total.item()


@pytest.mark.parametrize("reconnect", [False, True], ids=["clone", "before-torch-2.8"])
def test_a_background_store_waits_without_stopping_the_main_thread(run_ranks: Ranks, reconnect: bool) -> None:
    assert run_ranks(wait_in_background, 2, reconnect) == [([b"here"], 40.0)] * 2


def test_a_store_of_one_process_cannot_be_reached_again() -> None:
    with pytest.raises(ConfigurationError, match=r"HashStore.*rendezvous"):
        channel._reconnected(dist.HashStore())
