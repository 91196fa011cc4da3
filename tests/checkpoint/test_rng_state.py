"""Random generators go on where they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_hetckpt.checkpoint import rng_state
from lightning_hetckpt.errors import CorruptCheckpointError


def draw() -> tuple[list[float], list[float], list[float]]:
    # Odd counts of normal values leave one in each generator's pocket, which must come back, too.
    return (
        torch.randn(17).tolist(),
        np.random.normal(size=3).tolist(),
        [random.gauss(0, 1) for _ in range(3)] + [random.random()],
    )


def test_all_generators_go_on_where_they_were() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    draw()

    state = rng_state.capture()
    expected = draw()
    draw()
    rng_state.restore(state)

    assert draw() == expected


def test_derived_streams_are_the_same_again_and_differ_by_seed_step_and_rank() -> None:
    def stream(seed: int, step: int, rank: int) -> str:
        rng_state.derive(seed, step, rank)
        return str(draw())

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (7, 100_000, 63)]
    assert len({stream(*place) for place in places}) == len(places)
    assert stream(7, 100_000, 63) == stream(7, 100_000, 63)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"torch": "AAAA"}', rng_state.capture()[:-40], b"\xff"]
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="another snapshot"):
        rng_state.restore(data)
