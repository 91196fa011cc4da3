"""What one device needs for a batch, learnt from its own steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_hetckpt.balance.solver import DeviceModel

# Relative error of a single step where its spread was not measured.
_STEP_ERROR = 0.1
# No median is trusted further than this: times are a staircase in the batch size, not a line.
_LEAST_ERROR = 0.01
# Before a second batch size was seen, the fixed part is zero give or take this share of the step.
_FIXED_SHARE = 0.3
# From window to window a device's speed wanders by about this much; so old windows are forgotten.
_WANDER = 0.01
# A window that misses its prediction by more than this, and by more than chance explains, means that
# the device has changed its speed.
_DRIFT, _BEYOND_CHANCE = 0.15, 3.0
# What was learnt about the shape of the line before such a change counts so much less (in variance).
_DOUBT_AFTER_DRIFT = 10.0
# However flat a line looks, a sample costs at least this share of the mean cost per sample.
_LEAST_SLOPE = 0.05


@dataclass(frozen=True, slots=True)
class WindowStats:
    """What one rank measured at one batch size since the last exchange, on its own clock."""

    samples: int  # in this rank's batch
    compute_s: float  # median over the steps; load, forward and backward, waiting on peers excluded
    count: int  # steps behind the median
    spread_s: float | None = None  # robust standard deviation of a single step, where measured


class ThroughputModel:
    """The line `seconds = fixed_s + seconds_per_sample * samples` of one device, and how sure it is.

    Recursive least squares with forgetting (a Kalman filter over the two coefficients). One window
    alone makes the line proportional, with an honest doubt about the fixed part; a second batch
    size settles that doubt as far as its distance and the noise allow. A device that changes
    its speed keeps the shape of its line: all that was learnt is scaled to the new speed.
    """

    def __init__(self) -> None:
        self._line = np.zeros(2)  # fixed_s, seconds_per_sample
        self._doubt = np.zeros((2, 2))  # their covariance
        self._seen: tuple[int, int] | None = None

    @property
    def most_timed(self) -> int:
        """Samples of the largest batch that was timed; 0 before the first window."""
        return 0 if self._seen is None else self._seen[1]

    def observe(self, window: WindowStats) -> None:
        """Learn from one more window."""
        samples, measured_s = window.samples, window.compute_s
        if samples < 1 or window.count < 1 or not 0 < measured_s < math.inf:
            return
        error = _median_error(window) ** 2
        if self._seen is None:
            self._seen = samples, samples
            self._line = np.array([0.0, measured_s / samples])
            # The sum of both parts is what was measured, so an error in one is made good by the other.
            fixed = (_FIXED_SHARE * measured_s) ** 2
            self._doubt = np.array(
                [[fixed, -fixed / samples], [-fixed / samples, (fixed + error) / samples**2]]
            )
            return
        self._seen = min(self._seen[0], samples), max(self._seen[1], samples)

        at = np.array([1.0, samples])
        self._doubt = self._doubt + _WANDER**2 * np.outer(self._line, self._line)
        predicted_s, variance = float(at @ self._line), float(at @ self._doubt @ at)
        missed_s = abs(measured_s - predicted_s)
        if missed_s > _DRIFT * predicted_s and missed_s > _BEYOND_CHANCE * math.sqrt(variance + error):
            ratio = measured_s / predicted_s
            self._line = self._line * ratio
            self._doubt = self._doubt * (ratio**2 * _DOUBT_AFTER_DRIFT)
            predicted_s, variance = measured_s, float(at @ self._doubt @ at)

        gain = self._doubt @ at / (variance + error)
        self._line = self._line + gain * (measured_s - predicted_s)
        doubt = self._doubt - np.outer(gain, at @ self._doubt)
        self._doubt = (doubt + doubt.T) / 2

    def line(self) -> DeviceModel | None:
        """The most likely line with a fixed part of at least zero and a slope above zero; None if unseen."""
        if self._seen is None:
            return None
        fixed_s, slope = float(self._line[0]), float(self._line[1])
        if fixed_s < 0:
            slope -= fixed_s * self._doubt[0, 1] / self._doubt[0, 0]
            fixed_s = 0.0
        middle = sum(self._seen) / 2
        least = _LEAST_SLOPE * (fixed_s / middle + slope)
        if slope < least:
            fixed_s, slope = max(0.0, fixed_s + middle * (slope - least)), least
        return DeviceModel(float(slope), fixed_s)

    def relative_error(self, samples: int) -> float:
        """One standard deviation of the predicted seconds for `samples`, as a share of them."""
        at = np.array([1.0, samples])
        return math.sqrt(max(0.0, float(at @ self._doubt @ at))) / float(at @ self._line)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain JSON data."""
        return {"line": self._line.tolist(), "doubt": self._doubt.tolist(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._line, self._doubt = np.array(state["line"]), np.array(state["doubt"])
        self._seen = None if state["seen"] is None else (state["seen"][0], state["seen"][1])


def _median_error(window: WindowStats) -> float:
    """One standard deviation of the window's median, in seconds."""
    step_s = _STEP_ERROR * window.compute_s if window.spread_s is None else window.spread_s
    # The median of n normal values spreads sqrt(pi / 2n) times as wide as one of them.
    return math.hypot(step_s * math.sqrt(math.pi / 2 / window.count), _LEAST_ERROR * window.compute_s)
