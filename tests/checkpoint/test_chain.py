"""Whatever happens between the saves of a chain, every checkpoint loads as the bytes that were saved."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetckpt.channel import GroupChannel, present_channel
from lightning_hetckpt.checkpoint import publish, restore, verify
from lightning_hetckpt.checkpoint.consolidate import consolidate
from lightning_hetckpt.checkpoint.folders import run_of
from lightning_hetckpt.checkpoint.snapshotter import Snapshotter
from lightning_hetckpt.checkpoint.together import SharedReader, group_broadcast
from tests import ranks
from tests.checkpoint.stories import Story
from tests.checkpoint.test_publish import CHANGES
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


# --- A death between any two changes of the disk ---


def state_at(step: int) -> torch.Tensor:
    """One tensor of three buffers; each step changes rows of it."""
    tensor = torch.arange(5_000_000, dtype=torch.float32).view(5000, 1000)
    for done in range(step):
        tensor[1000 * done : 1000 * done + 30] += 1 + done
    return tensor


def die(folder: str, drives: int, kind: Any, changes: int) -> None:
    """Save twice more and retire what is older; the process ends after `changes` changes of the disk."""
    where = [Path(folder) / f"drive{n}" for n in range(drives)] or None
    snapshots, left = Path(folder) / "s", [changes]
    counting = threading.Lock()

    def mortal(change: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with counting:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
            return change(*args, **kwargs)

        return call

    with Snapshotter(where, save=kind) as engine:
        for step in range(4):
            if step == 2:
                for name in CHANGES:
                    setattr(os, name, mortal(getattr(os, name)))
                publish._exchange = mortal(publish._exchange)
            tensor = state_at(step)
            path = snapshots / ("last.ckpt" if step in (1, 2) else f"step={step}.ckpt")
            engine.begin({"t": tensor, "global_step": step}, path, [tensor]).wait()
        engine.retire(snapshots, 1)
        engine.wait()
    os._exit(0)


@pytest.mark.parametrize(("kind", "drives"), [("incremental", 2), ("differential", 0)])
def test_a_chain_killed_anywhere_leaves_whole_checkpoints_and_goes_on(
    tmp_path: Path, run_ranks: Any, kind: Any, drives: int
) -> None:
    seen = []
    for changes in range(0, 400, 7):
        folder = tmp_path / str(changes)
        process = ranks._CONTEXT.Process(target=die, args=(str(folder), drives, kind, changes))
        process.start()
        process.join()
        exit_code = process.exitcode
        process.close()
        snapshots = folder / "s"
        where = [folder / f"drive{n}" for n in range(drives)]
        found = publish.scan(snapshots)
        for info in found:
            verify.verify(info.path)
            assert torch.equal(restore.load(info.path)["t"], state_at(info.global_step))
        seen.append(found[0].global_step)
        run = run_of(snapshots)
        publish.sweep(snapshots, where, run)
        assert publish.scan(snapshots) == found
        ids = {info.snapshot_id for info in found}
        for drive in where:
            assert {one.name for one in (drive / "lightning_hetckpt" / run).iterdir()} == ids
        if exit_code == 0:
            break
        assert exit_code == 9
        if changes % 3 == 0:
            with Snapshotter(where or None, save=kind) as engine:
                for step in (3, 4):
                    tensor = state_at(step)
                    engine.begin({"t": tensor}, snapshots / f"step={step}0.ckpt", [tensor]).wait()
            for step in (3, 4):
                verify.verify(snapshots / f"step={step}0.ckpt")
        shutil.rmtree(folder)
    assert exit_code == 0
    assert seen == sorted(seen)
    assert {1, 2, 3} == set(seen)
