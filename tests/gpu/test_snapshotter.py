"""On a GPU a snapshot is exact and nobody waits: neither the host for the device nor the device for the drives."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from lightning_hetckpt.checkpoint import restore
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, new_id
from lightning_hetckpt.checkpoint.snapshotter import Snapshot, Snapshotter
from tests.checkpoint.trees import assert_same, checkpoint, stable, trees
from tests.gpu.device import DEVICE, frozen, keep_busy, make_model, moved, spoil, train

pytestmark = pytest.mark.gpu

BUSY_S = 5.0  # longer than a snapshot of a few megabytes takes on any machine
_steps = itertools.count(
    1
)  # a save of the same step and bytes as the one before would share its files, unread
State = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture
def state() -> State:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


@pytest.fixture
def engine(tmp_path: Path, state: State) -> Iterator[Snapshotter]:
    """An engine that has planned for `state`, with its buffers made and pinned."""
    with Snapshotter() as engine:
        begin(engine, tmp_path / "first.ckpt", state).wait()
        yield engine


def begin(engine: Snapshotter, path: Path, state: State, step: int | None = None) -> Snapshot:
    return engine.begin(checkpoint(*state, next(_steps) if step is None else step), path, stable(*state))


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable"])
@pytest.mark.parametrize("buffer_bytes", [None, 2 * CHUNK_BYTES])
def test_every_snapshot_of_a_gpu_that_trains_on_is_exact(
    tmp_path: Path, how: str, buffer_bytes: int | None
) -> None:
    model = make_model(1024)  # five chunks and more
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{how: True})
    truth = []
    with Snapshotter(buffer_bytes=buffer_bytes) as engine:
        for step in range(12):
            train(model, optimizer)  # its optimizer's hook fences the snapshot before
            truth.append(frozen(checkpoint(model, optimizer, step)))
            begin(engine, tmp_path / f"{step}.ckpt", (model, optimizer), step)
        engine.wait()

    for step in range(12):
        assert_same(restore.load(tmp_path / f"{step}.ckpt"), moved(truth[step], "cpu"))


def test_neither_begin_nor_fence_waits_for_the_gpu_and_what_comes_behind_them_is_not_saved(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    truth = frozen(checkpoint(*state, step=-1))
    busy = keep_busy(BUSY_S)
    snapshot = begin(engine, tmp_path / "a.ckpt", state, step=-1)
    snapshot.fence()
    spoil(stable(*state))
    spoil(state[0].buffers())

    assert not busy.query()  # the host came here while the GPU had not even begun to copy
    snapshot.wait()
    assert_same(restore.load(tmp_path / "a.ckpt"), moved(truth, "cpu"))


def test_a_second_save_of_the_same_step_makes_nobody_wait_for_the_gpu_either(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    truth = frozen(checkpoint(*state, step=-1))
    busy = keep_busy(BUSY_S)
    snapshots = [begin(engine, tmp_path / f"{name}.ckpt", state, step=-1) for name in "ab"]
    for snapshot in snapshots:
        snapshot.fence()
    spoil(stable(*state))
    spoil(state[0].buffers())

    assert not busy.query()
    engine.wait()
    for name in "ab":
        assert_same(restore.load(tmp_path / f"{name}.ckpt"), moved(truth, "cpu"))


def test_the_copy_does_not_queue_behind_the_next_steps_work(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    torch.cuda.synchronize(DEVICE)
    snapshot = begin(engine, tmp_path / "a.ckpt", state)
    busy = keep_busy(BUSY_S)
    snapshot.wait()  # durable, out of a stream of its own

    assert not busy.query()


def test_what_the_gpu_has_queued_before_begin_is_saved(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    keep_busy(0.5)
    train(*state, steps=3)
    truth = frozen(checkpoint(*state, step=-1))
    begin(engine, tmp_path / "a.ckpt", state, step=-1).wait()

    assert_same(restore.load(tmp_path / "a.ckpt"), moved(truth, "cpu"))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_operation_of_a_snapshot_synchronizes(engine: Snapshotter, state: State, tmp_path: Path) -> None:
    torch.cuda.set_sync_debug_mode("error")  # for every thread
    try:
        for number in range(3):
            snapshot = begin(engine, tmp_path / f"{number}.ckpt", state)
            snapshot.fence()
            train(*state)
            snapshot.wait()  # the copying thread's operations count, too
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's own advice
def test_a_snapshot_calls_for_no_synchronization_of_the_device_and_for_no_memory(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    def plain() -> None:
        train(*state, steps=4)

    def with_snapshots() -> None:
        for number in range(4):
            snapshot = begin(engine, tmp_path / f"{number}.ckpt", state)
            train(*state)
            snapshot.wait()

    without, found = _runtime_calls(plain), _runtime_calls(with_snapshots)
    for call in (
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc",
        "cudaHostRegister", "cudaMallocHost", "cudaStreamCreateWithPriority",
    ):  # fmt: skip
        assert found[call] == without[call], call


def _runtime_calls(work: Callable[[], None]) -> Counter[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    return Counter(event.name for event in profile.events())


def test_twenty_snapshots_ask_the_gpu_for_no_memory(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    def step(number: int) -> None:
        train(*state)
        begin(engine, tmp_path / f"{number}.ckpt", state).wait()

    def held() -> tuple[int, ...]:
        # A few kilobytes of small tensors laid side by side come out of what torch keeps already.
        found = torch.cuda.memory_stats(DEVICE)
        return torch.cuda.memory_allocated(DEVICE), *(
            found[name] for name in ("segment.all.allocated", "reserved_bytes.all.peak")
        )

    step(0)
    before = held()
    for number in range(1, 21):
        step(number)

    assert held() == before


def test_the_buffers_are_pinned_once_and_let_go_at_the_end(tmp_path: Path, state: State) -> None:
    with Snapshotter() as engine:
        begin(engine, tmp_path / "a.ckpt", state).wait()
        assert engine._pool._pool is not None
        memory = torch.frombuffer(engine._pool._pool.memory, dtype=torch.uint8)
        assert memory.is_pinned()
        begin(engine, tmp_path / "b.ckpt", state).wait()
        assert memory.data_ptr() == torch.frombuffer(engine._pool._pool.memory, dtype=torch.uint8).data_ptr()
    assert not memory.is_pinned()


def test_a_driver_that_refuses_to_pin_costs_speed_and_raises_nothing_later(
    tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = torch.zeros(CHUNK_BYTES, dtype=torch.uint8).pin_memory()
    # Memory that is pinned already is refused for real, and leaves CUDA's "last error" behind.
    monkeypatch.setattr(
        "lightning_hetckpt.checkpoint.staging_pool._address", lambda pool: int(pinned.data_ptr())
    )
    with Snapshotter() as engine:
        truth = frozen(checkpoint(*state, step=-1))
        begin(engine, tmp_path / "a.ckpt", state, step=-1).fence()
        train(*state)  # where the next kernel would find it
        engine.wait()

    assert_same(restore.load(tmp_path / "a.ckpt"), moved(truth, "cpu"))


def test_threads_that_wait_for_a_copy_leave_the_cores_to_others(
    engine: Snapshotter, state: State, tmp_path: Path
) -> None:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hetckpt")]

    def used_s() -> float:
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
        return sum(time.clock_gettime(clock) for clock in clocks)

    before_s = used_s()
    keep_busy(BUSY_S)
    begin(engine, tmp_path / "a.ckpt", state).wait()

    assert used_s() - before_s < BUSY_S / 4  # one thread that spins would use all of it


@given(tree=trees())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_of_tensors_on_the_gpu_comes_back(tmp_path: Path, tree: dict[Any, Any]) -> None:
    placed = moved(tree, DEVICE)
    path = tmp_path / f"{new_id()}.ckpt"
    with Snapshotter() as engine:
        engine.begin(placed, path, alone=True).wait()

    assert_same(restore.load(path, weights_only=False, map_location="cpu"), moved(placed, "cpu"))


_OTHER_DEVICE = """
import sys, torch
from pathlib import Path
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
torch.cuda.set_device(1)
weight = torch.ones(3_000_000, device="cuda:1")
with Snapshotter() as engine:
    for step in range(2):
        snapshot = engine.begin({"state_dict": {"w": weight}}, Path(sys.argv[1]) / f"{step}.ckpt", [weight])
        snapshot.fence()
        weight.add_(1)
        snapshot.wait()
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_on_the_second_gpu_takes_no_memory_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OTHER_DEVICE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert torch.equal(restore.load(tmp_path / "1.ckpt")["state_dict"]["w"], torch.full((3_000_000,), 2.0))
