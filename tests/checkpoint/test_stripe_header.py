from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors import torch as stock
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_hetckpt.checkpoint import layout, stripe_header
from lightning_hetckpt.checkpoint.layout import BLOCK_BYTES, drive_folder, new_id
from lightning_hetckpt.checkpoint.manifest import FileEntry, Manifest
from lightning_hetckpt.checkpoint.meta import pack_meta
from lightning_hetckpt.checkpoint.shard_plan import (
    DTYPE_BYTES,
    StripePlan,
    TensorSpec,
    file_tensors,
    plan_owned,
    plan_stripes,
)
from lightning_hetckpt.checkpoint.state_tree import flatten, spec
from lightning_hetckpt.checkpoint.stripe_header import (
    build_header,
    header_bytes,
    header_lengths,
    read_header,
    stamp_header,
)
from lightning_hetckpt.errors import CheckpointError, CorruptCheckpointError

# The stock loader warns that it runs in one process; that is the point here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CODES = {dtype: code for code, dtype in stock._TYPES.items()}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=numbers) < 0.5
    return (torch.rand(shape, generator=numbers) * 100).to(dtype)


def state() -> dict[str, torch.Tensor]:
    """Every shape that a cut could get wrong, in several item sizes."""
    shapes = {
        "wide": (1, 3000), "long": (301, 7), "block": (64, 5, 3), "vector": (97,), "one_row": (1, 4),
        "scalar": (), "no_rows": (0, 3), "no_columns": (4, 0), "nothing": (0,), "one": (1,),
    }  # fmt: skip
    dtypes = {"vector": torch.bfloat16, "block": torch.float64, "one": torch.bool, "scalar": torch.int64}
    return {
        f"state_dict.{name}": random_tensor(dtypes.get(name, torch.float32), shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def raw(rows: torch.Tensor) -> bytes:
    return rows.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def stripe_bytes(stripe: StripePlan, tensors: dict[str, torch.Tensor], snapshot_id: str) -> bytes:
    data = b"".join(
        raw(tensors[p.name][p.row : p.row + p.rows] if tensors[p.name].dim() else tensors[p.name])
        for p in stripe.pieces
    )
    return build_header(stripe, specs_of(tensors), snapshot_id) + data


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], world_size: int, drives: list[Path], weights: list[float]
) -> tuple[StripePlan, ...]:
    """What W ranks would write; with `drives`, to those, and links to it in the folder."""
    snapshot_id = new_id()
    stripes = plan_stripes(list(specs_of(tensors).values()), world_size, weights)
    folder.mkdir(parents=True)
    for stripe in stripes:
        path = folder / stripe.file
        if drives:
            place = drive_folder(drives[stripe.drive], "0" * 16, snapshot_id)
            place.mkdir(parents=True, exist_ok=True)
            path.symlink_to(place / stripe.file)
        path.write_bytes(stripe_bytes(stripe, tensors, snapshot_id))
    return stripes


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and raw(found) == raw(expected)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [1.0, 2.0, 1.0]])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stock_readers_find_every_bit(
    tmp_path: Path, world_size: int, weights: list[float], linked: bool
) -> None:
    tensors, folder = state(), tmp_path / "a.ckpt"
    drives = [tmp_path / f"ssd{number}" for number in range(len(weights))] if linked else []
    stripes = write_checkpoint(folder, tensors, world_size, drives, weights)

    for stripe in stripes:
        assert (folder / stripe.file).is_symlink() == linked
        with safe_open(folder / stripe.file, framework="pt") as file:
            assert set(file.keys()) == {piece.name for piece in stripe.pieces}
            for p in stripe.pieces:
                expected = tensors[p.name]
                assert same(
                    file.get_tensor(p.name), expected[p.row : p.row + p.rows] if expected.dim() else expected
                )

    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_the_reader_printed_in_the_format_brings_back_what_was_saved(tmp_path: Path) -> None:
    tied = random_tensor(torch.float32, (6, 5))
    saved = {
        "state_dict": OrderedDict(
            state() | {"a": tied, "b": tied, "z": torch.randn(3, 2, dtype=torch.complex128)}
        ),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}, 1: {}}}, (tied, None, "text")],
        "epoch": 3,
        "lightning_hetckpt": "the user's own",
    }
    flat = flatten(saved)
    stored = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in flat.tensors.items()}
    specs = {name: spec(name, tensor) for name, tensor in flat.tensors.items()}
    folder, snapshot_id = tmp_path / "a.ckpt", new_id()
    folder.mkdir()
    stripes = [*plan_stripes([s for s in specs.values() if s.name != "state_dict.z"], 3, [2.0, 1.0])]
    stripes.append(plan_owned([specs["state_dict.z"]]))
    contents = {s.file: stripe_bytes(s, stored, snapshot_id) for s in stripes} | {"meta.pt": pack_meta(flat)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    manifest = Manifest(
        snapshot_id, new_id(), None, 1, "full", 1, 0, 3, 1.5,
        {name: file_entry(name, content) for name, content in contents.items()},
        file_tensors(stripes, specs, {s.file: len(contents[s.file]) - s.data_bytes for s in stripes}),
        flat.aliases,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(manifest.to_json())

    page = (Path(layout.__file__).parent / "FORMAT.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    found = names["read"](folder)
    assert repr(found) == repr(saved)
    assert all(same(found["state_dict"][name], tensor) for name, tensor in saved["state_dict"].items())
    assert found["state_dict"]["a"] is found["state_dict"]["b"] is found["optimizer_states"][1][0]

    damaged = folder / stripes[0].file
    damaged.write_bytes(contents[damaged.name][:-1] + bytes([contents[damaged.name][-1] ^ 1]))
    with pytest.raises(ValueError, match=damaged.name):
        names["read"](folder)


def file_entry(name: str, content: bytes) -> FileEntry:
    chunks = (content[at : at + 4096] for at in range(0, len(content), 4096))
    return FileEntry(name, len(content), 4096, tuple(map(xxhash.xxh3_64_hexdigest, chunks)))


def load_resharded(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """Both ranks load the folder cut along the first, the second and no dimension; the whole comes back."""
    mesh = init_device_mesh("cpu", (2,))
    tensors, found = state(), {}
    for place in (Shard(0), Shard(1), Replicate()):
        wanted: dict[str, Any] = {
            name: distribute_tensor(torch.zeros_like(tensor), mesh, [place])
            for name, tensor in tensors.items()
            if tensor.numel() and tensor.dim() > (place.dim if isinstance(place, Shard) else -1)
        }
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(folder))
        for name, shard in wanted.items():
            assert isinstance(shard, DTensor)
            found[f"{place} {name}"] = shard.full_tensor()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_stock_dcp_loads_a_checkpoint_of_other_ranks_in_two_sharded_ones(
    tmp_path, run_ranks, world_size
) -> None:
    tensors, folder = state(), tmp_path / "a.ckpt"
    write_checkpoint(folder, tensors, world_size, [tmp_path / "ssd0", tmp_path / "ssd1"], [2.0, 1.0])
    for found in run_ranks(load_resharded, 2, str(folder)):
        assert len(found) == 6 + 4 + 7  # not a tensor less than could be cut so
        assert all(same(tensor, tensors[key.rpartition(" ")[2]]) for key, tensor in found.items())


@pytest.mark.parametrize("code", sorted(DTYPE_BYTES))
def test_every_dtype_of_the_format_comes_back_from_stock_readers(tmp_path: Path, code: str) -> None:
    dtype = stock._TYPES[code]
    assert dtype.itemsize == DTYPE_BYTES[code]
    tensors = {
        "odd": random_tensor(torch.uint8, (3,)),
        "cut": random_tensor(dtype, (5, 3)),
        "0": random_tensor(dtype, ()),
    }
    write_checkpoint(tmp_path / "a", tensors, 2, [], [1.0])
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "a")), no_dist=True)
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_every_dtype_that_stock_readers_know_is_in_the_format_but_complex() -> None:
    assert set(stock._TYPES) - DTYPE_BYTES.keys() == {"C64"}


NAMES = st.lists(st.text(st.characters(codec="utf-8"), max_size=8), unique=True, max_size=5).map(
    lambda names: [name for name in names if name != "__metadata__"]
)


@given(names=NAMES, shape=st.lists(st.integers(0, 4), max_size=3).map(tuple), world_size=st.integers(1, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_name_and_shape_makes_a_file_that_safetensors_reads(tmp_path, names, shape, world_size) -> None:
    tensors = {name: random_tensor(torch.int16, shape, seed) for seed, name in enumerate(names)}
    for stripe in plan_stripes(list(specs_of(tensors).values()), world_size, [1.0]):
        file = stripe_bytes(stripe, tensors, new_id())
        assert set(stock.load(file)) == {piece.name for piece in stripe.pieces}


@given(names=NAMES, count=st.integers(0, 200), world_size=st.integers(1, 4))
def test_a_header_ends_on_a_block_border_and_is_as_long_for_every_snapshot(names, count, world_size) -> None:
    specs = {
        name: TensorSpec(name, "F32", (9, 3)) for name in [*names, *(f"layer.{n}" for n in range(count))]
    }
    first, second = new_id(), new_id()
    for stripe in (*plan_stripes(list(specs.values()), world_size, [1.0]), plan_owned(list(specs.values()))):
        header = build_header(stripe, specs, first)
        assert len(header) % BLOCK_BYTES == 0
        assert len(build_header(stripe, specs, second)) == len(header)
        assert stamp_header(header, second) == build_header(stripe, specs, second)


@given(
    names=NAMES,
    shape=st.lists(st.integers(0, 2000), max_size=3).map(tuple),
    count=st.integers(0, 20),
    world_size=st.integers(1, 4),
)
def test_the_length_of_a_header_is_known_without_making_it(names, shape, count, world_size) -> None:
    specs = {name: TensorSpec(name, "BF16", shape) for name in [*names, *map(str, range(count))]}
    stripes = [*plan_stripes(list(specs.values()), world_size, [2.0, 1.0]), plan_owned(list(specs.values()))]
    with pytest.MonkeyPatch.context() as no_padding:  # it would hide an error of a few bytes
        no_padding.setattr(stripe_header, "padded", lambda nbytes: nbytes)
        made = {stripe.file: len(build_header(stripe, specs, new_id())) for stripe in stripes}
        assert header_lengths(stripes, specs) == made
    made = {stripe.file: len(build_header(stripe, specs, new_id())) for stripe in stripes}
    assert header_lengths(stripes, specs) == made


@given(count=st.integers(0, 30), world_size=st.integers(1, 4))
def test_reading_a_header_finds_what_was_planned(count: int, world_size: int) -> None:
    specs = {f"t{n}": TensorSpec(f"t{n}", "BF16", (7, 3, 2)[: n % 4]) for n in range(count)}
    snapshot_id = new_id()
    for stripe in plan_stripes(list(specs.values()), world_size, [1.0]):
        header = build_header(stripe, specs, snapshot_id)
        assert header_bytes(header[:8], Path("s")) == len(header)
        found = read_header(header + b"data behind it", Path("s"))
        assert (found.snapshot_id, found.data_start, found.data_bytes) == (
            snapshot_id,
            len(header),
            stripe.data_bytes,
        )
        assert {(name, p.row, p.nbytes, p.offset) for name, p in found.pieces.items()} == {
            (p.name, p.row, p.nbytes, p.offset) for p in stripe.pieces
        }


def sample() -> tuple[dict[str, Any], bytes]:
    specs = {
        "a": TensorSpec("a", "F32", (4, 2)),
        "b": TensorSpec("b", "U8", (3,)),
        "c": TensorSpec("c", "I64", ()),
    }
    stripe = plan_stripes(list(specs.values()), 2, [1.0])[1]
    header = build_header(stripe, specs, "0" * 16)
    return json.loads(header[8:]), header


def encode(plain: Any) -> bytes:
    body = json.dumps(plain).encode()
    length = -(-(len(body) + 8) // BLOCK_BYTES) * BLOCK_BYTES - 8
    return length.to_bytes(8, "little") + body.ljust(length)


def refused(header: bytes) -> str:
    with pytest.raises(CorruptCheckpointError, match=r"stripe\.safetensors") as caught:
        read_header(header, Path("stripe.safetensors"))
    return str(caught.value)


def test_a_header_that_lies_is_refused_with_what_is_wrong() -> None:
    plain, header = sample()
    name = next(name for name in plain if name != "__metadata__")
    assert read_header(encode(plain), Path("s")) == read_header(header, Path("s"))

    def lie(**changes: Any) -> str:
        return refused(encode({**plain, name: {**plain[name], **changes}}))

    def lie_about(**changes: Any) -> str:
        return refused(encode({**plain, "__metadata__": {**plain["__metadata__"], **changes}}))

    assert "dtype" in lie(dtype="C64")
    assert "bytes" in lie(shape=[1])
    assert "larger" in lie(shape=[2**40, 2**40])
    assert "expected a whole number" in lie(shape=[-1])
    assert "dimensions" in lie(shape=[1] * 100)
    assert "numbers" in lie(data_offsets=[0])
    assert "expected an object" in lie(more=1)
    assert "snapshot" in lie_about(snapshot="../x")
    assert "DCP_SHARDING_INFO" in lie_about(DCP_SHARDING_INFO="{}")
    assert "bad JSON" in lie_about(DCP_SHARDING_INFO="{")
    assert "starts at byte" in refused(encode({n: v for n, v in plain.items() if n == name or n[0] == "_"} | {
        "__metadata__": {**plain["__metadata__"], "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [1, 0]}})},
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
    }))  # fmt: skip
    assert "holds 1 numbers, expected 2" in refused(encode({
        "__metadata__": {**plain["__metadata__"], "DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0]}})},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }))  # fmt: skip


def test_a_shard_may_begin_in_the_middle_of_its_rows() -> None:
    plain, _ = sample()
    found = read_header(encode({
        "__metadata__": {**plain["__metadata__"], "DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [4, 1]}})},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }), Path("s"))  # fmt: skip
    assert (found.pieces["a"].row, found.pieces["a"].columns) == (4, (1,))
    assert "an object" in refused(encode([1]))


@pytest.mark.parametrize("first", [b"", b"\0" * 7, (4087).to_bytes(8, "little"), b"\xff" * 8])
def test_a_length_that_no_stripe_has_is_refused_before_anything_is_read(first: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="length of a header"):
        header_bytes(first, Path("s"))


def test_a_header_cut_short_is_refused() -> None:
    assert "expected 4096" in refused(sample()[1][:4000])


@given(data=st.data())
@settings(max_examples=200)
def test_a_damaged_header_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    header = bytearray(sample()[1])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    try:
        read_header(bytes(header), Path("s"))
    except CorruptCheckpointError:
        pass


def test_too_many_tensors_for_one_header_are_refused_before_anything_is_written(monkeypatch) -> None:
    monkeypatch.setattr("lightning_hetckpt.checkpoint.stripe_header.MAX_HEADER_BYTES", 4096)
    specs = {f"t{n}": TensorSpec(f"t{n}", "F32", (9, 3)) for n in range(100)}
    with pytest.raises(CheckpointError, match="100 tensors need a header of"):
        build_header(plan_owned(list(specs.values())), specs, new_id())
    with pytest.raises(CheckpointError, match="100 tensors need a header of"):
        header_lengths([plan_owned(list(specs.values()))], specs)
