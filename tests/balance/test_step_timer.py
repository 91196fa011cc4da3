from __future__ import annotations

import pytest
import torch

from lightning_hetckpt.balance.step_timer import StepTimer
from tests.doubles import ManualClock

# Whole seconds are exact in floats, so medians of equal steps are equal, too.


class Rank:
    """A rank that takes these seconds for the parts of a step, on a clock of its own."""

    def __init__(self, timer: StepTimer, clock: ManualClock) -> None:
        self.timer, self.clock = timer, clock

    def step(
        self,
        samples: int = 8,
        compute_s: float = 4.0,
        load_s: float | None = None,
        wait_s: float = 100.0,
        whole: bool = True,
        reduces: bool = True,
        callbacks_s: float = 50.0,
    ) -> None:
        if load_s is not None:
            self.timer.fetch_started()
            self.clock.advance(load_s)
            self.timer.batch_fetched()
        self.clock.advance(callbacks_s)
        self.timer.batch_started(samples, whole)
        self.clock.advance(callbacks_s)
        self.timer.forward_started()
        self.clock.advance(compute_s)
        if reduces:
            self.timer.bucket_ready(is_last=True)
            self.clock.advance(wait_s)
        self.timer.backward_ended()
        self.clock.advance(wait_s)

    def steps(self, count: int, **parts: float) -> None:
        for _ in range(count):
            self.step(**parts)  # type: ignore[arg-type]


@pytest.fixture
def rank() -> Rank:
    clock = ManualClock()
    return Rank(StepTimer("cpu", clock), clock)


def work(rank: Rank) -> tuple[int, float, int, float | None]:
    """What the rank tells of its own work in a window."""
    window = rank.timer.window()
    assert window is not None
    return window.samples, window.compute_s, window.count, window.spread_s


def warm(rank: Rank, samples: int = 8) -> None:
    rank.steps(3, samples=samples, compute_s=999.0)


def test_a_step_counts_from_forward_to_the_last_gradient_and_no_waiting_is_work(rank: Rank) -> None:
    warm(rank)
    rank.steps(5, compute_s=4.0, wait_s=1000.0)
    assert work(rank) == (8, 4.0, 5, 0.0)


def test_loading_counts_as_work(rank: Rank) -> None:
    warm(rank)
    rank.steps(5, compute_s=4.0, load_s=3.0)
    window = rank.timer.window()
    assert window is not None
    assert window.compute_s == 7.0


def test_without_an_all_reduce_the_end_of_backward_counts(rank: Rank) -> None:
    warm(rank)
    rank.steps(4, compute_s=4.0, reduces=False)
    window = rank.timer.window()
    assert window is not None
    assert window.compute_s == 4.0


def test_the_first_forward_and_the_first_last_gradient_of_a_batch_count(rank: Rank) -> None:
    warm(rank)
    for _ in range(4):
        rank.timer.batch_started(8)
        for _ in range(2):  # a second optimizer, or a module that is called again
            rank.timer.forward_started()
            rank.clock.advance(2.0)
            rank.timer.bucket_ready(is_last=True)
            rank.clock.advance(60.0)
            rank.timer.backward_ended()
    window = rank.timer.window()
    assert window is not None
    assert window.compute_s == 2.0


def test_the_first_steps_of_a_run_are_left_out(rank: Rank) -> None:
    rank.steps(3, compute_s=500.0)
    rank.steps(2, compute_s=4.0)
    assert rank.timer.window() is None
    rank.step(compute_s=4.0)
    assert work(rank) == (8, 4.0, 3, 0.0)


def test_a_new_batch_size_starts_a_new_window_without_its_first_step(rank: Rank) -> None:
    warm(rank)
    rank.steps(10, samples=8, compute_s=4.0)
    rank.steps(4, samples=12, compute_s=6.0)
    assert work(rank) == (12, 6.0, 3, 0.0)


def test_the_remainder_of_an_epoch_is_left_out(rank: Rank) -> None:
    warm(rank)
    rank.steps(3)
    rank.step(samples=3, compute_s=1.0, whole=False)
    rank.steps(3)
    assert work(rank) == (8, 4.0, 6, 0.0)


def test_all_backward_passes_of_a_step_are_work_and_the_all_reduces_between_them_are_not(rank: Rank) -> None:
    warm(rank)
    for _ in range(4):
        rank.timer.batch_started(8)
        rank.timer.forward_started()
        for _ in range(2):
            rank.clock.advance(1.0)
            rank.timer.backward_started()
            rank.clock.advance(2.0)
            rank.timer.bucket_ready(is_last=True)
            rank.clock.advance(60.0)
            rank.timer.backward_ended()
            rank.timer.optimizer_started()
            rank.clock.advance(4.0)
            rank.timer.optimizer_ended()
    assert work(rank) == (8, 14.0, 4, 0.0)


def phased_step(rank: Rank, buckets: int = 3, optimizer: bool = True) -> None:
    """Load 1 s, move 2 s, forward 4 s; buckets are ready 8 s apart, and each takes 16 s on the wire in turn."""
    timer, clock = rank.timer, rank.clock
    timer.fetch_started()
    clock.advance(1.0)
    timer.batch_fetched()
    clock.advance(2.0)
    timer.batch_moved()
    clock.advance(50.0)
    timer.batch_started(8)
    timer.forward_started()
    clock.advance(4.0)
    timer.backward_started()
    reduced = []
    for bucket in range(buckets):
        clock.advance(8.0)
        reduced.append(timer.bucket_ready(is_last=bucket == buckets - 1))
    clock.advance(8.0)  # after the first was handed over 16 s have passed for two buckets more
    if buckets == 1:
        clock.advance(8.0)
    for done in reduced:
        done()
        clock.advance(16.0)
    timer.backward_ended()
    if optimizer:
        timer.optimizer_started()
        with timer.waiting():
            clock.advance(500.0)
        clock.advance(32.0)
        timer.optimizer_ended()


def test_every_phase_is_told_apart(rank: Rank) -> None:
    for _ in range(7):
        phased_step(rank)
    window = rank.timer.window()
    assert window is not None
    assert window.compute_s == 1 + 2 + 4 + 3 * 8 + 32
    assert (window.load_s, window.backward_s, window.first_bucket_s) == (1.0, 24.0, 8.0)
    # The first bucket: 8 s to 32 s; the second waits for it and ends 16 s later; then the last one.
    assert (window.hidden_s, window.tail_s) == (24.0 + 16.0, 16.0)
    assert window.step_s == 3 + 50 + 4 + 24 + 8 + 48 + 500 + 32


def test_one_bucket_alone_hides_nothing(rank: Rank) -> None:
    for _ in range(7):
        phased_step(rank, buckets=1)
    window = rank.timer.window()
    assert window is not None
    assert (window.backward_s, window.first_bucket_s) == (8.0, 8.0)
    assert (window.hidden_s, window.tail_s) == (0.0, 16.0)


def test_the_time_in_which_the_network_waits_for_the_next_bucket_is_no_exchange(rank: Rank) -> None:
    for _ in range(7):
        rank.timer.batch_started(8)
        rank.timer.forward_started()
        rank.timer.backward_started()
        for bucket in range(3):
            rank.clock.advance(10.0)
            reduced = rank.timer.bucket_ready(is_last=bucket == 2)
            rank.clock.advance(1.0)
            reduced()
        rank.timer.backward_ended()
    window = rank.timer.window()
    assert window is not None
    assert (window.hidden_s, window.tail_s) == (2.0, 1.0)


def test_the_optimizer_is_spread_over_the_batches_that_it_accumulates(rank: Rank) -> None:
    for step in range(11):
        phased_step(rank, optimizer=step % 4 == 2)
    window = rank.timer.window()
    assert window is not None
    assert window.compute_s == 31 + 32 * 2 / 8


def test_a_step_behind_an_interruption_is_left_out_and_the_one_before_has_no_length(rank: Rank) -> None:
    warm(rank)
    rank.steps(3)
    rank.timer.interrupted()
    rank.clock.advance(10_000.0)
    rank.step(compute_s=77.0)
    rank.steps(1)
    rank.timer.fetch_started()
    window = rank.timer.window()
    assert window is not None
    assert (window.compute_s, window.count) == (4.0, 4)
    assert window.step_s == 4 + 2 * 50 + 2 * 100


def test_where_every_step_is_interrupted_every_second_one_counts(rank: Rank) -> None:
    for _ in range(20):
        rank.step()
        rank.timer.interrupted()
    assert work(rank) == (8, 4.0, 7, 0.0)


def test_a_skipped_step_is_left_out(rank: Rank) -> None:
    warm(rank)
    rank.steps(3)
    rank.step()
    rank.timer.step_skipped()
    assert work(rank) == (8, 4.0, 3, 0.0)


def test_a_step_that_never_reached_its_last_gradient_is_left_out(rank: Rank) -> None:
    warm(rank)
    rank.steps(3)
    rank.timer.batch_started(8)
    rank.timer.forward_started()
    rank.clock.advance(33.0)
    rank.steps(1)
    assert work(rank) == (8, 4.0, 4, 0.0)


def test_a_backward_without_forward_means_nothing(rank: Rank) -> None:
    warm(rank)
    rank.timer.batch_started(8)
    rank.timer.bucket_ready(is_last=True)
    rank.timer.backward_ended()
    rank.steps(3)
    assert work(rank) == (8, 4.0, 3, 0.0)


def test_a_batch_that_was_drawn_before_a_window_keeps_its_loading(rank: Rank) -> None:
    warm(rank)
    rank.steps(3, load_s=1.0)
    rank.timer.fetch_started()
    rank.clock.advance(9.0)
    rank.timer.batch_fetched()
    assert work(rank) == (8, 5.0, 3, 0.0)
    rank.step()
    rank.steps(2, load_s=9.0)
    assert work(rank) == (8, 13.0, 3, 0.0)


def test_outliers_do_not_move_the_median_and_do_not_count(rank: Rank) -> None:
    warm(rank)
    for compute_s in (4.0, 4.0, 5.0, 3.0, 4.0, 5.0, 3.0, 900.0, 800.0):
        rank.step(compute_s=compute_s)
    window = rank.timer.window()
    assert window is not None
    assert (window.compute_s, window.count) == (4.0, 7)
    assert window.spread_s == pytest.approx(1.4826)


def test_a_window_is_told_once(rank: Rank) -> None:
    warm(rank)
    rank.steps(5)
    assert rank.timer.window() is not None
    assert rank.timer.window() is None


def test_too_few_steps_wait_for_more(rank: Rank) -> None:
    warm(rank)
    rank.steps(2)
    assert rank.timer.window() is None
    rank.steps(1)
    assert work(rank) == (8, 4.0, 3, 0.0)


def test_a_run_that_never_asks_for_a_window_keeps_a_bounded_number_of_steps(rank: Rank) -> None:
    rank.steps(2000)
    window = rank.timer.window()
    assert window is not None
    assert window.count == 512


class DeviceEvent:
    """An event on a device whose clock the test moves; `done_s` is how far the device has come."""

    clock = ManualClock()
    done_s = 0.0
    at_s: float

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at_s = self.clock.now_s

    def query(self) -> bool:
        return self.at_s <= DeviceEvent.done_s

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.query()
        assert end.query(), "elapsed_time of an event that the device has not reached raises in torch"
        return (end.at_s - self.at_s) * 1000


@pytest.fixture
def cuda_rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    DeviceEvent.clock, DeviceEvent.done_s = ManualClock(), 0.0
    return Rank(StepTimer("cuda"), DeviceEvent.clock)


def test_on_a_gpu_a_step_is_read_when_the_device_has_done_it(cuda_rank: Rank) -> None:
    for _ in range(20):
        cuda_rank.step(compute_s=4.0, load_s=2.0)
        DeviceEvent.done_s = cuda_rank.clock.now_s - 400.0  # the device lags by one to two steps
    first = cuda_rank.timer.window()
    assert first is not None
    assert (first.compute_s, first.samples) == (6.0, 8)
    DeviceEvent.done_s = cuda_rank.clock.now_s
    cuda_rank.steps(3, compute_s=4.0, load_s=2.0)
    DeviceEvent.done_s = cuda_rank.clock.now_s
    second = cuda_rank.timer.window()
    assert second is not None
    assert first.count + second.count == 20  # of 23, the first three are left out, none is lost or told twice


def test_on_a_gpu_that_lags_too_far_steps_are_lost_and_nobody_waits(cuda_rank: Rank) -> None:
    cuda_rank.steps(20)
    assert cuda_rank.timer.window() is None
    DeviceEvent.done_s = cuda_rank.clock.now_s
    cuda_rank.steps(20)
    DeviceEvent.done_s = cuda_rank.clock.now_s
    assert cuda_rank.timer.window() is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_gpu_more_work_takes_more_seconds() -> None:
    timer = StepTimer("cuda")
    seconds = []
    for size in (256, 4096):
        matrix = torch.ones(size, size, device="cuda")
        for _ in range(12):
            timer.fetch_started()
            timer.batch_started(size)
            timer.forward_started()
            for _ in range(20):
                matrix = matrix @ matrix * 0
            timer.bucket_ready(is_last=True)
        torch.cuda.synchronize()
        window = timer.window()
        assert window is not None
        seconds.append(window.compute_s)
    assert 0 < seconds[0] < seconds[1]


def test_an_exchange_in_the_middle_of_a_step_is_no_work(rank: Rank) -> None:
    warm(rank)
    for _ in range(4):
        rank.timer.batch_started(8)
        with rank.timer.waiting():  # before the forward pass nothing counts anyway
            rank.clock.advance(7.0)
        rank.timer.forward_started()
        rank.clock.advance(1.0)
        for _ in range(2):
            with rank.timer.waiting():
                rank.clock.advance(100.0)
        rank.clock.advance(2.0)
        rank.timer.bucket_ready(is_last=True)
        with rank.timer.waiting():
            rank.clock.advance(50.0)
        rank.timer.backward_ended()
    assert work(rank) == (8, 3.0, 4, 0.0)
