"""Where everything lies: every file and folder name of a checkpoint is spelled here, and only here."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

FORMAT_VERSION = 1
BLOCK_BYTES = 4096  # what direct I/O wants offsets, lengths and addresses to be a multiple of
CHUNK_BYTES = 8 * 2**20  # one hash, one buffer, one write

MANIFEST_NAME = "manifest.json"
META_NAME = "meta.pt"
RANKS_NAME = "ranks.json"
INCREMENTAL_NAME = "incremental.safetensors"  # stops stock readers, which would take the stripes for all

STRIPE_SUFFIX = ".safetensors"

HIDDEN_PREFIX = ".hetckpt-"
SPARE_NAME = f"{HIDDEN_PREFIX}spare"
DRIVE_FOLDER = "lightning_hetckpt"
OWNER_NAME = "owner.json"
PARTIAL_NAME = "partial"
RETIRED_NAME = "retired.json"  # what was the manifest of a checkpoint whose stripes may be written over


def new_id() -> str:
    """A fresh random name of 16 hexadecimal digits, for a snapshot or a run."""
    return secrets.token_hex(8)


def stripe_name(rank: int, drive: int) -> str:
    """The file in which `rank` keeps its share of `drive`; drives count from 0 on each rank."""
    return f"stripe-r{rank:05d}-d{drive:02d}.safetensors"


def drive_of_stripe(file: str) -> int | None:
    """The drive number in a name that `stripe_name` spelled; None for any other file."""
    match = re.fullmatch(r"stripe-r\d{5,}-d(\d{2,})\.safetensors", file)
    return int(match[1]) if match else None


def delta_name(stripe: str, snapshot_id: str) -> str:
    """The file of what one snapshot changed in the file `stripe` of an earlier one."""
    return f"delta-{stripe.removeprefix('stripe-').removesuffix(STRIPE_SUFFIX)}-{snapshot_id}.bin"


def stripe_of_delta(file: str) -> str | None:
    """The stripe in a name that `delta_name` spelled; None for any other file."""
    match = re.fullmatch(r"delta-(r\d{5,}-d\d{2,})-[0-9a-f]{16}\.bin", file)
    return f"stripe-{match[1]}{STRIPE_SUFFIX}" if match else None


def is_stripe(file: str) -> bool:
    """Whether a file of this name holds tensors; so far `stripe_name` and `owned_stripe_name` spell them all."""
    return file.endswith(STRIPE_SUFFIX)


def owned_stripe_name(rank: int = 0) -> str:
    """The file of the tensors that `rank` alone owns, such as buffers."""
    return f"stripe-r{rank:05d}-owned.safetensors"


def build_folder(path: Path, snapshot_id: str) -> Path:
    """The hidden sibling in which the checkpoint `path` is built until one rename publishes it."""
    # Lightning takes whatever holds ".ckpt", "last" or "ckpt_" in its name for a checkpoint to resume from.
    return path.parent / f"{HIDDEN_PREFIX}{snapshot_id}"


def drive_folder(drive: Path, run: str, snapshot_id: str) -> Path:
    """The folder on `drive` that holds one snapshot's stripes; two runs never share one."""
    return drive / DRIVE_FOLDER / run / snapshot_id


def spare_folder(folder: Path) -> Path:
    """Where stripes that lay in `folder` wait to be written over: beside it, on the same file system."""
    return folder.parent / SPARE_NAME


def drive_of(folder: Path) -> Path:
    """The drive that the stripes in `folder` lie on: what `drive_folder` was made of, or a build folder's parent."""
    return folder.parents[2] if folder.parent.parent.name == DRIVE_FOLDER else folder.parent


def run_file(folder: Path) -> Path:
    """The file that holds the random run id of the snapshot folder `folder`."""
    return folder / ".lightning_hetckpt_run"


def padded(nbytes: int, block: int = BLOCK_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `block`."""
    return -(-nbytes // block) * block
