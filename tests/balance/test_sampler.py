from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_hetckpt.balance.plan import BatchPlan, PlanBook, StepKey
from lightning_hetckpt.balance.sampler import GlobalOrder, PlannedBatchSampler
from lightning_hetckpt.errors import LoaderError


class Numbers(Dataset[int]):
    """The samples are their own indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def reference(length: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """What torch gives to one process."""
    sampler = DistributedSampler(Numbers(length), num_replicas=1, rank=0, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def loader_of(sampler: PlannedBatchSampler, length: int, **options: object) -> DataLoader[int]:
    loader = DataLoader(Numbers(length), **options)  # type: ignore[arg-type]
    object.__setattr__(loader, "batch_sampler", sampler)
    return loader


class Job:
    """The samplers of all ranks, and the training loop that counts their batches."""

    def __init__(
        self,
        length: int,
        shares: Sequence[int],
        seed: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
        base: Sampler[int] | None = None,
    ) -> None:
        self.trained = 0
        self.books = [PlanBook(BatchPlan(tuple(shares))) for _ in shares]
        self.samplers = [
            PlannedBatchSampler(
                GlobalOrder(length, shuffle, seed, base), book, rank, drop_last, lambda: self.trained
            )
            for rank, book in enumerate(self.books)
        ]

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.sampler.set_epoch(epoch)  # as Lightning does

    def replan(self, shares: Sequence[int], start: StepKey) -> None:
        for book in self.books:
            book.add(BatchPlan(tuple(shares), start))

    def replan_behind_the_furthest(self, shares: Sequence[int]) -> None:
        """As the strategy does: unless the last plan has not begun, which happens at the end of an epoch."""
        start = StepKey(self.furthest.epoch, self.furthest.batch + 1)
        if start > self.books[0].latest.start:
            self.replan(shares, start)

    def load(self, state: dict[str, object]) -> None:
        for sampler in self.samplers:
            sampler.load_state_dict(dict(state))

    @property
    def furthest(self) -> StepKey:
        return max(sampler.issued for sampler in self.samplers)

    def batches(self) -> list[list[list[int]]]:
        """One pass: per batch the parts of all ranks, in rank order."""
        return [list(parts) for parts in zip(*self.samplers, strict=True)]

    def samples(self) -> list[int]:
        """One pass: all samples in the global order."""
        return [index for parts in self.batches() for part in parts for index in part]


@st.composite
def splits(draw: st.DrawFn, world: int, total: int) -> tuple[int, ...]:
    cuts = draw(st.lists(st.integers(1, total - 1), min_size=world - 1, max_size=world - 1, unique=True))
    borders = [0, *sorted(cuts), total]
    return tuple(after - before for before, after in itertools.pairwise(borders))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Samples, world, global batch, seed; the remainder of the epoch has at least one sample per rank."""
    world = draw(st.integers(1, 4))
    total = draw(st.integers(world + 1, 24))
    length = draw(st.integers(1, 100).filter(lambda n: n % total == 0 or n % total >= world))
    return length, world, total, draw(st.integers(0, 2**40))


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 50), st.booleans())
def test_the_global_order_is_that_of_torch_for_one_process(length, seed, epoch, shuffle) -> None:
    order = GlobalOrder(length, shuffle, seed)
    assert list(order.indices(epoch)) == reference(length, seed, epoch, shuffle)
    assert len(order) == length


@given(st.data(), jobs())
def test_every_sample_comes_once_per_epoch_in_the_global_order_while_plans_change(data, job) -> None:
    length, world, total, seed = job
    first, second = data.draw(splits(world, total)), data.draw(splits(world, total))
    run = Job(length, first, seed)
    run.replan(second, StepKey(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5))))
    for epoch in range(3):
        run.set_epoch(epoch)
        assert run.samples() == reference(length, seed, epoch)


@given(st.data(), jobs())
def test_every_sample_comes_once_where_the_global_batch_changes_with_an_epoch(data, job) -> None:
    length, world, total, seed = job
    run = Job(length, data.draw(splits(world, total)), seed)
    totals = [total]
    for epoch in range(1, 4):
        totals.append(data.draw(st.sampled_from([totals[-1], world + 1, 2 * total, length + world])))
        if totals[-1] != totals[-2]:
            run.replan(data.draw(splits(world, totals[-1])), StepKey(epoch, 0))
    for epoch, whole in enumerate(totals):
        run.set_epoch(epoch)
        assert [len(sampler) for sampler in run.samplers] == [-(-length // whole)] * world
        sizes = [run.samplers[0].batch_samples(batch) for batch in range(len(run.samplers[0]))]
        batches = run.batches()
        if sizes[-1] >= world:  # else some ranks repeat a sample of weight zero
            assert [sum(map(len, parts)) for parts in batches] == sizes
            assert [index for parts in batches for part in parts for index in part] == reference(
                length, seed, epoch
            )
        assert sum(sizes) == length
        run.trained = len(sizes)
        state = run.samplers[0].state_dict()
        assert (state["global_batch_size"], state["samples"]) == (whole, length)


@given(st.data(), jobs())
def test_the_plan_of_each_step_is_the_split_of_that_step(data, job) -> None:
    length, world, total, seed = job
    first, second = data.draw(splits(world, total)), data.draw(splits(world, total))
    run, start = Job(length, first, seed), StepKey(0, data.draw(st.integers(1, 5)))
    run.replan(second, start)
    for batch, parts in enumerate(run.batches()):
        sizes = tuple(len(part) for part in parts)
        if sum(sizes) == total:
            assert sizes == (second if batch >= start.batch else first)
        assert sum(sizes) == run.samplers[0].batch_samples(batch)


@settings(max_examples=15)
@given(st.data(), jobs(), st.integers(0, 3))
def test_plans_made_while_other_ranks_draw_ahead_hold_from_a_step_that_none_has_drawn(
    data, job, ahead
) -> None:
    """Ranks prefetch differently; new plans come in between, each from behind the furthest draw on."""
    length, world, total, seed = job
    run = Job(length, data.draw(splits(world, total)), seed)
    for epoch in range(2):
        run.set_epoch(epoch)
        passes = [iter(sampler) for sampler in run.samplers]
        drawn: list[list[list[int]]] = [[] for _ in range(world)]
        batches = len(run.samplers[0])
        for batch in range(batches):
            for rank in range(world):
                wanted = min(batches, batch + 1 + (ahead * rank) % 3)
                while len(drawn[rank]) < wanted:
                    drawn[rank].append(next(passes[rank]))
            if data.draw(st.booleans()):
                run.replan_behind_the_furthest(data.draw(splits(world, total)))
        assert all(next(each, None) is None for each in passes)
        dealt = [index for parts in zip(*drawn, strict=True) for part in parts for index in part]
        assert dealt == reference(length, seed, epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_prefetching_workers_that_persist_give_every_sample_once(workers) -> None:
    length, seed = 47, 7
    run = Job(length, (4, 2), seed)
    options = {"num_workers": workers}
    if workers:
        options |= {"prefetch_factor": 3, "persistent_workers": True}
    loaders = [loader_of(sampler, length, **options) for sampler in run.samplers]
    assert [len(loader) for loader in loaders] == [8, 8]
    dice = random.Random(3)
    for epoch in range(3):
        run.set_epoch(epoch)
        dealt: list[int] = []
        for batch, parts in enumerate(zip(*loaders, strict=True)):
            dealt += [int(index) for part in parts for index in part]
            assert run.furthest >= StepKey(epoch, batch)
            fast = dice.randint(1, 5)
            run.replan_behind_the_furthest((fast, 6 - fast))
        assert dealt == reference(length, seed, epoch)
    assert len(run.books[0].history) > 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_resumes_though_it_asks_for_two_passes(workers) -> None:
    run = Job(23, (3, 1), seed=5)
    run.trained = 2
    state = run.samplers[0].state_dict()
    resumed = Job(23, (4,), seed=5)
    loader = loader_of(resumed.samplers[0], 23, num_workers=workers)
    resumed.load(state)
    dealt = [int(index) for part in loader for index in part]
    assert dealt == reference(23, 5, 0)[8:]
    assert [int(index) for part in loader for index in part] == reference(23, 5, 0)


@given(st.data(), jobs())
def test_a_run_resumed_at_any_batch_with_any_world_goes_on_with_the_next_sample(data, job) -> None:
    length, world, total, seed = job
    run = Job(length, data.draw(splits(world, total)), seed)
    other_world = data.draw(st.integers(1, min(4, total - 1)))
    split = data.draw(splits(other_world, total))
    batches = len(run.samplers[0])
    for epoch in (0, 2):
        run.set_epoch(epoch)
        run.batches()
        for run.trained in range(batches + 1):
            state = run.samplers[-1].state_dict()
            assert state["samples"] == min(run.trained * total, length)
            resumed = Job(length, split, seed)
            resumed.load(state)
            assert resumed.samplers[0].state_dict()["epoch"] == epoch
            rest = [index for parts in resumed.batches() for part in parts for index in part]
            expected = reference(length, seed, epoch)[run.trained * total :]
            # With fewer samples than ranks, the ranks that get none repeat one of weight zero.
            assert list(dict.fromkeys(rest)) == expected
            resumed.set_epoch(epoch + 1)
            assert list(dict.fromkeys(resumed.samples())) == reference(length, seed, epoch + 1)


def test_at_the_end_of_an_epoch_nothing_is_left_and_then_comes_the_next_epoch_whole() -> None:
    run = Job(20, (3, 1), seed=1)
    run.batches()
    run.trained = 5
    resumed = Job(20, (2, 2), seed=1)
    resumed.load(run.samplers[0].state_dict())
    assert resumed.batches() == []
    resumed.set_epoch(1)
    assert resumed.samples() == reference(20, 1, 1)


def test_the_saved_end_of_an_epoch_is_over_though_nobody_drew_from_it() -> None:
    run = Job(20, (3, 1), seed=1)
    run.trained = 5
    resumed = Job(20, (3, 1), seed=1)
    resumed.load(run.samplers[0].state_dict())
    for sampler in resumed.samplers:
        iter(sampler)
    resumed.set_epoch(1)
    assert resumed.samples() == reference(20, 1, 1)


def test_a_fresh_pass_belongs_to_the_epoch_that_is_set_before_its_first_draw() -> None:
    run = Job(20, (4,), seed=1)
    early = iter(run.samplers[0])
    run.set_epoch(3)
    assert [index for part in early for index in part] == reference(20, 1, 3)


def test_a_resumed_pass_may_be_asked_for_twice_before_it_begins() -> None:
    run = Job(20, (4,), seed=1)
    run.trained = 2
    resumed = Job(20, (4,), seed=1)
    resumed.load(run.samplers[0].state_dict())
    iter(resumed.samplers[0])
    assert resumed.samples() == reference(20, 1, 0)[8:]
    assert resumed.samples() == reference(20, 1, 0)


def test_the_epoch_that_was_just_announced_starts_with_nothing_trained() -> None:
    run = Job(20, (4,), seed=1)
    run.batches()
    run.trained = 5
    run.set_epoch(1)  # Lightning resets its count of batches a little later
    state = run.samplers[0].state_dict()
    assert (state["epoch"], state["batches"], state["samples"]) == (1, 0, 0)


def test_the_state_of_a_resumed_run_is_what_was_loaded_until_it_trains() -> None:
    run = Job(20, (3, 1), seed=1)
    run.set_epoch(4)
    run.batches()
    run.trained = 3
    state = run.samplers[0].state_dict()
    assert state == {
        "version": 1,
        "epoch": 4,
        "batches": 3,
        "samples": 12,
        "seed": 1,
        "global_batch_size": 4,
        "length": 20,
        "shares": [3, 1],
    }
    resumed = Job(20, (2, 2), seed=1)
    resumed.load(state)
    resumed.trained = 3  # Lightning restores its own count
    assert all(sampler.state_dict() == {**state, "shares": [2, 2]} for sampler in resumed.samplers)


@given(st.integers(1, 60), st.integers(2, 12))
def test_drop_last_leaves_the_remainder_out(length, total) -> None:
    run = Job(length, (total - 1, 1), seed=2, drop_last=True)
    assert all(len(sampler) == length // total for sampler in run.samplers)
    assert run.samples() == reference(length, 2, 0)[: length // total * total]


def test_with_drop_last_the_last_whole_batch_ends_the_epoch() -> None:
    run = Job(22, (3, 1), seed=2, drop_last=True)
    run.trained = 5
    resumed = Job(22, (3, 1), seed=2, drop_last=True)
    resumed.load(run.samplers[0].state_dict())
    assert resumed.batches() == []
    other = Job(22, (3, 2), seed=2, drop_last=True)
    other.load(run.samplers[0].state_dict())  # with another global batch, since nothing is half done
    assert other.batches() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_without_a_sample_repeat_one_and_all_take_the_same_number_of_steps(workers) -> None:
    run = Job(10, (3, 3, 2), seed=4, shuffle=False)
    loaders = [loader_of(sampler, 10, num_workers=workers) for sampler in run.samplers]
    parts = [[part.tolist() for part in loader] for loader in loaders]
    assert parts == [[[0, 1, 2], [8]], [[3, 4, 5], [9]], [[6, 7], [8]]]


def test_an_epoch_smaller_than_the_world_is_one_step_on_every_rank() -> None:
    run = Job(2, (3, 3, 2), shuffle=False)
    assert run.batches() == [[[0], [1], [0]]]


def test_issued_never_goes_back() -> None:
    run = Job(20, (4,), seed=1)
    (sampler,) = run.samplers
    assert sampler.issued == StepKey(0, -1)
    cut_off = iter(sampler)
    next(cut_off), next(cut_off)
    assert sampler.issued == StepKey(0, 1)
    next(iter(sampler))  # the same epoch once more
    assert sampler.issued == StepKey(0, 1)
    run.set_epoch(1)
    assert sampler.issued == StepKey(0, 1)
    next(iter(sampler))
    assert sampler.issued == StepKey(1, 0)
    next(cut_off)  # a worker's late draw for a pass that was given up
    assert sampler.issued == StepKey(1, 0)
    state = sampler.state_dict() | {"epoch": 0, "batches": 2, "samples": 8}
    sampler.load_state_dict(state)
    assert sampler.issued == StepKey(1, 0)
    sampler.load_state_dict(state | {"epoch": 3})
    assert sampler.issued == StepKey(3, 1)


def test_the_batch_size_is_this_rank_s_present_share() -> None:
    run = Job(40, (6, 2), seed=1)
    run.replan((5, 3), StepKey(0, 2))
    second = run.samplers[1]
    sizes = [(len(part), second.batch_size) for part in second]
    assert sizes == [(2, 2), (2, 2), (3, 3), (3, 3), (3, 3)]


class TestSavedPlaces:
    """States that another run has saved."""

    @pytest.fixture
    def state(self) -> dict[str, object]:
        run = Job(40, (6, 2), seed=11)
        run.trained = 3
        return run.samplers[0].state_dict()

    def test_another_dataset_is_refused_in_the_middle_of_an_epoch(self, state) -> None:
        with pytest.raises(LoaderError, match=r"behind batch 3 of epoch 0 of 40 samples.*has 41"):
            Job(41, (6, 2), seed=11).load(state)

    def test_another_global_batch_is_refused_in_the_middle_of_an_epoch(self, state) -> None:
        with pytest.raises(
            LoaderError, match=r"with 8 samples in a global batch.*has 10.*global_batch_size=8"
        ):
            Job(40, (6, 4), seed=11).load(state)

    def test_another_seed_is_refused(self, state) -> None:
        with pytest.raises(LoaderError, match=r"seed 11.*seed 12.*seed_everything\(11\)"):
            Job(40, (6, 2), seed=12).load(state)

    def test_the_seed_says_nothing_about_an_order_without_shuffling(self, state) -> None:
        run = Job(40, (6, 2), seed=12, shuffle=False)
        run.load(state)
        assert run.samples() == list(range(24, 40))

    def test_another_version_is_refused(self, state) -> None:
        with pytest.raises(LoaderError, match="version 9, expected 1"):
            Job(40, (6, 2), seed=11).load(state | {"version": 9})

    @pytest.mark.parametrize("place", [{"batches": 0, "samples": 0}, {"batches": 5, "samples": 40}])
    def test_between_epochs_dataset_and_global_batch_may_change(self, state, place) -> None:
        run = Job(50, (6, 4), seed=11)
        run.load(state | place)
        assert run.samples() == (reference(50, 11, 0) if place["batches"] == 0 else [])
        run.set_epoch(1)
        assert run.samples() == reference(50, 11, 1)


class Dicey(Sampler[int]):
    """A sampler that draws from all the random sources there are."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, []

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        indices = torch.randperm(self.length).tolist()
        random.shuffle(indices)
        return iter(np.random.permutation(indices).tolist())


WEIGHTS = [1.0, 5.0, 2.0, 9.0] * 5


def own_samplers() -> list[Sampler[int]]:
    return [
        Dicey(20),
        RandomSampler(Numbers(20)),
        RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(3)),
        WeightedRandomSampler(WEIGHTS, 20),
        WeightedRandomSampler(WEIGHTS, 20, generator=torch.Generator().manual_seed(3)),
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_sampler_of_the_user_s_own_draws_the_same_on_every_rank_and_after_a_restart(which) -> None:
    orders = []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        order = GlobalOrder(20, False, 6, own_samplers()[which])
        if rank == 0:
            order.indices(0)  # the other one was just resumed
        orders.append([order.indices(1), order.indices(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("which", range(5))
def test_drawing_from_it_leaves_no_trace_in_any_random_source(which) -> None:
    sampler = own_samplers()[which]
    generator = getattr(sampler, "generator", None)

    def sources() -> list[object]:
        own = generator.get_state().tolist() if generator is not None else None
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), own]

    before = sources()
    GlobalOrder(20, False, 6, sampler).indices(1)
    assert sources() == before


def test_it_is_told_the_epoch() -> None:
    base = Dicey(20)
    run = Job(20, (4,), base=base)
    run.set_epoch(3)
    run.samples()
    assert base.epochs == [3]


class Liar(Sampler[int]):
    """Yields another number of indices than it says."""

    def __init__(self, says: int, yields: int) -> None:
        self.says, self.yields = says, yields

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.yields))


@pytest.mark.parametrize(("yields", "found"), [(9, "only 9"), (11, "more"), (10**12, "more")])
def test_one_that_does_not_keep_its_length_is_refused(yields, found) -> None:
    with pytest.raises(LoaderError, match=f"Liar yielded {found} indices in epoch 2, expected 10"):
        GlobalOrder(10, False, 0, Liar(10, yields)).indices(2)
