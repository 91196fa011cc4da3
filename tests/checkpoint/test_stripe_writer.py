from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint import direct_io, stripe_writer
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.errors import CheckpointError
from tests.checkpoint.disk_saves import put, write_files
from tests.doubles import Gate

SMALL = 8192  # chunks of this size keep a test small


@pytest.fixture
def writer() -> Iterator[StripeWriter]:
    writer = StripeWriter("drive")
    yield writer
    writer.shutdown()


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(stripe_writer, "CHUNK_BYTES", SMALL)


def save(writer: StripeWriter, path: Path, data: bytes, checksum: bool = True) -> FileEntry:
    stripe = writer.open(path, len(data), direct=True, checksum=checksum)
    size = stripe_writer.CHUNK_BYTES
    for start in range(0, len(data), size):
        put(writer, stripe, start, data[start : start + size])
    return writer.close(stripe).result(timeout=60)


def test_a_file_of_several_chunks_holds_the_bytes_and_its_entry_their_hashes(tmp_path) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 12_345)
    (entry,) = write_files({tmp_path / "stripe": data})
    assert (tmp_path / "stripe").read_bytes() == data
    chunks = [data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES], data[2 * CHUNK_BYTES :]]
    hashes = tuple(xxhash.xxh3_64(chunk).hexdigest() for chunk in chunks)
    assert entry == FileEntry("stripe", len(data), CHUNK_BYTES, hashes)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 4 * SMALL))
def test_any_length_comes_back_byte_for_byte(tmp_path, writer, small_chunks, nbytes) -> None:
    data = os.urandom(nbytes)
    entry = save(writer, tmp_path / "stripe", data)
    assert (tmp_path / "stripe").read_bytes() == data
    assert len(entry.chunks) == -(-nbytes // SMALL)


def test_without_checksums_the_entry_has_the_length_and_no_hashes(tmp_path, writer, small_chunks) -> None:
    assert save(writer, tmp_path / "stripe", bytes(20_000), checksum=False) == FileEntry(
        "stripe", 20_000, SMALL, ()
    )


def test_the_caller_never_touches_a_file_nor_waits_for_one(
    tmp_path, writer, small_chunks, monkeypatch
) -> None:
    users = set()
    real = stripe_writer.DirectFile

    def watched(*args):
        users.add(threading.current_thread())
        return real(*args)

    monkeypatch.setattr(stripe_writer, "DirectFile", watched)
    gate = Gate()
    stripe = writer.open(tmp_path / "first", SMALL, True, True)
    writer.put(stripe, 0, memoryview(bytearray(SMALL)), SMALL, gate.pass_through, lambda: None)
    assert gate.arrived.wait(30)
    # The drive is stuck now, and everything below returns all the same.
    later = writer.open(tmp_path / "second", SMALL, False, True)
    put(writer, later, 0, bytes(SMALL))
    futures = [writer.close(stripe), writer.close(later)]
    assert not (tmp_path / "second").exists()
    assert not any(future.done() for future in futures)
    gate.open()
    for future in futures:
        future.exception(timeout=30)
    assert threading.current_thread() not in users


def test_a_buffer_is_read_only_after_it_is_ready_and_released_only_after_it_was_written(
    tmp_path, writer, small_chunks
) -> None:
    buffer = bytearray(SMALL)
    seen = []

    def fill() -> None:
        buffer[:] = b"f" * SMALL

    stripe = writer.open(tmp_path / "stripe", SMALL, direct=False, checksum=True)
    writer.put(
        stripe,
        0,
        memoryview(buffer),
        SMALL,
        fill,
        lambda: seen.append((tmp_path / "stripe").read_bytes()),
    )
    entry = writer.close(stripe).result(timeout=30)
    assert seen == [b"f" * SMALL]
    assert entry.chunks == (xxhash.xxh3_64(b"f" * SMALL).hexdigest(),)


def test_the_padding_of_the_last_block_holds_zeros_and_nothing_of_an_older_tensor(
    tmp_path, writer, small_chunks
) -> None:
    buffer = memoryview(bytearray(b"secret--" * (SMALL // 8)))
    unfinished = []
    stripe = writer.open(tmp_path / "stripe", 5000, direct=False, checksum=True)
    writer.put(stripe, 0, buffer, 5000, None, lambda: unfinished.append((tmp_path / "stripe").read_bytes()))
    writer.close(stripe).result(timeout=30)
    assert unfinished == [b"secret--" * 625 + bytes(8192 - 5000)]


def failing_pwrite(monkeypatch, path: Path) -> None:
    real = os.pwrite

    def pwrite(fd, view, at):
        if Path(f"/proc/self/fd/{fd}").readlink() == path and at == SMALL:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, view, at)

    monkeypatch.setattr(direct_io.os, "pwrite", pwrite)


def test_after_an_error_every_buffer_still_comes_back_and_other_files_are_whole(
    tmp_path, writer, small_chunks, monkeypatch
) -> None:
    failing_pwrite(monkeypatch, tmp_path / "bad")
    bad = writer.open(tmp_path / "bad", 4 * SMALL, True, True)
    good = writer.open(tmp_path / "good", 4 * SMALL, True, True)
    data = os.urandom(4 * SMALL)
    released = [
        put(writer, stripe, start, data[start : start + SMALL])
        for start in range(0, len(data), SMALL)
        for stripe in (bad, good)
    ]
    broken, whole = writer.close(bad), writer.close(good)
    with pytest.raises(OSError, match=r"No space left.*8192 bytes at offset 8192.*bad") as full:
        broken.result(timeout=30)
    assert full.value.errno == errno.ENOSPC
    assert all(event.wait(30) for event in released)
    assert whole.result(timeout=30).nbytes == len(data)
    assert (tmp_path / "good").read_bytes() == data
    assert save(writer, tmp_path / "next", data).nbytes == len(data)


def test_a_file_whose_folder_is_missing_fails_at_close_and_gives_its_buffers_back(
    tmp_path, writer, small_chunks
) -> None:
    stripe = writer.open(tmp_path / "missing" / "stripe", SMALL, True, True)
    released = put(writer, stripe, 0, bytes(SMALL))
    with pytest.raises(FileNotFoundError, match="missing"):
        writer.close(stripe).result(timeout=30)
    assert released.wait(30)


def test_what_ready_raises_fails_the_file_and_not_the_thread(tmp_path, writer, small_chunks) -> None:
    released = []

    def ready() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    stripe = writer.open(tmp_path / "stripe", SMALL, True, True)
    writer.put(stripe, 0, memoryview(bytearray(SMALL)), SMALL, ready, lambda: released.append(1))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        writer.close(stripe).result(timeout=30)
    assert released == [1]
    assert save(writer, tmp_path / "next", bytes(SMALL)).nbytes == SMALL


def test_what_release_raises_fails_the_file_and_not_the_thread(tmp_path, writer, small_chunks) -> None:
    def release() -> None:
        raise ValueError("not on loan")

    stripe = writer.open(tmp_path / "stripe", SMALL, False, True)
    writer.put(stripe, 0, memoryview(bytearray(SMALL)), SMALL, None, release)
    with pytest.raises(ValueError, match="not on loan"):
        writer.close(stripe).result(timeout=30)
    assert save(writer, tmp_path / "next", bytes(SMALL)).nbytes == SMALL


@pytest.mark.parametrize(
    ("offset", "used_bytes", "found"),
    [
        (SMALL, SMALL, "8192 bytes at offset 8192"),  # out of order
        (0, 100, "100 bytes at offset 0"),  # a short chunk that is not the last
        (0, 0, "0 bytes at offset 0"),
    ],
)
def test_chunks_out_of_order_or_of_odd_length_fail_the_file(
    tmp_path, writer, small_chunks, offset, used_bytes, found
) -> None:
    stripe = writer.open(tmp_path / "stripe", 2 * SMALL, True, True)
    released = put(writer, stripe, offset, bytes(used_bytes))
    with pytest.raises(
        CheckpointError, match=f"found a chunk of {found}, expected 8192 bytes at offset 0 in a file of 16384"
    ):
        writer.close(stripe).result(timeout=30)
    assert released.is_set()


def test_a_file_closed_too_early_is_an_error_that_counts_the_bytes(tmp_path, writer, small_chunks) -> None:
    stripe = writer.open(tmp_path / "stripe", 2 * SMALL, True, True)
    put(writer, stripe, 0, bytes(SMALL))
    with pytest.raises(CheckpointError, match="stripe: closed after 8192 of 16384 bytes"):
        writer.close(stripe).result(timeout=30)


def test_a_file_counts_only_after_its_bytes_then_its_name_are_flushed(
    tmp_path, writer, small_chunks, monkeypatch
) -> None:
    events = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(fd):
            events.append((name, Path(f"/proc/self/fd/{fd}").readlink()))
            return real(fd)

        monkeypatch.setattr(direct_io.os, name, call)

    spy("fdatasync")
    spy("fsync")
    stripe = writer.open(tmp_path / "stripe", SMALL, True, True)
    put(writer, stripe, 0, bytes(SMALL))
    future = writer.close(stripe)
    future.add_done_callback(lambda _: events.append(("done", tmp_path)))
    future.result(timeout=30)
    writer.shutdown()
    assert events == [("fdatasync", tmp_path / "stripe"), ("fsync", tmp_path), ("done", tmp_path)]


def test_a_refusal_of_direct_io_is_announced_once_for_all_folders_of_the_file_system(
    tmp_path, writer, small_chunks, monkeypatch, caplog
) -> None:
    real, refused = os.open, []

    def opening(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(direct_io.os, "open", opening)
    data = os.urandom(20_000)
    with caplog.at_level(logging.WARNING, logger="lightning_hetckpt"):
        for number in range(3):
            (tmp_path / str(number)).mkdir()
            save(writer, tmp_path / str(number) / "stripe", data)
            assert (tmp_path / str(number) / "stripe").read_bytes() == data
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / '0'}: no direct I/O on this file system; using the page cache"
    ]
    assert len(refused) == 1


def test_shutdown_finishes_what_is_queued_and_then_refuses_everything(tmp_path, small_chunks) -> None:
    writer = StripeWriter("drive")
    gate = Gate()
    stripe = writer.open(tmp_path / "stripe", SMALL, True, True)
    other = writer.open(
        tmp_path / "other", SMALL, True, True
    )  # nobody closes it: its descriptor must not leak
    writer.put(stripe, 0, put_buffer(), SMALL, gate.pass_through, lambda: None)
    future = writer.close(stripe)
    gate.open()
    writer.shutdown()
    writer.shutdown()
    assert future.result(timeout=0).nbytes == SMALL
    for late in (
        lambda: writer.open(tmp_path / "late", SMALL, True, True),
        lambda: writer.put(other, 0, put_buffer(), SMALL, None, lambda: None),
        lambda: writer.close(other),
    ):
        with pytest.raises(CheckpointError, match="the writer of drive is shut down"):
            late()


def put_buffer() -> memoryview:

    return memoryview(mmap.mmap(-1, SMALL))


def test_nobody_can_cancel_the_future_from_under_the_thread(tmp_path, writer, small_chunks) -> None:
    gate = Gate()
    stripe = writer.open(tmp_path / "stripe", SMALL, True, True)
    writer.put(stripe, 0, put_buffer(), SMALL, gate.pass_through, lambda: None)
    future = writer.close(stripe)
    assert not future.cancel()
    gate.open()
    assert future.result(timeout=30).nbytes == SMALL
