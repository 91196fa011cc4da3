"""How soon and how closely the real controller finds the best split, on clusters that exist in numbers only.

    python -m benchmarks.simulate --json out.json --plots out/

Each cluster trains in virtual time (`benchmarks/cluster.py`) from an even split on, under three policies:

- `even`          the same share for every device: DDP, and AdaptDL at a fixed global batch
- `proportional`  shares in proportion to the measured samples per second, in the manner of LB-BSP
- `ours`          `lightning_hetckpt.balance.controller.Controller`, the very code that `HeteroDDP` runs

A second table lets the global batch grow as far as it pays: AdaptDL's goodput with an equal split against ours.
The devices' speeds are rough ratios of published figures, not measurements; only the shape of a cluster is real.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from benchmarks.cluster import Cluster, Slowdown, VirtualRun
from benchmarks.machine import describe, write_json
from lightning_hetckpt.balance.controller import Controller
from lightning_hetckpt.balance.plan import BatchPlan, StepKey
from lightning_hetckpt.balance.solver import (
    DeviceModel,
    OptPerf,
    optperf_over,
    share_by_speed,
    solve,
    step_s,
)
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


# ------------------------------------------------------------ clusters


def device(sample_ms: float, load_ms: float = 0.0) -> DeviceModel:
    """A device of which about two thirds of the time are backward, plus what it waits for its input."""
    return DeviceModel(sample_ms / 1e3, (8.0 + load_ms) / 1e3, sample_ms / 1.5e3, 4.0 / 1e3)


# Six buckets, evenly ready from a quarter of the backward pass on.
READY = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


def fleet(
    kinds: Sequence[tuple[int, float] | tuple[int, float, float]],
    samples: int,
    comm_s: float,
    noise: float = 0.03,
    **more: Any,
) -> Cluster:
    """So many devices of each kind, `(count, milliseconds per sample)`, and `samples` for each on average.

    A third number is the milliseconds that these wait for their input in each step.
    """
    devices = [device(*times_ms) for count, *times_ms in kinds for _ in range(count)]
    transfer_s = tuple([comm_s / len(READY)] * len(READY))
    return Cluster(tuple(devices), samples * len(devices), READY, transfer_s, noise, **more)


CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "2 devices, 2:1": lambda: fleet([(1, 2.0), (1, 4.0)], 32, 0.02),
    "2 devices, 4:1": lambda: fleet([(1, 1.0), (1, 4.0)], 32, 0.02),
    "3 GPUs of three generations (A5000, A4000, P4000)": lambda: fleet(
        [(1, 1.0), (1, 1.5), (1, 3.4)], 32, 0.03
    ),
    "16 GPUs of three kinds (4 A100, 4 V100, 8 RTX 6000)": lambda: fleet(
        [(4, 0.6), (4, 1.1), (8, 1.5)], 32, 0.03
    ),
    "the same 16, slow network": lambda: fleet([(4, 0.6), (4, 1.1), (8, 1.5)], 32, 0.09),
    "the same 16, slow network, the A100 load for 25 ms": lambda: fleet(
        [(4, 0.6, 25.0), (4, 1.1), (8, 1.5)], 32, 0.06
    ),
    "the same 16, 10 % noise and stalls": lambda: fleet(
        [(4, 0.6), (4, 1.1), (8, 1.5)], 32, 0.03, noise=0.1, stalls=0.01
    ),
    "8 equal, one shared with a co-tenant at step 200 to 300": lambda: fleet(
        [(8, 1.5)], 32, 0.03, slowdowns=(Slowdown(3, 200, 300, 2.0),)
    ),
    "8 equal, one slides to 1.6x in steps 100 to 300": lambda: fleet(
        [(8, 1.5)], 32, 0.03, slowdowns=(Slowdown(3, 100, 300, 1.6, slides=True),)
    ),
    "16 equal, 10 % noise": lambda: fleet([(16, 1.5)], 32, 0.03, noise=0.1),
    "64 of four kinds": lambda: fleet([(16, 0.6), (16, 1.1), (16, 1.5), (16, 3.0)], 32, 0.04),
    "1,000 of four kinds": lambda: fleet([(250, 0.6), (250, 1.1), (250, 1.5), (250, 3.0)], 32, 0.04),
    "10,000 of four kinds": lambda: fleet([(2500, 0.6), (2500, 1.1), (2500, 1.5), (2500, 3.0)], 32, 0.04),
}
QUICK = ("2 devices, 2:1", "16 GPUs of three kinds (4 A100, 4 V100, 8 RTX 6000)")


def policies(cluster: Cluster) -> dict[str, Policy]:
    """Fresh ones for one run."""
    return {"even": Even(), "proportional": Proportional(cluster), "ours": Ours(cluster)}


def compare(
    name: str, cluster: Cluster, steps: int, seeds: int
) -> tuple[list[dict[str, Any]], dict[str, Course]]:
    """Every policy on one cluster: the rows of the table, and the course of the first seed for the plots."""
    rows, courses = [], {}
    for policy in policies(cluster):
        runs = [simulate(cluster, policies(cluster)[policy], steps, seed) for seed in range(seeds)]
        settled = [run.settled_after(0, _first_change(cluster)) for run in runs]
        again = [
            run.settled_after(each.end if each.slides else each.begin, None if each.slides else each.end)
            for run in runs
            for each in cluster.slowdowns
        ]
        rows.append(
            {
                "cluster": name,
                "policy": policy,
                "settled_after": _worst(settled),
                "resettled_after": _worst(again) if again else None,
                "over_optimum": median(run.over[-1] for run in runs),
                "worst_over_optimum": max(run.over[-1] for run in runs),
                "replans": max(len(run.replans) for run in runs),
                "look_s": median(seconds for run in runs for seconds in run.look_s),
            }
        )
        courses[policy] = runs[0]
    return rows, courses


def _first_change(cluster: Cluster) -> int | None:
    return min((each.begin for each in cluster.slowdowns), default=None)


def _worst(steps: Sequence[int | None]) -> int | None:
    """The most steps of all runs; None if one of them never got there."""
    return None if None in steps else max(step for step in steps if step is not None)


# ------------------------------------------------------------ adaptive global batch


def goodput(samples: int, seconds: float, first: int, noise_scale: float) -> float:
    """Samples per second, each worth what it is in a batch of `first` (Pollux, OSDI 2021)."""
    return samples / seconds * (noise_scale + first) / (noise_scale + samples)


def adapt(cluster: Cluster, noise_scale: float, rounds: int = 6, steps: int = 60) -> dict[str, float]:
    """Goodput where the batch may grow: an equal split's best, ours as learnt from timings, and the best there is.

    Args:
        cluster: its global batch is the first one.
        noise_scale: gradient noise scale in samples.
        rounds: how often our batch may change, after so many steps each.
        steps: of a round.
    """
    first, world = cluster.global_batch_size, len(cluster.devices)
    candidates = sorted({round(first * 16 ** (k / 49)) for k in range(50)})

    def worth(total: int, seconds: float) -> float:
        return goodput(total, seconds, first, noise_scale)

    def truly(shares: Sequence[int]) -> float:
        return worth(sum(shares), step_s(cluster.devices, shares, cluster.network))

    equal = max(truly(share_by_speed(total, [1.0] * world)) for total in candidates)
    over = optperf_over(cluster.devices, candidates, *cluster.bounds, cluster.network)
    best = max(worth(total, each.step_s) for total, each in zip(candidates, over, strict=True) if each)

    policy, now = Ours(cluster, explore=True), cluster
    course = simulate(now, policy, steps)
    for _ in range(rounds):
        known: list[tuple[float, OptPerf]] = [
            (worth(total, each.step_s), each)
            for total, each in zip(candidates, policy.controller.predict_over(candidates), strict=True)
            if each
        ]
        top, chosen = max(known, key=lambda pair: pair[0])
        if top < 1.05 * truly(course.shares):
            break
        now = replace(cluster, global_batch_size=chosen.global_batch_size)
        course = simulate(now, policy, steps)
    return {
        "noise_scale": noise_scale,
        "first_batch": first,
        "batch": sum(course.shares),
        "equal": equal,
        "ours": truly(course.shares),
        "best": best,
        "fixed_even": truly(cluster.even),
    }


# ------------------------------------------------------------ solver


def solver_speed(repeats: int) -> dict[str, float]:
    """Milliseconds of processor time that the solver takes, the best of some repeats."""
    dice = np.random.default_rng(0)

    def many(count: int) -> list[DeviceModel]:
        return [device(float(ms)) for ms in dice.uniform(0.5, 4.0, count)]

    network = CLUSTERS["2 devices, 2:1"]().network

    def best_ms(work: Callable[[], object]) -> float:
        took = []
        for _ in range(repeats):
            began_s = time.process_time()
            work()
            took.append(time.process_time() - began_s)
        return min(took) * 1e3

    result = {}
    for count in (16, 1_000, 10_000):
        models, ones, open_end = many(count), [1] * count, [None] * count
        for multiple_of in (1, 8):
            result[f"{count} devices, multiples of {multiple_of}"] = best_ms(
                lambda m=models, o=ones, e=open_end, k=multiple_of: solve(
                    m, 32 * len(m) + 5, o, e, k, network
                )
            )
    models = many(16)
    totals = list(range(512, 512 + 50 * 37, 37))
    for multiple_of in (1, 8):
        result[f"50 global batches x 16 devices, multiples of {multiple_of}"] = best_ms(
            lambda k=multiple_of: optperf_over(models, totals, [1] * 16, [None] * 16, k, network)
        )
    return result


# ------------------------------------------------------------ report


def tables(
    rows: Sequence[dict[str, Any]], adaptive: dict[str, dict[str, float]], speed: dict[str, float]
) -> str:
    """Everything as markdown."""
    lines = [
        "| cluster | policy | settled (steps) | settled again | over the optimum | worst seed | most re-plans | a look |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        again = row["resettled_after"]
        lines.append(
            f"| {row['cluster']} | {row['policy']} | {_steps(row['settled_after'])} | "
            f"{'' if again is None else again} | {row['over_optimum']:.1%} | {row['worst_over_optimum']:.1%} | "
            f"{row['replans']} | {row['look_s'] * 1e3:.1f} ms |"
        )
    lines += [
        "",
        "| cluster | noise scale | first batch | our batch | DDP, first batch | AdaptDL, equal split | ours | best possible |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, each in adaptive.items():
        lines.append(
            f"| {name} | {each['noise_scale']:.0f} | {each['first_batch']:.0f} | {each['batch']:.0f} | "
            f"{each['fixed_even']:.0f} | {each['equal']:.0f} | {each['ours']:.0f} | {each['best']:.0f} |"
        )
    lines += ["", "| solver | processor time |", "|---|--:|"]
    lines += [f"| {name} | {ms:.2f} ms |" for name, ms in speed.items()]
    return "\n".join(lines)


def _steps(steps: int | None) -> str:
    return "never" if steps is None else str(steps)


def plot(name: str, courses: dict[str, Course], folder: Path) -> None:
    """The distance to the optimum by step, one line for each policy; nothing where matplotlib is not installed."""
    try:
        from matplotlib import figure
    except ImportError:
        return
    page = figure.Figure(figsize=(7, 3.5), layout="constrained")
    axes = page.subplots()
    for policy, course in courses.items():
        axes.plot([100 * over for over in course.over], label=policy)
    axes.set(title=name, xlabel="step", ylabel="over the best split, %")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    page.savefig(folder / ("".join(c if c.isalnum() else "-" for c in name) + ".svg"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every cluster under every policy, print the tables and keep every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--seeds", type=int, default=10, help="runs of each cluster; one from 1,000 devices on"
    )
    parser.add_argument("--quick", action="store_true", help="two clusters, one seed, 60 steps")
    parser.add_argument("--only", help="clusters with this in their names")
    parser.add_argument("--plots", type=Path, help="folder for one plot of each cluster")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.seeds = 60, 1

    rows = []
    for name, make in CLUSTERS.items():
        if (options.quick and name not in QUICK) or (options.only and options.only not in name):
            continue
        cluster = make()
        large = len(cluster.devices) >= 1_000
        found, courses = compare(
            name, cluster, min(options.steps, 100) if large else options.steps, 1 if large else options.seeds
        )
        rows += found
        if options.plots:
            plot(name, courses, options.plots)
    adaptive = {}
    for name in QUICK if options.quick else (*QUICK, "the same 16, slow network"):
        cluster = CLUSTERS[name]()
        adaptive[name] = adapt(cluster, 4.0 * cluster.global_batch_size)
    speed = solver_speed(2 if options.quick else 9)
    print(tables(rows, adaptive, speed))
    result = {"clusters": rows, "adaptive": adaptive, "solver_ms": speed}
    write_json(options.json, describe("benchmarks.simulate") | result)


if __name__ == "__main__":
    main()
