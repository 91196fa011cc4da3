"""Whatever the tensors and however small the pool, a stripe holds exactly the rows of its plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lightning_hetckpt.checkpoint.buffer_pool import BufferPool
from lightning_hetckpt.checkpoint.drive_shares import HostDrives
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.checkpoint.save_layout import LayoutBook
from lightning_hetckpt.checkpoint.snapshot import Snapshot
from lightning_hetckpt.checkpoint.staging import Pour, Stager, pour
from lightning_hetckpt.checkpoint.staging_pool import StagingPool
from lightning_hetckpt.checkpoint.stripe_writer import StripeWriter
from lightning_hetckpt.errors import CheckpointError, TornSnapshotError
from tests.checkpoint.trees import bits
from tests.doubles import Gate

WAIT_S = 20


@pytest.fixture
def writers() -> Iterator[list[StripeWriter]]:
    writers = [StripeWriter("0"), StripeWriter("1")]
    yield writers
    for writer in writers:
        writer.shutdown()


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager()
    yield stager
    stager.close()


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(2 * CHUNK_BYTES, CHUNK_BYTES)
    yield pool
    pool.close()


def pours(
    tensors: Mapping[str, Tensor], writers: list[StripeWriter], folder: Path, ranks: int = 1
) -> list[Pour]:
    # Folders of one drive: every rank writes to all of them, whatever the drive's speed.
    host = HostDrives(tuple(range(ranks)), ("ssd",) * len(writers), (1e9,) * len(writers))
    layout = LayoutBook().shared(tensors, [host])
    return [
        Pour(
            s,
            layout.chunks(s),
            layout.header(s),
            tensors,
            writers[s.drive],
            folder / s.file,
            direct=True,
            checksum=True,
        )
        for s in layout.stripes
    ]


def read_back(folder: Path) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                found.setdefault(name, []).append(opened.get_tensor(name))
    return found


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if parts[0].dim() == 0 else torch.cat(parts)


def odd_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "step": torch.tensor(3.0),
        "nothing": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "turned": torch.randn(40, 60, generator=generator).T,
        "channels": torch.randn(6, 4, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "view": torch.randn(100, generator=generator)[7::3],
        "spread": torch.randn(1, 4, generator=generator).expand(5, 4),
        "big": torch.randn(3000, 1700, generator=generator),
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_stripes_hold_the_rows_of_their_tensors(
    tmp_path: Path, writers: list[StripeWriter], pool: BufferPool, ranks: int
) -> None:
    tensors = odd_tensors()
    assert sum(t.nbytes for t in tensors.values()) > len(pool.memory)

    files = [file.result(WAIT_S) for file in pour(pours(tensors, writers, tmp_path, ranks), pool)]

    assert {file.name for file in files} == {path.name for path in tmp_path.iterdir()}
    found = read_back(tmp_path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert bits(joined(found[name])) == bits(tensor), name
    assert pool.free_chunks == 2


def test_all_drives_get_work_from_the_first_chunk_on(tmp_path: Path, pool: BufferPool) -> None:
    order: list[tuple[str, int]] = []

    class Noting(StripeWriter):
        def put(self, stripe: Any, offset: int, *rest: Any) -> None:
            order.append((self.name, offset))
            super().put(stripe, offset, *rest)

    writers: list[StripeWriter] = [Noting("0"), Noting("1")]
    pour(pours({"t": torch.zeros(12, CHUNK_BYTES // 8)}, writers, tmp_path), pool)
    for writer in writers:
        writer.shutdown()

    names = [name for name, _ in order]
    assert names[:6] == ["0", "1"] * 3
    assert [offset for name, offset in order if name == "1"] == [n * CHUNK_BYTES for n in range(4)]


def test_an_error_in_the_middle_leaves_no_buffer_out_and_no_file_open(
    tmp_path: Path, writers: list[StripeWriter], pool: BufferPool
) -> None:
    tensors = {"fine": torch.ones(10, 10), "lost": torch.ones(10, 10), "more": torch.ones(10, 10)}
    jobs = pours(tensors, writers, tmp_path)
    del tensors["lost"]

    with pytest.raises(KeyError):
        pour(jobs, pool)

    for writer in writers:
        writer.shutdown()  # comes behind everything that was handed over
    assert pool.free_chunks == 2


def snapshot_of(tensors: dict[str, Tensor], path: Path) -> Snapshot:
    return Snapshot(path, tensors, lambda _: None)


def test_the_stager_seals_a_snapshot_that_nobody_fences_once_all_is_copied(
    tmp_path: Path, writers: list[StripeWriter], pool: BufferPool, stager: Stager
) -> None:
    tensors = odd_tensors()
    snapshot = snapshot_of(tensors, tmp_path)
    stager.drain(snapshot, pours(tensors, writers, tmp_path), pool)

    assert len(snapshot.files()) == 2
    assert snapshot.fenced


def test_a_snapshot_under_an_open_step_is_sealed_by_a_fence_alone(
    tmp_path: Path, writers: list[StripeWriter], pool: BufferPool, stager: Stager
) -> None:
    tensors = odd_tensors()
    snapshot = snapshot_of(tensors, tmp_path)
    snapshot.hold()
    stager.drain(snapshot, pours(tensors, writers, tmp_path), pool)
    stager.close()

    assert not snapshot.fenced
    assert snapshot.mark_torn("the step moved the weights")
    with pytest.raises(TornSnapshotError, match="the step moved the weights"):
        snapshot.fence()


def test_a_change_in_place_before_the_fence_is_found_and_named(
    tmp_path: Path, writers: list[StripeWriter], pool: BufferPool, stager: Stager
) -> None:
    tensors = odd_tensors()
    snapshot = snapshot_of(tensors, tmp_path)
    tensors["half"].add_(1)
    stager.drain(snapshot, pours(tensors, writers, tmp_path), pool)

    with pytest.raises(TornSnapshotError, match="such as half"):
        snapshot.files()


def test_a_failed_copy_is_told_by_its_own_snapshot_and_not_by_the_next(
    tmp_path: Path, writers: list[StripeWriter], pool: BufferPool, stager: Stager
) -> None:
    broken, whole = odd_tensors(), odd_tensors()
    first, second = snapshot_of({}, tmp_path / "1"), snapshot_of(whole, tmp_path / "2")
    for path in (first.path, second.path):
        path.mkdir()
    jobs = pours(broken, writers, first.path)
    del broken["big"]
    stager.drain(first, jobs, pool)
    stager.drain(second, pours(whole, writers, second.path), pool)

    with pytest.raises(CheckpointError, match=r"could not be copied: KeyError\('big'\)"):
        first.fence()
    second.fence()
    assert len(second.files()) == 2


def test_the_fence_waits_for_the_copy_but_not_for_the_drive(
    tmp_path: Path, pool: BufferPool, stager: Stager
) -> None:
    gate = Gate()
    writer = StripeWriter("gated")
    writer._submit(gate.pass_through)
    tensors = {"t": torch.ones(100, 100)}
    snapshot = snapshot_of(tensors, tmp_path)
    stager.drain(snapshot, pours(tensors, [writer], tmp_path), pool)

    snapshot.fence()
    tensors["t"].zero_()
    gate.open()

    snapshot.files()
    assert torch.equal(read_back(tmp_path)["t"][0], torch.ones(100, 100))
    writer.shutdown()


def test_a_fence_waits_for_the_drive_where_the_pool_is_smaller_than_the_state(
    tmp_path: Path, pool: BufferPool, stager: Stager
) -> None:
    gate = Gate()
    writer = StripeWriter("gated")
    writer._submit(gate.pass_through)
    tensors = {"t": torch.arange(5 * CHUNK_BYTES // 4, dtype=torch.float32)}
    snapshot = snapshot_of(tensors, tmp_path)
    stager.drain(snapshot, pours(tensors, [writer], tmp_path), pool)
    fenced = threading.Event()
    fencing = threading.Thread(target=lambda: (snapshot.fence(), fenced.set()))
    fencing.start()

    assert gate.arrived.wait(WAIT_S)
    assert not snapshot.fenced
    gate.open()
    assert fenced.wait(WAIT_S)
    fencing.join()
    snapshot.files()
    assert torch.equal(read_back(tmp_path)["t"][0], tensors["t"])
    writer.shutdown()


def test_other_files_of_the_snapshot_are_reported_with_it(
    tmp_path: Path, pool: BufferPool, stager: Stager
) -> None:
    entry = FileEntry("meta.pt", 1, CHUNK_BYTES, ())
    meta: Future[FileEntry] = Future()
    snapshot = snapshot_of({}, tmp_path)
    stager.drain(snapshot, [], pool, [meta])
    meta.set_result(entry)

    assert snapshot.files() == [entry]


def no_earlier_saves() -> None:
    raise AssertionError("nobody was to be waited for")


def test_the_staging_pool_keeps_to_the_size_it_was_given() -> None:
    pool = StagingPool(3 * CHUNK_BYTES, 1)
    first = pool.ready(100 * CHUNK_BYTES, no_earlier_saves)
    assert first.chunk_count == 3
    assert pool.ready(1000 * CHUNK_BYTES, no_earlier_saves) is first
    pool.close()
    with pytest.raises(CheckpointError, match="closed"):
        first.acquire()


def test_the_staging_pool_grows_only_behind_the_saves_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    drained: list[str] = []
    pool = StagingPool(None, 1)
    first = pool.ready(CHUNK_BYTES, no_earlier_saves)
    assert first.chunk_count == 8  # 64 MiB at least
    assert pool.ready(CHUNK_BYTES, no_earlier_saves) is first

    second = pool.ready(10 * CHUNK_BYTES, lambda: drained.append("now"))

    assert drained == ["now"]
    assert second.chunk_count == 10
    assert pool.ready(9 * CHUNK_BYTES, no_earlier_saves) is second
    pool.close()


def test_the_staging_pool_takes_no_more_than_its_part_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lightning_hetckpt.checkpoint.staging_pool._free_memory_bytes", lambda: 80 * CHUNK_BYTES
    )
    pool = StagingPool(None, 2)
    assert pool.ready(1000 * CHUNK_BYTES, no_earlier_saves).chunk_count == 10
    pool.close()
