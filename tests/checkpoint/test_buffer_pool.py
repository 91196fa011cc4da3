from __future__ import annotations

import ctypes
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.buffer_pool import BufferPool
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

BLOCK = 4096


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@given(st.integers(0, 64 * BLOCK), st.integers(1, 8))
def test_it_lends_what_fits_but_at_least_two_aligned_buffers_that_do_not_overlap(total, blocks) -> None:
    pool = BufferPool(total, blocks * BLOCK)
    views = [pool.acquire() for _ in range(pool.free_chunks)]
    assert len(views) == max(2, total // (blocks * BLOCK))
    assert pool.free_chunks == 0
    starts = sorted(address(view) for view in views)
    assert all(start % BLOCK == 0 for start in starts)
    assert all(b - a == blocks * BLOCK for a, b in pairwise(starts))
    assert starts[0] == address(pool.memory)
    assert {view.nbytes for view in views} == {blocks * BLOCK}


@pytest.mark.parametrize("chunk_bytes", [0, 100, BLOCK + 1])
def test_a_buffer_that_direct_io_would_refuse_is_refused_at_once(chunk_bytes) -> None:
    with pytest.raises(ConfigurationError, match=f"{chunk_bytes} bytes"):
        BufferPool(10 * BLOCK, chunk_bytes)


def test_whoever_finds_no_buffer_waits_until_one_comes_back() -> None:
    pool = BufferPool(2 * BLOCK, BLOCK)
    first, second = pool.acquire(), pool.acquire()
    got: list[memoryview] = []
    asked = threading.Event()

    def borrow() -> None:
        asked.set()
        got.append(pool.acquire())

    thread = threading.Thread(target=borrow)
    thread.start()
    assert asked.wait(10)
    assert pool.free_chunks == 0
    assert not got
    pool.release(second)
    thread.join(10)
    assert got == [second]
    assert got[0] is second
    pool.release(first)


def test_closing_wakes_whoever_waits_with_an_error_and_takes_buffers_back_later() -> None:
    pool = BufferPool(2 * BLOCK, BLOCK)
    first, _ = pool.acquire(), pool.acquire()
    errors: list[Exception] = []

    def borrow() -> None:
        try:
            pool.acquire()
        except CheckpointError as error:
            errors.append(error)

    thread = threading.Thread(target=borrow)
    thread.start()
    pool.close()
    pool.close()
    thread.join(10)
    assert len(errors) == 1
    pool.release(first)
    with pytest.raises(CheckpointError, match="closed"):
        pool.acquire()


def test_a_buffer_comes_back_once_and_only_from_its_borrower() -> None:
    pool = BufferPool(2 * BLOCK, BLOCK)
    view = pool.acquire()
    with pytest.raises(ValueError, match="not on loan"):
        pool.release(memoryview(bytearray(BLOCK)))
    pool.release(view)
    with pytest.raises(ValueError, match="not on loan"):
        pool.release(view)
    assert pool.free_chunks == 2


def test_many_threads_never_hold_the_same_buffer_at_once() -> None:
    pool = BufferPool(3 * BLOCK, BLOCK)
    clashes = []

    def work(mark: int) -> None:
        for _ in range(200):
            view = pool.acquire()
            view[:8] = bytes([mark]) * 8
            if bytes(view[:8]) != bytes([mark]) * 8:
                clashes.append(mark)
            pool.release(view)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not clashes
    assert pool.free_chunks == 3
