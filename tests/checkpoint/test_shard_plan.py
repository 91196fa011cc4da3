from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.shard_plan import (
    DTYPE_BYTES,
    StripePlan,
    TensorSpec,
    file_tensors,
    fingerprint,
    plan_owned,
    plan_stripes,
)
from lightning_hetckpt.errors import CheckpointError, ConfigurationError

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
SHAPES = st.one_of(
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    st.tuples(st.integers(0, 300), st.integers(0, 3)),
    st.tuples(st.integers(1, 3), st.integers(0, 3000)),  # rows larger than a rank's share
)
SPECS = st.lists(st.tuples(DTYPES, SHAPES), max_size=12).map(
    lambda drawn: [TensorSpec(f"t{n}", dtype, shape) for n, (dtype, shape) in enumerate(drawn)]
)
WORLDS = st.integers(1, 9)
WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=4).filter(lambda weights: sum(weights) > 0)


def per_rank(stripes: tuple[StripePlan, ...]) -> dict[int, int]:
    given_bytes: dict[int, int] = defaultdict(int)
    for stripe in stripes:
        given_bytes[stripe.rank] += stripe.data_bytes
    return given_bytes


def owner_of_each_row(
    specs: list[TensorSpec], by_rank: list[list[float]]
) -> dict[tuple[str, int], tuple[int, int]]:
    """(rank, drive) of each row, found one by one: a row lies in the share that its middle falls into.

    A middle right on a border belongs to the share before it. A tensor without rows counts as row -1.
    """
    total = sum(spec.nbytes for spec in specs)
    shares = []
    for rank, weights in enumerate(by_rank):
        before, whole = Fraction(0), sum(map(Fraction, weights))
        for drive, weight in enumerate(weights):
            if weight:
                shares.append((Fraction(total) * (rank + before / whole) / len(by_rank), (rank, drive)))
            before += Fraction(weight)
    found, at = {}, Fraction(0)
    for spec in sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype]):
        for row in range(spec.rows) or [-1]:
            middle = at + Fraction(spec.nbytes, spec.rows or 1) * (row + Fraction(1, 2) if spec.rows else 0)
            found[spec.name, row] = [shares[0][1], *(owner for start, owner in shares if start < middle)][-1]
        at += spec.nbytes
    return found


@given(specs=SPECS, world_size=WORLDS, data=st.data())
def test_each_row_lies_in_the_share_that_its_middle_falls_into(specs, world_size, data) -> None:
    by_rank = data.draw(st.lists(WEIGHTS, min_size=world_size, max_size=world_size))
    found = {}
    for stripe in plan_stripes(specs, world_size, by_rank):
        for piece in stripe.pieces:
            for row in range(piece.row, piece.row + piece.rows) or [-1]:
                found[piece.name, row] = (stripe.rank, stripe.drive)
    assert found == owner_of_each_row(specs, by_rank)


@given(specs=SPECS, world_size=WORLDS, data=st.data())
def test_one_ranks_stripes_are_those_of_the_whole_plan(specs, world_size, data) -> None:
    weights = data.draw(st.one_of(WEIGHTS, st.lists(WEIGHTS, min_size=world_size, max_size=world_size)))
    stripes = plan_stripes(specs, world_size, weights)
    for rank in range(world_size):
        assert plan_stripes(specs, world_size, weights, rank) == tuple(s for s in stripes if s.rank == rank)


@given(specs=SPECS, world_size=WORLDS, weights=WEIGHTS)
def test_every_row_of_every_tensor_is_written_once(specs, world_size, weights) -> None:
    rows = defaultdict(list)
    for stripe in plan_stripes(specs, world_size, weights):
        for piece in stripe.pieces:
            rows[piece.name] += range(piece.row, piece.row + piece.rows)
    assert rows.keys() == {spec.name for spec in specs}
    assert all(sorted(rows[spec.name]) == list(range(spec.rows)) for spec in specs)


@given(specs=SPECS, world_size=WORLDS, weights=WEIGHTS)
def test_a_stripe_holds_its_pieces_end_to_end_each_tensor_at_most_once_and_aligned(
    specs, world_size, weights
):
    known = {spec.name: spec for spec in specs}
    stripes = plan_stripes(specs, world_size, weights)
    assert len({stripe.file for stripe in stripes}) == len(stripes)
    for stripe in stripes:
        end = 0
        for piece in stripe.pieces:
            assert piece.offset == end
            assert piece.nbytes == piece.rows * known[piece.name].row_bytes
            assert piece.offset % DTYPE_BYTES[known[piece.name].dtype] == 0
            end += piece.nbytes
        assert stripe.data_bytes == end
        assert stripe.pieces
        assert len({piece.name for piece in stripe.pieces}) == len(stripe.pieces)


@given(specs=SPECS, world_size=WORLDS, weights=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4))
@example(
    specs=[TensorSpec("no_rows", "F64", (0,)), TensorSpec("w", "F32", (8,))], world_size=1, weights=[0.0, 1.0]
)
@example(specs=[TensorSpec("no_rows", "F64", (0,))], world_size=2, weights=[0.0, 1.0, 0.0])
def test_a_drive_of_weight_zero_gets_no_file_not_even_for_an_empty_tensor(specs, world_size, weights) -> None:
    if any(weights):
        assert all(weights[stripe.drive] for stripe in plan_stripes(specs, world_size, weights))


def row_at(specs: list[TensorSpec], place: Fraction) -> int:
    """Bytes of one row of the tensor that holds byte `place`, widest items first; 0 on a tensor's border."""
    for spec in sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype]):
        if 0 < place < spec.nbytes:
            return spec.nbytes // spec.rows
        place -= spec.nbytes
    return 0


@given(specs=SPECS, world_size=WORLDS, weights=WEIGHTS)
def test_no_rank_is_further_from_the_mean_than_one_row_of_a_tensor_it_is_cut_in(specs, world_size, weights):
    given_bytes = per_rank(plan_stripes(specs, world_size, weights))
    total = sum(spec.nbytes for spec in specs)
    for rank in range(world_size):
        first, last = Fraction(total * rank, world_size), Fraction(total * (rank + 1), world_size)
        row = max(row_at(specs, first), row_at(specs, last))
        assert abs(given_bytes[rank] - Fraction(total, world_size)) <= row


@given(specs=SPECS, world_size=WORLDS, weights=WEIGHTS)
def test_each_drive_gets_its_share_of_each_rank_to_one_row(specs, world_size, weights) -> None:
    held = {(s.rank, s.drive): s.data_bytes for s in plan_stripes(specs, world_size, weights)}
    total = sum(spec.nbytes for spec in specs)
    rank_bytes, whole = Fraction(total, world_size), sum(map(Fraction, weights))
    for rank in range(world_size):
        before = Fraction(0)
        for drive, weight in enumerate(weights):
            first = rank_bytes * (rank + before / whole)
            before += Fraction(weight)
            last = rank_bytes * (rank + before / whole)
            row = max(row_at(specs, first), row_at(specs, last))
            assert abs(held.get((rank, drive), 0) - (last - first)) <= row


@given(specs=SPECS, world_size=WORLDS, weights=WEIGHTS)
def test_a_tensor_without_elements_or_dimensions_lies_whole_in_one_stripe(specs, world_size, weights) -> None:
    holders = defaultdict(int)
    for stripe in plan_stripes(specs, world_size, weights):
        for piece in stripe.pieces:
            holders[piece.name] += 1
    assert all(holders[spec.name] == 1 for spec in specs if spec.nbytes == 0 or spec.shape == ())


@given(
    worlds=st.tuples(WORLDS, WORLDS),
    weights=st.tuples(WEIGHTS, WEIGHTS),
    tensors=st.tuples(SPECS, SPECS),
    same=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example(worlds=(2, 2), weights=([1.0], [3.0]), tensors=([TensorSpec("a", "F32", (8,))],) * 2, same=(1, 0, 1))
@example(
    worlds=(1, 1),
    weights=([1.0], [1.0]),
    tensors=([TensorSpec("a", "F32", (8,))], [TensorSpec("a", "I32", (8,))]),
    same=(1, 1, 0),
)
def test_fingerprints_are_equal_exactly_where_plans_and_tensors_are(worlds, weights, tensors, same) -> None:
    one = (tensors[0], worlds[0], weights[0])
    two = (tensors[not same[2]], worlds[not same[0]], weights[not same[1]])
    alike = plan_stripes(*one) == plan_stripes(*two) and {*one[0]} == {*two[0]}
    assert (fingerprint(*one) == fingerprint(*two)) == alike


def test_four_equal_drives_share_one_tensor_evenly() -> None:
    weight = TensorSpec("w", "F32", (1000, 1))
    assert [s.data_bytes for s in plan_stripes([weight], 1, [5, 5, 5, 5])] == [1000] * 4


def test_a_drive_three_times_as_fast_gets_three_times_the_bytes() -> None:
    stripes = plan_stripes([TensorSpec("w", "F32", (800,))], 2, [3.0, 1.0])
    assert [(s.rank, s.drive, s.data_bytes) for s in stripes] == [
        (0, 0, 1200), (0, 1, 400), (1, 0, 1200), (1, 1, 400),
    ]  # fmt: skip


def test_a_cut_goes_to_the_nearest_row_border() -> None:
    stripes = plan_stripes([TensorSpec("w", "F32", (5, 10))], 3, [1.0])  # ideal cuts at rows 1.67 and 3.33
    assert [piece.row for stripe in stripes for piece in stripe.pieces] == [0, 2, 3]


def test_one_huge_row_goes_whole_to_one_rank() -> None:
    (stripe,) = plan_stripes([TensorSpec("w", "BF16", (1, 1000))], 8, [1.0])
    assert stripe.data_bytes == 2000


def test_nothing_to_write_is_no_stripe() -> None:
    assert plan_stripes([], 4, [1.0]) == ()
    assert plan_owned([]).pieces == ()


@given(specs=SPECS, rank=st.integers(0, 5))
def test_the_owned_stripe_holds_every_tensor_whole(specs: list[TensorSpec], rank: int) -> None:
    stripe = plan_owned(specs, rank, drive=1)
    assert (stripe.rank, stripe.drive) == (rank, 1)
    assert {(p.name, p.row, p.rows) for p in stripe.pieces} == {(s.name, 0, s.rows) for s in specs}
    assert stripe.data_bytes == sum(spec.nbytes for spec in specs)


@given(specs=SPECS, world_size=WORLDS, weights=WEIGHTS)
def test_the_manifest_finds_each_row_behind_the_header_of_its_file(specs, world_size, weights) -> None:
    stripes = plan_stripes(specs, world_size, weights)
    headers = {stripe.file: 4096 * (1 + stripe.rank) for stripe in stripes}
    found = file_tensors(reversed(stripes), {spec.name: spec for spec in specs}, headers)
    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {
        spec.name: (spec.dtype, spec.shape) for spec in specs
    }
    placed = {
        (s.file, p.name): (headers[s.file] + p.offset, p.row, p.rows) for s in stripes for p in s.pieces
    }
    for name, entry in found.items():
        assert [p.row for p in entry.pieces] == sorted(p.row for p in entry.pieces)
        for p in entry.pieces:
            assert placed.pop((p.file, name)) == (p.offset, p.row, p.rows)
    assert not placed


def test_a_complex_tensor_is_marked_in_the_manifest() -> None:
    spec = TensorSpec("z", "F32", (3, 2), "complex64")
    stripe = plan_owned([spec])
    assert file_tensors([stripe], {"z": spec}, {stripe.file: 4096})["z"].complex == "complex64"


@pytest.mark.parametrize(
    ("specs", "world_size", "weights", "error", "words"),
    [
        ([TensorSpec("a", "F32", ()), TensorSpec("a", "F32", ())], 1, [1], CheckpointError, "stand twice"),
        ([TensorSpec("a", "C64", ())], 1, [1], CheckpointError, "meta.pt"),
        ([TensorSpec("__metadata__", "F32", ())], 1, [1], CheckpointError, "__metadata__"),
        ([], 0, [1], ConfigurationError, "0 ranks"),
        ([], 1, [], ConfigurationError, "weights"),
        ([], 1, [0.0, 0.0], ConfigurationError, "weights"),
        ([], 1, [2.0, -1.0], ConfigurationError, "weights"),
        ([], 1, [math.inf], ConfigurationError, "weights"),
        ([], 1, [math.nan, 1.0], ConfigurationError, "weights"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_words(specs, world_size, weights, error, words) -> None:
    with pytest.raises(error, match=words):
        plan_stripes(specs, world_size, weights)
