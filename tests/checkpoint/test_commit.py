from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from lightning_hetckpt.checkpoint.commit import (
    Exchange,
    RankReport,
    SoloExchange,
    StoreExchange,
    objection,
)
from lightning_hetckpt.checkpoint.manifest import FileEntry
from lightning_hetckpt.errors import CommitError

LONG_S = 30.0


class Job:
    """Ranks as threads, each with a client of its own to one real TCPStore."""

    def __init__(self, world_size: int, timeout_s: float = LONG_S) -> None:
        self.server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG_S))
        self.keys_before = self.server.num_keys()
        self.exchanges = [
            StoreExchange(self.client(), "job/commit", rank, world_size, timeout_s)
            for rank in range(world_size)
        ]

    def client(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.server.port, None, False, timedelta(seconds=LONG_S))

    def run(self, work: Callable[[int, Exchange], Any], ranks: list[int] | None = None) -> list[Any]:
        """What `work` returned on each rank, or the exception that it raised."""
        chosen = ranks if ranks is not None else list(range(len(self.exchanges)))
        with ThreadPoolExecutor(len(chosen)) as pool:
            futures = [pool.submit(work, rank, self.exchanges[rank]) for rank in chosen]
            return [future.exception(LONG_S) or future.result() for future in futures]

    @property
    def keys_left(self) -> int:
        return int(self.server.num_keys() - self.keys_before)


@pytest.fixture
def job() -> type[Job]:
    return Job


def report(rank: int, plan: str = "plan", error: str | None = None) -> RankReport:
    chunks = (f"{rank:016x}", "f" * 16)
    return RankReport(rank, (FileEntry(f"stripe-{rank}", 9000, 8192, chunks),), plan, "c3RhdGU=", error)


def one_round(serial: int, rank: int, exchange: Exchange, mine: RankReport | None = None) -> Any:
    """A rank's part in one commit; every rank returns the decision and what came with it."""
    exchange.report(serial, mine or report(rank))
    if rank > 0:
        return exchange.await_answer(serial)
    try:
        reports = exchange.collect(serial)
        error = objection(reports)
        payload = {"files": [entry.name for one in reports for entry in one.files]}
    except CommitError as failure:
        error, payload = str(failure), {}
    exchange.answer(serial, error, payload)
    return error, payload


@given(
    st.builds(
        RankReport,
        rank=st.integers(0, 10_000),
        files=st.lists(
            st.builds(
                FileEntry,
                name=st.text(),
                nbytes=st.integers(0, 2**62),
                chunk_bytes=st.integers(1, 2**30),
                chunks=st.lists(st.text("0123456789abcdef", min_size=16, max_size=16)).map(tuple),
            )
        ).map(tuple),
        plan=st.text(),
        rank_state=st.text(),
        error=st.none() | st.text(),
    )
)
def test_a_report_comes_out_of_the_store_as_it_went_in(given_report) -> None:
    assert RankReport.from_json(given_report.to_json().encode()) == given_report


def test_one_failed_rank_makes_no_checkpoint_and_is_named_with_its_reason() -> None:
    text = objection([report(1, error="/nvme0: No space left on device"), report(0), report(2)])
    assert text == "1 of 3 ranks could not write their part (rank 1: /nvme0: No space left on device)"


def test_ranks_that_cut_the_state_differently_make_no_checkpoint() -> None:
    assert objection([report(0), report(1)]) is None
    assert "ranks [1, 3] cut the state differently from rank 0" in str(
        objection([report(0), report(1, plan="other"), report(2), report(3, plan="another")])
    )


def test_all_ranks_learn_the_same_decision_and_no_key_stays(job) -> None:
    three = job(3)
    answers = three.run(lambda rank, exchange: one_round(1, rank, exchange))
    assert answers == [(None, {"files": ["stripe-0", "stripe-1", "stripe-2"]})] * 3
    assert three.keys_left == 0


def test_an_exchange_of_one_rank_needs_nobody(job) -> None:
    expected = (None, {"files": ["stripe-0"]})
    assert one_round(1, 0, SoloExchange()) == expected
    one = job(1)
    assert one_round(1, 0, one.exchanges[0]) == expected
    assert one.keys_left == 0


def test_rounds_may_overlap_and_end_in_another_order_than_ranks_report_them(job) -> None:
    two = job(2)
    second, first = two.exchanges[1], two.exchanges[0]
    for serial in (1, 2, 3):  # this rank is three saves ahead
        second.report(serial, report(1, plan=str(serial)))
    for serial in (1, 2, 3):
        first.report(serial, report(0, plan=str(serial)))
        assert [one.plan for one in first.collect(serial)] == [str(serial)] * 2
        first.answer(serial, None, {"commit": serial})
    assert [second.await_answer(serial)[1]["commit"] for serial in (3, 1, 2)] == [3, 1, 2]
    assert two.keys_left == 0


def test_the_failure_of_one_rank_is_the_answer_on_all(job) -> None:
    three = job(3)
    failed = report(2, error="/nvme1: Input/output error")
    answers = three.run(lambda rank, exchange: one_round(7, rank, exchange, failed if rank == 2 else None))
    assert [error for error, _ in answers] == [
        "1 of 3 ranks could not write their part (rank 2: /nvme1: Input/output error)"
    ] * 3
    assert three.keys_left == 0


def test_missing_ranks_are_named_to_all_who_are_there_and_their_late_reports_do_not_stay(job) -> None:
    four = job(4, timeout_s=0.3)
    four.exchanges[2].report(5, report(2))
    answers = [one_round(5, 0, four.exchanges[0]), four.exchanges[2].await_answer(5)]
    for error, _ in answers:
        assert error is not None
        assert "snapshot 5: no report from ranks [1, 3] of 4 within 0.3 s" in error
    late = four.run(lambda rank, exchange: one_round(5, rank, exchange), ranks=[1, 3])
    assert [error for error, _ in late] == [answers[0][0]] * 2
    assert four.keys_left == 0


def test_a_rank_without_an_answer_names_rank_0(job) -> None:
    two = job(2, timeout_s=0.1)
    two.exchanges[1].report(1, report(1))
    with pytest.raises(CommitError, match=r"snapshot 1: rank 1 got no answer from ranks \[0\] within 0.2 s"):
        two.exchanges[1].await_answer(1)


def test_a_waiting_rank_can_be_called_off(job) -> None:
    two = job(2, timeout_s=1000.0)
    waiting = [lambda: two.exchanges[0].collect(1), lambda: two.exchanges[1].await_answer(1)]
    two.exchanges[0].report(1, report(0))
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(wait) for wait in waiting]
        for exchange in two.exchanges:
            exchange.cancel()
        for future in futures:
            with pytest.raises(CommitError, match="the job is going down"):
                future.result(LONG_S)


def test_a_lost_store_is_an_error_at_once_and_not_after_the_time_limit(job) -> None:
    two = job(2, timeout_s=1000.0)
    two.exchanges[1].report(1, report(1))
    two.server = None
    with pytest.raises(CommitError, match="rank 1 lost the store"):
        two.exchanges[1].await_answer(1)


def test_other_users_of_the_same_store_go_on_while_a_rank_waits(job) -> None:
    shared = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG_S))
    exchange = StoreExchange(shared, "commit", 1, 2, LONG_S)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(exchange.await_answer(1)))
    thread.start()
    shared.set("somebody", "else's")  # a blocking wait inside the exchange would hold this up
    assert shared.get("somebody") == b"else's"
    StoreExchange(shared, "commit", 0, 2, LONG_S).answer(1, None, {})
    thread.join(LONG_S)
    assert got == [(None, {})]
