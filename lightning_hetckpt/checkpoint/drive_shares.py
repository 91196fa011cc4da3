"""Who writes how much to which drive: chosen from the drives' speeds, and corrected by what saves have seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

FILE_OVERHEAD_S = 0.004  # to create a file and make it durable, whatever its length
ASSUMED_BYTES_PER_S = 1e9  # of a drive that was not measured
_LEAST_SEEN_BYTES = 2**20  # below, the fixed cost of a file hides the drive's speed
_WEIGHT_OF_NEW = 0.3  # in the moving average
_SLOWEST = 0.02  # of the fastest drive's speed: a drive that gets nothing could never be seen to recover
_WORTH_REPLANNING = 1.1  # times the shortest time: a new plan costs the training thread some milliseconds


@dataclass(frozen=True, slots=True)
class HostDrives:
    """One host: the ranks on it, and the folders over which they stripe, in one order for all of them."""

    ranks: tuple[int, ...]
    disks: tuple[str, ...]  # the physical drive of each folder; folders with one name share one drive
    speeds: tuple[float, ...]  # bytes per second of each folder's drive, when nobody else uses it

    @property
    def weights(self) -> tuple[float, ...]:
        """What each folder may take of the bytes: folders on one drive share its speed."""
        return tuple(
            speed / self.disks.count(disk) for disk, speed in zip(self.disks, self.speeds, strict=True)
        )


def drive_weights(hosts: Sequence[HostDrives], nbytes: int) -> tuple[tuple[float, ...], ...]:
    """For every rank the weight of each of its folders, as `plan_stripes` takes them.

    Each rank writes an equal part of the `nbytes` of all tensors. On each host either every rank writes to all
    drives, or every rank to one: whichever is predicted to end first, and one drive each where both end together.
    """
    ranks = sum(len(host.ranks) for host in hosts)
    rows: dict[int, tuple[float, ...]] = {}
    for host in hosts:
        rank_bytes = nbytes / ranks
        apart, apart_s = one_drive_each(host, rank_bytes)
        if apart_s <= all_drives_s(host, rank_bytes):
            chosen = [
                tuple(w if disk == mine else 0.0 for w, disk in zip(host.weights, host.disks, strict=True))
                for mine in apart
            ]
        else:
            chosen = [host.weights] * len(host.ranks)
        rows.update(zip(host.ranks, chosen, strict=True))
    return tuple(rows[rank] for rank in range(ranks))


def all_drives_s(host: HostDrives, rank_bytes: float) -> float:
    """Predicted seconds for every rank of `host` to write `rank_bytes` over all drives in proportion to their speed."""
    most_files = max(host.disks.count(disk) for disk in host.disks) * len(host.ranks)
    return rank_bytes * len(host.ranks) / sum(host.weights) + most_files * FILE_OVERHEAD_S


def one_drive_each(host: HostDrives, rank_bytes: float) -> tuple[tuple[str, ...], float]:
    """The drive of each rank of `host`, and the predicted seconds until the last has written `rank_bytes` to it.

    Ranks have equal loads, so giving each the drive that would have it done first is the best there is.
    """
    speed = dict(zip(host.disks, host.speeds, strict=True))
    each_s = {disk: rank_bytes / speed[disk] + host.disks.count(disk) * FILE_OVERHEAD_S for disk in speed}
    ends_s = dict.fromkeys(speed, 0.0)
    drives = []
    for _ in host.ranks:
        disk = min(ends_s, key=lambda disk: ends_s[disk] + each_s[disk])  # the first of equals, on every rank
        ends_s[disk] += each_s[disk]
        drives.append(disk)
    return tuple(drives), max(ends_s.values())


def seen_speeds(host: HostDrives, written: Iterable[tuple[int, int, int, float]]) -> dict[str, float]:
    """Bytes per second of each drive in one save; drives that got next to nothing are left out.

    Args:
        written: (rank, number of the folder, bytes, seconds in which the drive was busy with them) of every file.
            The ranks of a host write at the same time, so their bytes add up and their seconds do not.
    """
    nbytes = dict.fromkeys(host.disks, 0)
    busy_s: dict[str, dict[int, float]] = {disk: {} for disk in host.disks}
    for rank, folder, length, seconds in written:
        if rank in host.ranks and folder < len(host.disks):
            disk = host.disks[folder]
            nbytes[disk] += length
            busy_s[disk][rank] = busy_s[disk].get(rank, 0.0) + seconds
    slowest_s = {disk: max(by_rank.values(), default=0.0) for disk, by_rank in busy_s.items()}
    return {
        disk: nbytes[disk] / slowest_s[disk]
        for disk in nbytes
        if nbytes[disk] >= _LEAST_SEEN_BYTES and slowest_s[disk] > 0
    }


def corrected(host: HostDrives, seen: Mapping[str, float]) -> HostDrives:
    """`host` with its speeds moved some way towards those of a save."""
    speeds = [
        speed + _WEIGHT_OF_NEW * (seen.get(disk, speed) - speed)
        for disk, speed in zip(host.disks, host.speeds, strict=True)
    ]
    return replace(host, speeds=tuple(max(speed, _SLOWEST * max(speeds)) for speed in speeds))


def is_worth_replanning(in_force: HostDrives, known: HostDrives) -> bool:
    """Whether shares after the speeds `in_force` would take markedly longer than after `known`, which are true."""
    shares = [weight / sum(in_force.weights) for weight in in_force.weights]
    takes_s = max(share / weight for share, weight in zip(shares, known.weights, strict=True))
    return takes_s * sum(known.weights) > _WORTH_REPLANNING


class DriveSpeeds:
    """On rank 0: what is known of all drives, and what the plans go by. No clock, file or rank in here."""

    def __init__(self, hosts: Sequence[HostDrives]) -> None:
        self._known = tuple(hosts)
        self.in_force = tuple(hosts)

    def note(self, written: Sequence[tuple[int, int, int, float]]) -> tuple[HostDrives, ...]:
        """Learn from one save, in the words of `seen_speeds`; the hosts that plans should go by from now on."""
        self._known = tuple(corrected(host, seen_speeds(host, written)) for host in self._known)
        if any(map(is_worth_replanning, self.in_force, self._known)):
            self.in_force = self._known
        return self.in_force
