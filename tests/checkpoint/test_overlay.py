"""Overlays say of every byte what writing the newer bytes over the older ones would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.overlay import NOTHING, Overlay

LENGTH = 40


@st.composite
def overlays(draw: st.DrawFn, file: str) -> Overlay:
    borders = sorted(draw(st.sets(st.integers(0, LENGTH), max_size=10)))
    ranges, offset = [], draw(st.integers(0, 5))
    for start, end in zip(borders[::2], borders[1::2], strict=False):
        ranges.append((start, end - start, offset))
        offset += end - start + draw(st.integers(0, 2))
    return Overlay.of(file, ranges)


def painted(overlay: Overlay) -> list[tuple[str | None, int]]:
    """Where each byte lies, told from the table itself."""
    found: list[tuple[str | None, int]] = [(None, at) for at in range(LENGTH)]
    for start, nbytes, file, offset in overlay.ranges.tolist():
        for n in range(nbytes):
            found[start + n] = overlay.files[file], offset + n
    return found


@given(st.lists(st.sampled_from("abc"), max_size=5).flatmap(lambda names: st.tuples(*map(overlays, names))))
def test_over_is_painting_over(several: tuple[Overlay, ...]) -> None:
    found, truth = NOTHING, [(None, at) for at in range(LENGTH)]
    for overlay in several:
        found = overlay.over(found)
        truth = [new if new[0] is not None else old for new, old in zip(painted(overlay), truth, strict=True)]
    assert painted(found) == truth
    assert found.nbytes == sum(file is not None for file, _ in truth)
    starts = found.ranges[:, 0].tolist()
    assert starts == sorted(starts)
    assert set(found.files) == {file for file, _ in truth} - {None}


@given(overlays("a"), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_a_range_splits_into_what_it_is_painted_with(overlay: Overlay, one: int, other: int) -> None:
    start, end = sorted((one, other))
    found: list[tuple[str | None, int]] = []
    for at, nbytes, file, offset in overlay.split(start, end - start):
        assert at == start + len(found)
        assert nbytes > 0
        found += [(file, offset + n) for n in range(nbytes)]
    assert found == painted(overlay)[start:end]


def test_neighbours_in_place_and_file_are_one_range() -> None:
    assert Overlay.of("a", [(0, 4, 0), (4, 4, 4), (8, 4, 9)]).ranges.tolist() == [[0, 8, 0, 0], [8, 4, 0, 9]]
