"""Leaks are looked for among threads alone: CUDA, NCCL and the profiler keep descriptors for the whole process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    left = [
        thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("hetckpt")
    ]
    assert not left
