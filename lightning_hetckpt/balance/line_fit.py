"""A line through the seconds that batches of different sizes took, and how sure it is."""

from __future__ import annotations

import math
from typing import Any

# From one batch size the fixed part is not to be told: it is in doubt by this share of the step.
_FIXED_SHARE = 0.5
# From window to window a device's speed wanders by about this much; so old windows are forgotten.
_WANDER = 0.01
# A window that misses its prediction by more than this, and by more than chance explains, means that
# the device has changed its speed.
_DRIFT, _BEYOND_CHANCE = 0.15, 3.0
# However flat a line looks, at least this share of a step is taken to grow with the batch.
_LEAST_SLOPE = 0.05


class LineFit:
    """The line `seconds = fixed_s + per_sample_s * samples`, learnt window by window.

    Recursive least squares with forgetting (a Kalman filter over the two coefficients). One window
    alone makes the line proportional, with an honest doubt about the fixed part; a second batch
    size settles that doubt as far as its distance and the noise allow. When a device changes its
    speed, the line is scaled to the new one, and its shape is in doubt again.
    """

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.per_sample_s = 0.0
        self._doubt = (0.0, 0.0, 0.0)  # variance of fixed_s, covariance, variance of per_sample_s
        self._most_timed = 0

    @property
    def most_timed(self) -> int:
        """Samples of the largest batch that was timed; 0 before the first one."""
        return self._most_timed

    def at(self, samples: int) -> float:
        """Seconds predicted for `samples`."""
        return self.fixed_s + self.per_sample_s * samples

    def error_s(self, samples: int) -> float:
        """One standard deviation of them."""
        return math.sqrt(self._variance(samples))

    @property
    def fixed_error_s(self) -> float:
        """One standard deviation of `fixed_s`: how little is known about the shape of the line."""
        return math.sqrt(self._doubt[0])

    def observe(self, samples: int, measured_s: float, error_s: float) -> None:
        """Learn that a batch took `measured_s`, give or take one standard deviation of `error_s`."""
        error = error_s**2
        if self._most_timed == 0:
            self.per_sample_s = measured_s / samples
            self._doubt = (0.0, 0.0, error / samples**2)
            self._doubt_shape(samples, measured_s)
        else:
            self._grow_doubt(1.0, _WANDER)
            predicted_s = self.at(samples)
            missed_s = abs(measured_s - predicted_s)
            chance_s = math.sqrt(self._variance(samples) + error)
            if missed_s > _DRIFT * predicted_s and missed_s > _BEYOND_CHANCE * chance_s:
                ratio = measured_s / predicted_s
                self._grow_doubt(ratio, 0.0)
                self.fixed_s, self.per_sample_s = self.fixed_s * ratio, self.per_sample_s * ratio
                self._doubt_shape(samples, measured_s)
            self._weigh(samples, measured_s, error)
        self._most_timed = max(self._most_timed, samples)

    def _weigh(self, samples: int, measured_s: float, error: float) -> None:
        """Weigh the measurement against the line, each by its own doubt."""
        predicted_s, variance = self.at(samples), self._variance(samples)
        p00, p01, p11 = self._doubt
        gain_fixed = (p00 + p01 * samples) / (variance + error)
        gain_slope = (p01 + p11 * samples) / (variance + error)
        # Joseph's form of the update: rounding cannot make the covariance negative over a long run.
        a, b, c, d = 1 - gain_fixed, -gain_fixed * samples, -gain_slope, 1 - gain_slope * samples
        top_fixed, top_slope = a * p00 + b * p01, a * p01 + b * p11
        low_fixed, low_slope = c * p00 + d * p01, c * p01 + d * p11
        self._doubt = (
            top_fixed * a + top_slope * b + error * gain_fixed**2,
            top_fixed * c + top_slope * d + error * gain_fixed * gain_slope,
            low_fixed * c + low_slope * d + error * gain_slope**2,
        )
        # Between what was predicted and what was measured, so above zero like both.
        step_s = predicted_s + variance / (variance + error) * (measured_s - predicted_s)
        fixed_s = self.fixed_s + gain_fixed * (measured_s - predicted_s)
        # Noise can tilt a line beyond what a device can do; it is turned back around the present batch.
        self.fixed_s = min(max(0.0, fixed_s), (1 - _LEAST_SLOPE) * step_s)
        self.per_sample_s = (step_s - self.fixed_s) / samples

    def _doubt_shape(self, samples: int, step_s: float) -> None:
        """Doubt how much of the step at `samples` is fixed, but not how long it takes."""
        turn_s = _FIXED_SHARE * step_s
        p00, p01, p11 = self._doubt
        self._doubt = (p00 + turn_s**2, p01 - turn_s**2 / samples, p11 + (turn_s / samples) ** 2)

    def _grow_doubt(self, ratio: float, wander: float) -> None:
        """Scale the doubt with the line, and let the line as a whole wander by a share of itself."""
        p00, p01, p11 = self._doubt
        self._doubt = (
            p00 * ratio**2 + (wander * self.fixed_s) ** 2,
            p01 * ratio**2 + wander**2 * self.fixed_s * self.per_sample_s,
            p11 * ratio**2 + (wander * self.per_sample_s) ** 2,
        )

    def _variance(self, samples: int) -> float:
        """Of the predicted seconds; large parts of it cancel, so it is known to some digits only."""
        p00, p01, p11 = self._doubt
        parts = (p00, 2 * p01 * samples, p11 * samples**2)
        return max(sum(parts), 1e-12 * sum(map(abs, parts)))

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain JSON data."""
        return {
            "line": [self.fixed_s, self.per_sample_s],
            "doubt": list(self._doubt),
            "most_timed": self._most_timed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.fixed_s, self.per_sample_s = map(float, state["line"])
        p00, p01, p11 = map(float, state["doubt"])
        self._doubt = (p00, p01, p11)
        self._most_timed = int(state["most_timed"])
