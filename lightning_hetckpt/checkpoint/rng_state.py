"""One rank's random number generators as plain bytes: dropout goes on with the same masks after a resume."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from lightning_hetckpt.errors import CorruptCheckpointError


def capture() -> bytes:
    """The present state of torch's, CUDA's, numpy's and Python's global generators, as JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    # Asking for CUDA's state would start CUDA in a process that never uses it.
    started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if started else []
    state = {
        "torch": _pack(torch.get_rng_state()),
        "cuda": [_pack(one) for one in cuda],
        "cuda_device": torch.cuda.current_device() if started else None,
        "numpy": [kind, _text(np.asarray(keys, dtype="<u4").tobytes()), position, has_gauss, gauss],
        "python": [version, _text(np.asarray(words, dtype="<u4").tobytes()), next_gauss],
    }
    return json.dumps(state).encode()


def restore(data: bytes) -> None:
    """Put every generator back to where `capture` found it.

    The device that the rank computes on gets the state of the one it computed on; the others are matched by
    number, and devices that the saving process did not have keep theirs.

    Raises:
        CorruptCheckpointError: `data` is not what `capture` makes.
    """
    try:
        state = json.loads(data)
        torch_state = _unpack(state["torch"])
        cuda_states = [_unpack(one) for one in state["cuda"]]
        own = state.get("cuda_device")
        own_state = None if own is None else cuda_states[own]
        kind, keys, position, has_gauss, gauss = state["numpy"]
        version, words, next_gauss = state["python"]
        numpy_state = (kind, np.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, gauss)
        python_words = tuple(int(word) for word in np.frombuffer(base64.b64decode(words), dtype="<u4"))
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate((version, python_words, next_gauss))
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"the random state of a rank ({len(data)} bytes) cannot be restored: {error}; "
            "resume from another snapshot"
        ) from error
    if cuda_states and torch.cuda.is_available():
        for device, one in enumerate(cuda_states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
        if own_state is not None:
            torch.cuda.set_rng_state(own_state, torch.cuda.current_device())


def derive(seed: int, step: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank): the streams of a rank that did not exist at the save."""
    mixed = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed)  # CUDA's generators too
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _pack(state: torch.Tensor) -> str:
    return _text(state.cpu().numpy().tobytes())


def _unpack(text: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
