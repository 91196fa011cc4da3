from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.balance.parts import cut, part_sizes
from lightning_hetckpt.errors import LoaderError

Pair = namedtuple("Pair", "inputs targets")  # noqa: PYI024 (what a user's collate function may return)


@given(samples=st.integers(0, 500), most=st.none() | st.integers(1, 500))
def test_parts_sum_to_the_whole_none_is_too_large_and_there_are_no_more_than_needed(
    samples: int, most: int | None
) -> None:
    sizes = part_sizes(samples, most)
    assert sum(sizes) == samples
    assert len(sizes) == (1 if most is None else max(1, -(-samples // most)))
    assert most is None or max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_parts_of_a_nested_batch_make_up_the_whole_again(sizes: list[int]) -> None:
    n = sum(sizes)
    rows, names = torch.arange(2 * n).view(n, 2), [f"sample {i}" for i in range(n)]
    batch = {"pair": Pair(rows, rows + 1), "more": [rows, (rows, None)], "names": names, "task": "lm"}

    parts = cut(batch, sizes)

    assert [len(part["pair"].inputs) for part in parts] == sizes
    assert torch.equal(torch.cat([part["pair"].targets for part in parts]), rows + 1)
    assert torch.equal(torch.cat([part["more"][1][0] for part in parts]), rows)
    assert [name for part in parts for name in part["names"]] == names
    for part in parts:
        assert type(part["pair"]) is Pair
        assert part["more"][1][1] is None
        assert part["task"] == "lm"


def test_a_list_with_one_entry_per_sample_is_cut_itself() -> None:
    images = [torch.zeros(1, size) for size in (4, 5, 6)]
    first, second = cut([images, torch.zeros(3)], (2, 1))
    assert [image.shape[1] for image in first[0]] == [4, 5]
    assert [image.shape[1] for image in second[0]] == [6]


def test_as_many_tensors_as_samples_are_still_cut_one_by_one() -> None:
    first, second = cut((torch.zeros(2, 5), torch.ones(2)), (1, 1))
    assert first[0].shape == (1, 5)
    assert second[1].shape == (1,)


def test_a_mapping_keeps_its_type_and_no_tensor_is_copied() -> None:
    whole = OrderedDict(x=torch.zeros(4))
    part = cut(whole, (1, 3))[1]
    assert type(part) is OrderedDict
    part["x"][0] = 1.0
    assert whole["x"].tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        (torch.zeros(5), r"batch is a Tensor of shape \(5,\)"),
        ({"x": torch.zeros(4), "count": torch.tensor(4)}, r"batch\['count'\] is a Tensor of shape \(\)"),
        ({"x": torch.zeros(4), "tokens": 17}, r"batch\['tokens'\] is a int without one entry per sample"),
        ([torch.zeros(4), [object()]], r"batch\[1\]\[0\] is a object without"),
    ],
)
def test_what_has_another_length_is_named(batch: Any, place: str) -> None:
    with pytest.raises(LoaderError, match=rf"4 samples.*{place}.*4 rows.*max_micro_batch"):
        cut(batch, (2, 2))
