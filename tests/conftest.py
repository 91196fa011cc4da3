"""What every test gets: nothing leaks out of it, and nothing it changed stays changed."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How fast this machine is today says nothing about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

GRACE_S = 2.0
OWN = Path("/proc/self/fd")


@pytest.fixture(scope="session")
def _rank_server() -> None:
    """Start what `run_ranks` keeps for the whole session, so that no single test seems to leak it."""
    from tests import ranks  # noqa: F401 (names the libraries that the server loads)

    forkserver.ensure_running()


@functools.cache
def _open_what_stays_open() -> None:
    """Let libraries open now what they open once per process and keep for good."""
    resource_tracker.ensure_running()
    if "torch" in sys.modules:
        import torch.distributed as dist

        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # libuv's own signal pipe


@pytest.fixture
def run_ranks(_rank_server: None) -> Callable[..., list[Any]]:
    """`run_ranks(fn, world_size, *args)`: what `fn(rank, *args)` returned in each fresh gloo process."""
    from tests.ranks import run_ranks

    return run_ranks


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a file descriptor or a child process behind."""
    if "run_ranks" in request.fixturenames:
        request.getfixturevalue("_rank_server")
    _open_what_stays_open()
    threads, files, children = set(threading.enumerate()), _descriptors(), _children()
    yield
    _destroy_process_group()
    deadline_s = time.monotonic() + GRACE_S
    while True:
        gc.collect()  # files and pools of objects that only a cycle still holds
        multiprocessing.active_children()  # reaps those that have ended
        leaks = [f"thread {thread.name!r}" for thread in set(threading.enumerate()) - threads]
        leaks += [f"descriptor {fd} -> {target}" for fd, target in sorted(_descriptors() - files)]
        leaks += [f"child process {pid}: {name}" for pid, name in sorted(_children() - children)]
        leaks = [leak for leak in leaks if not any(known in leak for known in ALLOWED)]
        if not leaks:
            return
        if time.monotonic() > deadline_s:
            pytest.fail("the test left behind: " + ", ".join(leaks), pytrace=False)
        time.sleep(0.02)


def _destroy_process_group() -> None:
    """End the gloo group of a Trainer that ran in this process; Lightning leaves it to the process's end."""
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


# Started by libraries once per process, on first use, and kept on purpose.
ALLOWED = (
    "thread 'tqdm_monitor'",  # refreshes progress bars
    "thread 'child-process-observer'",  # Lightning's; ends by itself within 5 s of the last child
    "-> /dev/urandom",  # Python's and OpenSSL's source of random bytes
)


@pytest.fixture(autouse=True)
def _state_is_restored() -> Iterator[None]:
    """Put back the environment, Lightning's idea of the rank, and the signal handlers."""
    env = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    rank = _lightning_rank()
    yield
    os.environ.clear()
    os.environ.update(env)
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank or 0


def _lightning_rank() -> int | None:
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    return getattr(module.rank_zero_only, "rank", None) if module is not None else None


def _descriptors() -> set[tuple[int, str]]:
    """Every open descriptor with what it leads to; empty where the system does not tell."""
    found = set()
    for entry in OWN.iterdir() if OWN.exists() else ():
        try:
            found.add((int(entry.name), str(entry.readlink())))
        except FileNotFoundError:
            pass  # the one that read the folder
    return found


def _children() -> set[tuple[int, str]]:
    """Every direct child process, ended but unreaped ones included; empty where the system does not tell."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.add((int(stat.parent.name), command or name.partition("(")[2]))
        except (FileNotFoundError, ProcessLookupError):
            pass  # ended while we looked
    return found
