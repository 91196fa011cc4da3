"""Whatever happens between the saves of a chain, every checkpoint loads as the bytes that were saved."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetckpt.channel import GroupChannel, present_channel
from lightning_hetckpt.checkpoint import restore, verify
from lightning_hetckpt.checkpoint.consolidate import consolidate
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.together import SharedReader, group_broadcast
from tests.checkpoint.stories import Story
from tests.checkpoint.trees import assert_same

KINDS = ["full", "incremental", "differential"]
NAMES = [f"step={n}.ckpt" for n in range(4)] + ["last.ckpt"]


def save(engine: Snapshotter, story: Story, path: Path) -> None:
    engine.begin(
        story.tree(), path, list(story.tensors.values()), frozen=story.frozen(), sparse=story.sparse()
    ).wait()


def strided_like(place: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Somewhere to load to where no row is whole in memory."""
    if place[0] != "state_dict" or not shape:
        return None
    return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]


def check(folder: Path, truths: dict[str, Any]) -> None:
    """All that should be there is, whole, also where it is loaded into tensors with gaps."""
    assert {path.name for path in folder.glob("*.ckpt")} == set(truths)
    for name, truth in truths.items():
        verify.verify(folder / name)
        assert_same(restore.load(folder / name), truth)
        assert_same(restore.load(folder / name, destination=strided_like), truth)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(rng=st.randoms(use_true_random=False), drives=st.integers(0, 2), full_every=st.integers(2, 6))
def test_every_checkpoint_loads_bit_by_bit_whatever_happened_between(
    tmp_path_factory: pytest.TempPathFactory, kind: Any, rng: random.Random, drives: int, full_every: int
) -> None:
    folder = tmp_path_factory.mktemp("story")
    where = [folder / f"drive{n}" for n in range(drives)] or None
    story, truths = Story(rng), dict[str, Any]()
    engine = Snapshotter(where, save=kind, full_every=full_every, verify_unchanged=rng.choice([1, 3, 100]))
    try:
        for _ in range(rng.randint(2, 7)):
            name = rng.choice(NAMES)
            truths[name] = story.truth()
            save(engine, story, folder / name)
            story.go_on()
            what = rng.choice(["nothing"] * 4 + ["remove", "alone", "resume", "consolidate", "by hand"])
            others = sorted(set(truths) - {name})
            if what in ("remove", "by hand") and others:
                gone = rng.choice(others)
                del truths[gone]
                if what == "remove":
                    engine.remove(folder / gone)
                    engine.wait()
                else:
                    shutil.rmtree(folder / gone)
            elif what == "alone":
                other = rng.choice([one for one in NAMES if one != name])
                truths[other] = story.truth()
                engine.begin(story.tree(), folder / other, alone=True).wait()
            elif what == "consolidate" and others:
                consolidate(folder / rng.choice(others))
            elif what == "resume":
                engine.close()
                engine = Snapshotter(where, save=kind, full_every=full_every)
                engine.resumed_from(folder / name)
    finally:
        engine.close()
    check(folder, truths)
    shutil.rmtree(folder)


def tell(rank: int, folder: str, kind: Any, seeds: list[int], drives: int) -> None:
    """Every rank tells the same stories, and together they save them."""
    for seed in seeds:
        here = Path(folder) / str(seed)
        where = [here / f"drive{n}" for n in range(drives)] or None
        rng = random.Random(seed)
        story = Story(rng)
        with Snapshotter(where, channel=GroupChannel(), save=kind, full_every=4) as engine:
            for number in range(6):
                if rank == 0:
                    here.mkdir(parents=True, exist_ok=True)
                    torch.save(story.truth(), here / f"{number}.truth")
                save(engine, story, here / f"{number}.ckpt")
                story.go_on()


def hear(rank: int, folder: str, seeds: list[int]) -> int:
    """Load everything together; how many there were."""
    found = sorted(Path(folder).glob("*/*.ckpt"))
    for path in found:
        truth = torch.load(path.with_suffix(".truth"), weights_only=False)
        for destination in (None, strided_like):
            reader = SharedReader(path, present_channel(), group_broadcast(), buffer_bytes=2**25)
            assert_same(restore.load(path, reader=reader, destination=destination), truth)
    return len(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("savers", "drives"), [(2, 0), (3, 2)])
def test_what_ranks_saved_together_any_number_of_ranks_loads(
    tmp_path: Path, run_ranks: Any, kind: Any, savers: int, drives: int
) -> None:
    seeds = list(range(100 * savers, 100 * savers + 4))
    run_ranks(tell, savers, str(tmp_path), kind, seeds, drives)
    for seed in seeds:
        here = tmp_path / str(seed)
        truths = {f"{n}.ckpt": torch.load(here / f"{n}.truth", weights_only=False) for n in range(6)}
        check(here, truths)
    for loaders in (2, 3):
        assert run_ranks(hear, loaders, str(tmp_path), seeds) == [6 * len(seeds)] * loaders
