"""The drives of all hosts, as every rank of a crew knows them: agreed on once, then corrected at agreed saves."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_hetckpt.channel import Channel
from lightning_hetckpt.checkpoint.commit import RankReport
from lightning_hetckpt.checkpoint.drive_shares import DriveSpeeds, HostDrives
from lightning_hetckpt.checkpoint.drives import Found, find, measure
from lightning_hetckpt.checkpoint.layout import drive_of_stripe
from lightning_hetckpt.errors import CheckpointError, HetckptError

_log = logging.getLogger("lightning_hetckpt")

# What save n has seen counts from save n + DELAY on. By then its answer has reached every rank, or `in_force`
# waits for it: more saves than this are never under way at once where there are drives to choose from.
DELAY = 4

Speeds = list[list[float]]  # of every host's folders, as they travel


@dataclass(frozen=True, slots=True)
class HostFolders:
    """What one rank has found on its host, for all ranks there."""

    found: Found
    speeds: tuple[float, ...]


# Guarantees
#   `in_force(n)` is the same on every rank that has heard the answer to save n - DELAY.
#   A rank that missed an answer is right again with the next one it hears: answers tell all, not differences.
# Assumes: the commit thread calls `heard` once for every save, also for those that fail.


class Fleet:
    """The folders of all ranks, and the speeds that plans go by.

    Args:
        hosts: of all ranks; rank r is among the ranks of exactly one.
        found: the folders on each of these hosts.
        timeout_s: how long an answer is waited for.
    """

    def __init__(
        self, rank: int, hosts: Sequence[HostDrives], found: Sequence[Found], timeout_s: float
    ) -> None:
        self._hosts = tuple(hosts)
        self._speeds = DriveSpeeds(hosts)  # learns on rank 0 alone
        by_rank = {one: there for host, there in zip(hosts, found, strict=True) for one in host.ranks}
        self.found = by_rank[rank]  # on this rank's host
        self.folders = {
            one: tuple(Path(folder) if folder else None for folder in there.folders)
            for one, there in by_rank.items()
        }  # None is the checkpoint's own folder
        self._learns = any(len(set(host.disks)) > 1 for host in hosts)
        self._timeout_s = timeout_s
        self._news = threading.Condition()
        self._heard: dict[int, Speeds | None] = {}  # by the save from which on they count

    def in_force(self, serial: int) -> tuple[HostDrives, ...]:
        """What the plan of save number `serial` goes by. Serials only grow from call to call."""
        if self._learns and serial >= DELAY:
            with self._news:
                self._news.wait_for(lambda: serial in self._heard, self._timeout_s)
                for due in sorted(one for one in self._heard if one <= serial):
                    speeds = self._heard.pop(due)
                    if speeds is not None:
                        self._hosts = _with(self._hosts, speeds)
        return self._hosts

    def learn(self, reports: Iterable[RankReport]) -> Speeds | None:
        """On rank 0: what to answer all ranks, now that `reports` tell how fast the drives were."""
        if not self._learns:
            return None
        before = self._speeds.in_force
        written = [
            (report.rank, folder, entry.nbytes, entry.write_s)
            for report in reports
            for entry in report.files
            if entry.snapshot is None  # else nothing was written
            and (folder := drive_of_stripe(entry.name)) is not None
        ]
        now = self._speeds.note(written)
        if now is not before:
            _log.info("drives changed speed, stripes follow: %s", describe(now, self.folders))
        return [list(host.speeds) for host in now]

    def heard(self, serial: int, speeds: Speeds | None) -> None:
        """On every rank: the answer to save number `serial` told these speeds, or none."""
        if self._learns:
            with self._news:
                self._heard[serial + DELAY] = speeds
                self._news.notify_all()


def agree(
    channel: Channel, home: Path, dirs: Sequence[Path] | None, auto: bool, direct: bool, timeout_s: float
) -> Fleet:
    """The fleet of the ranks of `channel`: one rank of each host looks and measures. All ranks call it together.

    Args:
        home: the folder of the checkpoints, which exists; the others as in `drives.find`.

    Raises:
        CheckpointError: some rank could not use its drives; on all ranks alike.
    """
    names = channel.all_gather(socket.gethostname())
    leads = names.index(names[channel.rank]) == channel.rank
    mine: HostFolders | None = None
    error = ""
    if leads:
        try:
            found = find(home, dirs, auto)
            for folder in found.folders:
                # Else every single save would fail, and training go on without any.
                if folder:
                    Path(folder).mkdir(parents=True, exist_ok=True)
            mine = HostFolders(found, measure(found, home, direct))
        except (HetckptError, OSError) as failure:
            error = f"rank {channel.rank}: {failure}"
    gathered = channel.all_gather((mine, error))
    errors = [text for _, text in gathered if text]
    if errors:
        raise CheckpointError(f"{home}: its drives cannot be used. {'; '.join(errors)}")
    hosts, found_there = [], []
    for lead, (there, _) in enumerate(gathered):
        if there is not None:
            ranks = tuple(rank for rank, name in enumerate(names) if name == names[lead])
            hosts.append(HostDrives(ranks, there.found.disks, there.speeds))
            found_there.append(there.found)
    fleet = Fleet(channel.rank, hosts, found_there, timeout_s)
    if channel.rank == 0 and any(len(there.folders) > 1 for there in found_there):
        _log.info("checkpoints in %s are striped over %s", home, describe(hosts, fleet.folders))
    return fleet


def describe(hosts: Sequence[HostDrives], folders: dict[int, tuple[Path | None, ...]]) -> str:
    """The folders with their speeds; one host speaks for all where all are alike."""
    texts = []
    for host in hosts:
        parts = []
        for folder, disk, speed in zip(folders[host.ranks[0]], host.disks, host.speeds, strict=True):
            twins = host.disks.count(disk)
            told = f"{speed / 1e6:.0f} MB/s" if len(set(host.disks)) > 1 else "not measured"
            shared = f", one drive for {twins} folders" if twins > 1 else ""
            parts.append(f"{folder or 'their own drive'} ({told}{shared})")
        texts.append(", ".join(parts))
    return texts[0] if len(set(texts)) == 1 else "; ".join(texts)


def _with(hosts: Sequence[HostDrives], speeds: Speeds) -> tuple[HostDrives, ...]:
    return tuple(replace(host, speeds=tuple(new)) for host, new in zip(hosts, speeds, strict=True))
