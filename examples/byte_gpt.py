"""A byte-level GPT, and the Python standard library's own source to train it on."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset

BYTES = 256  # the vocabulary


class SourceBytes(Dataset[Tensor]):
    """Windows of bytes over the standard library's source, in a fixed order; nothing is downloaded.

    Args:
        window: bytes that the model sees of a sample; one more is there to be predicted.
        limit_bytes: how much source to read.
    """

    def __init__(self, window: int = 64, limit_bytes: int = 8 * 2**20) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= limit_bytes:
                break
        self.window = window
        self._text = torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._text) - 1) // self.window

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.window
        return self._text[start : start + self.window + 1].long()


class Block(nn.Module):
    """Attention to the bytes before, then two layers on each byte."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_layers = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, window, width) to the same shape."""
        samples, window, width = x.shape
        split = self.query_key_value(self.norm_attention(x)).view(samples, window, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(samples, window, width))
        return x + self.layers(self.norm_layers(x))


class ByteGPT(LightningModule):
    """Predicts the next byte; an ordinary LightningModule that knows of no other device.

    With the default sizes it has 6.2 million parameters.
    """

    def __init__(
        self,
        width: int = 288,
        depth: int = 6,
        heads: int = 6,
        window: int = 64,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.byte = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes (samples, window) to logits (samples, window, 256)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.byte(x) + self.place(places))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the next byte, in nats."""
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, BYTES), batch[:, 1:].reshape(-1))
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on everything."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
