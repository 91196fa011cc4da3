"""The formulas for messages and sizes, held against the real exchange, reports and manifests."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.scale import (
    adamw_state,
    chunks_of,
    hosts_of,
    manifest_bytes,
    measure,
    report_bytes,
    store_messages,
)
from lightning_hetckpt.channel import SoloChannel
from lightning_hetckpt.checkpoint.commit import RankReport, StoreExchange
from lightning_hetckpt.checkpoint.crew import Crew
from lightning_hetckpt.checkpoint.drive_shares import drive_weights
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES, stripe_name
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest
from lightning_hetckpt.checkpoint.shard_plan import file_tensors, plan_stripes
from lightning_hetckpt.checkpoint.stripe_header import header_lengths


class CountingStore:
    """A store in memory that counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> None:
        self.requests["delete_key"] += 1
        del self.values[key]


class Member(SoloChannel):
    """One rank of a crew that has agreed on everything already."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def broadcast(self, obj: object) -> object:
        return ("0" * 16, "seed", "")


@pytest.mark.parametrize("ranks", [2, 3, 17])
def test_one_commit_takes_as_many_messages_as_the_formula_says(tmp_path, ranks: int) -> None:
    store = CountingStore()
    crews = [
        Crew(Member(rank, ranks), tmp_path, lambda run: None, lambda: store, 1.0) for rank in range(ranks)
    ]
    store.requests.clear()

    for crew in crews:
        crew.exchange.report(0, RankReport(crew.rank, (), "plan"))
    assert len(crews[0].exchange.collect(0)) == ranks
    crews[0].exchange.answer(0, None, {})
    for crew in crews[1:]:
        crew.exchange.await_answer(0)
        crew.acknowledge(0)

    assert store.requests.total() == store_messages(ranks)
    assert isinstance(crews[0].exchange, StoreExchange)


def test_a_single_process_asks_no_store() -> None:
    assert store_messages(1) == 0


def entry(rank: int, drive: int, nbytes: int) -> FileEntry:
    chunks = ("0123456789abcdef",) * -(-nbytes // CHUNK_BYTES)
    return FileEntry(stripe_name(rank, drive), nbytes, CHUNK_BYTES, chunks, 0.12345678901234567)


@given(
    rank=st.integers(0, 99_999),
    sizes=st.lists(st.integers(1, 2**36), max_size=8),
    state=st.binary(max_size=200),
)
@example(rank=99_999, sizes=[], state=b"")
@settings(deadline=None)
def test_no_report_is_longer_than_the_formula_says_and_none_much_shorter(rank, sizes, state) -> None:
    files = tuple(entry(rank, drive, nbytes) for drive, nbytes in enumerate(sizes))
    text = "A" * (4 * -(-len(state) // 3))
    found = len(RankReport(rank, files, "0123456789abcdef", text).to_json())

    most = report_bytes(len(files), sum(len(file.chunks) for file in files), len(state))
    assert 0.75 * most - 60 <= found <= most


@pytest.mark.parametrize(("ranks", "drives"), [(1, 1), (2, 3), (8, 8), (64, 2)])
@pytest.mark.parametrize("layers", [0, 3])
def test_no_manifest_is_longer_than_the_formula_says_and_none_much_shorter(ranks, drives, layers) -> None:
    specs = adamw_state(layers, width=1024)
    weights = [host.weights for host in hosts_of(ranks, drives) for _ in host.ranks]
    stripes = plan_stripes(specs, ranks, weights)
    by_name = {spec.name: spec for spec in specs}
    headers = header_lengths(stripes, by_name)
    files = {s.file: entry(s.rank, s.drive, headers[s.file] + s.data_bytes) for s in stripes}
    manifest = Manifest(
        snapshot_id="0" * 16,
        run="1" * 16,
        parent="2" * 16,
        commit=1000,
        kind="full",
        global_step=1000,
        epoch=3,
        world_size=ranks,
        created_unix_s=time.time(),
        files=files,
        tensors=file_tensors(stripes, by_name, headers),
        aliases={},
    )
    chunks = sum(chunks_of(s, headers[s.file]) for s in stripes)
    assert chunks == sum(len(file.chunks) for file in files.values())

    most = manifest_bytes(
        len(files), chunks, len(specs), sum(len(s.pieces) for s in stripes), sum(map(len, by_name))
    )
    assert 0.75 * most - 600 <= len(manifest.to_json()) <= most


def test_the_planned_model_is_as_large_as_it_says() -> None:
    assert sum(spec.nbytes for spec in adamw_state(95)) == pytest.approx(1e12, rel=0.01)
    assert {spec.name.split(".")[0] for spec in adamw_state(1)} == {"state_dict", "optimizer_states"}


def test_each_rank_has_its_host() -> None:
    hosts = hosts_of(19, 3)
    assert [rank for host in hosts for rank in host.ranks] == list(range(19))
    assert len(drive_weights(hosts, 10**9)) == 19


def test_a_row_of_the_benchmark_tells_of_one_plan() -> None:
    row = measure(adamw_state(1, width=256), ranks=4, drives=2, split=True)
    assert (row["ranks"], row["stripes"], row["store_messages"]) == (4, 8, store_messages(4))
    assert row["pieces"] >= row["tensors"]
