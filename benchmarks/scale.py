"""What a checkpoint of a very large job takes besides its bytes: the plan, the messages, the manifest.

    python -m benchmarks.scale --ranks 10000 --drives 8 --layers 95

Nothing is written and nobody else is asked: the tensors are a Llama-like model's with AdamW's state in float32
(95 layers of width 8192 are 83e9 parameters, 1 TB), the plan is worked out for all ranks, and messages and sizes
come from the formulas below, which tests hold against the real thing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, write_json
from lightning_hetckpt.checkpoint.drive_shares import HostDrives, drive_weights
from lightning_hetckpt.checkpoint.layout import CHUNK_BYTES
from lightning_hetckpt.checkpoint.shard_plan import (
    StripePlan,
    TensorSpec,
    file_tensors,
    fingerprint,
    plan_stripes,
)
from lightning_hetckpt.checkpoint.stripe_header import header_lengths

T = TypeVar("T")

# In JSON; upper ends, since numbers have as many digits as they have.
HASH_BYTES = 19  # 16 digits, quotes and a comma
FILE_BYTES = 95  # its name, length and chunk size, and their keys
PIECE_BYTES = 110  # the name of its file, three numbers, and their keys
TENSOR_BYTES = 75  # dtype, shape and keys, without its name
REPORT_BYTES = 100  # of a rank without files
REPORTED_FILE_BYTES = 140  # as in the manifest, and the seconds of its drive
MANIFEST_BYTES = 900  # of a checkpoint without tensors, figures included


def store_messages(ranks: int) -> int:
    """Requests to the job's store for one commit, when nobody looks before the others are ready.

    Of every rank but 0: its report, a look at its answer, reading and deleting that, and its acknowledgement. Of rank
    0, one look at all reports, then for every other rank reading and deleting its report and setting its answer.
    Each further look of a rank that is early adds one; they come 50 ms apart at most often.
    """
    others = ranks - 1
    return 8 * others + 1 if others else 0


def report_bytes(files: int, chunks: int, rank_state_bytes: int) -> int:
    """At most how long one rank's report is, in bytes of JSON.

    Args:
        files: that it wrote.
        chunks: of all of them together.
        rank_state_bytes: of its random number generators.
    """
    encoded = 4 * -(-rank_state_bytes // 3)
    return REPORT_BYTES + REPORTED_FILE_BYTES * files + HASH_BYTES * chunks + encoded


def manifest_bytes(files: int, chunks: int, tensors: int, pieces: int, name_bytes: int) -> int:
    """At most how long the manifest is.

    Args:
        files: of all ranks.
        chunks: of all files.
        tensors: that are stored.
        pieces: of all tensors; one of each, and one more for every cut inside of a tensor.
        name_bytes: of all tensors' names together.
    """
    return (
        MANIFEST_BYTES
        + FILE_BYTES * files
        + HASH_BYTES * chunks
        + TENSOR_BYTES * tensors
        + PIECE_BYTES * pieces
        + name_bytes
    )


def chunks_of(stripe: StripePlan, header: int) -> int:
    """Hashes of one file."""
    return -(-(header + stripe.data_bytes) // CHUNK_BYTES)


def adamw_state(layers: int, width: int = 8192) -> list[TensorSpec]:
    """The tensors of a Llama-like model and of AdamW's state, in float32, named as in a Lightning checkpoint."""
    kv, inner, vocabulary = width // 8, 7 * width // 2, 128_256
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens", (vocabulary, width))]
    for layer in range(layers):
        place = f"model.layers.{layer}"
        shapes += [
            (f"{place}.self_attn.q_proj", (width, width)),
            (f"{place}.self_attn.k_proj", (kv, width)),
            (f"{place}.self_attn.v_proj", (kv, width)),
            (f"{place}.self_attn.o_proj", (width, width)),
            (f"{place}.mlp.gate_proj", (inner, width)),
            (f"{place}.mlp.up_proj", (inner, width)),
            (f"{place}.mlp.down_proj", (width, inner)),
            (f"{place}.input_layernorm", (width,)),
            (f"{place}.post_attention_layernorm", (width,)),
        ]
    shapes += [("model.norm", (width,)), ("lm_head", (vocabulary, width))]
    specs = [TensorSpec(f"state_dict.{name}.weight", "F32", shape) for name, shape in shapes]
    for number, (_, shape) in enumerate(shapes):
        place = f"optimizer_states.0.state.{number}"
        specs.append(TensorSpec(f"{place}.step", "F32", ()))
        specs += [TensorSpec(f"{place}.{moment}", "F32", shape) for moment in ("exp_avg", "exp_avg_sq")]
    return specs


def hosts_of(ranks: int, drives: int, per_host: int = 8) -> list[HostDrives]:
    """Hosts of `per_host` ranks with drives of slightly different speed, as measured ones have."""
    disks = tuple(f"259:{number}" for number in range(drives))
    return [
        HostDrives(
            tuple(range(first, min(first + per_host, ranks))),
            disks,
            tuple(3e9 + 1e7 * ((31 * first + 17 * number) % 23) for number in range(drives)),
        )
        for first in range(0, ranks, per_host)
    ]


def measure(specs: Sequence[TensorSpec], ranks: int, drives: int, split: bool) -> dict[str, Any]:
    """Processor seconds of each part of one plan, which others on the machine hardly change, and what its commit takes.

    Args:
        split: every rank writes to all drives; otherwise as `drive_weights` chooses.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        began_s = time.process_time()
        result = work()
        seconds[name] = time.process_time() - began_s
        return result

    nbytes = sum(spec.nbytes for spec in specs)
    hosts = hosts_of(ranks, drives)
    weights = timed("weights_s", lambda: drive_weights(hosts, nbytes))
    if split:
        weights = tuple(host.weights for host in hosts for _ in host.ranks)
    by_name = {spec.name: spec for spec in specs}
    stripes = timed("plan_s", lambda: plan_stripes(specs, ranks, weights))
    timed("own_s", lambda: plan_stripes(specs, ranks, weights, ranks // 2))
    timed("fingerprint_s", lambda: fingerprint(specs, ranks, weights))
    headers = timed("headers_s", lambda: header_lengths(stripes, by_name))
    timed("places_s", lambda: file_tensors(stripes, by_name, headers))
    chunks = [chunks_of(stripe, headers[stripe.file]) for stripe in stripes]
    pieces = sum(len(stripe.pieces) for stripe in stripes)
    return {
        "ranks": ranks,
        "drives": drives,
        "tensors": len(specs),
        "bytes": nbytes,
        "stripes": len(stripes),
        "pieces": pieces,
        "chunks": sum(chunks),
        **seconds,
        "store_messages": store_messages(ranks),
        "report_bytes": report_bytes(-(-len(stripes) // ranks), -(-sum(chunks) // ranks), 12_000),
        "manifest_bytes": manifest_bytes(
            len(stripes), sum(chunks), len(specs), pieces, sum(len(spec.name) for spec in specs)
        ),
    }


def main() -> None:
    """Plan for ever more ranks, up to as many as asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 100, 1000, 10_000])
    parser.add_argument("--drives", type=int, default=8, help="of each host, and every rank writes to all")
    parser.add_argument("--layers", type=int, default=95, help="of the model; 95 make 1 TB")
    parser.add_argument("--chosen", action="store_true", help="let the plan choose: one drive each, or all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    specs = adamw_state(options.layers)
    rows = [measure(specs, ranks, options.drives, not options.chosen) for ranks in options.ranks]
    result = {**describe("benchmarks.scale"), "rows": rows}
    write_json(options.json, result)
    Console().print(_table(result))


def _table(result: dict[str, Any]) -> Table:
    first = result["rows"][0]
    table = Table(
        title=f"the plan of {first['bytes'] / 1e12:.2f} TB in {first['tensors']} tensors, and its commit",
        caption=f"{result['cpu']}, {result['cores']} cores, {result['date']}",
    )
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda row: f"{row['ranks']}",
        "files": lambda row: f"{row['stripes']}",
        "plan": lambda row: f"{row['plan_s']:.3f} s",
        "one rank's": lambda row: f"{row['own_s']:.3f} s",
        "fingerprint": lambda row: f"{row['fingerprint_s']:.3f} s",
        "headers": lambda row: f"{row['headers_s']:.3f} s",
        "places": lambda row: f"{row['places_s']:.3f} s",
        "messages": lambda row: f"{row['store_messages']}",
        "report": lambda row: f"{row['report_bytes'] / 1e3:.1f} kB",
        "manifest": lambda row: f"{row['manifest_bytes'] / 1e6:.2f} MB",
    }
    for heading in cells:
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(*(cell(row) for cell in cells.values()))
    return table


if __name__ == "__main__":
    main()
