"""Headers: sound ones are read, every other file is refused by name and never crashes the reader."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from snapshot_maker import bf16_target, write_header, write_target

from dflash_serve.checkpoint.safetensors_header import read_header, tensor_names
from dflash_serve.checkpoint.snapshot import check_snapshot
from dflash_serve.checkpoint.tensor_bytes import Tensor
from dflash_serve.errors import CheckpointError


def write(path: Path, header: Any, data: int = 0, *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + b"\0" * data)
    return path


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_a_sound_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    size = write_header(path, [Tensor("b", "BF16", (3, 5)), Tensor("a", "F8_E4M3", ()), Tensor("c", "I64", (0, 7))])
    header = read_header(path)
    assert header.file_bytes == size
    assert {t.name: (t.shape, t.bytes) for t in header.tensors} == {"b": ((3, 5), 30), "a": ((), 1), "c": ((0, 7), 0)}
    assert tensor_names(tmp_path) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlap"),
        ({"a": entry(0, 4)}, 3, "truncated"),
        ({"a": entry(0, 4)}, 5, "after its last"),
        ({"a": entry(4, 8)}, 8, "to no tensor"),
        ({"a": entry(0, 5)}, 5, "5 bytes"),
        ({"a": entry(4, 0)}, 4, "bytes for"),
        ({"a": entry(-4, 0)}, 4, "offsets"),
        ({"a": entry(0, 4, shape=(-2,))}, 4, "shape"),
        ({"a": entry(0, 4, shape=(True, 2))}, 4, "shape"),
        ({"a": entry(0, 4, shape="2")}, 4, "shape"),
        ({"a": entry(0, 4, shape=(1 << 62, 1 << 62))}, 4, "bytes for"),
        ({"a": entry(0, 4, dtype="F13")}, 4, "dtype"),
        ({"a": entry(0, 4, dtype=["x"])}, 4, "dtype"),
        ({"a": entry(0, "4")}, 4, "offsets"),
        ({"a": {"dtype": "BF16", "shape": [2]}}, 4, "offsets"),
        ({"a": 7}, 4, "no object"),
        ([], 0, "no object"),
        (b"{", 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
        (b"[" * 50_000, 0, "not JSON"),
    ],
)
def test_unsound_headers(header: Any, data: int, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "x.safetensors" in caught.value.what


@pytest.mark.parametrize(
    ("length", "message"), [(1 << 40, "not a safetensors"), (1000, "truncated inside its header"), (1 << 63, "not a")]
)
def test_lengths_that_lie(length: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(write(tmp_path / "x.safetensors", {}, 4, length=length))


def test_files_that_are_too_small_or_missing(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="no safetensors header"):
        read_header(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "y.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 80), st.binary(max_size=16))
def test_any_bytes_give_a_header_or_a_checkpoint_error(raw: bytes, length: int, tail: bytes) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"dflash-fuzz-{os.getpid()}.safetensors"
    path.write_bytes(struct.pack("<Q", length) + raw + tail)
    try:
        read_header(path)
    except CheckpointError:
        event("refused")
    finally:
        path.unlink()


VALUES = st.none() | st.integers(-2, 10) | st.text(max_size=3) | st.lists(st.integers(-2, 9), max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries(
            {"dtype": st.sampled_from(["BF16", "U8", "?"]) | VALUES, "shape": VALUES, "data_offsets": VALUES}
        ),
        max_size=4,
    ),
    st.integers(0, 24),
)
def test_any_entries_give_a_header_or_a_checkpoint_error(entries: dict, data: int) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"dflash-fuzz-{os.getpid()}.safetensors"
    write(path, entries, data)
    try:
        header = read_header(path)
        assert sum(t.bytes for t in header.tensors) == data
    except CheckpointError:
        event("refused")
    finally:
        path.unlink()


def findings(place: Path) -> dict[str, str]:
    return {finding.id: finding.what for finding in check_snapshot(place)}


def test_a_whole_snapshot_has_no_findings(tmp_path: Path) -> None:
    assert findings(write_target(tmp_path / "t", bf16_target(), shards=4)) == {}


def test_what_an_interrupted_download_left(tmp_path: Path) -> None:
    """An index of 66 shards, 65 of them and one .incomplete file."""
    place = write_target(tmp_path / "t", bf16_target(), shards=66)
    name = "model-00040-of-00066.safetensors"
    (place / name).rename(place / f"{name}.incomplete")
    found = findings(place)
    assert name in found["checkpoint-missing-shard"]
    assert "incomplete" in found["checkpoint-partial"]


def test_shards_without_an_index_are_counted(tmp_path: Path) -> None:
    place = write_target(tmp_path / "t", bf16_target(), shards=4)
    (place / "model.safetensors.index.json").unlink()
    assert findings(place) == {}
    (place / "model-00003-of-00004.safetensors").unlink()
    assert "model-00003-of-00004" in findings(place)["checkpoint-missing-shard"]


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        write_header(tmp_path / name, [Tensor("a", "BF16", (2,))])
    (tmp_path / "config.json").write_text("{}")
    assert "a is in" in findings(tmp_path)["checkpoint-duplicate-tensor"]


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x/y"}}']
)
def test_broken_indexes(index: str, tmp_path: Path) -> None:
    place = write_target(tmp_path / "t", bf16_target(), shards=2)
    (place / "model.safetensors.index.json").write_text(index)
    assert "checkpoint-index" in findings(place)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    assert set(findings(tmp_path)) == {"checkpoint-config", "checkpoint-no-weights"}
