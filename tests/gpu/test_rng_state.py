"""A GPU's random numbers go on where they were."""

from __future__ import annotations

import pytest
import torch

from lightning_hetckpt.checkpoint import rng_state
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu


def draw(device: torch.device | int = DEVICE) -> list[float]:
    layer = torch.nn.Dropout(0.5)
    return [*torch.randn(17, device=device).tolist(), *layer(torch.ones(64, device=device)).tolist()]


def test_a_gpus_generator_goes_on_where_it_was() -> None:
    torch.manual_seed(1)
    draw()
    state = rng_state.capture()
    expected = draw()
    draw()
    torch.manual_seed(99)

    rng_state.restore(state)

    assert draw() == expected


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_capturing_does_not_wait_for_the_gpu() -> None:
    draw()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rng_state.capture()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_gpu_keeps_its_own_stream() -> None:
    torch.manual_seed(1)
    draw(1)
    state = rng_state.capture()
    expected = draw(0), draw(1)

    rng_state.restore(state)

    assert (draw(0), draw(1)) == expected
    assert expected[0] != expected[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_comes_back_on_another_gpu_goes_on_with_its_own_stream() -> None:
    torch.manual_seed(1)
    with torch.cuda.device(1):
        draw(1)
        state = rng_state.capture()
        expected = draw(1)

    with torch.cuda.device(0):
        rng_state.restore(state)
        assert draw(0) == expected


def test_derived_streams_differ_by_rank_and_are_the_same_again() -> None:
    found = []
    for rank in (0, 1, 0):
        rng_state.derive(3, 5, rank)
        found.append(draw())
    assert found[0] == found[2] != found[1]
