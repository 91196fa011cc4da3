from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_hetckpt.checkpoint.layout import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    MANIFEST_NAME,
    META_NAME,
    new_id,
    stripe_name,
)
from lightning_hetckpt.checkpoint.verify import check_files, holds, is_checkpoint, read_manifest, verify
from lightning_hetckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoint.disk_saves import save

STRIPE = stripe_name(0, 0)


@pytest.fixture
def whole(tmp_path) -> Path:
    """A checkpoint with its stripe behind a link and of two chunks."""
    return save(tmp_path / "a.ckpt", drives=[tmp_path / "drive"], nbytes=CHUNK_BYTES + 100)


def test_a_whole_checkpoint_passes_also_through_a_link_to_it(whole, tmp_path) -> None:
    verify(whole)
    (tmp_path / "last.ckpt").symlink_to(whole)
    verify(tmp_path / "last.ckpt")
    assert holds(whole, read_manifest(whole).snapshot_id)
    assert not holds(whole, new_id())


def test_any_flipped_byte_of_a_stripe_is_found_and_the_chunk_named(whole) -> None:
    for offset in (BLOCK_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 99):
        with (whole / STRIPE).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(CorruptCheckpointError, match=f"{STRIPE}: chunk {offset // CHUNK_BYTES} "):
            verify(whole)
        with (whole / STRIPE).open("r+b") as file:
            file.seek(offset)
            file.write(bytes([byte]))
    verify(whole)


@pytest.mark.parametrize("length", [0, CHUNK_BYTES, CHUNK_BYTES + 99, CHUNK_BYTES + 101])
def test_a_cut_or_grown_stripe_is_found_without_reading_it(whole, length) -> None:
    os.truncate(whole / STRIPE, length)
    with pytest.raises(CorruptCheckpointError, match=f"holds {length} bytes, expected {CHUNK_BYTES + 100}"):
        check_files(whole, read_manifest(whole))


def test_a_missing_drive_is_found_and_asked_for(whole, tmp_path) -> None:
    shutil.rmtree(tmp_path / "drive")
    with pytest.raises(CorruptCheckpointError, match=rf"{STRIPE}: cannot be read.*is its drive mounted"):
        verify(whole)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_link_to_anything_but_a_plain_file_is_refused_and_never_read(whole, make) -> None:
    (whole / META_NAME).unlink()
    make(whole / META_NAME)
    with pytest.raises(CorruptCheckpointError, match=f"{META_NAME}: .*expected a plain file"):
        verify(whole)


def test_nothing_there_is_not_found_and_says_what_was_expected(tmp_path) -> None:
    (tmp_path / "file.ckpt").write_bytes(b"stock")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "file.ckpt"):
        with pytest.raises(CheckpointNotFoundError, match="expected the folder of a committed checkpoint"):
            read_manifest(path)
        assert not is_checkpoint(path)


def test_a_damaged_manifest_is_corruption_and_still_a_checkpoint(whole) -> None:
    data = bytearray((whole / MANIFEST_NAME).read_bytes())
    data[-20] ^= 1
    (whole / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=MANIFEST_NAME):
        verify(whole)
    assert is_checkpoint(whole)
    assert is_checkpoint(whole / META_NAME)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_manifest_that_is_no_plain_file_is_corruption_and_nobody_waits_for_it(whole, make) -> None:
    (whole / MANIFEST_NAME).unlink()
    make(whole / MANIFEST_NAME)
    with pytest.raises(CorruptCheckpointError, match=MANIFEST_NAME):
        read_manifest(whole)


def test_a_link_to_the_manifest_of_another_checkpoint_is_not_followed(whole, tmp_path) -> None:
    other = save(tmp_path / "other.ckpt")
    (other / MANIFEST_NAME).unlink()
    (other / MANIFEST_NAME).symlink_to(whole / MANIFEST_NAME)
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json: cannot be read"):
        read_manifest(other)


def test_a_manifest_larger_than_any_is_refused_before_it_is_read(whole) -> None:
    os.truncate(whole / MANIFEST_NAME, 2**40)
    with pytest.raises(CorruptCheckpointError, match=f"{2**40} bytes, expected a plain file of at most"):
        read_manifest(whole)
