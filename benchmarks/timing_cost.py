"""What measuring the phases of a step costs the step: `python -m benchmarks.timing_cost [--device cuda]`.

Runs every mark that the strategy makes in one step, with nothing between them, and reports the time per step.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from lightning_hetckpt.balance.step_timer import StepTimer

STEP_S = 0.020  # the step that the share is told of


def step_cost_s(device: str, buckets: int, steps: int = 2000) -> float:
    """Median host seconds that one step spends on its marks."""
    timer, seconds = StepTimer(device), []
    for step in range(steps):
        began_s = time.perf_counter()
        timer.fetch_started()
        timer.batch_fetched()
        timer.batch_moved()
        timer.batch_started(8)
        timer.forward_started()
        timer.backward_started()
        for bucket in range(buckets):
            timer.bucket_ready(is_last=bucket == buckets - 1)()
        timer.backward_ended()
        timer.optimizer_started()
        timer.optimizer_ended()
        seconds.append(time.perf_counter() - began_s)
        if device == "cuda":
            torch.cuda.synchronize()
        if step % 20 == 19:
            timer.window()
    return median(seconds)


def main() -> None:
    """Print one line per number of buckets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    for buckets in (1, 4, 16):
        cost_s = step_cost_s(device, buckets)
        print(
            f"{device}, {buckets:2d} buckets: {1e6 * cost_s:6.1f} us per step, {cost_s / STEP_S:.3%} of 20 ms"
        )


if __name__ == "__main__":
    main()
