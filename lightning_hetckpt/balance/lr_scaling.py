"""What another global batch means for the learning rate, and for the scheduler that sets it."""

from __future__ import annotations

import math
from typing import Literal

LrScaling = Literal["adascale", "sqrt", "linear", "none"]


def lr_factor(rule: LrScaling, total: int, base: int, noise_scale: float | None = None) -> float:
    """By how much to multiply a learning rate made for `base` samples when a step has `total`; 1 at `base`.

    - `adascale`: (φ/B0 + 1)/(φ/B + 1), the progress of one such step counted in steps at the base batch; between 1
      and B/B0. For SGD (Johnson et al., arXiv 2007.05105).
    - `sqrt`: √(B/B0). For Adam and its kin (Malladi et al., arXiv 2205.10287).
    - `linear`: B/B0, right as long as both batches are far below φ (Goyal et al., arXiv 1706.02677).
    - `none`: 1.

    Args:
        noise_scale: φ in samples, which `adascale` alone looks at; None where it is not known yet, which leaves
            the learning rate as it is.
    """
    scale = total / base
    if rule == "sqrt":
        return math.sqrt(scale)
    if rule == "linear":
        return scale
    if rule == "none" or noise_scale is None:
        return 1.0
    if math.isinf(noise_scale):
        return scale
    return (noise_scale / base + 1) / (noise_scale / total + 1)


def scheduler_ticks(step: int, steps: int, base_steps: int) -> int:
    """How often a step-wise scheduler moves after optimizer step `step` of an epoch.

    All steps of the epoch together move it `base_steps` times, as often as the base batch would have: so warm-up
    and decay are told in samples, and a schedule made for the whole run ends with it.

    Args:
        step: within the epoch, from 0.
        steps: optimizer steps in this epoch.
        base_steps: optimizer steps in an epoch at the base batch.
    """
    return (step + 1) * base_steps // steps - step * base_steps // steps
