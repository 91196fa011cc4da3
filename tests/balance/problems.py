"""Random devices, networks and bounds for the laws of the solver."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_hetckpt.balance.optperf import DeviceModel, SyncModel

# Whole thousandths make ties common, plain floats make them rare; both must come out right.
seconds = st.one_of(st.integers(1, 20).map(lambda ms: ms / 1000), st.floats(1e-4, 10))
part = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
devices = st.builds(DeviceModel, seconds, st.one_of(st.just(0.0), seconds))
devices_with_backward = st.builds(
    lambda model, steep, flat: DeviceModel(
        model.seconds_per_sample, model.fixed_s, steep * model.seconds_per_sample, flat * model.fixed_s
    ),
    devices,
    part,
    part,
)
networks = st.builds(
    SyncModel, st.floats(0.01, 1), st.one_of(st.just(0.0), seconds), st.one_of(st.just(0.0), seconds)
)


@st.composite
def problems(
    draw: st.DrawFn,
) -> tuple[list[DeviceModel], int, list[int], list[int | None], int, SyncModel | None]:
    """A small problem of any kind; many of them have no solution."""
    sync = draw(st.one_of(st.none(), networks))
    models = draw(st.lists(devices if sync is None else devices_with_backward, min_size=1, max_size=3))
    each = {"min_size": len(models), "max_size": len(models)}
    total = draw(st.integers(1, 24))
    low = draw(st.lists(st.integers(1, 5), **each))
    high = draw(st.lists(st.one_of(st.none(), st.integers(1, 14)), **each))
    return models, total, low, high, draw(st.integers(1, 5)), sync
