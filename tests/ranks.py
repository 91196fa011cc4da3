"""Runs a function in W fresh processes that meet over gloo, as torchrun would."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# A server that has imported the slow libraries once and forks a clean child in milliseconds
# (a spawned child would spend about 7 s of CPU on torch and Lightning).
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "hypothesis"])


class RankError(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    group: bool = True,
    timeout_s: float = 60.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, *args)` in `world_size` fresh processes and return what each returned, in rank order.

    The processes meet at a store that lives in this process on a port the kernel chose, so two test
    runs at once never collide. As under torchrun, `init_process_group()` needs no address, and a
    Trainer finds the processes that are there instead of starting its own.

    Args:
        fn: a function at the top level of an importable module.
        group: make the gloo group before the call and destroy it after. Leave it to Lightning with False.
        timeout_s: then every rank prints where it stands, is killed, and the call fails.
        env: more environment variables for the ranks.
    """
    # The meeting point; only its server side lives here, and it dies with this function.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    ranks = []
    try:
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _CONTEXT.Process(
                target=_rank_main, args=(theirs, own, rank, group, timeout_s, sys.path, fn, args)
            )
            process.start()
            theirs.close()  # else the pipe would stay open after the rank's death
            ranks.append((process, ours))
        return _collect(ranks, time.monotonic() + timeout_s)
    finally:
        for process, ours in ranks:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            ours.close()
        del store


def _collect(ranks: list[tuple[Any, Connection]], deadline_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    failed: dict[int, str] = {}
    while len(found) < len(ranks):
        waiting = {ours: rank for rank, (_, ours) in enumerate(ranks) if rank not in {*found, *failed}}
        # After a failure the others only get the moment they need to tell what they saw of it.
        ready = wait(list(waiting), timeout=0.5 if failed else deadline_s - time.monotonic())
        if not ready:
            failed = failed or dict.fromkeys(waiting.values(), "did not finish in time")
            raise RankError("\n".join(f"rank {rank} {what}" for rank, what in sorted(failed.items())))
        for ours in ready:
            rank = waiting[ours]
            try:
                ok, value = pickle.loads(ours.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                failed[rank] = f"died with exit code {ranks[rank][0].exitcode}"
            else:
                if ok:
                    found[rank] = value
                else:
                    failed[rank] = f"raised\n{value}"
    return [found[rank] for rank in range(len(ranks))]


def _rank_main(
    pipe: Connection,
    env: dict[str, str],
    rank: int,
    group: bool,
    timeout_s: float,
    path: list[str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(env)
    sys.path[:] = path
    # Prints where a hung rank stands, and ends it even if the test run itself was killed.
    faulthandler.dump_traceback_later(max(timeout_s - 2, 1), exit=True)
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    # The server read both at import time, when there was no rank yet.
    rank_zero_only.rank = rank
    torch.set_num_threads(1)
    try:
        if group:
            dist.init_process_group("gloo")
        value = fn(rank, *args)
        # Plain pickle copies tensors; a pipe's own would only send a handle that dies with this process.
        answer = pickle.dumps((True, value))
    except BaseException:  # noqa: BLE001 (whatever it was, the test run raises it)
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
