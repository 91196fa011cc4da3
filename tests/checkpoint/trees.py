"""Odd checkpoints, and what it means that one came back as it was."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,  # no stripe holds this one
]


def assert_same(found: Any, truth: Any, where: str = "") -> None:
    """The same types, keys, order, attributes and, bit by bit, the same tensors."""
    assert type(found) is type(truth), f"{where}: {type(found)} is not {type(truth)}"
    if isinstance(truth, Tensor):
        assert (found.dtype, found.shape, found.device) == (truth.dtype, truth.shape, truth.device), where
        assert found.requires_grad == truth.requires_grad, where
        if truth.layout is torch.strided and not truth.is_quantized and not truth.is_meta:
            assert bits(found) == bits(truth), where
    elif isinstance(truth, dict):
        assert list(found) == list(truth), where
        assert [type(key) for key in found] == [type(key) for key in truth], where
        for key in truth:
            assert_same(found[key], truth[key], f"{where}.{key}")
        if isinstance(truth, OrderedDict):
            assert vars(found) == vars(truth), where
    elif isinstance(truth, list | tuple):
        assert len(found) == len(truth), where
        for number, (one, other) in enumerate(zip(found, truth, strict=True)):
            assert_same(one, other, f"{where}.{number}")
    else:
        assert found == truth or found != found, where


def bits(tensor: Tensor) -> bytes:
    """The values as bytes, row by row; equal where NaNs are, too."""
    rows = torch.empty(tensor.shape, dtype=tensor.dtype)
    rows.copy_(tensor.detach().resolve_conj().resolve_neg())
    return rows.reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype, shape and stride; also views into larger memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    spare = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    count = spare + torch.Size(shape).numel()
    raw = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype)[spare:].view(shape)
    how = draw(st.sampled_from(["plain", "transposed", "strided", "expanded"]))
    if how == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if how == "strided" and tensor.dim():
        return tensor[::2]
    if how == "expanded":
        return tensor.expand(2, *tensor.shape)
    return tensor


KEYS = st.one_of(
    st.text(max_size=4), st.integers(-3, 3), st.booleans(), st.just("a.b"), st.just("__metadata__")
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))


@st.composite
def trees(draw: st.DrawFn) -> dict[Any, Any]:
    """Nested dicts, OrderedDicts, lists and tuples of tensors and scalars; some tensors stand in two places."""
    pool = draw(st.lists(tensors(), min_size=1, max_size=3))
    leaves = st.one_of(SCALARS, st.sampled_from(pool), tensors())
    nodes = st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(KEYS, children, max_size=3),
            st.dictionaries(KEYS, children, max_size=3).map(OrderedDict),
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(KEYS, nodes, max_size=5))


def training_state(width: int = 8, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with BatchNorm buffers and tied weights, and an optimizer that has stepped."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.BatchNorm1d(2 * width),
        nn.Linear(2 * width, width),
        nn.Linear(width, width),
    )
    model.append(nn.Linear(width, width, bias=False))
    model[4].weight = model[3].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 1) -> dict[str, Any]:
    """What Lightning would save of them."""
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": model.state_dict(),
        "loops": {},
        "callbacks": {"Some{'x': 1}": {"best": torch.tensor(0.5), "empty": {}}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
    }


def stable(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that only an optimizer step moves."""
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
