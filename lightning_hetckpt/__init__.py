"""Data parallelism for devices that are not alike, and a snapshot at every step.

The whole use is one line::

    Trainer(strategy=HeteroDDP(), plugins=[StripedAsyncCheckpointIO()])

Importing this package imports neither torch nor Lightning: a name loads what it needs when it is first
asked for. The strategy names (`Trainer(strategy="hetero_ddp")`) are known as soon as both this package
and Lightning are imported, whichever comes first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hetckpt.host import install_registration

if TYPE_CHECKING:
    from lightning_hetckpt.adaptive_batch import AdaptiveBatch
    from lightning_hetckpt.callbacks import SnapshotCallback
    from lightning_hetckpt.checkpoint_io import StripedAsyncCheckpointIO
    from lightning_hetckpt.errors import HetckptError
    from lightning_hetckpt.strategy import HeteroDDP

__version__ = "0.1.0"

__all__ = ["AdaptiveBatch", "HetckptError", "HeteroDDP", "SnapshotCallback", "StripedAsyncCheckpointIO"]

_HOME = {
    "AdaptiveBatch": "lightning_hetckpt.adaptive_batch",
    "HeteroDDP": "lightning_hetckpt.strategy",
    "HetckptError": "lightning_hetckpt.errors",
    "SnapshotCallback": "lightning_hetckpt.callbacks",
    "StripedAsyncCheckpointIO": "lightning_hetckpt.checkpoint_io",
}


def __getattr__(name: str) -> object:
    """Load a front door on its first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    found: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install_registration()
