from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulate import CLUSTERS, READY, Even, Ours, Proportional, adapt, fleet


def test_the_quick_run_prints_its_tables_and_keeps_the_figures(tmp_path: Path, capsys) -> None:
    simulate.main(["--quick", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "| 2 devices, 2:1 | ours |" in printed
    assert "| solver | processor time |" in printed
    kept = json.loads((tmp_path / "out.json").read_text())
    assert {row["policy"] for row in kept["clusters"]} == {"even", "proportional", "ours"}
    assert kept["command"].startswith("python -m benchmarks.simulate")


def test_a_plot_is_drawn_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cluster = fleet([(1, 2.0), (1, 4.0)], 32, 0.02)
    simulate.plot("2 devices, 2:1", {"even": simulate.simulate(cluster, Even(), 5)}, tmp_path)
    assert (tmp_path / "2-devices--2-1.svg").read_text().startswith("<?xml")


def test_every_cluster_can_be_built() -> None:
    for name, make in CLUSTERS.items():
        cluster = make()
        assert sum(cluster.even) == cluster.global_batch_size, name


def test_overlap_in_the_optimum_beats_a_proportional_rule_where_loading_hides_nothing() -> None:
    cluster = CLUSTERS["the same 16, slow network, the A100 load for 25 ms"]()
    ours = simulate.simulate(cluster, Ours(cluster), 80)
    proportional = simulate.simulate(cluster, Proportional(cluster), 80)
    assert max(ours.over[40:]) <= 0.03
    assert min(proportional.over[40:]) > 0.05


def test_a_batch_that_may_grow_gives_more_than_an_equal_split_with_the_best_batch() -> None:
    cluster = fleet([(2, 0.6), (2, 1.5)], 32, 0.09, noise=0.0)
    assert len(cluster.ready) == len(READY)
    found = adapt(cluster, noise_scale=512.0)
    assert found["batch"] > found["first_batch"]
    assert found["fixed_even"] < found["equal"] < found["ours"] <= found["best"] * (1 + 1e-9)
    assert found["ours"] >= 0.95 * found["best"]
