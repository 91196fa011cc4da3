"""What one device needs for a batch, learnt from its own steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetckpt.balance.solver import DeviceModel

# Relative error of a single step where its spread was not measured.
_STEP_ERROR = 0.1
# No median is trusted further than this: times are a staircase in the batch size, not a line.
_LEAST_ERROR = 0.01
# From one batch size the fixed part is not to be told: it is in doubt by this share of the step.
_FIXED_SHARE = 0.5
# From window to window a device's speed wanders by about this much; so old windows are forgotten.
_WANDER = 0.01
# A window that misses its prediction by more than this, and by more than chance explains, means that
# the device has changed its speed.
_DRIFT, _BEYOND_CHANCE = 0.15, 3.0
# However flat a line looks, at least this share of a step is taken to grow with the batch.
_LEAST_SLOPE = 0.05


@dataclass(frozen=True, slots=True)
class WindowStats:
    """What one rank measured at one batch size since the last exchange, on its own clock.

    All seconds are medians over the steps. Whoever cannot tell the optional ones leaves them out; they are
    needed from all ranks before the all-reduce becomes a part of the plan.
    """

    samples: int  # in this rank's batch
    compute_s: (
        float  # load, host to device, forward, backward and optimizer; waiting on peers excluded (a + P)
    )
    count: int  # steps behind the medians
    spread_s: float | None = None  # robust standard deviation of a single step's compute_s
    backward_s: float | None = None  # the part of compute_s from start of backward to last gradient (P)
    first_bucket_s: float | None = None  # from start of backward to the first bucket's all-reduce (gamma * P)
    # Of each bucket only the time from when it was handed over and the one before it was through, until it
    # was through: so not the time in which a finished network waits for this rank's next bucket.
    hidden_s: float | None = None  # of all buckets but the last, summed (T_o, and waiting on peers)
    tail_s: float | None = None  # of the last bucket (T_u, and waiting on peers)
    load_s: float | None = None  # the part of compute_s that the rank waited for its input
    step_s: float | None = None  # the whole step, all-reduce and waiting included


class ThroughputModel:
    """The line `seconds = fixed_s + seconds_per_sample * samples` of one device, and how sure it is.

    Recursive least squares with forgetting (a Kalman filter over the two coefficients). One window
    alone makes the line proportional, with an honest doubt about the fixed part; a second batch
    size settles that doubt as far as its distance and the noise allow. When a device changes its
    speed, the line is scaled to the new one, and its shape is in doubt again.
    """

    def __init__(self) -> None:
        self._line = np.zeros(2)  # fixed_s, seconds_per_sample
        self._doubt = np.zeros((2, 2))  # their covariance
        self._most_timed = 0

    @property
    def most_timed(self) -> int:
        """Samples of the largest batch that was timed; 0 before the first window."""
        return self._most_timed

    def observe(self, window: WindowStats) -> None:
        """Learn from one more window; one that cannot be true is left out."""
        samples, measured_s = window.samples, window.compute_s
        if samples < 1 or window.count < 1 or not 0 < measured_s < math.inf:
            return
        at, error = np.array([1.0, samples]), _median_error(window) ** 2
        if self._most_timed == 0:
            self._line = np.array([0.0, measured_s / samples])
            self._doubt = np.diag([0.0, error / samples**2]) + _shape_doubt(samples, measured_s)
        else:
            self._doubt = self._doubt + _WANDER**2 * np.outer(self._line, self._line)
            predicted_s = float(at @ self._line)
            missed_s = abs(measured_s - predicted_s)
            chance_s = math.sqrt(self._variance(at) + error)
            if missed_s > _DRIFT * predicted_s and missed_s > _BEYOND_CHANCE * chance_s:
                ratio = measured_s / predicted_s
                self._line = self._line * ratio
                self._doubt = self._doubt * ratio**2 + _shape_doubt(samples, measured_s)
            self._update(at, measured_s, error)
        self._most_timed = max(self._most_timed, samples)

    def _update(self, at: NDArray[np.float64], measured_s: float, error: float) -> None:
        """Weigh the measurement against the line, each by its own doubt."""
        predicted_s, variance = float(at @ self._line), self._variance(at)
        gain = self._doubt @ at / (variance + error)
        # Joseph's form of the update: rounding cannot make the covariance negative over a long run.
        kept = np.eye(2) - np.outer(gain, at)
        self._doubt = kept @ self._doubt @ kept.T + error * np.outer(gain, gain)
        # Between what was predicted and what was measured, so above zero like both.
        step_s = predicted_s + variance / (variance + error) * (measured_s - predicted_s)
        fixed_s = float(self._line[0] + gain[0] * (measured_s - predicted_s))
        # Noise can tilt a line beyond what a device can do; it is turned back around the present batch.
        fixed_s = min(max(0.0, fixed_s), (1 - _LEAST_SLOPE) * step_s)
        self._line = np.array([fixed_s, (step_s - fixed_s) / at[1]])

    def line(self) -> DeviceModel | None:
        """The most likely line; None before the first window."""
        if self._most_timed == 0:
            return None
        return DeviceModel(seconds_per_sample=float(self._line[1]), fixed_s=float(self._line[0]))

    def relative_error(self, samples: int) -> float:
        """One standard deviation of the predicted seconds for `samples`, as a share of them."""
        at = np.array([1.0, samples])
        return math.sqrt(self._variance(at)) / float(at @ self._line)

    def _variance(self, at: NDArray[np.float64]) -> float:
        """Of the predicted seconds; large parts of it cancel, so it is known to some digits only."""
        parts = self._doubt * np.outer(at, at)
        return max(float(parts.sum()), 1e-12 * float(np.abs(parts).sum()))

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain JSON data."""
        return {
            "line": self._line.tolist(),
            "doubt": self._doubt.tolist(),
            "most_timed": self._most_timed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._line, self._doubt = np.array(state["line"]), np.array(state["doubt"])
        self._most_timed = int(state["most_timed"])


def _shape_doubt(samples: int, step_s: float) -> NDArray[np.float64]:
    """The covariance of a line whose value at `samples` is sure, but not how much of it is fixed."""
    turned = np.array([1.0, -1.0 / samples]) * (_FIXED_SHARE * step_s)
    return np.outer(turned, turned)


def _median_error(window: WindowStats) -> float:
    """One standard deviation of the window's median, in seconds."""
    step_s = _STEP_ERROR * window.compute_s if window.spread_s is None else window.spread_s
    # The median of n normal values spreads sqrt(pi / 2n) times as wide as one of them.
    return math.hypot(step_s * math.sqrt(math.pi / 2 / window.count), _LEAST_ERROR * window.compute_s)
