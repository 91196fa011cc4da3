"""How ranks agree that a snapshot is written, through a key-value store and without collectives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from lightning_hetckpt.checkpoint.manifest import FileEntry, OverlayEntry, read_overlays, spell_overlays
from lightning_hetckpt.errors import CommitError

_LOOK_EVERY_S = 0.05  # at most, while waiting: bounds both the delay and the load on the store


class Store(Protocol):
    """What we need of a key-value store; `torch.distributed.TCPStore` has it.

    We look with `check` instead of its `wait`: a wait cannot be cancelled, keeps the client from
    everybody else, and each one that runs out prints two warnings on stderr.
    """

    def set(self, key: str, value: str, /) -> Any:
        """Let everybody find `value` under `key`."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def delete_key(self, key: str, /) -> Any:
        """Forget a key; nothing happens where it is not there."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did for one snapshot."""

    rank: int
    files: tuple[FileEntry, ...]  # durable, with their names
    plan: str  # fingerprint of the stripe plan that this rank followed
    rank_state: str = ""  # base64 of what is this rank's own, such as its RNG states
    error: str | None = None  # why it failed; no file counts then
    overlays: Mapping[str, OverlayEntry] = field(default_factory=dict)  # of this rank's stripes

    def to_json(self) -> str:
        """The report as text for the store."""
        plain = {**asdict(replace(self, overlays={})), "overlays": spell_overlays(self.overlays)}
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: bytes | str) -> RankReport:
        """The report that `to_json` spelled, by another rank of the same job."""
        plain = json.loads(data)
        files = tuple(FileEntry(**{**file, "chunks": tuple(file["chunks"])}) for file in plain.pop("files"))
        return cls(files=files, overlays=read_overlays(plain.pop("overlays")), **plain)


def objection(reports: Iterable[RankReport]) -> str | None:
    """Why these reports make no checkpoint, or None: the one decision that holds for all ranks."""
    reports = sorted(reports, key=lambda report: report.rank)
    failed = [f"rank {report.rank}: {report.error}" for report in reports if report.error is not None]
    if failed:
        return f"{len(failed)} of {len(reports)} ranks could not write their part ({'; '.join(failed)})"
    strangers = [report.rank for report in reports if report.plan != reports[0].plan]
    if strangers:
        return (
            f"ranks {strangers} cut the state differently from rank {reports[0].rank}: names, shapes and "
            "dtypes of parameters and optimizer state must be equal on all ranks"
        )
    return None


class Exchange(Protocol):
    """One round per snapshot: every rank reports, rank 0 collects, decides and answers, the others await it.

    `serial` counts the snapshots of a job, equally on every rank; rounds may overlap.
    """

    def report(self, serial: int, report: RankReport) -> None:
        """On every rank: tell rank 0 what this rank did."""

    def collect(self, serial: int) -> list[RankReport]:
        """On rank 0: the reports of all ranks in rank order; CommitError names the ranks without one."""

    def answer(self, serial: int, error: str | None, payload: Mapping[str, Any]) -> None:
        """On rank 0: tell every other rank the decision, and why where it is no."""

    def await_answer(self, serial: int) -> tuple[str | None, dict[str, Any]]:
        """On the other ranks: the error, or None, and the payload that rank 0 answered with."""

    def cancel(self) -> None:
        """Make whoever waits now or later give up at once, with CommitError: the job is going down."""


class SoloExchange:
    """The exchange of a job of one process: rank 0 hears itself."""

    def __init__(self) -> None:
        self._reports: dict[int, RankReport] = {}

    def report(self, serial: int, report: RankReport) -> None:
        """Keep the report for `collect`."""
        self._reports[serial] = report

    def collect(self, serial: int) -> list[RankReport]:
        """The one report."""
        return [self._reports.pop(serial)]

    def answer(self, serial: int, error: str | None, payload: Mapping[str, Any]) -> None:
        """Nobody waits for it."""

    def await_answer(self, serial: int) -> tuple[str | None, dict[str, Any]]:
        """Never called: rank 0 gives the answer."""
        raise CommitError(f"snapshot {serial}: a job of one process has nobody to wait for")

    def cancel(self) -> None:
        """Nothing to interrupt: no call waits."""


class StoreExchange:
    """The exchange over a store: for a background thread, no collective in it.

    Every key is deleted by the rank that it was meant for, or by its writer once the answer is there,
    so a job's store does not grow with its snapshots.

    Args:
        store: best a client of its own, since others' blocking calls would hold ours up.
        prefix: sets this exchange's keys apart from everybody else's.
        timeout_s: how much later than rank 0 another rank may finish its part. The others wait twice as
            long for the answer, so that they hear from rank 0 who was missing.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._own: dict[int, RankReport] = {}  # of rank 0, which need not travel
        self._cancelled = threading.Event()

    def report(self, serial: int, report: RankReport) -> None:
        """Tell rank 0 what this rank did."""
        if self._rank == 0:
            self._own[serial] = report
        else:
            self._store.set(self._report_key(serial, self._rank), report.to_json())

    def collect(self, serial: int) -> list[RankReport]:
        """On rank 0: the reports of all ranks in rank order.

        Raises:
            CommitError: ranks, which are named, did not report in time.
        """
        keys = {rank: self._report_key(serial, rank) for rank in range(1, self._world_size)}
        if not self._arrived(list(keys.values()), self._timeout_s):
            missing = [rank for rank, key in keys.items() if not self._arrived([key], 0.0)]
            if missing:
                raise CommitError(
                    f"snapshot {serial}: no report from ranks {missing} of {self._world_size} within "
                    f"{self._timeout_s:g} s; their processes died or their drives are much slower"
                )
        reports = [self._own.pop(serial)]
        for key in keys.values():
            reports.append(RankReport.from_json(self._store.get(key)))
            self._store.delete_key(key)
        return reports

    def answer(self, serial: int, error: str | None, payload: Mapping[str, Any]) -> None:
        """On rank 0: tell every other rank the decision, and why where it is no."""
        self._own.pop(serial, None)
        text = json.dumps([error, payload])
        for rank in range(1, self._world_size):
            self._store.set(self._answer_key(serial, rank), text)

    def await_answer(self, serial: int) -> tuple[str | None, dict[str, Any]]:
        """On the other ranks: the error, or None, and the payload that rank 0 answered with.

        Raises:
            CommitError: rank 0 did not answer in time.
        """
        key = self._answer_key(serial, self._rank)
        if not self._arrived([key], 2 * self._timeout_s):
            raise CommitError(
                f"snapshot {serial}: rank {self._rank} got no answer from ranks [0] within "
                f"{2 * self._timeout_s:g} s; its process died or its drives are much slower"
            )
        error, payload = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if error is not None:
            # Rank 0 may have given up before this rank's report came, and then nobody else takes it away.
            self._store.delete_key(self._report_key(serial, self._rank))
        return error, payload

    def cancel(self) -> None:
        """Make whoever waits now or later give up at once, with CommitError: the job is going down."""
        self._cancelled.set()

    def _report_key(self, serial: int, rank: int) -> str:
        return f"{self._prefix}/{serial}/report/{rank}"

    def _answer_key(self, serial: int, rank: int) -> str:
        return f"{self._prefix}/{serial}/answer/{rank}"

    def _arrived(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all `keys` are there within the time; looks once at least."""
        began = time.monotonic()
        while True:
            try:
                if not keys or self._store.check(keys):
                    return True
            except RuntimeError as error:
                raise CommitError(f"rank {self._rank} lost the store that ranks meet in: {error}") from error
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                return False
            # Looking again after a twentieth of the time waited so far delays a commit by 5 % at most.
            if self._cancelled.wait(min(max(waited_s / 20, 0.0005), _LOOK_EVERY_S)):
                raise CommitError(f"rank {self._rank} gave up waiting for {keys}: the job is going down")
