"""A small regression job in float64, and the same job written out for one process without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES = 5


class Numbers(Dataset[tuple[int, Tensor, Tensor]]):
    """`length` fixed random samples; each comes with its own index, so that a test can see who got it."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(length, FEATURES, dtype=torch.float64, generator=generator)
        self.targets = self.inputs.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.targets[index]


def make_net(dropout: float = 0.0, batch_norm: bool = False) -> nn.Module:
    """The same small network, bit for bit, at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        middle: list[nn.Module] = [nn.BatchNorm1d(8)] if batch_norm else []
        return nn.Sequential(
            nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)
        ).double()


class Toy(LightningModule):
    """Trains `make_net` with AdamW; remembers which samples came in every step and what happened when."""

    def __init__(self, lr: float = 1e-2, **net: Any) -> None:
        super().__init__()
        self.net = make_net(**net)
        self.lr = lr
        self.seen: list[tuple[int, int, list[int]]] = []  # epoch, batch, sample indices of this rank

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, inputs, targets = batch
        self.seen.append((self.current_epoch, batch_idx, index.tolist()))
        return nn.functional.mse_loss(self.net(inputs), targets)


class ManualToy(Toy):
    """The same training written as manual optimization."""

    def __init__(self, bare: bool = False, **net: Any) -> None:
        super().__init__(**net)
        self.automatic_optimization = False
        self.bare = bare

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        loss.backward() if self.bare else self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def loader(length: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    """A train loader over `Numbers`."""
    return DataLoader(Numbers(length), batch_size=batch_size, **options)


def trainer(root: Path | str, strategy: Any, devices: int, **options: Any) -> Trainer:
    """A quiet CPU Trainer."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return Trainer(default_root_dir=root, strategy=strategy, devices=devices, **{**quiet, **options})


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def order(length: int, epoch: int, seed: int = 0) -> list[int]:
    """The order of samples that torch itself would give to one process."""
    sampler = DistributedSampler(range(length), num_replicas=1, rank=0, shuffle=True, seed=seed)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def batches(length: int, batch: int, epochs: int) -> Iterator[tuple[int, list[int]]]:
    """Epoch and sample indices of every global batch, the short last ones included."""
    for epoch in range(epochs):
        indices = order(length, epoch)
        for start in range(0, length, batch):
            yield epoch, indices[start : start + batch]


def train_alone(
    length: int,
    batch: int,
    epochs: int,
    accumulate: int = 1,
    clip: float | None = None,
    make: Callable[[], nn.Module] = make_net,
) -> list[Tensor]:
    """The truth: one process, plain PyTorch, the whole batch at once; returns the parameters."""
    data, net = Numbers(length), make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    steps = list(batches(length, batch, epochs))
    last_of_epoch = {
        i for i, (epoch, _) in enumerate(steps) if i + 1 == len(steps) or steps[i + 1][0] != epoch
    }
    in_epoch = 0
    for i, (_, indices) in enumerate(steps):
        loss = nn.functional.mse_loss(net(data.inputs[indices]), data.targets[indices])
        (loss / accumulate).backward()
        in_epoch += 1
        if in_epoch % accumulate == 0 or i in last_of_epoch:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if i in last_of_epoch:
            in_epoch = 0
    return parameters(net)
