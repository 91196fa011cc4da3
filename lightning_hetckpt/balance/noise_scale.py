"""How noisy the gradient is: from the gradients of unequal batches to the noise scale of the whole.

With G the true gradient and Σ the covariance of one sample's, rank i's gradient over `b_i` samples has
E|g_i|² = |G|² + trΣ/b_i, and that of all B = Σ b_i samples has E|g|² = |G|² + trΣ/B. The noise scale φ = trΣ/|G|²
is about the batch beyond which more samples stop to help (McCandlish et al., arXiv 1812.06162).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Of a step at the first batch size; a larger batch forgets as many steps as it stands for (AdaptDL's choice).
_KEPT_PER_STEP = 0.999
_STANDARD_ERRORS = 1.0  # by how many the signal is raised where too small a noise scale is the safe side


def noise_parts(
    samples: Any, local_square: Any, global_square: Any, total: int, ranks: int
) -> tuple[Any, Any]:
    """One rank's parts of the estimates of trΣ and |G|²; summed over the ranks they are the estimates.

    The sums are S = (Σ b_i|g_i|² - B|g|²)/(n-1) and |g|² - S/B. Both are unbiased, and for unequal `b_i` none has
    a smaller variance: 2tr(Σ²)/(n-1), and 4GᵀΣG/B + 2tr(Σ²)/B² · n/(n-1) (√b_i(g_i - G) are n draws of one normal
    law, so this is the analysis of variance, and Lehmann-Scheffé holds). Cannikin's weights (arXiv 2402.05302)
    agree with them for equal `b_i` only.

    Args:
        samples: `b_i`. This and the squares may be numbers, arrays or tensors alike.
        local_square: |g_i|² of the mean gradient over them.
        global_square: |g|² of the mean gradient over the samples of all ranks.
        total: B.
        ranks: n, at least 2.
    """
    noise = samples * (local_square - global_square) / (ranks - 1)
    return noise, samples * global_square / total - noise / total


def estimate(
    samples: Sequence[int], local_squares: Sequence[float], global_square: float
) -> tuple[float, float] | None:
    """The estimates of trΣ and |G|² from one step; None where one rank alone has nothing to compare with."""
    total, ranks = sum(samples), len(samples)
    if ranks < 2:
        return None
    parts = [
        noise_parts(own, square, global_square, total, ranks)
        for own, square in zip(samples, local_squares, strict=True)
    ]
    return sum(noise for noise, _ in parts), sum(signal for _, signal in parts)


def ratio(noise: float, signal: float) -> float:
    """The noise scale in samples from the averages of both estimates.

    Averages, since the ratio of one step's is biased beyond use. Where the signal drowns (an unbiased square may be
    negative) it is infinite, which means that every batch so far was small.
    """
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf


class NoiseAverages:
    """The averages of trΣ and |G|² over the steps of a run, in which old steps fade.

    Plain numbers; the same estimates in the same order give the same averages on every rank.
    """

    def __init__(self) -> None:
        self._noise = self._signal = self._signal_square = 0.0  # weighted sums
        self._weight = self._weight_square = 0.0

    def add(self, noise: float, signal: float, steps: float = 1.0) -> None:
        """Take in the estimates of one step; one that overflowed is left out.

        Args:
            steps: for how many steps at the first batch size this one stands.
        """
        if not (math.isfinite(noise) and math.isfinite(signal)):
            return
        kept = _KEPT_PER_STEP**steps
        self._noise = kept * self._noise + noise
        self._signal = kept * self._signal + signal
        self._signal_square = kept * self._signal_square + signal**2
        self._weight = kept * self._weight + 1
        self._weight_square = kept**2 * self._weight_square + 1

    @property
    def steps(self) -> float:
        """The steps that an equally sharp plain average would need."""
        return self._weight**2 / self._weight_square if self._weight else 0.0

    @property
    def noise_scale(self) -> float | None:
        """The most likely noise scale in samples; None before the first step."""
        return ratio(self._noise, self._signal) if self._weight else None

    @property
    def cautious(self) -> float | None:
        """A noise scale that is rather too small than too large; None before the second step.

        The signal is raised by its own standard error: one step of two ranks says almost nothing, and a batch that
        is too large for the gradient wastes samples.
        """
        if self.steps < 1.5:
            return None
        mean = self._signal / self._weight
        variance = max(0.0, self._signal_square / self._weight - mean**2) / (self.steps - 1)
        return ratio(self._noise / self._weight, mean + _STANDARD_ERRORS * math.sqrt(variance))

    def state_dict(self) -> dict[str, float]:
        """The sums, as plain JSON data."""
        return {
            "noise": self._noise,
            "signal": self._signal,
            "signal_square": self._signal_square,
            "weight": self._weight,
            "weight_square": self._weight_square,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self._noise, self._signal = state["noise"], state["signal"]
        self._signal_square = state["signal_square"]
        self._weight, self._weight_square = state["weight"], state["weight_square"]
