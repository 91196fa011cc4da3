"""Whether ranks that seem too slow are so, or were only unlucky."""

from __future__ import annotations

import math
from collections.abc import Sequence

# A normal value is beyond this many standard deviations once in a thousand looks.
_RARE = 3.4


def stands_out(excess_s: Sequence[float], errors_s: Sequence[float]) -> bool:
    """Whether these excesses over a common level are more than noise would show among equal ranks.

    Either of two tests will do: one rank alone that is far off, or many that are off a little together.

    Args:
        excess_s: how much longer than the level each rank seems to take; below zero where it is done sooner.
        errors_s: one standard deviation of each.
    """
    if not any(excess > 0 for excess in excess_s):
        return False
    if not all(error > 0 for error in errors_s):
        return True
    return _one_stands_out(excess_s, errors_s) or _many_stand_out(excess_s, errors_s)


def _one_stands_out(excess_s: Sequence[float], errors_s: Sequence[float]) -> bool:
    """The slowest of W equal ranks stands out by about sqrt(2 ln W) deviations; almost two more are rare."""
    typical = math.sqrt(sum(error**2 for error in errors_s) / len(errors_s))
    return max(excess_s) > typical * (1.8 + math.sqrt(2 * math.log(len(errors_s))))


def _many_stand_out(excess_s: Sequence[float], errors_s: Sequence[float]) -> bool:
    """The squares of the excesses above zero sum to more than chance.

    Of a normal value half the square remains, with a variance of 5/4; so W of them together are much like 5/4 of
    a chi-square with 2/5 W degrees of freedom, the tail of which Wilson and Hilferty's cube gives.
    """
    found = sum((max(excess, 0.0) / error) ** 2 for excess, error in zip(excess_s, errors_s, strict=True))
    degrees = 0.4 * len(errors_s)
    tail = 1 - 2 / (9 * degrees) + _RARE * math.sqrt(2 / (9 * degrees))
    return found > 1.25 * degrees * tail**3
