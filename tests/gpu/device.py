"""The GPU of these tests, and how to keep it busy. Whoever imports this is skipped where there is no GPU."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
_TRIAL_CYCLES = 20_000_000


def keep_busy(seconds: float) -> torch.cuda.Event:
    """Queue work of about `seconds` in the compute stream; the event comes behind it."""
    torch.cuda._sleep(int(seconds * _cycles_per_s()))
    return torch.cuda.current_stream(DEVICE).record_event()


@functools.cache
def _cycles_per_s() -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(DEVICE)
    torch.cuda._sleep(_TRIAL_CYCLES)  # lets the clock rise
    began.record()
    torch.cuda._sleep(_TRIAL_CYCLES)
    ended.record()
    ended.synchronize()
    return _TRIAL_CYCLES / (began.elapsed_time(ended) / 1e3)


def make_model(width: int = 512) -> nn.Module:
    """Weights, tied ones too, and BatchNorm's buffers; three million numbers at the usual width."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.BatchNorm1d(2 * width),
        nn.Linear(2 * width, width),
        nn.Linear(width, width),
        nn.Linear(width, width, bias=False),
    )
    model[4].weight = model[3].weight
    return model.to(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Queue whole steps; nothing in here waits for the GPU."""
    for _ in range(steps):
        model(torch.ones(4, model[0].in_features, device=DEVICE)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen(tree: Any) -> Any:
    """A copy of everything in `tree`, made in the compute stream."""
    return copy.deepcopy(tree)


def moved(tree: Any, device: torch.device | str) -> Any:
    """The same tree with every tensor on `device`; ties, strides and attributes of containers stay."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=device, weights_only=False)


def spoil(tensors: Iterable[Tensor]) -> None:
    """Queue an overwrite of everything in the compute stream."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
