"""A cluster that exists in numbers only: unequal devices, buckets, an all-reduce, noise, co-tenants, drift.

Time is virtual and exact. A step is worked out event by event: forward, each bucket ready, each all-reduce as soon as
every rank has handed its bucket over and the one before is through. What a rank can see of that on its own
clock is handed on as `WindowStats`, by the rules of `balance/step_timer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hetckpt.balance.solver import DeviceModel, SyncModel, optimise, share_by_speed, step_s
from lightning_hetckpt.balance.throughput import WindowStats

Array = NDArray[np.float64]

FIRST_STEPS, FIRST_OF_SIZE, FEWEST_STEPS = 3, 1, 3  # left out, left out, needed: as the step timer does
OUTLIER, MAD_TO_SIGMA = 5.0, 1.4826


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From step `begin` on a device takes `factor` times as long, until `end`; or slides there until then and stays."""

    rank: int
    begin: int
    end: int
    factor: float
    slides: bool = False

    def at(self, step: int) -> float:
        """How many times as long the device takes at `step`."""
        if step < self.begin:
            return 1.0
        if not self.slides:
            return self.factor if step < self.end else 1.0
        return 1.0 + (self.factor - 1.0) * min(1.0, (step - self.begin) / (self.end - self.begin))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, the network between them, and what happens to them.

    Args:
        devices: their lines, the backward pass included.
        global_batch_size: samples in a step.
        ready: the share of the backward pass after which each bucket is ready.
        transfer_s: seconds of each bucket's all-reduce.
        noise: standard deviation of a step's compute time, as a share of it.
        load_share: the part of the compute time that is waiting for input.
        stalls: how often a device's step takes three times as long for no reason.
        slowdowns: what happens to them.
        max_samples: most samples of each device.
        multiple_of: all shares but one are multiples of it.
    """

    devices: tuple[DeviceModel, ...]
    global_batch_size: int
    ready: tuple[float, ...] = (1.0,)
    transfer_s: tuple[float, ...] = (0.0,)
    noise: float = 0.0
    load_share: float = 0.0
    stalls: float = 0.0
    slowdowns: tuple[Slowdown, ...] = ()
    max_samples: tuple[int | None, ...] = ()
    multiple_of: int = 1

    @property
    def bounds(self) -> tuple[list[int], list[int | None], int]:
        """Fewest and most samples of each device, and the multiple."""
        open_end: list[int | None] = [None] * len(self.devices)
        return [1] * len(self.devices), list(self.max_samples) or open_end, self.multiple_of

    @property
    def even(self) -> tuple[int, ...]:
        """The split to start from."""
        return share_by_speed(self.global_batch_size, [1.0] * len(self.devices), *self.bounds)

    @property
    def network(self) -> SyncModel:
        """The true all-reduce."""
        return SyncModel.of_buckets(self.ready, self.transfer_s)

    def devices_at(self, step: int) -> tuple[DeviceModel, ...]:
        """The true lines at `step`."""
        devices = list(self.devices)
        for each in self.slowdowns:
            factor, old = each.at(step), devices[each.rank]
            devices[each.rank] = DeviceModel(
                old.seconds_per_sample * factor,
                old.fixed_s * factor,
                old.backward_per_sample_s * factor,
                old.backward_fixed_s * factor,
            )
        return tuple(devices)

    def over_optimum(self, shares: Sequence[int], step: int) -> float:
        """How much longer than the best possible split these shares truly take at `step`, as a share of it."""
        devices = self.devices_at(step)
        best = optimise(devices, sum(shares), *self.bounds, self.network)
        return step_s(devices, shares, self.network) / best.step_s - 1


class VirtualRun:
    """Trains step by step and keeps what each rank's own timer would have kept.

    Args:
        cluster: what trains.
        seed: of the noise.
        backward: whether the ranks time backward passes and buckets, or their compute time alone.
    """

    def __init__(self, cluster: Cluster, seed: int = 0, backward: bool = True) -> None:
        world = len(cluster.devices)
        self._cluster = cluster
        self._dice = np.random.default_rng(seed)
        self._backward = backward
        self._lines = np.array(
            [
                (d.seconds_per_sample, d.fixed_s, d.backward_per_sample_s, d.backward_fixed_s)
                for d in cluster.devices
            ]
        ).T
        self._samples = np.zeros(world, dtype=np.int64)
        self._counts_from = np.full(world, FIRST_STEPS)
        self._since = 0  # the step of the first row
        self._rows: list[
            Array
        ] = []  # of each step: compute, backward, first bucket, hidden, tail of each rank
        self._step_s: list[float] = []
        self.step = 0

    def train(self, shares: Sequence[int]) -> float:
        """One step; the seconds that it took."""
        samples = np.array(shares)
        changed = samples != self._samples
        self._counts_from[changed] = np.maximum(self._counts_from[changed], self.step + FIRST_OF_SIZE)
        self._samples = samples
        row, took_s = self._events(samples)
        self._rows.append(row)
        self._step_s.append(took_s)
        self.step += 1
        return took_s

    def windows(self) -> list[WindowStats | None]:
        """What each rank would tell in an exchange now; what was told is forgotten."""
        table = np.array(self._rows)  # steps, numbers, ranks
        at = self._since + np.arange(len(table))[:, None]
        counts = at >= self._counts_from
        told = counts.sum(axis=0) >= FEWEST_STEPS
        table = np.where(counts[:, None] & told, table, np.nan)
        table[:, :, ~told] = 0.0
        middle = np.median(table, axis=0) if counts.all() else np.nanmedian(table, axis=0)
        away = np.abs(table[:, 0] - middle[0])
        spread = MAD_TO_SIGMA * np.nanmedian(away, axis=0)
        usual = np.where((away <= OUTLIER * np.maximum(spread, 1e-12))[:, None], table, np.nan)
        middle = np.nanmedian(usual, axis=0)
        steps = (~np.isnan(usual[:, 0])).sum(axis=0)
        whole_s = float(np.median(self._step_s))
        self._counts_from[told] = self.step
        self._forget()
        return [
            self._window(int(samples), numbers, int(count), float(wide), whole_s) if known else None
            for samples, numbers, count, wide, known in zip(
                self._samples, middle.T.tolist(), steps, spread, told, strict=True
            )
        ]

    def _events(self, samples: NDArray[np.int64]) -> tuple[Array, float]:
        """One step as the ranks see it."""
        cluster = self._cluster
        compute_s, backward_s = self._true_s(samples)
        noise = np.maximum(0.1, self._dice.normal(1.0, cluster.noise, len(samples)))
        if cluster.stalls:
            noise = np.where(self._dice.random(len(samples)) < cluster.stalls, 3 * noise, noise)
        compute_s, backward_s = compute_s * noise, backward_s * noise
        through_s, seen_s = 0.0, []
        for part, transfer_s in zip(cluster.ready, cluster.transfer_s, strict=True):
            handed_over_s = compute_s - (1 - part) * backward_s
            ends_s = max(through_s, float(handed_over_s.max())) + transfer_s
            seen_s.append(ends_s - np.maximum(handed_over_s, through_s))
            through_s = ends_s
        hidden_s = np.sum(seen_s[:-1], axis=0) if seen_s[1:] else np.zeros_like(compute_s)
        row = np.array([compute_s, backward_s, cluster.ready[0] * backward_s, hidden_s, seen_s[-1]])
        return row, through_s

    def _true_s(self, samples: NDArray[np.int64]) -> tuple[Array, Array]:
        """Seconds of compute and of backward in it."""
        slope, fixed, steep, flat = self._lines
        factor = np.ones(len(samples))
        for each in self._cluster.slowdowns:
            factor[each.rank] *= each.at(self.step)
        return (fixed + slope * samples) * factor, (flat + steep * samples) * factor

    def _window(
        self, samples: int, numbers: list[float], count: int, spread_s: float, whole_s: float
    ) -> WindowStats:
        compute_s, backward_s, first_bucket_s, hidden_s, tail_s = numbers
        if not self._backward:
            return WindowStats(samples, compute_s, count, spread_s)
        return WindowStats(
            samples,
            compute_s,
            count,
            spread_s,
            backward_s,
            first_bucket_s,
            hidden_s,
            tail_s,
            self._cluster.load_share * compute_s,
            whole_s,
        )

    def _forget(self) -> None:
        """Drop the steps that no rank needs any more."""
        old = int(self._counts_from.min()) - self._since
        del self._rows[:old], self._step_s[:old]
        self._since += max(old, 0)
