"""Any part of a stored tensor arrives in any tensor, as indexing would give it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.destination import Box, targets
from lightning_hetckpt.checkpoint.manifest import FileEntry, PieceEntry, TensorEntry
from lightning_hetckpt.checkpoint.span_reader import Source, read
from tests.checkpoint.trees import bits

CODES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "U8": torch.uint8}


@st.composite
def parts(draw: st.DrawFn, shape: list[int]) -> Box:
    start = [draw(st.integers(0, size - 1)) for size in shape]
    return Box(tuple(start), tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_part_of_a_tensor_in_pieces_is_what_slicing_gives(tmp_path: Path, data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(sorted(CODES)))
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    truth = torch.randint(0, 100, shape, generator=generator).to(CODES[code])
    rows = shape[0] if shape else 1
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    files, pieces, sources = {}, [], {}
    for number, (row, end) in enumerate(pairwise(cuts)):
        gap = data.draw(st.integers(0, 9)) * CODES[code].itemsize + data.draw(st.sampled_from([0, 0, 1]))
        content = b"\0" * gap + bits(truth[row:end] if shape else truth)
        name, chunk_bytes = f"{number}.bin", data.draw(st.sampled_from([4096, 16, 7]))
        (tmp_path / name).write_bytes(content)
        hashes = [
            xxhash.xxh3_64_hexdigest(content[at : at + chunk_bytes])
            for at in range(0, len(content), chunk_bytes)
        ]
        files[name] = FileEntry(name, len(content), chunk_bytes, tuple(hashes))
        pieces.append(PieceEntry(name, gap, row, end - row))
        sources[name] = []
    entry = TensorEntry(code, tuple(shape), tuple(pieces))
    part = data.draw(parts(shape))
    expected = truth[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))]
    into = torch.zeros(part.shape, dtype=data.draw(st.sampled_from([CODES[code], torch.float64])))
    if data.draw(st.booleans()):
        into = (
            into.permute(tuple(reversed(range(into.dim()))))
            .contiguous()
            .permute(tuple(reversed(range(into.dim()))))
        )
    for name, target in targets(entry, into, files, part):
        sources[name].append(target)
    read([Source(tmp_path / name, files[name], wanted) for name, wanted in sources.items()])
    assert torch.equal(into, expected.to(into.dtype))
