"""Which drives a machine has, read from recorded tables of several machines, and which of them are striped over."""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path

import pytest

from lightning_hetckpt.checkpoint import drives
from lightning_hetckpt.checkpoint.drives import Disk, Found, Place, choose, disks_of, mount_of, parse_mounts


class Machine:
    """A /sys and a /dev as the kernel lays them out: real folders per device, links by number and by name."""

    def __init__(self, root: Path) -> None:
        self.sys, self.dev = root / "sys", root / "dev"

    def disk(
        self,
        name: str,
        number: str,
        where: str = "pci0000:00/0000:00:04.0",
        rotational: str = "0",
        **files: str,
    ) -> Path:
        block = self.sys / "devices" / where / "block" / name
        self._device(block, name, number)
        self._write(block / "queue/rotational", rotational)
        self._write(block / "removable", files.pop("removable", "0"))
        self._write(block / "size", "1000215216")
        (block / "slaves").mkdir()
        for file, text in files.items():
            self._write(block / file.replace("__", "/"), text)
        return block

    def partition(self, disk: Path, name: str, number: str) -> Path:
        self._device(disk / name, name, number)
        self._write(disk / name / "partition", "1")
        return disk / name

    def over(self, name: str, number: str, *below: Path) -> Path:
        """What md, LVM and dm-crypt make of other devices."""
        block = self.disk(name, number, "virtual")
        for one in below:
            (block / "slaves" / one.name).symlink_to(os.path.relpath(one, block / "slaves"))
        return block

    def _device(self, block: Path, name: str, number: str) -> None:
        block.mkdir(parents=True)
        for link in (self.sys / "dev/block" / number, self.sys / "class/block" / name):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(block, link.parent))

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def chosen(self, mountinfo: str, home: str) -> list[str]:
        """What is striped over for checkpoints in `home`, if this user may write everywhere."""
        mounts = parse_mounts(mountinfo)
        below = mount_of(home, mounts)
        assert below is not None
        places = [
            Place(one.point, disks_of(one, self.sys, self.dev), usable=not one.read_only) for one in mounts
        ]
        own = Place(home, disks_of(below, self.sys, self.dev))
        return [place.folder for place in choose(own, places)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


SYSTEM = """\
22 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw
23 28 0:21 / /proc rw,nosuid shared:14 - proc proc rw
24 28 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw,size=8118412k
30 24 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw
31 28 0:27 / /run rw shared:5 - tmpfs tmpfs rw
"""

LAPTOP = (
    SYSTEM
    + """\
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 28 259:1 / /boot/efi rw shared:30 - vfat /dev/nvme0n1p1 rw
41 28 7:0 / /snap/core20/2105 ro,nodev shared:31 - squashfs /dev/loop0 ro
42 28 259:3 / /home rw,relatime shared:32 - ext4 /dev/nvme0n1p3 rw
43 28 8:1 / /media/me/STICK rw,nosuid shared:33 - vfat /dev/sda1 rw
44 28 8:17 / /data/disk rw,relatime shared:34 - ext4 /dev/sdb1 rw
45 28 8:33 / /data/my\\040ssd rw,relatime shared:35 - ext4 /dev/sdc1 rw
46 28 8:49 / /data/frozen ro,relatime shared:36 - ext4 /dev/sdd1 ro
"""
)


@pytest.fixture
def laptop(machine: Machine) -> Machine:
    nvme = machine.disk("nvme0n1", "259:0", "pci0000:00/nvme/nvme0", wwid="eui.01", device__transport="pcie")
    for n in (1, 2, 3):
        machine.partition(nvme, f"nvme0n1p{n}", f"259:{n}")
    machine.disk("loop0", "7:0", "virtual")
    machine.partition(machine.disk("sda", "8:0", "pci0000:00/usb1/1-2", removable="1"), "sda1", "8:1")
    machine.partition(machine.disk("sdb", "8:16", "pci0000:00/ata1", rotational="1"), "sdb1", "8:17")
    machine.partition(machine.disk("sdc", "8:32", "pci0000:00/ata2"), "sdc1", "8:33")
    machine.partition(machine.disk("sdd", "8:48", "pci0000:00/ata3"), "sdd1", "8:49")
    return machine


def test_a_laptop_adds_its_second_ssd_and_no_stick_no_spinning_disk_no_snap(laptop: Machine) -> None:
    assert laptop.chosen(LAPTOP, "/home/me/run") == ["/home/me/run", "/data/my ssd"]


def test_partitions_of_one_drive_count_as_one(laptop: Machine) -> None:
    assert laptop.chosen(LAPTOP, "/data/my ssd/run") == ["/data/my ssd/run", "/home"]
    assert laptop.chosen(LAPTOP, "/srv/run") == ["/srv/run", "/data/my ssd"]  # "/" and /home are one drive


def test_whatever_the_checkpoints_own_path_lies_on_comes_first(laptop: Machine) -> None:
    for home in ("/media/me/STICK", "/data/disk/x", "/dev/shm/x", "/run/x"):
        assert laptop.chosen(LAPTOP, home) == [home, "/data/my ssd", "/home"]


def test_a_cloud_machine_stripes_over_its_local_nvmes_and_not_over_its_network_disk(machine: Machine) -> None:
    ebs = machine.disk(
        "nvme0n1", "259:0", "a/nvme0", serial="vol1", device__model="Amazon Elastic Block Store"
    )
    machine.partition(ebs, "nvme0n1p1", "259:1")
    more = machine.disk(
        "nvme9n1", "259:9", "a/nvme9", serial="vol2", device__model="Amazon Elastic Block Store"
    )
    mountinfo = SYSTEM + "28 1 259:1 / / rw - xfs /dev/nvme0n1p1 rw\n"
    mountinfo += f"60 28 259:9 / /more rw - xfs /dev/{more.name} rw\n"
    for n in range(1, 5):
        machine.disk(f"nvme{n}n1", f"259:1{n}", f"a/nvme{n}", serial=f"s{n}", device__transport="pcie")
        mountinfo += f"5{n} 28 259:1{n} / /mnt/nvme{n} rw - xfs /dev/nvme{n}n1 rw\n"
    machine.disk("nvme7n1", "259:17", "a/nvme7", device__transport="tcp")
    machine.disk("sdx", "65:112", "a/session1/target0")
    mountinfo += (
        "57 28 259:17 / /fabric rw - xfs /dev/nvme7n1 rw\n58 28 65:112 / /iscsi rw - xfs /dev/sdx rw\n"
    )
    assert machine.chosen(mountinfo, "/root/run") == [
        "/root/run", "/mnt/nvme1", "/mnt/nvme2", "/mnt/nvme3", "/mnt/nvme4",
    ]  # fmt: skip
    assert machine.chosen(mountinfo, "/mnt/nvme2/run") == [
        "/mnt/nvme2/run", "/mnt/nvme1", "/mnt/nvme3", "/mnt/nvme4",
    ]  # fmt: skip


def test_nvme_with_several_paths_counts_as_remote_if_one_of_them_leads_over_a_network(
    machine: Machine,
) -> None:
    near = machine.disk("nvme0n1", "259:0", "virtual/0", device__nvme0__transport="pcie")
    far = machine.disk("nvme1n1", "259:1", "virtual/1", device__nvme1__transport="rdma")
    mounts = parse_mounts(
        f"1 0 259:0 / /a rw - xfs /dev/{near.name} rw\n2 0 259:1 / /b rw - xfs /dev/{far.name} rw\n"
    )
    assert [{disk.is_local_ssd for disk in disks_of(one, machine.sys)} for one in mounts] == [{True}, {False}]


def test_a_raid_is_one_drive_and_so_are_its_members_and_all_volumes_on_them(machine: Machine) -> None:
    members = [machine.disk(f"nvme{n}n1", f"259:{n}", f"a/nvme{n}", serial=f"s{n}") for n in range(3)]
    part = machine.partition(members[0], "nvme0n1p1", "259:10")
    raid = machine.over("md0", "9:0", part, members[1])
    machine.over("dm-0", "253:0", raid)
    machine.over("dm-1", "253:1", raid)
    mountinfo = (
        SYSTEM
        + """\
28 1 0:55 / / rw - tmpfs rootfs rw
50 28 253:0 / /scratch rw - xfs /dev/mapper/vg-scratch rw
51 28 253:1 / /scratch2 rw - xfs /dev/mapper/vg-scratch2 rw
52 28 259:2 / /third rw - xfs /dev/nvme2n1 rw
"""
    )
    assert machine.chosen(mountinfo, "/root") == ["/root", "/scratch", "/third"]
    assert machine.chosen(mountinfo, "/scratch2/run") == ["/scratch2/run", "/third"]
    scratch = mount_of("/scratch/run", parse_mounts(mountinfo))
    assert scratch is not None
    assert {disk.id for disk in disks_of(scratch, machine.sys)} == {"s0", "s1"}


def test_an_encrypted_home_and_a_btrfs_are_traced_to_their_drives(machine: Machine) -> None:
    one = machine.disk("nvme0n1", "259:0", "a/nvme0", serial="s0")
    crypt = machine.over("dm-0", "253:0", machine.partition(one, "nvme0n1p3", "259:3"))
    machine.disk("nvme1n1", "259:4", "a/nvme1", serial="s1")
    (machine.dev / "mapper").mkdir(parents=True)
    (machine.dev / "mapper/home").symlink_to("../dm-0")
    (machine.dev / crypt.name).touch()
    mountinfo = (
        SYSTEM
        + """\
28 1 259:3 / / rw - ext4 /dev/nvme0n1p3 rw
50 28 0:40 /@home /home rw - btrfs /dev/mapper/home rw,subvol=/@home
51 28 0:41 / /data rw - btrfs /dev/nvme1n1 rw
"""
    )
    assert machine.chosen(mountinfo, "/home/me") == ["/home/me", "/data"]
    assert machine.chosen(mountinfo, "/data/run") == ["/data/run", "/home"]


def test_a_home_on_nfs_stripes_over_the_nodes_own_ssds(machine: Machine) -> None:
    machine.disk("nvme0n1", "259:0", "a/nvme0", serial="s0")
    machine.disk("nvme1n1", "259:1", "a/nvme1", serial="s1")
    mountinfo = (
        SYSTEM
        + """\
28 1 259:0 / / rw - ext4 /dev/nvme0n1 rw
50 28 0:70 / /home rw - nfs4 filer:/home rw,vers=4.2
51 28 0:71 / /projects rw - lustre 10.0.0.1@tcp:/p rw
52 28 259:1 / /local rw - ext4 /dev/nvme1n1 rw
"""
    )
    assert machine.chosen(mountinfo, "/home/me/run") == ["/home/me/run", "/local"]


def test_a_container_keeps_to_its_overlay_and_the_data_volumes_it_was_given(machine: Machine) -> None:
    machine.disk("nvme0n1", "259:0", "a/nvme0", serial="s0")
    machine.disk("nvme1n1", "259:1", "a/nvme1", serial="s1")
    mountinfo = """\
600 500 0:310 / / rw - overlay overlay rw,lowerdir=/a:/b,upperdir=/c,workdir=/d
601 600 259:0 /var/lib/docker/containers/x/hosts /etc/hosts rw - ext4 /dev/nvme0n1 rw
602 600 259:1 /volumes/scratch /scratch rw - xfs /dev/nvme1n1 rw
603 600 0:311 / /dev/shm rw - tmpfs shm rw
"""
    assert machine.chosen(mountinfo, "/workspace") == ["/workspace", "/scratch"]


def test_a_later_mount_hides_an_earlier_one_and_odd_lines_are_passed_over() -> None:
    mounts = parse_mounts(
        "1 0 8:1 / /a rw - ext4 /dev/x rw\n\nnonsense\n1 2 3 - x\n2 1 8:2 / /a ro - xfs /dev/y rw\n"
    )
    assert [(one.device, one.read_only) for one in mounts] == [("8:2", True)]
    assert mount_of("/ab", mounts) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_never_names_a_drive_twice_and_does_not_depend_on_the_order(seed: int) -> None:
    rng = random.Random(seed)
    disks = [Disk(str(n), is_local_ssd=rng.random() < 0.7) for n in range(5)]
    others = [
        Place(
            f"/m{n}", frozenset(rng.sample(disks, rng.randint(1, 2))), rng.random() < 0.8, rng.randint(0, 3)
        )
        for n in range(12)
    ]
    home = Place("/home/me", frozenset({disks[0]}))
    chosen = choose(home, others)
    ids = [disk.id for place in chosen for disk in place.disks]
    assert len(ids) == len(set(ids))
    assert all(place.usable and all(d.is_local_ssd for d in place.disks) for place in chosen[1:])
    assert choose(home, rng.sample(others, len(others))) == chosen


# --- This very machine ---


def test_folders_on_one_drive_are_told_as_one_also_before_they_exist(tmp_path: Path) -> None:
    found = drives.find(tmp_path, [tmp_path / "a/b", tmp_path / "c"])
    assert found.folders == (str(tmp_path / "a/b"), str(tmp_path / "c"))
    assert found.disks == (found.home_disk,) * 2
    assert not (tmp_path / "a").exists()


def test_without_a_mount_table_file_systems_stand_for_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drives, "_present_mounts", tuple)
    found = drives.find(tmp_path, None, auto=True)
    assert found == Found(("",), (f"device {tmp_path.stat().st_dev}",), found.disks[0], frozenset())


def two_drives(folder: Path) -> Found:
    return Found(("", str(folder / "b")), ("disk a", "disk b"), "disk a", frozenset({"disk a"}))


def test_one_drive_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "probe", lambda folder, direct: pytest.fail(f"probed {folder}"))
    one = Found(("x", "y"), ("disk", "disk"), "disk", frozenset({"disk"}))
    assert len(set(drives.measure(one, tmp_path))) == 1


def test_a_speed_is_kept_for_a_week_by_the_drives_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    probed: list[str] = []
    speeds = {tmp_path.name: 3e8, "b": 1e8}

    def probe(folder: Path, direct: bool) -> float:
        probed.append(folder.name)
        return speeds[folder.name]

    monkeypatch.setattr(drives, "probe", probe)
    assert drives.measure(two_drives(tmp_path), tmp_path) == (3e8, 1e8)
    assert drives.measure(two_drives(tmp_path), tmp_path) == (3e8, 1e8)
    # "disk b" has no name that outlives a reboot, so nothing is kept of it.
    assert sorted(probed) == sorted([tmp_path.name, "b", "b"])
    cache = tmp_path / "cache/lightning_hetckpt/drives.json"
    entry = json.loads(cache.read_text())["disk a"]
    cache.write_text(json.dumps({"disk a": {**entry, "unix_s": entry["unix_s"] - 8 * 24 * 3600}}))
    drives.measure(two_drives(tmp_path), tmp_path)
    assert probed.count(tmp_path.name) == 2


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", '{"disk a": 3}', '{"disk a": {"bytes_per_s": -1, "unix_s": 0}}', '{"disk a": {}}'],
)
def test_a_damaged_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(drives, "probe", lambda folder, direct: 5e8)
    cache = tmp_path / "lightning_hetckpt/drives.json"
    cache.parent.mkdir()
    cache.write_text(text)
    assert drives.measure(two_drives(tmp_path), tmp_path) == (5e8, 5e8)
    assert json.loads(cache.read_text())["disk a"]["bytes_per_s"] == 5e8


@pytest.mark.parametrize("direct", [True, False])
def test_a_probe_writes_for_real_and_leaves_nothing_behind(tmp_path: Path, direct: bool) -> None:
    assert drives.probe(tmp_path / "new", direct) > 0
    assert list((tmp_path / "new").iterdir()) == []


def test_a_home_that_takes_no_file_costs_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(drives, "probe", lambda folder, direct: 5e8)
    with caplog.at_level(logging.DEBUG, "lightning_hetckpt"):
        assert drives.measure(two_drives(tmp_path), tmp_path) == (5e8, 5e8)
    assert "not kept" in caplog.text
