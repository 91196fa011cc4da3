"""The table and the picture of the main job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import matplotlib as mpl
from rich.table import Table

if TYPE_CHECKING:
    from main_job import Act

WARM_UP = 3  # first steps of a process: allocators, kernels, DDP's buckets


def table(even: Act, story: list[Act], snapshot_bytes: int, how: str) -> Table:
    """Everything worth knowing, each figure from this very run."""
    balanced, resumed, *others = story
    before_s, after_s = step_s(even), settled_s(balanced)
    stall_s = median(record["stall_s"] for record in balanced.steps[WARM_UP:])
    megabytes = snapshot_bytes / 1e6
    alone_s = [record["save_s"] for record in resumed.records if "save_s" in record]

    rows = Table(title="main job", caption=how, title_style="bold", show_header=True)
    rows.add_column("")
    rows.add_column("even split", justify="right")
    rows.add_column("balanced", justify="right")
    rows.add_row("samples per rank", _shares(even, 0), _shares(balanced, -1))
    rows.add_row("step time", f"{before_s:.3f} s", f"{after_s:.3f} s")
    rows.add_row("speed-up over the even split", "1.00x", f"[bold green]{before_s / after_s:.2f}x[/]")
    rows.add_row("stall per snapshot", *(f"{ms:.1f} ms" for ms in (1e3 * _stall_s(even), 1e3 * stall_s)))
    rows.add_row("... as a share of the step", f"{_stall_s(even) / before_s:.1%}", f"{stall_s / after_s:.1%}")
    rows.add_row(
        "written behind training",
        *(f"{megabytes / 1e3 / seconds:.2f} GB/s" for seconds in (before_s, after_s)),
    )
    rows.add_row("one save alone", "", f"{megabytes:.0f} MB, {megabytes / 1e3 / max(alone_s):.2f} GB/s")
    rows.add_section()
    rows.add_row("killed (SIGKILL) at step", "", f"{balanced.steps[-1]['step']:.0f}")
    for before, act in pairwise(story):
        rows.add_row(
            f"resumed on {act.devices} behind step",
            "",
            f"{act.steps[0]['step'] - 1:.0f}, loss {_loss(before, last=True):.2f} -> {_loss(act, last=False):.2f}",
        )
    rows.add_row(
        "loss, first and last steps",
        "",
        f"{_loss(balanced, last=False):.2f} -> {_loss(others[-1], last=True):.2f}",
    )
    return rows


def draw(even: Act, story: list[Act], path: Path) -> Path:
    """Draw the split and the step time over the steps, one colour per rank, and return `path`."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(10.5, 5.5), layout="constrained")
    colours = ["#3b6ea5", "#d1603d", "#6a994e"]
    seen: set[int] = set()
    for act in story:
        for rank in range(act.devices):
            mine = [record for record in act.records if record["rank"] == rank and "step" in record]
            label = f"rank {rank}" + (
                f" (slow until step {story[1].steps[-1]['step']:.0f})" if rank == 1 else ""
            )
            upper.step(
                [record["step"] for record in mine],
                [record["samples"] for record in mine],
                where="mid",
                linewidth=2,
                color=colours[rank],
                label=None if rank in seen else label,
            )
            seen.add(rank)
        steps = act.steps[1:]  # the first one includes what only a start costs
        lower.plot(
            [record["step"] for record in steps],
            [record["seconds"] for record in steps],
            marker="o",
            markersize=3,
            color="#333333",
        )
    lower.axhline(step_s(even), color="#999999", linestyle="--", label="even split, median")
    for before, act in pairwise(story):
        border = act.steps[0]["step"] - 0.5
        for axes in (upper, lower):
            axes.axvline(border, color="#c1121f" if before.killed else "#bbbbbb", linewidth=1)
        what = f"{'killed, ' if before.killed else ''}resumed on {act.devices}"
        upper.annotate(
            what, (border, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8
        )
    upper.set_ylabel("samples")
    upper.set_ylim(bottom=0)
    lower.set_ylabel("step time (s)")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("global step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    upper.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    lower.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.suptitle("Two unequal processes, a snapshot at every step")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def step_s(act: Act) -> float:
    """Median step time of an act, its first steps left out."""
    return median(record["seconds"] for record in act.steps[WARM_UP:])


def settled_s(act: Act) -> float:
    """Median step time over the steps that were cut as the last one was."""
    share = act.steps[-1]["samples"]
    return median(record["seconds"] for record in act.steps[WARM_UP:] if record["samples"] == share)


def _stall_s(act: Act) -> float:
    return median(record["stall_s"] for record in act.steps[WARM_UP:])


def _shares(act: Act, index: int) -> str:
    step = act.steps[index]["step"]
    cut = {record["rank"]: record["samples"] for record in act.records if record.get("step") == step}
    return " / ".join(f"{cut[rank]:.0f}" for rank in sorted(cut))


def _loss(act: Act, last: bool) -> float:
    steps = act.steps[-3:] if last else act.steps[:3]
    return sum(record["loss"] for record in steps) / len(steps)
