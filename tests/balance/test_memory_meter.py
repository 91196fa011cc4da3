from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_hetckpt.balance import memory_meter
from lightning_hetckpt.balance.memory_meter import MemoryMeter, device_name, held_by_others

MIB = 2**20


def test_the_peak_grows_by_what_is_held_and_is_forgotten_with_another_size() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    assert meter.window() is None
    meter.batch_started(4)
    before = meter.window()
    held = bytearray(b"x" * (256 * MIB))
    during = meter.window()
    del held
    meter.batch_started(8)
    after = meter.window()

    assert before is not None
    assert during is not None
    assert after is not None
    assert (before.samples, after.samples) == (4, 8)
    assert during.peak_bytes >= before.peak_bytes + 200 * MIB
    assert after.peak_bytes <= during.peak_bytes
    assert during.peak_bytes < during.limit_bytes + 256 * MIB


def test_ranks_of_one_host_share_what_is_free() -> None:
    alone, shared = MemoryMeter(torch.device("cpu")), MemoryMeter(torch.device("cpu"), local_ranks=10)
    for meter in (alone, shared):
        meter.batch_started(1)
    whole, part = alone.window(), shared.window()
    assert whole is not None
    assert part is not None
    assert part.limit_bytes < whole.limit_bytes


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"cgroup/job/memory.max": "1000", "cgroup/job/memory.current": "300"}, 700),
        ({"cgroup/job/memory.max": "max", "cgroup/job/memory.current": "300"}, None),
        ({"cgroup/memory.max": "1000", "cgroup/memory.current": "1300"}, 0),
        ({}, None),
    ],
    ids=["limit", "no-limit", "inside-a-container", "no-files"],
)
def test_the_limit_of_a_control_group_of_version_two_counts(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    _lay_out(tmp_path, "0::/job\n", files)
    assert memory_meter._cgroup_free_bytes(tmp_path / "proc", tmp_path / "cgroup") == free


@pytest.mark.parametrize(("limit", "free"), [("1000", 600), ("9223372036854771712", None)])
def test_the_limit_of_a_control_group_of_version_one_counts(
    tmp_path: Path, limit: str, free: int | None
) -> None:
    group = "cgroup/memory/job/memory"
    files = {f"{group}.limit_in_bytes": limit, f"{group}.usage_in_bytes": "400"}
    _lay_out(tmp_path, "7:cpu,cpuacct:/job\n3:memory:/job\n", files)
    assert memory_meter._cgroup_free_bytes(tmp_path / "proc", tmp_path / "cgroup") == free


def _lay_out(root: Path, groups: str, files: dict[str, str]) -> None:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_processor_is_named_with_its_host_and_has_no_other_owners() -> None:
    assert " in " in device_name(torch.device("cpu"))
    assert held_by_others(torch.device("cpu")) is None


class Nvml(ModuleType):
    """What `nvidia-ml-py` tells of a device on which three processes run, one of them this one."""

    NVMLError = OSError

    def __init__(self, broken: bool) -> None:
        super().__init__("pynvml")
        self.broken = broken

    def nvmlInit(self) -> None:  # noqa: N802 (its names)
        if self.broken:
            raise OSError("no driver")

    nvmlShutdown = nvmlDeviceGetHandleByUUID = lambda self, *given: given  # noqa: N815

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:  # noqa: N802
        assert handle == ("GPU-abc",)
        sizes = {os.getpid(): 50 * MIB, 1: 30 * MIB, 2: None}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes.items()]


@pytest.mark.parametrize(("broken", "expected"), [(False, 30 * MIB), (True, None)])
def test_what_other_processes_hold_is_told_without_our_own(
    monkeypatch: pytest.MonkeyPatch, broken: bool, expected: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    assert held_by_others(torch.device("cuda", 0)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_is_that_of_the_allocator() -> None:
    meter = MemoryMeter(torch.device("cuda", 0))
    meter.batch_started(4)
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    window = meter.window()
    assert window is not None
    assert len(held) <= window.peak_bytes < window.limit_bytes
