from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetckpt.checkpoint.layout import new_id
from lightning_hetckpt.checkpoint.manifest import DTYPE_BYTES, FileEntry, Manifest, PieceEntry, TensorEntry
from lightning_hetckpt.checkpoint.shard_plan import TensorSpec, file_tensors, plan_owned, plan_stripes
from lightning_hetckpt.errors import CorruptCheckpointError

PATH = Path("run/step-7.ckpt/manifest.json")


def sign(plain: dict[str, Any]) -> bytes:
    """A manifest of any content whose checksum is right, made as FORMAT.md says and not by our own code."""
    rest = b'",' + json.dumps({k: v for k, v in plain.items() if k != "checksum"}).encode()[1:]
    return b'{"checksum":"' + hashlib.sha256(rest).hexdigest().encode() + rest


def sample() -> Manifest:
    stripe, owned = "stripe-r00000-d00.safetensors", "stripe-r00000-owned.safetensors"
    files = [
        FileEntry("meta.pt", 5, 8, ("0123456789abcdef",)),
        FileEntry("ranks.json", 0, 8, ()),
        FileEntry(stripe, 4096 + 32 + 24, 4096, ("0" * 16, "f" * 16)),
        FileEntry(owned, 4096 + 40, 2**23, ()),
    ]
    tensors = {
        "w": TensorEntry("F32", (4, 3), (PieceEntry(stripe, 4096 + 32, 0, 2), PieceEntry(owned, 4096, 2, 2))),
        "z": TensorEntry("F64", (2, 2), (PieceEntry(stripe, 4096, 0, 2),), "complex128"),
        "scalar": TensorEntry("I64", (), (PieceEntry(owned, 4096 + 32, 0, 1),)),
        "empty.ü": TensorEntry("U8", (0, 3), (PieceEntry(owned, 4096, 0, 0),)),
    }
    return Manifest(
        snapshot_id="00112233445566aa", run="ffeeddccbbaa9988", parent="0" * 16, commit=9, kind="full",
        global_step=7, epoch=1, world_size=2, created_unix_s=1.75e9 + 0.125,
        files={file.name: file for file in files}, tensors=tensors, aliases={"tied": "w"},
        figures={"begin_ms": 0.5, "nbytes": 4301.0, "gb_per_s": {"/mnt/a": 0.2, "/mnt/b": 1e18}},
    )  # fmt: skip


def refused(data: bytes) -> str:
    with pytest.raises(CorruptCheckpointError) as caught:
        Manifest.from_json(data, PATH)
    assert str(PATH) in str(caught.value)
    return str(caught.value)


@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
        max_size=6,
    ),
    world_size=st.integers(1, 4),
    weights=st.lists(st.floats(0.1, 9), min_size=1, max_size=3),
    parent=st.none() | st.builds(new_id),
    numbers=st.tuples(*[st.integers(0, 2**63 - 1)] * 3),
    created_unix_s=st.floats(0, 4e9),
    checksum=st.booleans(),
)
def test_what_was_planned_and_written_down_reads_back_equal(
    tensors, world_size, weights, parent, numbers, created_unix_s, checksum
) -> None:
    specs = {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in tensors.items()}
    half = list(specs.values())[: len(specs) // 2]
    stripes = [*plan_stripes(half, world_size, weights), plan_owned(list(specs.values())[len(half) :])]
    files = {
        s.file: FileEntry(
            s.file,
            4096 + s.data_bytes,
            4096,
            ("0" * 16,) * (1 + -(-s.data_bytes // 4096)) if checksum else (),
        )
        for s in stripes
    }
    manifest = Manifest(
        new_id(), new_id(), parent, numbers[0], "full", numbers[1], numbers[2], world_size, created_unix_s,
        files, file_tensors(stripes, specs, dict.fromkeys(files, 4096)), {},
    )  # fmt: skip
    written = manifest.to_json()
    assert Manifest.from_json(written, PATH) == manifest
    assert json.loads(written)["snapshot_id"] == manifest.snapshot_id


def test_without_figures_none_stand_in_it_as_in_manifests_before_there_were_any() -> None:
    bare = replace(sample(), figures={})

    assert "figures" not in json.loads(bare.to_json())
    assert Manifest.from_json(bare.to_json(), PATH) == bare


def test_equal_manifests_are_the_same_bytes_in_whatever_order_they_were_built() -> None:
    one = sample()
    other = replace(one, files=dict(reversed(one.files.items())), tensors=dict(reversed(one.tensors.items())))
    assert one.to_json() == other.to_json()


def test_the_checksum_is_the_sha256_of_every_byte_behind_it() -> None:
    written = sample().to_json()
    head, digits, rest = written[:13], written[13:77], written[77:]
    assert head == b'{"checksum":"'
    assert hashlib.sha256(rest).hexdigest() == digits.decode()


@given(data=st.data())
@settings(max_examples=300)
def test_changed_bytes_are_refused(data: st.DataObject) -> None:
    written = bytearray(sample().to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(written) - 1)))
        match data.draw(st.sampled_from(["change", "cut", "insert", "drop"])):
            case "change":
                written[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del written[place:]
                written += b"}"
            case "insert":
                written[place:place] = data.draw(st.binary(min_size=1, max_size=4))
            case "drop":
                del written[place : place + 1]
    try:
        assert Manifest.from_json(bytes(written), PATH) == sample()
    except CorruptCheckpointError:
        assert bytes(written) != sample().to_json()


def places(plain: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [-1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 10**400, 0.0, 1.0, -0.5, 1e308, float("inf"), float("nan")]
    ),
    st.sampled_from(
        ["", "/etc/passwd", "..", "../x", "a/b", "manifest.json", "full", "w", "tied", "F32", "C64", "\ud800"]
    ),
    st.recursive(
        st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=5
    ),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_a_forged_manifest_is_sound_or_refused_and_nothing_else(data: st.DataObject) -> None:
    plain = json.loads(sample().to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        inner = [place for place in places(plain) if place != ("checksum",)]
        *above, key = data.draw(st.sampled_from(inner))
        parent = plain
        for step in above:
            parent = parent[step]
        match data.draw(st.sampled_from(["replace", "nudge", "remove", "swap", "rename"])):
            case "replace":
                parent[key] = data.draw(ODD)
            case "nudge" if isinstance(parent[key], int):
                parent[key] += data.draw(st.sampled_from([-12, -4, -1, 1, 4, 12]))
            case "remove":
                del parent[key]
            case "swap":
                source: Any = json.loads(sample().to_json())
                for step in data.draw(st.sampled_from([*places(source)])):
                    source = source[step]
                parent[key] = source
            case "rename" if isinstance(parent, dict):
                parent[data.draw(st.sampled_from(["../x", "/x", "x", "w", "nbytes", "\ud800"]))] = parent.pop(
                    key
                )
    try:
        manifest = Manifest.from_json(sign(plain), PATH)
    except CorruptCheckpointError:
        return
    assert_sound(manifest)
    assert Manifest.from_json(manifest.to_json(), PATH) == manifest


def assert_sound(manifest: Manifest) -> None:
    """Brute force: every byte of every row exists, in one place, below the checkpoint."""
    taken: dict[str, set[int]] = {name: set() for name in manifest.files}
    for name in manifest.files:
        assert name not in {"", ".", "..", "manifest.json"}
        assert not set("/\\\0") & set(name)
    for tensor in manifest.tensors.values():
        count = 1
        for size in tensor.shape[1:]:
            count *= size
        row_bytes = count * DTYPE_BYTES[tensor.dtype]
        row = 0
        for p in tensor.pieces:
            assert p.row == row
            row += p.rows
            held = range(p.offset, p.offset + p.rows * row_bytes)
            assert held.stop <= manifest.files[p.file].nbytes
            assert taken[p.file].isdisjoint(held)
            taken[p.file] |= set(held)
        assert row == (tensor.shape[0] if tensor.shape else 1)
    assert all(target in manifest.tensors for target in manifest.aliases.values())


S = "stripe-r00000-d00.safetensors"
LIES: list[tuple[str, tuple[Any, ...], Any]] = [
    ("format version 2", ("format_version",), 2),
    ("format version True", ("format_version",), True),
    ("format version 1.0", ("format_version",), 1.0),
    ("kind 'delta'", ("kind",), "delta"),
    ("snapshot_id", ("snapshot_id",), "../../etc/passwd00"),
    ("run", ("run",), "0123456789ABCDEF"),
    ("parent", ("parent",), ""),
    ("commit", ("commit",), -1),
    ("epoch", ("epoch",), 2**63),
    ("global_step", ("global_step",), 7.0),
    ("global_step", ("global_step",), True),
    ("world_size", ("world_size",), 0),
    ("created_unix_s", ("created_unix_s",), -1.0),
    ("created_unix_s", ("created_unix_s",), 10**400),
    ("created_unix_s", ("created_unix_s",), 2**63 - 1),  # as a float it is one more, and would not read back
    ("created_unix_s", ("created_unix_s",), "now"),
    ("files is", ("files",), []),
    ("nbytes", ("files", S, "nbytes"), -1),
    ("which has 100", ("files", S), {"nbytes": 100, "chunk_bytes": 4096, "chunks": []}),
    ("chunk_bytes", ("files", S, "chunk_bytes"), 0),
    ("chunk_bytes", ("files", S, "chunk_bytes"), 2**40),
    ("1 hashes for 4152 bytes", ("files", S, "chunks"), ["0" * 16]),
    ("a chunk of", ("files", S, "chunks"), ["0" * 15, "0" * 16]),
    ("expected an array", ("files", S, "chunks"), "0" * 16),
    ("expected an object with", ("files", S, "mode"), 493),
    ("file name '/etc/passwd'", ("files", "/etc/passwd"), {"nbytes": 0, "chunk_bytes": 1, "chunks": []}),
    ("file name '..'", ("files", ".."), {"nbytes": 0, "chunk_bytes": 1, "chunks": []}),
    ("file name 'a/b'", ("files", "a/b"), {"nbytes": 0, "chunk_bytes": 1, "chunks": []}),
    ("file name 'manifest.json'", ("files", "manifest.json"), {"nbytes": 0, "chunk_bytes": 1, "chunks": []}),
    ("file name 'a\\n'", ("files", "a\n"), {"nbytes": 0, "chunk_bytes": 1, "chunks": []}),
    ("dtype 'C64'", ("tensors", "w", "dtype"), "C64"),
    ("dtype", ("tensors", "w", "dtype"), ["F32"]),
    ("expected its real view", ("tensors", "w", "complex"), "complex64"),
    ("expected its real view", ("tensors", "z", "complex"), "complex64"),
    ("expected its real view", ("tensors", "scalar", "complex"), "complex64"),
    ("complex of", ("tensors", "w", "complex"), 1),
    ("larger than any file", ("tensors", "w", "shape"), [2**40, 2**40]),
    ("larger than any file", ("tensors", "empty.ü", "shape"), [0, 2**40, 2**40]),
    ("at most 64", ("tensors", "w", "shape"), [1] * 65),
    ("shape of", ("tensors", "w", "shape"), [4, -3]),
    ("hold 4 rows, expected 5", ("tensors", "w", "shape"), [5, 3]),
    ("no gap or overlap", ("tensors", "w", "pieces", 1, "row"), 1),
    ("no gap or overlap", ("tensors", "w", "pieces", 1, "row"), 3),
    ("no gap or overlap", ("tensors", "w", "pieces", 0, "rows"), 0),
    ("0 pieces hold 0 rows", ("tensors", "empty.ü", "pieces"), []),
    ("expected an array", ("tensors", "w", "pieces"), {}),
    ("ends at byte", ("tensors", "w", "pieces", 0, "offset"), 2**62),
    ("is taken up to", ("tensors", "w", "pieces", 0, "offset"), 4096 + 16),
    ("not a listed file", ("tensors", "w", "pieces", 0, "file"), "other"),
    ("alias 'tied' of 'x'", ("aliases", "tied"), "x"),
    ("alias 'z' of 'w'", ("aliases", "z"), "w"),
    ("alias", ("aliases", "tied"), None),
    ("expected text", ("aliases", "\ud800"), "w"),
    ("expected an object with", ("more",), 1),
    ("figures is", ("figures",), None),
    ("figure 'begin_ms'", ("figures", "begin_ms"), -0.1),
    ("figure 'begin_ms'", ("figures", "begin_ms"), "fast"),
    ("figure 'begin_ms'", ("figures", "begin_ms"), True),
    ("figure 'nbytes'", ("figures", "nbytes"), 10**400),
    ("figure '/mnt/a'", ("figures", "gb_per_s", "/mnt/a"), {}),
]


@pytest.mark.parametrize(("words", "place", "lie"), LIES)
def test_each_lie_is_refused_with_what_is_wrong(words: str, place: tuple[Any, ...], lie: Any) -> None:
    plain: Any = json.loads(sample().to_json())
    assert Manifest.from_json(sign(plain), PATH) == sample()
    *above, key = place
    parent = plain
    for step in above:
        parent = parent[step]
    parent[key] = lie
    assert words in refused(sign(plain))


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("bad JSON", b'"commit":1'),
        ("bad JSON", b'"commit":"\xff"}'),
        ("stands twice", b'"commit":1,"commit":2}'),
        ("the number NaN", b'"commit":NaN}'),
        ("bad JSON", b'"commit":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("expected an object with", b'"format_version":1}'),
    ],
)
def test_json_that_is_not_plain_is_refused(words: str, body: bytes) -> None:
    rest = b'",' + body
    assert words in refused(b'{"checksum":"' + hashlib.sha256(rest).hexdigest().encode() + rest)


def test_nesting_of_any_depth_is_refused_in_words() -> None:
    for depth in [*range(1, 1200, 13), 5000]:
        plain = json.loads(sample().to_json())
        for place in ("commit", "files", "kind"):
            hole = json.dumps({**plain, place: "HOLE"}).encode()
            rest = b'",' + hole[hole.index(b'"format_version"') :].replace(
                b'"HOLE"', b"[" * depth + b"]" * depth
            )
            refused(b'{"checksum":"' + hashlib.sha256(rest).hexdigest().encode() + rest)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\x80\x04", sample().to_json()[:77], b'{"checksum":"' + b"\xff" * 64]
)
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    refused(data)


def test_a_checksum_of_other_bytes_is_named_with_both_values() -> None:
    written = sample().to_json()
    assert "expected" in refused(written.replace(b'"epoch":1', b'"epoch":2'))


def boxed(pieces: list[tuple[int, int, list[list[int]]]]) -> bytes:
    """A manifest whose tensor of shape (4, 3) lies in boxes: row, rows, columns."""
    plain = json.loads(sample().to_json())
    [first, *_] = plain["tensors"]["w"]["pieces"]
    offset, found = first["offset"], []
    for row, rows, columns in pieces:
        found.append({"file": first["file"], "offset": offset, "row": row, "rows": rows, "columns": columns})
        offset += 4 * rows * max(1, columns[0][1] if columns else 1)
    plain["tensors"]["w"]["pieces"] = found
    plain["files"][first["file"]] |= {"nbytes": 2**20, "chunks": []}
    others = [name for name in plain["tensors"] if name != "w"]
    plain["tensors"] = {"w": plain["tensors"]["w"]}
    plain["aliases"] = {}
    assert others
    return sign(plain)


def test_shards_of_columns_cover_a_tensor() -> None:
    manifest = Manifest.from_json(boxed([(0, 4, [[0, 2]]), (0, 1, [[2, 1]]), (1, 3, [[2, 1]])]), PATH)
    assert Manifest.from_json(manifest.to_json(), PATH) == manifest


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("do not hold", [(0, 4, [[0, 2]])]),
        ("overlap", [(0, 4, [[0, 2]]), (0, 2, [[1, 2]])]),
        ("has a piece at", [(0, 4, [[0, 2]]), (0, 4, [[2, 2]])]),
        ("has a piece at", [(0, 4, [[0, 3], [0, 1]])]),
        ("expected start and size", [(0, 4, [[0, 3, 1]])]),
        ("has a piece at", [(0, 4, [[0, 3]]), (0, 0, [[0, 3]])]),
    ],
)
def test_shards_that_do_not_cover_a_tensor_once_are_refused(text: str, pieces: list[Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match=text):
        Manifest.from_json(boxed(pieces), PATH)
