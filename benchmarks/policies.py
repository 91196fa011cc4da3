"""Who may change the split in a simulated run, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from benchmarks.cluster import Cluster, VirtualRun
from lightning_hetckpt.balance.controller import Controller
from lightning_hetckpt.balance.plan import BatchPlan, StepKey
from lightning_hetckpt.balance.solver import share_by_speed
from lightning_hetckpt.balance.throughput import WindowStats

LOOK_EVERY = 10  # steps from one exchange of timings to the next
CLOSE = 0.03  # what counts as settled: this far from the optimum


class Policy(Protocol):
    """Looks at the windows of all ranks and may make a new plan."""

    def look(self, stats: list[WindowStats | None], current: BatchPlan, start: StepKey) -> BatchPlan | None:
        """A plan from `start` on, or None to keep `current`."""
        ...


class Even:
    """Never changes anything."""

    def look(self, stats: list[WindowStats | None], current: BatchPlan, start: StepKey) -> BatchPlan | None:
        """Keep."""
        return None


class Proportional:
    """Shares in proportion to the samples per second of the last window."""

    def __init__(self, cluster: Cluster) -> None:
        self._bounds = cluster.bounds

    def look(self, stats: list[WindowStats | None], current: BatchPlan, start: StepKey) -> BatchPlan | None:
        """Follow the last window of each rank."""
        if None in stats:
            return None
        speeds = [window.samples / window.compute_s for window in stats if window is not None]
        shares = share_by_speed(current.global_batch_size, speeds, *self._bounds)
        return None if shares == current.shares else BatchPlan(shares, start)


class Ours:
    """The real controller."""

    def __init__(self, cluster: Cluster, explore: bool = False) -> None:
        world = len(cluster.devices)
        self.controller = Controller(world, cluster.global_batch_size, *cluster.bounds, explore=explore)

    def look(self, stats: list[WindowStats | None], current: BatchPlan, start: StepKey) -> BatchPlan | None:
        """Observe and decide, as rank 0 does."""
        self.controller.observe(stats)
        return self.controller.decide(current, start)


@dataclass(slots=True)
class Course:
    """What came of one run.

    Args:
        over: by step, how much longer than the best split's the step of the split in force truly takes.
        replans: the steps at which a new plan was made.
        look_s: processor seconds of each look at the timings.
        shares: in the end.
    """

    over: list[float]
    replans: list[int]
    look_s: list[float]
    shares: tuple[int, ...]

    def settled_after(self, begin: int = 0, end: int | None = None) -> int | None:
        """Steps from `begin` until the split stays close to the optimum; None if it never does."""
        last = max((step for step, over in enumerate(self.over[begin:end]) if over > CLOSE), default=-1)
        return None if last + 1 == len(self.over[begin:end]) else last + 1

    def noticed_after(self, begin: int) -> int | None:
        """Steps from `begin` to the next plan."""
        return next((step - begin for step in self.replans if step >= begin), None)


def simulate(
    cluster: Cluster,
    policy: Policy,
    steps: int,
    seed: int = 0,
    look_every: int = LOOK_EVERY,
    prefetch: int = 1,
    backward: bool = True,
) -> Course:
    """Train `steps` steps; a plan takes hold `prefetch` steps after it was made, when no loader has drawn yet."""
    run = VirtualRun(cluster, seed, backward)
    plans = [BatchPlan(cluster.even)]
    course = Course([], [], [], cluster.even)
    known: dict[tuple[tuple[int, ...], tuple[float, ...]], float] = {}
    for step in range(steps):
        if step and step % look_every == 0:
            stats = run.windows()
            began_s = time.process_time()
            plan = policy.look(stats, plans[-1], StepKey(0, step + prefetch))
            course.look_s.append(time.process_time() - began_s)
            if plan is not None:
                plans.append(plan)
                course.replans.append(step)
        shares = next(plan for plan in reversed(plans) if plan.start <= StepKey(0, step)).shares
        run.train(shares)
        key = (shares, tuple(each.at(step) for each in cluster.slowdowns))
        if key not in known:
            known[key] = cluster.over_optimum(shares, step)
        course.over.append(known[key])
        course.shares = shares
    return course
