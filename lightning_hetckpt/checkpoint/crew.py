"""The ranks that write checkpoints together, and what they agreed on once so that no save needs a collective."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from lightning_hetckpt.channel import Channel
from lightning_hetckpt.checkpoint.commit import Exchange, SoloExchange, Store, StoreExchange
from lightning_hetckpt.checkpoint.folders import run_of
from lightning_hetckpt.checkpoint.layout import new_id
from lightning_hetckpt.errors import CheckpointError, HetckptError

_GOODBYE_S = 10.0  # rank 0 may hold the store that the others read their last answer from


class Crew:
    """The ranks of one channel. Every rank makes it at the same moment: it broadcasts, once.

    Args:
        folder: in which the first checkpoint will lie; its run id becomes the crew's.
        prepare: what rank 0 does before any rank writes, given the run id.
        store: a connection to the job's store for the commit thread; asked for only where there are more ranks.
        timeout_s: how much later than rank 0 another rank may finish a save.
    """

    def __init__(
        self,
        channel: Channel,
        folder: Path,
        prepare: Callable[[str], object],
        store: Callable[[], Store],
        timeout_s: float,
    ) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self._serial = 0
        run = seed = error = ""
        if self.rank == 0:
            try:
                run, seed = run_of(folder), new_id()
                prepare(run)
            except (HetckptError, OSError) as failure:
                error = f"{folder}: no checkpoints can be written here: {failure}"
        # Also when rank 0 failed: the others are waiting.
        self.run, self._seed, error = channel.broadcast((run, seed, error))
        if error:
            raise CheckpointError(error)
        self._store = store() if self.size > 1 else None
        self._prefix = f"hetckpt/{self._seed}"
        self.exchange: Exchange = (
            SoloExchange()
            if self._store is None
            else StoreExchange(self._store, self._prefix, self.rank, self.size, timeout_s)
        )

    @property
    def upcoming(self) -> int:
        """The serial number that `next_save` will give."""
        return self._serial

    def next_save(self) -> tuple[int, str]:
        """Serial number and snapshot id of the next save, the same on every rank without a word."""
        serial, self._serial = self._serial, self._serial + 1
        return serial, hashlib.blake2b(f"{self._seed}/{serial}".encode(), digest_size=8).hexdigest()

    def acknowledge(self, serial: int) -> None:
        """On another rank than 0: the answer to `serial` has arrived."""
        if self._store is not None:
            self._store.set(self._heard_key(self.rank), str(serial))

    def await_goodbye(self) -> None:
        """On rank 0: return when every rank has heard the last answer, or has had time to."""
        if self._store is None or self.rank != 0 or self._serial == 0:
            return
        keys = [self._heard_key(rank) for rank in range(1, self.size)]
        deadline_s = time.monotonic() + _GOODBYE_S
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is everybody who needs it
            while time.monotonic() < deadline_s and not self._all_heard(keys):
                time.sleep(0.01)

    def _all_heard(self, keys: list[str]) -> bool:
        store = self._store
        return store is None or (
            store.check(keys) and all(int(store.get(key)) >= self._serial - 1 for key in keys)
        )

    def _heard_key(self, rank: int) -> str:
        return f"{self._prefix}/heard/{rank}"
