from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_hetckpt.checkpoint import direct_io
from lightning_hetckpt.checkpoint.direct_io import (
    DirectFile,
    read_into,
    supports_direct,
    write_durably,
)
from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, padded
from lightning_hetckpt.errors import CorruptCheckpointError, ShortWriteError

SIZES = [0, 1, 4095, 4096, 4097, 3 * 4096, 50_001]


def aligned(data: bytes) -> memoryview:
    """The bytes in page-aligned memory, padded to whole blocks with ones that no file may show."""
    view = memoryview(mmap.mmap(-1, max(padded(len(data)), BLOCK_BYTES)))[: padded(len(data))]
    view[:] = b"\xff" * len(view)
    view[: len(data)] = data
    return view


def save(path: Path, data: bytes, direct: bool) -> DirectFile:
    with DirectFile(path, len(data), direct) as file:
        view = aligned(data)
        for start in range(0, len(view), 4 * BLOCK_BYTES):
            file.write(view[start : start + 4 * BLOCK_BYTES], start)
    return file


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_file_holds_exactly_the_bytes_given_whatever_its_length(tmp_path, nbytes, direct) -> None:
    data = os.urandom(nbytes)
    save(tmp_path / "file", data, direct)
    assert (tmp_path / "file").read_bytes() == data


def test_an_old_longer_file_of_the_name_leaves_nothing_behind(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"old" * 10_000)
    save(tmp_path / "file", b"new", direct=True)
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 50_001])
def test_a_reused_file_keeps_its_room_and_holds_the_new_bytes_alone(tmp_path, nbytes, before, direct) -> None:
    (tmp_path / "file").write_bytes(b"o" * before)
    inode = (tmp_path / "file").stat().st_ino
    data = os.urandom(nbytes)
    with DirectFile(tmp_path / "file", nbytes, direct, reuse=True) as file:
        assert (tmp_path / "file").stat().st_size >= before
        file.write(aligned(data), 0)
    assert (tmp_path / "file").read_bytes() == data
    assert (tmp_path / "file").stat().st_ino == inode


def test_a_reused_file_that_was_not_written_to_its_end_is_not_finished(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"o" * 50_000)
    file = DirectFile(tmp_path / "file", 10_000, direct=False, reuse=True)
    file.write(aligned(b"x" * 4096), 0)
    with pytest.raises(ShortWriteError, match="holds 4096 of 12288 bytes"):
        file.finish()


def test_a_file_that_cannot_be_blanked_is_closed(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"o" * 50_000)
    monkeypatch.setattr(direct_io.os, "pwrite", lambda fd, view, at: 100)
    with pytest.raises(ShortWriteError, match="blanked 100 of its first 4096 bytes"):
        DirectFile(tmp_path / "file", 10_000, direct=False, reuse=True)


def test_nothing_is_reused_where_nothing_is(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "file", 10_000, direct=False, reuse=True)


def resident_pages(path: Path) -> int:
    """How many pages of the file the page cache holds, as the kernel tells it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    length = path.stat().st_size
    pages = ctypes.create_string_buffer(length // mmap.PAGESIZE)
    with path.open("rb") as file:
        address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    try:
        assert libc.mincore(address, length, pages) == 0
    finally:
        libc.munmap(address, length)
    return sum(byte & 1 for byte in pages.raw[: length // mmap.PAGESIZE])


def test_a_buffered_file_leaves_no_more_than_its_newest_write_in_the_page_cache(tmp_path) -> None:
    if not supports_direct(tmp_path):
        pytest.skip("the files of this file system may live in the page cache alone")
    size = 2**20
    with DirectFile(tmp_path / "file", 8 * size, direct=False) as file:
        view = aligned(os.urandom(size))
        for number in range(8):
            file.write(view, number * size)
            assert resident_pages(tmp_path / "file") <= size // mmap.PAGESIZE
    assert resident_pages(tmp_path / "file") == 0
    assert (tmp_path / "file").read_bytes() == bytes(view) * 8


@pytest.mark.parametrize("direct", [True, False])
def test_each_buffered_write_is_sent_off_at_once_and_awaited_behind_the_next(
    tmp_path, monkeypatch, direct
) -> None:
    if direct and not supports_direct(tmp_path):
        pytest.skip("no direct I/O here")
    seen = []
    monkeypatch.setattr(direct_io, "_sync_range", lambda fd, *what: seen.append(what))
    with DirectFile(tmp_path / "file", 3 * 4096, direct) as file:
        for number in range(3):
            file.write(aligned(b"x" * 4096), number * 4096)
    start, wait = direct_io._SYNC_START, direct_io._SYNC_AND_WAIT
    assert seen == (
        []
        if direct
        else [
            (0, 4096, start),
            (4096, 4096, start),
            (0, 4096, wait),
            (8192, 4096, start),
            (4096, 4096, wait),
        ]
    )


class SyncLibc:
    """A C library that can flush a range and fails to, or one that has no such function."""

    def __init__(self, code: int | None) -> None:
        if code is not None:
            self.sync_file_range = type("Call", (), {"__call__": lambda *_: -1})()


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EINVAL])
def test_where_the_system_cannot_flush_a_range_the_file_is_flushed_at_its_end(
    tmp_path, monkeypatch, code
) -> None:
    monkeypatch.setattr(direct_io.ctypes, "CDLL", lambda *_, **__: SyncLibc(code))
    monkeypatch.setattr(direct_io.ctypes, "get_errno", lambda: code)
    data = os.urandom(50_001)
    save(tmp_path / "file", data, direct=False)
    assert (tmp_path / "file").read_bytes() == data


def test_a_drive_that_fails_while_a_range_is_flushed_fails_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(direct_io.ctypes, "CDLL", lambda *_, **__: SyncLibc(errno.EIO))
    monkeypatch.setattr(direct_io.ctypes, "get_errno", lambda: errno.EIO)
    file = DirectFile(tmp_path / "file", 4096, direct=False)
    with pytest.raises(OSError, match=r"writing back up to 4096 bytes at offset 0.*file"):
        file.write(aligned(b"x" * 4096), 0)
    file.abort()


def test_a_link_is_not_followed_for_writing(tmp_path) -> None:
    (tmp_path / "victim").write_bytes(b"keep me")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="file"):
        DirectFile(tmp_path / "file", 1, direct=True)
    assert (tmp_path / "victim").read_bytes() == b"keep me"


def refuse_at_open(monkeypatch) -> None:
    real = os.open

    def opening(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(direct_io.os, "open", opening)


def refuse_at_write(monkeypatch) -> None:
    real = os.pwrite

    def writing(fd, *args):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *args)

    monkeypatch.setattr(direct_io.os, "pwrite", writing)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_write])
def test_where_direct_io_is_refused_the_file_is_buffered_and_says_so(tmp_path, monkeypatch, refuse) -> None:
    refuse(monkeypatch)
    data = os.urandom(50_001)
    file = save(tmp_path / "file", data, direct=True)
    assert not file.direct
    assert (tmp_path / "file").read_bytes() == data
    assert not supports_direct(tmp_path)


def test_an_invalid_argument_after_a_good_direct_write_is_an_error_and_no_refusal(
    tmp_path, monkeypatch
) -> None:
    if not supports_direct(tmp_path):
        pytest.skip("no direct I/O here")
    file = DirectFile(tmp_path / "file", 2 * BLOCK_BYTES, direct=True)
    file.write(aligned(b"a" * BLOCK_BYTES), 0)
    refuse_at_write(monkeypatch)
    with pytest.raises(OSError, match=r"4096 bytes at offset 4096.*file"):
        file.write(aligned(b"b" * BLOCK_BYTES), BLOCK_BYTES)
    file.abort()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [4096, 5000, 3 * 4096 + 1])
def test_short_writes_are_gone_on_with(tmp_path, monkeypatch, direct, most) -> None:
    real = os.pwrite
    # The kernel writes whole blocks here and admits fewer, as if the rest of the last one were lost.
    monkeypatch.setattr(
        direct_io.os, "pwrite", lambda fd, view, at: min(most, real(fd, view[: padded(most)], at))
    )
    data = os.urandom(50_001)
    save(tmp_path / "file", data, direct)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("taken", [0, 100])
def test_a_write_that_gets_nowhere_is_an_error_with_path_offset_and_bytes(
    tmp_path, monkeypatch, taken
) -> None:
    monkeypatch.setattr(direct_io.os, "pwrite", lambda fd, view, at: taken)
    file = DirectFile(tmp_path / "file", 10_000, direct=False)
    with pytest.raises(ShortWriteError, match=rf"file: wrote {taken} of 8192 bytes at offset 4096"):
        file.write(aligned(b"x" * 8192), 4096)
    file.abort()


@contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    """Let the kernel itself take short writes and then refuse, as a full drive does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_drive_is_an_error_with_path_and_offset(tmp_path, direct) -> None:
    file = DirectFile(tmp_path / "file", 10 * BLOCK_BYTES, direct)
    with (
        files_no_longer_than(3 * BLOCK_BYTES),
        pytest.raises(OSError, match=r"at offset 12288.*file") as full,
    ):
        file.write(aligned(os.urandom(10 * BLOCK_BYTES)), 0)
    assert full.value.errno == errno.EFBIG
    file.abort()
    file.abort()


@pytest.mark.parametrize(("nbytes", "offset"), [(100, 0), (4096, 100), (8192, 8192), (4096, 12288)])
def test_a_write_off_the_blocks_or_behind_the_end_is_refused(tmp_path, nbytes, offset) -> None:
    with DirectFile(tmp_path / "file", 12_000, direct=False) as file:
        with pytest.raises(ValueError, match=f"{nbytes} bytes at offset {offset} does not fit"):
            file.write(aligned(b"x" * 8192)[:nbytes], offset)
        file.write(aligned(b"x" * 12_000), 0)


def test_a_file_that_lacks_its_end_is_not_finished(tmp_path) -> None:
    file = DirectFile(tmp_path / "file", 10_000, direct=False)
    file.write(aligned(b"x" * 4096), 0)
    with pytest.raises(ShortWriteError, match="holds 4096 of 12288 bytes"):
        file.finish()


def test_an_error_of_the_flush_is_told_once_and_the_file_is_closed(tmp_path, monkeypatch) -> None:
    flushes = []

    def failing(fd: int) -> None:
        flushes.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct_io.os, "fdatasync", failing)
    file = DirectFile(tmp_path / "file", 4096, direct=False)
    file.write(aligned(b"x" * 4096), 0)
    with pytest.raises(OSError, match=r"finishing 4096 bytes.*file"):
        file.finish()
    file.abort()
    assert len(flushes) == 1


def test_the_question_for_direct_io_agrees_with_the_kernel_and_leaves_nothing(tmp_path) -> None:
    view = aligned(b"x" * BLOCK_BYTES)
    try:
        fd = os.open(tmp_path / "asked", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            expected = os.pwrite(fd, view, 0) == BLOCK_BYTES
        finally:
            os.close(fd)
    except OSError:
        expected = False
    (tmp_path / "asked").unlink(missing_ok=True)
    assert supports_direct(tmp_path) is expected
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_supports_nothing(tmp_path) -> None:
    assert not supports_direct(tmp_path / "missing")


def test_a_durable_write_is_flushed_before_it_gets_its_name_and_its_name_is_flushed_after(
    tmp_path, monkeypatch
) -> None:
    events = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def spy(*args, name=name, real=real):
            events.append((name, stat.S_ISDIR(os.fstat(args[0]).st_mode)) if name == "fsync" else (name,))
            return real(*args)

        monkeypatch.setattr(direct_io.os, name, spy)
    write_durably(tmp_path / "file", b"data")
    assert events == [("fsync", False), ("replace",), ("fsync", True)]
    assert (tmp_path / "file").read_bytes() == b"data"


def test_a_durable_write_that_fails_leaves_the_old_bytes_and_nothing_else(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def failing(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct_io.os, "replace", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_reading_fills_the_view_from_the_offset_on_also_when_the_kernel_gives_little(
    tmp_path, monkeypatch
) -> None:
    data = os.urandom(10_000)
    (tmp_path / "file").write_bytes(data)
    real = os.preadv
    monkeypatch.setattr(direct_io.os, "preadv", lambda fd, views, at: real(fd, [views[0][:777]], at))
    view = memoryview(bytearray(9000))
    read_into(tmp_path / "file", 1000, view)
    assert view == data[1000:]


def test_an_early_end_is_corruption_with_path_and_offset(tmp_path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(
        CorruptCheckpointError, match=r"file: ends at byte 100, expected 50 bytes from offset 60"
    ):
        read_into(tmp_path / "file", 60, memoryview(bytearray(50)))
