"""What a user may rely on by name, and what an import costs and does."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import metadata, resources

import pytest

import lightning_hetckpt

REGISTERED = {
    "hetero_ddp",
    "hetero_ddp_find_unused_parameters_true",
    "hetero_ddp_spawn",
    "hetero_ddp_fork",
    "hetero_ddp_notebook",
}

OPTIONS = {
    "HeteroDDP": {
        "global_batch_size": None,
        "policy": "live",
        "shares": None,
        "min_samples": 1,
        "max_samples": None,
        "multiple_of": 1,
        "replan_every": 10,
        "loss_reduction": "mean",
        "weight_by": None,
        "max_micro_batch": None,
        "adaptive_batch": None,
    },
    "StripedAsyncCheckpointIO": {
        "dirs": None,
        "buffer_bytes": None,
        "checksum": True,
        "direct": "auto",
        "snapshots": True,
        "save": "full",
        "full_every": 20,
        "verify_unchanged": 10,
    },
    "AdaptiveBatch": {
        "max_global_batch_size": inspect.Parameter.empty,
        "min_global_batch_size": None,
        "lr_scaling": "adascale",
        "every_n_epochs": 1,
    },
    "SnapshotCallback": {
        "dirpath": None,
        "every_n_steps": 1,
        "keep_last": 2,
        "max_overhead": None,
        "when_busy": "wait",
        "keep_every_n_steps": None,
    },
}


def _python(code: str) -> str:
    """What a fresh interpreter prints when it runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_front_door_takes_the_promised_options_in_the_promised_order(name: str) -> None:
    parameters = inspect.signature(getattr(lightning_hetckpt, name)).parameters
    found = {key: p.default for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}

    assert list(OPTIONS[name].items()) == list(found.items())


def test_hetero_ddp_passes_other_options_on_to_ddp() -> None:
    strategy = lightning_hetckpt.HeteroDDP(find_unused_parameters=True)

    assert strategy._ddp_kwargs["find_unused_parameters"] is True


def test_every_public_name_is_there_and_listed() -> None:
    names = ["HeteroDDP", "HetckptError", "SnapshotCallback", "StripedAsyncCheckpointIO"]
    names += ["StripedModelParallel"]
    names += ["export_checkpoint", "import_checkpoint", "load_from_checkpoint", "open_checkpoint"]
    names += ["AdaptiveBatch"]

    assert sorted(lightning_hetckpt.__all__) == sorted(names)
    assert set(names) <= set(dir(lightning_hetckpt))
    assert all(getattr(lightning_hetckpt, name).__name__ == name for name in names)


def test_an_unknown_name_says_which_names_there_are() -> None:
    with pytest.raises(AttributeError, match="HeteroDDP"):
        lightning_hetckpt.HeteroDPP


def test_the_version_stands_in_one_place() -> None:
    assert metadata.version("lightning-hetckpt") == lightning_hetckpt.__version__


def test_types_and_format_come_with_the_package() -> None:
    root = resources.files("lightning_hetckpt")

    assert (root / "py.typed").is_file()
    assert (root / "checkpoint" / "FORMAT.md").is_file()


def test_importing_the_package_loads_neither_torch_nor_lightning() -> None:
    loaded = _python(
        "import sys, lightning_hetckpt\n"
        "print([m for m in ('torch', 'lightning', 'numpy', 'rich') if m in sys.modules])"
    )

    assert loaded == "[]"


def test_an_error_class_is_had_without_torch() -> None:
    assert (
        _python("import sys; from lightning_hetckpt import HetckptError; print('torch' in sys.modules)")
        == "False"
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning.pytorch, lightning_hetckpt",
        "import lightning_hetckpt, lightning.pytorch",
        "import lightning_hetckpt; from lightning.pytorch import Trainer",
        "import lightning_hetckpt; from lightning_hetckpt import HeteroDDP",
    ],
)
def test_strategy_names_are_known_whichever_package_comes_first(imports: str) -> None:
    found = _python(
        f"{imports}\n"
        "import sys\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(*sorted(n for n in StrategyRegistry.available_strategies() if n.startswith('hetero')))\n"
        "print([f for f in sys.meta_path if 'lightning_hetckpt' in type(f).__module__])\n"
    )
    names, watchers = found.splitlines()

    assert set(names.split()) == REGISTERED
    assert watchers == "[]"  # the import hook is one-shot


def test_ddps_own_names_stay_ddps() -> None:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy
    assert type(StrategyRegistry.get("hetero_ddp")) is lightning_hetckpt.HeteroDDP
    assert StrategyRegistry.get("hetero_ddp_spawn")._start_method == "spawn"
