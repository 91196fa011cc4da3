"""A rank's batch, cut into micro-batches that fit into its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from lightning_hetckpt.errors import LoaderError


def part_sizes(samples: int, most: int | None) -> tuple[int, ...]:
    """The fewest parts of `samples` of which none is above `most`, as equal as can be; the first are the larger.

    Args:
        samples: of the whole batch; 0 is one empty part.
        most: None for no limit.
    """
    if most is None or samples <= most:
        return (samples,)
    count = -(-samples // most)
    size, larger = divmod(samples, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """`batch` in parts of `sizes` samples, in order, each built like the whole; tensors are views, not copies.

    Tensors are cut along dimension 0. Mappings, lists and tuples of tensors are cut inside; a list or tuple with
    one entry per sample is cut itself, unless all tensors among its entries have a row for each sample. None and
    strings go into every part.

    Raises:
        LoaderError: something in there has no length of `sum(sizes)`; names the place.
    """
    borders = list(pairwise(accumulate(sizes, initial=0)))
    samples = borders[-1][1]
    _check(batch, samples, "batch")
    return [_slice(batch, begin, end, samples) for begin, end in borders]


def _slice(value: Any, begin: int, end: int, samples: int) -> Any:
    if isinstance(value, Tensor) or _is_one_per_sample(value, samples):
        return value[begin:end]
    if isinstance(value, Mapping):
        parts = {key: _slice(inner, begin, end, samples) for key, inner in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        inside = [_slice(inner, begin, end, samples) for inner in value]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    return value


def _check(value: Any, samples: int, place: str) -> None:
    if value is None or isinstance(value, str) or _is_one_per_sample(value, samples):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check(inner, samples, f"{place}[{key!r}]")
        return
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, samples, f"{place}[{index}]")
        return
    if isinstance(value, Tensor) and value.dim() and len(value) == samples:
        return
    found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "without one entry per sample"
    raise LoaderError(
        f"the batch of {samples} samples must be cut into micro-batches, but {place} is a {type(value).__name__} "
        f"{found}. Let the loader return tensors with {samples} rows, in dicts, lists or tuples; or keep shares within "
        "memory by max_samples instead of max_micro_batch."
    )


def _is_one_per_sample(value: Any, samples: int) -> bool:
    """Whether a sequence holds one entry per sample, and not tensors of which each has all samples."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != samples:
        return False
    # A pair of inputs and targets is as long as a batch of two.
    tensors = [inner for inner in value if isinstance(inner, Tensor)]
    return not tensors or not all(inner.dim() and len(inner) == samples for inner in tensors)
