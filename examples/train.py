"""The plain use: two processes share the work by their speed, and every step is on disk.

Start it, stop it with Ctrl-C or `kill -9`, start it again: it goes on with the next sample.

    python examples/train.py --devices 2 --max-steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

from byte_gpt import ByteGPT, SourceBytes
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_hetckpt import HeteroDDP, StripedAsyncCheckpointIO


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the standard library's source.")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--root", type=Path, default=Path("demo_out/train"), help="where the snapshots go")
    parser.add_argument("--dirs", type=Path, nargs="*", help="one folder on each drive to stripe over")
    options = parser.parse_args()

    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=HeteroDDP(),
        plugins=[StripedAsyncCheckpointIO(dirs=options.dirs)],
        max_steps=options.max_steps,
        default_root_dir=options.root,
        enable_checkpointing=False,  # a snapshot at every step is more than ModelCheckpoint's
        logger=False,
    )
    loader = DataLoader(SourceBytes(), batch_size=8, shuffle=True)
    trainer.fit(ByteGPT(), loader, ckpt_path="last")  # from the start where there is no snapshot yet


if __name__ == "__main__":
    main()
