"""Every byte arrives where it is wanted, however files, chunks and targets are cut; damage is refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint import direct_reads
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.span_reader import Source, Target, read, spans
from lightning_hetckpt.errors import CorruptCheckpointError

KIB = 1024
any_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(path: Path, nbytes: int, chunk_bytes: int, hashed: bool = True, seed: int = 0) -> FileEntry:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    chunks = [data[at : at + chunk_bytes] for at in range(0, nbytes, chunk_bytes)]
    hashes = tuple(xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks) if hashed else ()
    return FileEntry(path.name, nbytes, chunk_bytes, hashes)


def memory(nbytes: int, shift: int = 0) -> Any:
    return np.zeros(nbytes + shift, np.uint8)[shift:]


@given(data=st.data())
@any_folder
def test_any_targets_of_any_files_get_their_bytes(tmp_path: Path, data: st.DataObject) -> None:
    sources, truth = [], []
    for number in range(data.draw(st.integers(1, 3))):
        nbytes = data.draw(st.integers(1, 700 * KIB))
        chunk_bytes = data.draw(st.sampled_from([64 * KIB, 256 * KIB, 8192 * KIB, 5000, 4097]))
        path = tmp_path / f"{number}.bin"
        entry = write(path, nbytes, chunk_bytes, data.draw(st.booleans()), number)
        content = np.frombuffer(path.read_bytes(), np.uint8)
        targets = []
        for _ in range(data.draw(st.integers(0, 5))):
            start = data.draw(st.integers(0, nbytes - 1))
            length = data.draw(st.integers(1, nbytes - start))
            held = memory(length, data.draw(st.integers(0, 8)))
            if data.draw(st.booleans()):
                targets.append(Target(start, length, memory=held))
            else:
                targets.append(Target(start, length, put=lambda at, part, held=held: copy(held, at, part)))
            truth.append((held, content[start : start + length]))
        sources.append(Source(path, entry, targets))
    read(sources, data.draw(st.sampled_from([1, 2**20, 2**26])), data.draw(st.booleans()))
    for found, expected in truth:
        assert np.array_equal(found, expected)


def copy(held: Any, at: int, part: Any) -> None:
    held[at : at + len(part)] = part


def test_only_touched_chunks_are_read_and_each_once(tmp_path: Path) -> None:
    entry = write(tmp_path / "a.bin", 640 * KIB, 64 * KIB)
    targets = [
        Target(70 * KIB, 10, memory=memory(10)),
        Target(100 * KIB, 100 * KIB, memory=memory(100 * KIB)),
    ]
    source = Source(tmp_path / "a.bin", entry, targets)
    assert [(span.start, span.end) for span in spans([source])] == [
        (64 * KIB, 128 * KIB),
        (128 * KIB, 192 * KIB),
        (192 * KIB, 256 * KIB),
    ]
    assert read([source]) == 192 * KIB


def test_files_take_turns_so_that_all_drives_have_work(tmp_path: Path) -> None:
    sources = []
    for number in range(3):
        path = tmp_path / f"{number}.bin"
        entry = write(path, 256 * KIB, 64 * KIB)
        sources.append(Source(path, entry, [Target(0, 256 * KIB, memory=memory(256 * KIB))]))
    assert [span.source for span in spans(sources)] == [0, 1, 2] * 4


@pytest.mark.parametrize("place", [0, 70 * KIB, 299 * KIB])
@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_is_refused_by_file_and_offset(tmp_path: Path, place: int, direct: bool) -> None:
    path = tmp_path / "a.bin"
    entry = write(path, 300 * KIB, 64 * KIB)
    changed = bytearray(path.read_bytes())
    changed[place] ^= 4
    path.write_bytes(changed)
    wanted = [Target(0, 300 * KIB, memory=memory(300 * KIB))]
    with pytest.raises(CorruptCheckpointError, match=rf"a\.bin.*offset {place // (64 * KIB) * 64 * KIB} "):
        read([Source(path, entry, wanted)], direct=direct)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    entry = write(path, 300 * KIB, 64 * KIB)
    os.truncate(path, 280 * KIB)
    with pytest.raises(CorruptCheckpointError, match="ends at byte"):
        read([Source(path, entry, [Target(0, 300 * KIB, memory=memory(300 * KIB))])])


def test_a_drive_that_refuses_only_at_the_first_read_is_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    entry = write(path, 300 * KIB, 64 * KIB)
    preadv, refused = os.preadv, []

    def refuse_once(fd: int, views: Any, offset: int) -> int:
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "refused")
        return preadv(fd, views, offset)

    monkeypatch.setattr(direct_reads.os, "preadv", refuse_once)
    monkeypatch.setattr(direct_reads, "fits_direct", lambda wanted: True)
    held = memory(300 * KIB)
    read([Source(path, entry, [Target(0, 300 * KIB, memory=held)])], 1)
    assert np.array_equal(held, np.frombuffer(path.read_bytes(), np.uint8))


def test_large_targets_are_filled_without_a_copy(tmp_path: Path) -> None:
    """The buffers stay untouched: what they would hold is still zero."""
    path = tmp_path / "a.bin"
    entry = write(path, 512 * KIB, 64 * KIB)
    buffers: list[Any] = []

    def new_buffer(nbytes: int) -> Any:
        from lightning_hetckpt.checkpoint.span_reader import aligned

        buffers.append(aligned(nbytes))
        return buffers[-1]

    held = memory(2**20)
    held = held[-held.__array_interface__["data"][0] % 4096 :][: 512 * KIB]
    read([Source(path, entry, [Target(0, 512 * KIB, memory=held)])], new_buffer=new_buffer)
    assert np.array_equal(held, np.frombuffer(path.read_bytes(), np.uint8))
    assert buffers and not any(buffer.any() for buffer in buffers)
