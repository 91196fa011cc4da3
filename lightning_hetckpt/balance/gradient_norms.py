"""The norms of the local and of the global gradient, read off the buckets that DDP reduces anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetckpt.errors import ConfigurationError

CommHook = Callable[[Any, Any], torch.futures.Future[Tensor]]

_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
# Those of torch's hooks whose result is the mean of all ranks' gradients, up to rounding.
_EXACT = frozenset({"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"})
_ROW = 1024


class GradientSquares(NamedTuple):
    """Squared norms of the mean gradients behind one optimizer step, before any clipping."""

    samples: int  # of this rank, over all accumulated batches
    total: int  # of all ranks
    local_square: Tensor  # of this rank's mean gradient
    global_square: Tensor  # of the mean gradient over all samples, equal on every rank


class GradientNorms:
    """Adds up squared norms bucket by bucket: no collective of its own, one more pass over each bucket.

    Wrap the hook, tell of every batch whose gradient is on its way into the buckets, and take the result once the
    backward pass that reduces is over. With gradient accumulation the buckets hold the sum of several batches,
    so all of these are told before.
    """

    # The hook runs on the autograd thread, the second norm on a thread (and on CUDA a stream) of the process group;
    # DDP's backward returns behind both, so `take` on the main thread sees all.

    def __init__(self) -> None:
        self._squares: list[tuple[Tensor, Tensor]] = []  # of each bucket, before and after
        self._reduced = False
        self._samples = self._total = 0
        self._weight = 0.0

    def wrap(self, hook: CommHook) -> CommHook:
        """A hook that reduces as `hook` does, and measures before and after."""

        def measured(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            if bucket.index() == 0:
                self._squares.clear()  # of a backward pass that nobody asked about
            buffer = bucket.buffer()
            before = _square(buffer)
            # Made here, on the stream of the backward pass, since memory from the reducing one could be given
            # away again while the main stream still reads it.
            after = torch.empty_like(before)
            self._squares.append((before, after))
            self._reduced = bucket.is_last()

            def measure(future: torch.futures.Future[Any]) -> Any:
                value = future.value()
                after.copy_(_square(value[0] if isinstance(value, list | tuple) else value))
                return value

            return hook(state, bucket).then(measure)

        measured.__annotations__.clear()  # torch compares them with its own classes, and ours are strings
        return measured

    def add_batch(self, samples: int, total: int, weight: float) -> None:
        """Tell of one batch before its backward pass.

        Args:
            samples: of this rank.
            total: of all ranks.
            weight: by how much the gradient of this rank's mean loss is scaled on its way into the bucket. Within
                one optimizer step it must be in proportion to `samples`, by the same factor on every rank.
        """
        self._samples += samples
        self._total += total
        self._weight += weight

    def drop(self) -> None:
        """Forget the batches told so far, for a step that says nothing."""
        self._squares.clear()
        self._reduced = False
        self._samples = self._total = 0
        self._weight = 0.0

    @property
    def complete(self) -> bool:
        """Whether all buckets since the last `take` have been reduced."""
        return self._reduced

    def take(self, ranks: int, loss_scale: Tensor | float = 1.0) -> GradientSquares | None:
        """The norms of the optimizer step at hand, and begin anew; None if its gradients have no samples behind them.

        Nothing here waits for the device.

        Args:
            ranks: how many DDP averaged over.
            loss_scale: what mixed precision multiplied the loss by.
        """
        squares, samples, total, weight = self._squares, self._samples, self._total, self._weight
        self._squares = []
        self.drop()
        if not squares or not samples or not weight:
            return None
        before = torch.stack([one for one, _ in squares]).sum()
        after = torch.stack([one for _, one in squares]).sum()
        # A sample of any rank came into the buckets with this weight; DDP then divided by the number of ranks.
        per_sample = weight / samples * loss_scale
        return GradientSquares(
            samples,
            total,
            before / (per_sample * samples) ** 2,
            after / (per_sample * total / ranks) ** 2,
        )


def check_hook(hook: Any, state: object) -> None:
    """Refuse a communication hook of torch whose result is not the mean over the ranks.

    Raises:
        ConfigurationError: PowerSGD, post-local SGD, and hooks that quantise.
    """
    hook = getattr(hook, "func", hook)  # beneath a functools.partial
    module, name = str(getattr(hook, "__module__", "")), str(getattr(hook, "__name__", hook))
    kind = type(state)
    if (module.startswith(_OF_TORCH) and name not in _EXACT) or kind.__module__.startswith(_OF_TORCH):
        raise ConfigurationError(
            f"found the communication hook {name} with a state of type {kind.__name__}; AdaptiveBatch compares each "
            "rank's gradient with their mean, and this hook gives something else. Use allreduce_hook, "
            "fp16_compress_hook or bf16_compress_hook, or leave adaptive_batch out."
        )


def _square(gradient: Tensor) -> Tensor:
    """The squared norm in float64, to nine digits, at the speed of the gradient's own type.

    A sum over millions of float32 is wrong in the fourth digit, and the noise is a small difference of such sums.
    """
    flat = gradient.view(-1)
    whole = len(flat) // _ROW * _ROW
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    square: Tensor = rows.double().square().sum() + rest.double().square()
    return square
