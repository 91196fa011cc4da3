"""Reads of a stripe led to the files in which its newer bytes lie."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_hetckpt.checkpoint.manifest import Manifest
from lightning_hetckpt.checkpoint.overlay import Overlay
from lightning_hetckpt.checkpoint.span_reader import Target


def redirect(manifest: Manifest, wanted: Mapping[str, Sequence[Target]]) -> dict[str, list[Target]]:
    """`wanted` by the files that really hold it: each byte is read from where its newest version lies, and only there."""
    found: dict[str, list[Target]] = {}
    overlays = {name: Overlay.read(entry) for name, entry in manifest.overlays.items() if name in wanted}
    for name, targets in wanted.items():
        if name not in overlays:
            found.setdefault(name, []).extend(targets)
            continue
        for target in targets:
            for start, nbytes, file, offset in overlays[name].split(target.start, target.nbytes):
                part = _part(target, start - target.start, nbytes, offset)
                found.setdefault(file or name, []).append(part)
    return found


def _part(target: Target, at: int, nbytes: int, offset: int) -> Target:
    if target.memory is not None:
        return Target(offset, nbytes, memory=target.memory[at : at + nbytes])
    if target.put is None:
        return Target(offset, nbytes)
    return Target(offset, nbytes, put=_Whole(target, at, nbytes).put)


class _Whole:
    """Waits until a part is complete: what lies in another file may end inside of a number there."""

    def __init__(self, target: Target, at: int, nbytes: int) -> None:
        self._target, self._at = target, at
        self._data = torch.empty(nbytes, dtype=torch.uint8)
        self._missing = nbytes
        self._lock = threading.Lock()

    def put(self, at: int, data: Any) -> None:
        self._data[at : at + len(data)].copy_(torch.as_tensor(data))
        with self._lock:
            self._missing -= len(data)
            complete = self._missing == 0
        if complete:
            self._target.take(self._at, self._data.numpy())
