"""The global batch with which training gets on fastest, not the one with the most samples per second."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# A change makes allocators and kernels settle anew, and the predictions err by some percent.
_LEAST_GAIN = 0.05
_CANDIDATES = 50


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A global batch, and what speaks for it."""

    total: int  # samples of all ranks together
    step_s: float  # predicted
    efficiency: float  # progress per sample, of that at the base batch
    gain: float  # predicted goodput over that of the present batch, less 1


def efficiency(total: int, base: int, noise_scale: float) -> float:
    """Progress per sample at a global batch of `total`, as a share of that at `base`: (φ + B0)/(φ + B).

    (McCandlish et al., arXiv 1812.06162, and Pollux, OSDI 2021, where it is the statistical efficiency.)
    """
    return 1.0 if math.isinf(noise_scale) else (noise_scale + base) / (noise_scale + total)


def candidates(least: int, most: int, present: int, multiple_of: int = 1) -> list[int]:
    """Batches from `least` to `most` in about equal ratios, `present` among them, in rising order.

    Args:
        multiple_of: all but `least`, `most` and `present` are multiples of it.
    """
    steps = max(1, _CANDIDATES - 1)
    between = (least * (most / least) ** (step / steps) for step in range(_CANDIDATES))
    rounded = {round(total / multiple_of) * multiple_of for total in between}
    return sorted({least, most, present} | {total for total in rounded if least < total < most})


def choose(
    present: int,
    base: int,
    noise_scale: float,
    totals: Iterable[int],
    step_s: Callable[[int], float | None],
) -> BatchChoice | None:
    """The batch of the highest goodput B/OptPerf(B) · (φ + B0)/(φ + B), or None to keep the present one.

    Keeps where the predicted gain is 5 % or less, and where the present step cannot be predicted.

    Args:
        present: the global batch in use.
        base: B0, the batch that the user's learning rate was made for.
        noise_scale: φ in samples.
        totals: the batches to choose from; of equal ones the first wins.
        step_s: seconds of a step at the best split of so many samples; None where there is none.
    """

    def goodput(total: int) -> tuple[float, float]:
        seconds = step_s(total)
        return (total / seconds * efficiency(total, base, noise_scale), seconds) if seconds else (0.0, 0.0)

    now, _ = goodput(present)
    if not now:
        return None
    best = max(((*goodput(total), total) for total in totals), key=lambda one: one[0], default=None)
    if best is None or best[0] <= (1 + _LEAST_GAIN) * now:
        return None
    rate, seconds, total = best
    return BatchChoice(total, seconds, efficiency(total, base, noise_scale), rate / now - 1)
