"""A random training run as checkpoints see it: tensors of every kind that change, come, go and grow between saves."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint.trees import DTYPES

LARGE_BYTES = 9 * 2**20  # more than one buffer


class Story:
    """The same on every rank that tells it from the same random numbers.

    Attributes:
        tensors: live ones by name; some are views of one memory, or one tensor by two names.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tensors: dict[str, Tensor] = {}
        self.step = 0
        self._memory: dict[str, tuple[Tensor, bool]] = {}  # bytes, and whether they are zeros and ones only
        self._count = 0
        for _ in range(rng.randint(1, 4)):
            self.add()
        if rng.random() < 0.15:
            self.add(LARGE_BYTES)

    def add(self, nbytes: int | None = None) -> None:
        """One more tensor."""
        rng, name = self.rng, f"t{self._count}"
        self._count += 1
        how = rng.choice(["plain", "plain", "turned", "strided", "scalar", "empty", "view", "tied"])
        if how == "tied" and self.tensors:
            other = rng.choice(sorted(self.tensors))
            self.tensors[name] = self.tensors[other]
            self._memory[name] = self._memory[other]
            return
        dtype = rng.choice(DTYPES)
        if nbytes is None:
            nbytes = rng.choice([64, 3000, 70_000, 300_000])
        columns = rng.choice([1, 3, 16, 100])
        shape = {"scalar": (), "empty": (0, 3)}.get(how, (nbytes // dtype.itemsize // columns + 1, columns))
        spare = rng.randint(0, 3)
        count = spare + torch.Size(shape).numel()
        generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
        raw = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        if dtype is torch.bool:
            raw %= 2
        self._memory[name] = raw, dtype is torch.bool
        whole = raw.view(dtype)
        tensor = whole[spare:].view(shape)
        if how == "turned":
            tensor = tensor.T
        elif how == "strided":
            tensor = tensor[::2]
        self.tensors[name] = tensor
        if how == "view":  # of the same memory, overlapping
            self.tensors[f"{name}v"] = whole[: max(1, count // 2)]
            self._memory[f"{name}v"] = self._memory[name]

    def go_on(self) -> None:
        """Change single bytes, ranges or all of some tensors; now and then which tensors there are."""
        rng = self.rng
        self.step += 1
        for name in sorted(self.tensors):
            raw, is_bool = self._memory[name]
            if not len(raw) or rng.random() < 0.4:
                continue
            for _ in range(rng.choice([1, 1, 5])):
                start = rng.randrange(len(raw))
                length = rng.choice([1, 8, 5000, len(raw)])
                raw[start : start + length] ^= 1 if is_bool else rng.choice([1, 0x80, 0xFF])
        if rng.random() < 0.12:
            self.add()
        if rng.random() < 0.06 and len(self.tensors) > 1:
            gone = rng.choice(sorted(self.tensors))
            del self.tensors[gone], self._memory[gone]

    def tree(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "global_step": self.step,
            "state_dict": dict(self.tensors),
            "owned": [torch.tensor(self.step), torch.arange(self.step)],
            "note": "x" * self.step,
        }

    def truth(self) -> dict[str, Any]:
        """A copy of it."""
        tree = self.tree()
        return {**tree, "state_dict": {name: one.clone() for name, one in tree["state_dict"].items()}}

    def frozen(self) -> list[Tensor]:
        """Some of the tensors, said to be trained by nobody."""
        return [one for one in self.tensors.values() if self.rng.random() < 0.3]

    def sparse(self) -> list[Tensor]:
        """Some of the tensors, said to change row by row."""
        return [one for one in self.tensors.values() if self.rng.random() < 0.3]
