from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint import layout


@given(nbytes=st.integers(0, 2**62), block=st.integers(1, 2**20))
def test_padding_ends_at_the_next_block_border_and_not_further(nbytes: int, block: int) -> None:
    whole = layout.padded(nbytes, block)
    assert whole % block == 0
    assert nbytes <= whole < nbytes + block


def test_names_are_spelled_as_the_format_says() -> None:
    assert layout.stripe_name(3, 12) == "stripe-r00003-d12.safetensors"
    assert layout.owned_stripe_name() == "stripe-r00000-owned.safetensors"
    assert layout.drive_folder(Path("/ssd1"), "run", "id") == Path("/ssd1/lightning_hetckpt/run/id")


@given(rank=st.integers(0, 10**6), drive=st.integers(0, 10**3))
def test_no_two_shares_get_one_file(rank: int, drive: int) -> None:
    others = {
        layout.stripe_name(rank + 1, drive),
        layout.stripe_name(rank, drive + 1),
        layout.owned_stripe_name(rank),
    }
    assert len(others | {layout.stripe_name(rank, drive)}) == 4


def test_a_checkpoint_under_construction_looks_like_no_checkpoint_to_lightning() -> None:
    built = layout.build_folder(Path("run/last.ckpt"), layout.new_id())
    assert built.parent == Path("run")
    assert built.name.startswith(".")
    assert not any(word in built.name for word in (".ckpt", "last", "ckpt_"))


def test_ids_are_sixteen_hex_digits_and_new_every_time() -> None:
    ids = {layout.new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(an_id) == 16 and int(an_id, 16) >= 0 for an_id in ids)
