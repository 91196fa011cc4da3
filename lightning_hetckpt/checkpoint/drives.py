"""The drives of this host: which are there, which of them are local SSDs worth striping over, how fast they are."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_hetckpt.checkpoint.direct_io import DirectFile, write_durably
from lightning_hetckpt.checkpoint.drive_shares import ASSUMED_BYTES_PER_S
from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, DRIVE_FOLDER, HIDDEN_PREFIX, new_id

_log = logging.getLogger("lightning_hetckpt")

_LEAST_FREE_BYTES = 4 * 2**30  # a drive that is nearly full would soon fail every save
_PROBE_S = 0.3
_PROBE_BYTES = 64 * 2**20
_PROBE_BLOCK_BYTES = 4 * 2**20
_CACHE_AGE_S = 7 * 24 * 3600.0

# Where the system lives, and everything below: a data drive is mounted elsewhere.
_SYSTEM = ("/boot", "/dev", "/efi", "/etc", "/nix", "/proc", "/run", "/snap", "/sys", "/tmp", "/usr", "/var")  # noqa: S108
_VIRTUAL = re.compile(r"(loop|ram|zram|nbd|rbd|drbd|sr|fd)\d+")
# Disks at the other end of a network that look like local ones, by what they call themselves.
_NETWORK_MODELS = ("Amazon Elastic Block Store", "PersistentDisk", "nvme_card-pd", "MSFT NVMe Accelerator")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    device: str  # "259:1"; "0:N" where no block device is behind it, or the file system hides which
    kind: str  # of file system
    source: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """A whole physical drive, or what stands for one where the kernel names none."""

    id: str  # the same after a reboot, for a real one
    is_local_ssd: bool
    is_real: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A folder to which bytes could go, and the drives below it: several where they are bound together."""

    folder: str
    disks: frozenset[Disk]
    usable: bool = True  # this user may make a folder there, and it is neither read-only nor nearly full
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The folders that share the bytes of a checkpoint; "" is the checkpoint's own."""

    folders: tuple[str, ...]
    disks: tuple[str, ...]  # the physical drive of each
    home_disk: str  # the one below the checkpoint's own folder
    real: frozenset[str]  # those of `disks` that are the same after a reboot


def choose(home: Place, others: Sequence[Place]) -> tuple[Place, ...]:
    """`home` and one place on every further local SSD that holds data and no system.

    Places with a drive in common count as one: `home` before all, then the larger, then the shorter name.
    """
    chosen = [home]
    for place in sorted(others, key=lambda one: (-one.total_bytes, len(one.folder), one.folder)):
        taken = {disk.id for one in chosen for disk in one.disks}
        if (
            place.usable
            and not _is_system(place.folder)
            and place.disks
            and all(disk.is_local_ssd and disk.id not in taken for disk in place.disks)
        ):
            chosen.append(place)
    return (home, *sorted(chosen[1:], key=lambda one: one.folder))


def _is_system(folder: str) -> bool:
    path = PurePosixPath(folder)
    return path == PurePosixPath("/") or any(path.is_relative_to(one) for one in _SYSTEM)


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The mounts in the text of /proc/self/mountinfo that a path can lead to: a later one hides an earlier."""
    mounts: dict[str, Mount] = {}
    for line in text.splitlines():
        # "36 35 98:0 /root /point options optional... - kind source options of the file system"
        before, separator, behind = line.partition(" - ")
        fields, kind_fields = before.split(), behind.split()
        if not separator or len(fields) < 6 or len(kind_fields) < 2:
            continue
        super_options = kind_fields[2].split(",") if len(kind_fields) > 2 else []
        point = _unescaped(fields[4])
        mounts.pop(point, None)
        mounts[point] = Mount(
            point,
            fields[2],
            kind_fields[0],
            _unescaped(kind_fields[1]),
            "ro" in fields[5].split(",") or "ro" in super_options,
        )
    return tuple(mounts.values())


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), name)


def mount_of(folder: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that the absolute path `folder`, free of links, lies in."""
    above = [one for one in mounts if PurePosixPath(folder).is_relative_to(one.point)]
    return max(above, key=lambda one: len(one.point), default=None)


def disks_of(mount: Mount, sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> frozenset[Disk]:
    """The physical drives below a mount, through partitions, RAID, LVM and encryption."""
    block = sys / "dev/block" / mount.device
    if not block.exists() and mount.source.startswith("/dev/"):
        # btrfs has a device number of its own. Names like /dev/mapper/x are links to the kernel's names.
        name = os.path.realpath(dev / mount.source.removeprefix("/dev/"))
        block = sys / "class/block" / Path(name).name
    if not block.exists():
        return frozenset({Disk(f"{mount.kind} {mount.device}", is_local_ssd=False, is_real=False)})
    return frozenset(_disk(whole) for whole in _whole_disks(block.resolve()))


def _whole_disks(block: Path) -> set[Path]:
    if (block / "partition").exists():
        block = block.parent
    slaves = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if not slaves:
        return {block}
    return {whole for slave in slaves for whole in _whole_disks(slave.resolve())}


def _disk(block: Path) -> Disk:
    name = _first_line(block, "wwid", "device/wwid", "serial", "device/serial")
    is_local_ssd = (
        _first_line(block, "queue/rotational") == "0"
        and _first_line(block, "removable") != "1"
        and not _VIRTUAL.fullmatch(block.name)
        and not any(part.startswith(("usb", "session")) for part in block.parts)  # a stick; iSCSI
        and _transports(block) <= {"pcie"}  # else NVMe over a network
        and not _first_line(block, "device/model").startswith(_NETWORK_MODELS)
    )
    return Disk(name or f"{block.name}:{_first_line(block, 'size')}", is_local_ssd)


def _transports(block: Path) -> set[str]:
    """How NVMe controllers are reached: of the one above `block`, or of all where there are several paths to it."""
    device = block / "device"
    return {line for one in (device, *device.glob("nvme*")) if (line := _first_line(one, "transport"))}


def _first_line(block: Path, *names: str) -> str:
    for name in names:
        with suppress(OSError, UnicodeDecodeError, IndexError):
            line = (block / name).read_text().splitlines()[0].strip()
            if line:
                return line
    return ""


# --- What acts: looks at this very host ---


def find(home: Path, dirs: Sequence[Path] | None, auto: bool = False) -> Found:
    """The folders that a checkpoint in the folder `home`, which exists, is striped over.

    Args:
        dirs: named by the user; None is the checkpoint's own folder.
        auto: add one folder on every other local SSD.
    """
    mounts = _present_mounts()
    own = _place(home, mounts)
    if dirs is not None:
        places = [_place(folder, mounts) for folder in dirs]
    elif auto:
        there = [_look_at(one) for one in mounts if not _is_system(one.point)]
        places = list(choose(own, there))
    else:
        places = [own]
    names = [_name(place.disks) for place in places]
    return Found(
        tuple("" if place is own else place.folder for place in places),
        tuple(names),
        _name(own.disks),
        frozenset(
            name for place, name in zip(places, names, strict=True) if all(d.is_real for d in place.disks)
        ),
    )


def _present_mounts() -> tuple[Mount, ...]:
    try:
        # Names may be in any encoding.
        return parse_mounts(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
    except OSError:
        return ()  # not Linux: every file system counts as a drive


def _name(disks: frozenset[Disk]) -> str:
    return "+".join(sorted(disk.id for disk in disks))


def _place(folder: Path, mounts: Sequence[Mount]) -> Place:
    """Where `folder` lies, also if it is still to be made."""
    path = os.path.realpath(folder)
    mount = mount_of(path, mounts)
    if mount is not None:
        return Place(path, disks_of(mount))
    there = Path(path)
    while not there.exists():
        there = there.parent
    return Place(path, frozenset({Disk(f"device {there.stat().st_dev}", is_local_ssd=False, is_real=False)}))


def _look_at(mount: Mount) -> Place:
    disks = disks_of(mount)
    if not all(disk.is_local_ssd for disk in disks):
        return Place(
            mount.point, disks, usable=False
        )  # do not touch it: a dead NFS server hangs whoever asks
    usable, total_bytes = False, 0
    with suppress(OSError):
        size = os.statvfs(mount.point)
        total_bytes = size.f_blocks * size.f_frsize
        ours = Path(mount.point) / DRIVE_FOLDER
        usable = (
            not mount.read_only
            and size.f_bavail * size.f_frsize >= _LEAST_FREE_BYTES
            and Path(mount.point).is_dir()  # containers mount single files
            and os.access(ours if ours.exists() else mount.point, os.W_OK | os.X_OK)
        )
    return Place(mount.point, disks, usable, total_bytes)


def measure(found: Found, home: Path, direct: bool = True) -> tuple[float, ...]:
    """Bytes per second of the drive of each folder; not measured where only one drive is to be had.

    A short write to each drive, all of them at the same time; good for a week.
    """
    folder_of = dict(zip(found.disks, found.folders, strict=True))
    if len(folder_of) < 2:
        return (ASSUMED_BYTES_PER_S,) * len(found.disks)
    cache = _cache_file()
    known = _read_cache(cache, time.time())
    missing = [disk for disk in folder_of if disk not in known]
    if missing:
        folders = [Path(folder_of[disk] or home) for disk in missing]
        with ThreadPoolExecutor(len(missing), thread_name_prefix="hetckpt-probe") as threads:
            known.update(zip(missing, threads.map(lambda one: probe(one, direct), folders), strict=True))
        _write_cache(cache, {disk: known[disk] for disk in missing if disk in found.real}, time.time())
    return tuple(known[disk] for disk in found.disks)


def probe(folder: Path, direct: bool = True) -> float:
    """Bytes per second of a short write into `folder`, which is made if need be; leaves no file behind."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{HIDDEN_PREFIX}{new_id()}.probe"
    written = 0
    with mmap.mmap(-1, _PROBE_BLOCK_BYTES) as memory, memoryview(memory) as view:
        view[:] = os.urandom(BLOCK_BYTES) * (_PROBE_BLOCK_BYTES // BLOCK_BYTES)  # some drives skip zeros
        file = DirectFile(path, _PROBE_BYTES, direct)
        try:
            began_s = time.perf_counter()
            while written < _PROBE_BYTES and (written == 0 or time.perf_counter() - began_s < _PROBE_S):
                file.write(view, written)
                written += len(view)
            file.flush()
            return written / (time.perf_counter() - began_s)
        finally:
            file.abort()
            path.unlink(missing_ok=True)


def _cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(root) / "lightning_hetckpt" / "drives.json"


def _read_cache(file: Path, now_s: float) -> dict[str, float]:
    """Bytes per second by drive, of what was measured lately; nothing where the file is missing or odd."""
    try:
        plain = json.loads(file.read_text())
        return {
            str(disk): float(entry["bytes_per_s"])
            for disk, entry in plain.items()
            if 0 <= now_s - entry["unix_s"] <= _CACHE_AGE_S and 0 < entry["bytes_per_s"] < 1e15
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _write_cache(file: Path, speeds: Mapping[str, float], now_s: float) -> None:
    entries = {disk: {"bytes_per_s": speed, "unix_s": now_s} for disk, speed in speeds.items()}
    try:
        old: object = None
        with suppress(OSError, ValueError):
            old = json.loads(file.read_text())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps({**(old if isinstance(old, dict) else {}), **entries}).encode())
    except OSError as error:  # a home without space costs the next run 0.3 s, no more
        _log.debug("%s: the drives' speeds are not kept: %s", file, error)
