"""The timer measures what the GPU does, by events, and the host never waits for it."""

from __future__ import annotations

import pytest
import torch

from lightning_hetckpt.balance.step_timer import StepTimer
from tests.gpu.device import DEVICE, keep_busy

pytestmark = pytest.mark.gpu

WORK_S, OTHERS_S = 0.02, 0.05


def step(timer: StepTimer, samples: int = 8, wait_s: float = 0.0) -> tuple[torch.cuda.Event, ...]:
    """A batch of which this rank works `WORK_S`; returns the truth: events around just that."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    timer.batch_started(samples)
    keep_busy(OTHERS_S)  # a callback's work
    timer.forward_started()
    began.record()
    keep_busy(WORK_S)
    ended.record()
    if wait_s:
        with timer.waiting():
            keep_busy(wait_s)
    reduced = timer.bucket_ready(is_last=True)
    keep_busy(OTHERS_S)  # the all-reduce
    reduced()
    timer.backward_ended()
    return began, ended


@pytest.mark.parametrize("wait_s", [0.0, 0.03])
def test_only_the_gpus_own_work_counts(wait_s: float) -> None:
    timer = StepTimer(DEVICE)
    truth_s = []
    for _ in range(8):
        began, ended = step(timer, wait_s=wait_s)
        torch.cuda.synchronize(DEVICE)
        truth_s.append(began.elapsed_time(ended) / 1e3)

    window = timer.window()

    assert window is not None
    assert window.samples == 8
    assert window.compute_s == pytest.approx(sorted(truth_s[3:])[len(truth_s[3:]) // 2], rel=0.2)


def test_the_host_runs_ahead_of_the_gpu_and_asks_it_nothing() -> None:
    timer = StepTimer(DEVICE)
    busy = keep_busy(5.0)
    for _ in range(3):
        timer.batch_started(8)
        timer.forward_started()
        timer.bucket_ready(is_last=True)()
        timer.backward_ended()
    assert timer.window() is None  # nothing is there to read yet

    assert not busy.query()


def test_a_host_that_is_always_many_steps_ahead_still_learns() -> None:
    timer = StepTimer(DEVICE)
    torch.cuda.synchronize(DEVICE)
    work = torch.ones(2048, 2048, device=DEVICE)
    windows = []
    for number in range(400):  # the GPU needs much longer for a step than the host
        timer.batch_started(8)
        timer.forward_started()
        for _ in range(8):
            work = work @ work
        timer.bucket_ready(is_last=True)()
        timer.backward_ended()
        if number % 20 == 19:
            windows.append(timer.window())

    assert any(window is not None for window in windows)
