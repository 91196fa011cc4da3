"""What one device needs for a batch, learnt from its own steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_hetckpt.balance.line_fit import LineFit
from lightning_hetckpt.balance.solver import DeviceModel

# Relative error of a single step where its spread was not measured.
_STEP_ERROR = 0.1
# From window to window this part of what is known about the spread is kept.
_REMEMBER = 0.8
# A spread seen over n steps only is taken to be larger, its square by this over n.
_DISTRUST = 4.0
# No median is trusted further than this: times are a staircase in the batch size, not a line.
_LEAST_ERROR = 0.01
# A device that waits for its input for more than this share of its time is not the one that sets the pace.
_INPUT_BOUND = 0.3
# A line is trusted up to the largest batch that was timed times the first while its shape is a guess, which it is
# while its fixed part is in doubt by more than this share of a step, and times the second from then on.
_REACH, _FAR_REACH, _GUESS = 2, 3, 0.25
# Whatever the doubt, no more of a step than this is taken to be fixed.
_MOST_FIXED = 0.95
# Weight of the newest window in the share of time spent on input.
_NEWEST = 0.5


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

    @property
    def is_sound(self) -> bool:
        """Whether the numbers can be true."""
        return self.samples >= 1 and self.count >= 1 and 0 < self.compute_s < math.inf


class _Noise:
    """How much the steps of one device scatter around their median, over its last windows together.

    A few steps alone often look much quieter than they are, and what then is believed too much stays.
    """

    def __init__(self) -> None:
        self._steps = 0.0
        self._squares = 0.0

    def median_error(self, window: WindowStats) -> float:
        """One standard deviation of this window's medians, as a share of them."""
        spread = _STEP_ERROR if window.spread_s is None else window.spread_s / window.compute_s
        self._steps = window.count + _REMEMBER * self._steps
        self._squares = window.count * spread**2 + _REMEMBER * self._squares
        step = math.sqrt(self._squares / self._steps * (1 + _DISTRUST / self._steps))
        # The median of n normal values spreads sqrt(pi / 2n) times as wide as one of them.
        return math.hypot(step * math.sqrt(math.pi / 2 / window.count), _LEAST_ERROR)


class ThroughputModel:
    """How long one device takes for a batch, and its backward pass alone: two lines, each as sure as it says."""

    def __init__(self) -> None:
        self._whole = LineFit()
        self._backward = LineFit()
        self._noise = _Noise()
        self._input_share = 0.0

    @property
    def most_timed(self) -> int:
        """Samples of the largest batch that was timed; 0 before the first window."""
        return self._whole.most_timed

    @property
    def knows_backward(self) -> bool:
        """Whether the backward pass was ever timed by itself."""
        return self._backward.most_timed > 0

    @property
    def input_bound(self) -> bool:
        """Whether the device's input and not the device itself sets its pace."""
        return self._input_share > _INPUT_BOUND

    def observe(self, window: WindowStats) -> None:
        """Learn from one more window; one that cannot be true is left out."""
        if not window.is_sound:
            return
        error = self._noise.median_error(window)
        self._whole.observe(window.samples, window.compute_s, error * window.compute_s)
        if window.backward_s is not None and 0 < window.backward_s <= window.compute_s:
            self._backward.observe(window.samples, window.backward_s, error * window.backward_s)
        if window.load_s is not None:
            share = min(max(window.load_s / window.compute_s, 0.0), 1.0)
            self._input_share += _NEWEST * (share - self._input_share)

    def line(self) -> DeviceModel | None:
        """The most likely lines; None before the first window."""
        if self.most_timed == 0:
            return None
        whole, backward = self._whole, self._backward
        # Fitted each by itself, noise can make the part greater than the whole.
        return DeviceModel(
            seconds_per_sample=whole.per_sample_s,
            fixed_s=whole.fixed_s,
            backward_per_sample_s=min(backward.per_sample_s, whole.per_sample_s),
            backward_fixed_s=min(backward.fixed_s, whole.fixed_s),
        )

    def turned(self, samples: int, sigmas: float) -> DeviceModel:
        """Lines as long at `samples` as the most likely ones, with more of them fixed than seems likely."""
        step_s = self._whole.at(samples)
        fixed_s = min(self._whole.fixed_s + sigmas * self._whole.fixed_error_s, _MOST_FIXED * step_s)
        slope_s = (step_s - fixed_s) / samples
        part = min(self._backward.at(samples) / step_s, 1.0)
        return DeviceModel(slope_s, fixed_s, part * slope_s, part * fixed_s)

    def error_s(self, samples: int) -> float:
        """One standard deviation of the seconds predicted for `samples`."""
        return self._whole.error_s(samples)

    def relative_error(self, samples: int) -> float:
        """The same as a share of them."""
        return self.error_s(samples) / self._whole.at(samples)

    @property
    def is_guess(self) -> bool:
        """Whether the seconds at other batch sizes are anybody's guess."""
        return self._whole.fixed_error_s > _GUESS * self._whole.at(self.most_timed)

    @property
    def reach(self) -> int:
        """The largest batch up to which the line can be trusted."""
        return self.most_timed * (_REACH if self.is_guess else _FAR_REACH)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain JSON data."""
        return {"whole": self._whole.state_dict(), "backward": self._backward.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._whole.load_state_dict(state["whole"])
        self._backward.load_state_dict(state["backward"])
