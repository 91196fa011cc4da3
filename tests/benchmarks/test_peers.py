"""A rival that is not here is named with the reason, and the contest goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import peers


def test_a_rival_that_is_not_installed_or_breaks_on_import_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> Any:
        if name.startswith("deepspeed"):
            raise AttributeError("torch has no attribute 'old'\nand more")
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", refuse)
    here, skipped = peers.peers({}, [], 0, 1)

    assert not here
    assert skipped == {
        "torchsnapshot + fsync": "ModuleNotFoundError: No module named 'torchsnapshot'",
        "DeepSpeed FastFileWriter": "AttributeError: torch has no attribute 'old'",
    }


def test_an_op_that_does_not_build_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def load(self, verbose: bool) -> None:
            raise RuntimeError("libaio.h: no such file")

    monkeypatch.setitem(sys.modules, "deepspeed.io.fast_file_writer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", SimpleNamespace(AsyncIOBuilder=Builder))
    for name in ("deepspeed", "deepspeed.io", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))

    _, skipped = peers.peers({}, [], 0, 1)

    assert "libaio.h: no such file" in skipped["DeepSpeed FastFileWriter"]
    assert "libaio-dev" in skipped["DeepSpeed FastFileWriter"]


def test_everything_below_a_folder_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").touch()
    (tmp_path / "a" / "b" / "two").touch()
    done: list[Path] = []
    monkeypatch.setattr(peers, "fsync", done.append)

    peers.fsync_tree(tmp_path / "a")

    a = tmp_path / "a"
    assert sorted(done) == sorted([tmp_path, a, a / "one", a / "b", a / "b" / "two"])


def test_the_bytes_of_a_tensor_are_its_own_memory() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    (found,) = peers._ByteViews.cast_to_byte_tensor([tensor])
    assert found.data_ptr() == tensor.data_ptr()
    assert found.numel() == 24
