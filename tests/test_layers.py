"""The house rules about who may import whom, read from the source and never from a running program."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_hetckpt"
ROOT = Path(__file__).parents[1] / PACKAGE

WORDS, REASONING, ENGINE, TORCH, DOORS = range(5)
RINGS = {
    "errors": WORDS,
    "balance.plan": WORDS,
    "checkpoint.layout": WORDS,
    "checkpoint.manifest": WORDS,
    "balance.throughput": REASONING,
    "balance.optperf": REASONING,
    "balance.solver": REASONING,
    "balance.line_fit": REASONING,
    "balance.evidence": REASONING,
    "balance.probe": REASONING,
    "balance.sync_fit": REASONING,
    "balance.controller": REASONING,
    "balance.noise_scale": REASONING,
    "balance.goodput": REASONING,
    "balance.lr_scaling": REASONING,
    "balance.memory": REASONING,
    "balance.options": REASONING,
    "checkpoint.shard_plan": REASONING,
    "checkpoint.chunk_plan": REASONING,
    "checkpoint.overlay": REASONING,
    "checkpoint.units": ENGINE,
    "checkpoint.sieve": ENGINE,
    "checkpoint.delta_file": ENGINE,
    "checkpoint.redirect": TORCH,
    "checkpoint.chain": TORCH,
    "checkpoint.sifting": TORCH,
    "checkpoint.consolidate": TORCH,
    "checkpoint.stripe_header": REASONING,
    "checkpoint.cadence": REASONING,
    "checkpoint.retention": REASONING,
    "checkpoint.drive_shares": REASONING,
    "checkpoint.direct_io": ENGINE,
    "checkpoint.direct_reads": ENGINE,
    "checkpoint.span_reader": ENGINE,
    "checkpoint.drives": ENGINE,
    "checkpoint.buffer_pool": ENGINE,
    "checkpoint.stripe_writer": ENGINE,
    "checkpoint.commit": ENGINE,
    "checkpoint.verify": ENGINE,
    "checkpoint.folders": ENGINE,
    "checkpoint.publish": ENGINE,
    "checkpoint.figures": ENGINE,
    "checkpoint.ledger": ENGINE,
    "checkpoint.spares": ENGINE,
    "checkpoint.sharing": ENGINE,
    "channel": TORCH,
    "balance.sampler": TORCH,
    "balance.lap": TORCH,
    "balance.parts": TORCH,
    "balance.running_statistics": TORCH,
    "balance.memory_meter": TORCH,
    "weighing": TORCH,
    "balance.step_timer": TORCH,
    "balance.gradient_norms": TORCH,
    "balance.noise_metric": TORCH,
    "checkpoint.state_tree": TORCH,
    "checkpoint.rng_state": TORCH,
    "checkpoint.snapshot": TORCH,
    "checkpoint.meta": TORCH,
    "checkpoint.save_layout": TORCH,
    "checkpoint.staging_pool": TORCH,
    "checkpoint.staging": TORCH,
    "checkpoint.lending": TORCH,
    "checkpoint.crew": TORCH,
    "checkpoint.fleet": TORCH,
    "checkpoint.survey": TORCH,
    "checkpoint.imprint": TORCH,
    "checkpoint.committer": TORCH,
    "checkpoint.snapshotter": TORCH,
    "checkpoint.destination": TORCH,
    "checkpoint.restore": TORCH,
    "checkpoint.together": TORCH,
    "checkpoint.step_guard": TORCH,
    "checkpoint.sharded_plan": TORCH,
    "checkpoint.stripe_files": TORCH,
    "checkpoint.dcp": TORCH,
    "checkpoint.export": TORCH,
    "checkpoint.parameter_names": TORCH,
    "host": DOORS,
    "resume": DOORS,
    "loaders": DOORS,
    "loading": DOORS,
    "convert": DOORS,
    "sharded": DOORS,
    "balancer": DOORS,
    "micro_batches": DOORS,
    "strategy": DOORS,
    "adaptive_batch": DOORS,
    "callbacks": DOORS,
    "checkpoint_io": DOORS,
}

# What each ring may import from outside, on top of the rings before it and the standard library.
OUTSIDE = {
    WORDS: set(),
    REASONING: {"numpy"},
    ENGINE: {"xxhash"},
    TORCH: {"torch", "torchmetrics", "safetensors", "pynvml", "typing_extensions"},
    DOORS: {"lightning", "lightning_utilities", "rich"},
}
# What the first two rings may not take from the standard library: they decide, and touch nothing.
ACTING = {
    "ctypes", "fcntl", "logging", "mmap", "multiprocessing", "os", "random", "select", "shutil", "signal",
    "socket", "subprocess", "tempfile", "threading", "time",
}  # fmt: skip


def _modules() -> dict[str, Path]:
    """Every module with code in it, by its name inside the package; the package fronts are no rooms."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.name != "__init__.py":
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def _imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import slips past the rings"
            base = node.module or ""
            inside = [f"{base}.{alias.name}" for alias in node.names]
            # `from lightning_hetckpt.checkpoint import layout` names a module, not an object.
            modules = [name for name in inside if name.removeprefix(f"{PACKAGE}.") in RINGS]
            yield from modules or [base]


def _inner(name: str) -> str | None:
    return name.removeprefix(f"{PACKAGE}.") if name.split(".")[0] == PACKAGE else None


def test_every_module_has_its_ring() -> None:
    unknown = sorted(set(_modules()) - set(RINGS))
    assert not unknown, f"give these modules a ring in {Path(__file__).name}: {unknown}"


@pytest.mark.parametrize("module", sorted(_modules()))
def test_a_module_imports_only_what_its_ring_may(module: str) -> None:
    ring = RINGS[module]
    allowed = set().union(*(OUTSIDE[level] for level in range(ring + 1))) | set(sys.stdlib_module_names)
    if ring <= REASONING:
        allowed -= ACTING
    wrong = []
    for name in _imports(_modules()[module]):
        inner = _inner(name)
        if inner is None:
            wrong += [name] if name.split(".")[0] not in allowed else []
        elif inner not in RINGS:
            wrong.append(f"{name} (the package front; name the module)")
        elif RINGS[inner] > ring:
            wrong.append(f"{name} (a ring further out)")
    assert not wrong, f"{module} may not import: {wrong}"


def test_the_two_halves_never_name_each_other() -> None:
    for module, path in _modules().items():
        half = module.split(".")[0]
        other = {"balance": "checkpoint", "checkpoint": "balance"}.get(half)
        named = [name for name in _imports(path) if other and (_inner(name) or "").split(".")[0] == other]
        assert not named, f"{module} imports {named}"


def test_the_fronts_of_both_halves_hold_no_code() -> None:
    for half in ("balance", "checkpoint"):
        front = ast.parse((ROOT / half / "__init__.py").read_text())
        assert ast.get_docstring(front), f"{half}/__init__.py is the map of its half"
        assert len(front.body) == 1, f"{half}/__init__.py holds more than its docstring"


def test_private_names_of_lightning_appear_in_host_alone() -> None:
    for module, path in _modules().items():
        if module == "host":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
                private = [a.name for a in node.names if a.name.startswith("_")]
                private += [part for part in (node.module or "").split(".") if part.startswith("_")]
                assert not private, f"{module} imports {private} of Lightning; that belongs to host.py"
