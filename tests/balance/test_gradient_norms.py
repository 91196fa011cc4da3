"""The norms that the hook measures, against gradients that one process works out by itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_hetckpt.balance.gradient_norms import GradientNorms, GradientSquares, _square, check_hook
from lightning_hetckpt.balance.noise_metric import NoiseScale
from lightning_hetckpt.balance.noise_scale import estimate
from lightning_hetckpt.errors import ConfigurationError

Ranks = Callable[..., list[Any]]
WIDTH = 24
SMALL_BUCKETS_MB = 0.002  # several buckets even here


def make_model(unused: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(dtype)
    if unused:
        model.register_parameter("idle", nn.Parameter(torch.ones(7, dtype=dtype)))
    return model


def data(samples: int, step: int) -> Tensor:
    return torch.randn(
        samples, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + step)
    )


def mean_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).tanh().square().mean()


def truth(parts: list[list[Tensor]]) -> tuple[list[float], float]:
    """All |g_i|² and |g|² of one optimizer step; `parts[i]` are the batches of rank i."""
    squares = []
    for own in [*parts, [rows for rank in parts for rows in rank]]:
        model = make_model()
        mean_loss(model, torch.cat(own)).backward()
        squares.append(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    return squares[:-1], squares[-1]


def cut(samples: list[int], step: int) -> list[Tensor]:
    return list(data(sum(samples), step).split(samples))


def measure(
    rank: int,
    samples: list[int],
    accumulate: int = 1,
    loss_scale: float = 1.0,
    hook: Any = allreduce_hook,
    summed: bool = False,
    steps: int = 3,
    **ddp: Any,
) -> list[tuple[int, int, float, float]]:
    """What each of some optimizer steps measured, where the loss is weighted as HeteroDDP does."""
    model = make_model(unused=ddp.get("find_unused_parameters", False))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **ddp)
    norms = GradientNorms()
    wrapped.register_comm_hook(None, norms.wrap(hook))
    world, total = len(samples), sum(samples)
    found = []
    for step in range(steps):
        for micro in range(accumulate):
            rows = cut(samples, step * accumulate + micro)[rank]
            weight = world * samples[rank] / total / accumulate * (total if summed else 1)
            norms.add_batch(samples[rank], total, weight)
            assert not norms.complete
            with wrapped.no_sync() if micro < accumulate - 1 else torch.enable_grad():
                (mean_loss(wrapped, rows) * weight * loss_scale).backward()
        assert norms.complete
        taken = norms.take(world, loss_scale)
        assert taken is not None
        found.append((taken.samples, taken.total, float(taken.local_square), float(taken.global_square)))
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-6)  # too late to be seen
        wrapped.zero_grad()
    return found


def expected(samples: list[int], accumulate: int, step: int) -> tuple[list[float], float]:
    batches = [cut(samples, step * accumulate + micro) for micro in range(accumulate)]
    return truth([[batch[rank] for batch in batches] for rank in range(len(samples))])


@pytest.mark.parametrize(
    ("samples", "case"),
    [
        ([6, 2], {}),
        ([4, 4], {}),
        ([5, 1, 2], {}),
        ([6, 2], {"accumulate": 3}),
        ([6, 2], {"loss_scale": 65536.0}),
        ([6, 2], {"summed": True}),
        ([6, 2], {"find_unused_parameters": True}),
        ([6, 2], {"static_graph": True}),
        ([5, 1, 2], {"gradient_as_bucket_view": True, "accumulate": 2}),
    ],
    ids=lambda value: "-".join(map(str, value)) or "plain",
)
def test_both_norms_are_those_of_one_process(
    run_ranks: Ranks, samples: list[int], case: dict[str, Any]
) -> None:
    found = run_ranks(functools.partial(measure, samples=samples, **case), len(samples))

    accumulate = case.get("accumulate", 1)
    for step in range(3):
        local, whole = expected(samples, accumulate, step)
        for rank, own in enumerate(samples):
            measured = found[rank][step]
            assert measured[:2] == (own * accumulate, sum(samples) * accumulate)
            assert measured[2] == pytest.approx(local[rank], rel=1e-12)
            assert measured[3] == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    "hook",
    [
        bf16_compress_hook,
        fp16_compress_hook,
        functools.partial(allreduce_hook),
    ],
    ids=["bf16", "fp16", "partial"],
)
def test_a_users_hook_that_rounds_stays_in_use_and_is_measured_before_it_rounds(
    run_ranks: Ranks, hook: Any
) -> None:
    found = run_ranks(functools.partial(measure, samples=[6, 2], hook=hook), 2)

    check_hook(hook, None)
    local, whole = expected([6, 2], 1, 0)
    assert [one[0][2] for one in found] == pytest.approx(local, rel=1e-12)
    assert found[0][0][3] == found[1][0][3] == pytest.approx(whole, rel=2e-2)
    if not isinstance(hook, functools.partial):
        assert found[0][0][3] != pytest.approx(whole, rel=1e-9)  # it did round


def test_a_hook_around_a_hook_is_measured_too(run_ranks: Ranks) -> None:
    found = run_ranks(measure_compressed, 2)

    _, whole = expected([6, 2], 1, 0)
    assert found[0][0][3] == found[1][0][3] == pytest.approx(whole, rel=1e-2)


def measure_compressed(rank: int) -> Any:
    return measure(rank, samples=[6, 2], hook=fp16_compress_wrapper(allreduce_hook))


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        (powerSGD_hook, PowerSGDState(None)),
        (post_localSGD_hook, PostLocalSGDState(None, None, 10)),
        (quantization_pertensor_hook, None),
        (functools.partial(powerSGD_hook), None),
    ],
    ids=["powersgd", "post-local", "quantised", "partial"],
)
def test_hooks_of_torch_that_give_no_mean_are_refused_by_name(hook: Any, state: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{getattr(hook, 'func', hook).__name__}.*allreduce_hook"):
        check_hook(hook, state)


def test_a_hook_of_the_users_own_is_trusted() -> None:
    def own_hook(state: object, bucket: Any) -> Any:
        return allreduce_hook(None, bucket)

    check_hook(own_hook, None)


def test_a_step_without_samples_or_without_a_reduction_tells_nothing() -> None:
    norms = GradientNorms()
    assert norms.take(2) is None

    norms.add_batch(0, 1, 0.0)
    assert norms.take(2) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_square_is_right_to_six_digits_over_millions_of_values(dtype: torch.dtype) -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(2)).to(dtype)

    assert float(_square(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("samples", [[6, 2], [3, 1, 2]], ids=str)
def test_the_metric_of_all_ranks_is_the_ratio_of_the_summed_estimates(
    run_ranks: Ranks, samples: list[int]
) -> None:
    found = run_ranks(functools.partial(fill_metric, samples=samples), len(samples))

    noise = signal = 0.0
    for step in range(3):
        both = estimate(samples, *expected(samples, 1, step))
        assert both is not None
        noise, signal = noise + both[0], signal + both[1]
    assert found == [pytest.approx(noise / signal if signal > 0 else math.inf, rel=1e-9)] * len(samples)


def fill_metric(rank: int, samples: list[int]) -> float:
    metric = NoiseScale()
    for own, total, local, whole in measure(rank, samples):
        squares = (torch.tensor(one, dtype=torch.float64) for one in (local, whole))
        metric.update(*GradientSquares(own, total, *squares), ranks=len(samples))
    lost = torch.tensor(math.inf)
    metric.update(1, 2, lost, lost, ranks=2)  # an overflow counts for nothing
    return float(metric.compute())


def test_the_metric_of_one_rank_alone_is_not_a_number() -> None:
    metric = NoiseScale()
    metric.update(4, 4, torch.tensor(1.0), torch.tensor(1.0), ranks=1)

    assert math.isnan(float(metric.compute()))
