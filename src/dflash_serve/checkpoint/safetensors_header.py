"""Safetensors headers without loading weights: names, dtypes, shapes, and whether the file is sound.

Format: 8 bytes little-endian length, a JSON object, then data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from dflash_serve.checkpoint.json_config import read_json
from dflash_serve.checkpoint.quantization import DTYPE_BYTES
from dflash_serve.errors import CheckpointError
from dflash_serve.values import dataclass

MAX_HEADER = 100_000_000  # the format's own limit
INDEX = "model.safetensors.index.json"
FIX = "fetch it again: dflash-serve fetch NAME --verify"


class TensorInfo(NamedTuple):
    """One tensor of a file: offsets are bytes from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Stored bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A file's tensors in file order."""

    path: str
    file_bytes: int
    header_bytes: int
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Read and check one file's header.

    Raises:
        CheckpointError: not a safetensors file, truncated, a dtype unknown, shape and bytes that disagree,
            offsets out of bounds, tensors that overlap, or bytes that no tensor owns.
    """
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            if len(start) < 8:
                raise _bad(path, f"has {size} bytes, no safetensors header")
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER:
                raise _bad(path, f"claims a header of {length} bytes: not a safetensors file")
            if 8 + length > size:
                raise _bad(path, f"is truncated inside its header: {size} bytes, header ends at {8 + length}")
            raw = handle.read(length)
    except OSError as exc:
        raise CheckpointError(f"cannot read {path.name}: {exc.strerror}", where=str(path), fix=FIX) from None
    try:
        parsed = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _bad(path, "has a header that is not JSON") from None
    if not isinstance(parsed, dict):
        raise _bad(path, "has a header that is no object")
    data_bytes = size - 8 - length
    tensors = [_tensor(path, name, entry) for name, entry in parsed.items() if name != "__metadata__"]
    tensors.sort(key=lambda t: (t.begin, t.end))
    _check_layout(path, tensors, data_bytes)
    return Header(path=str(path), file_bytes=size, header_bytes=8 + length, tensors=tuple(tensors))


def weight_files(directory: Path) -> list[str]:
    """Names of the weight files of a snapshot: those of the index, else every *.safetensors.

    Raises:
        CheckpointError: an index that is malformed, or names a path outside the directory.
    """
    if (directory / INDEX).exists():
        return sorted(set(index_map(directory).values()))
    return sorted(p.name for p in directory.glob("*.safetensors"))


def index_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name of model.safetensors.index.json.

    Raises:
        CheckpointError: the index is no index, or names a path outside the directory.
    """
    path = directory / INDEX
    parsed = read_json(path)
    table = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{INDEX} has no weight_map", where=str(path), fix=FIX)
    for tensor, file in table.items():
        if not isinstance(file, str) or "/" in file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(
                f"{INDEX} puts {tensor!r} into {file!r}, no plain file name", where=str(path), fix=FIX
            )
    return table


def tensor_names(directory: Path) -> frozenset[str]:
    """All tensor names of a snapshot by its index, else its headers; empty when the weights aren't there."""
    if (directory / INDEX).exists():
        return frozenset(index_map(directory))
    return frozenset(t.name for name in weight_files(directory) for t in read_header(directory / name).tensors)


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    # Thousands of them a checkpoint: plain loops, not generators.
    if not isinstance(entry, dict):
        raise _bad(path, f"describes {name!r} by no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _bad(path, f"gives {name!r} the dtype {str(dtype)[:20]!r}")
    if type(shape) is not list:
        raise _bad(path, f"gives {name!r} the shape {str(shape)[:40]}")
    size = DTYPE_BYTES[dtype]
    for length in shape:
        if type(length) is not int or length < 0:
            raise _bad(path, f"gives {name!r} the shape {str(shape)[:40]}")
        size *= length
    if type(offsets) is not list or len(offsets) != 2:
        raise _bad(path, f"gives {name!r} the offsets {str(offsets)[:40]}")
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or begin < 0 or end < 0:
        raise _bad(path, f"gives {name!r} the offsets {str(offsets)[:40]}")
    if end - begin != size:
        raise _bad(path, f"gives {name!r} {end - begin} bytes for {dtype} {str(shape)[:40]}")
    return TensorInfo(name, dtype, tuple(shape), begin, end)


def _check_layout(path: Path, tensors: list[TensorInfo], data_bytes: int) -> None:
    position = 0
    for tensor in tensors:
        if tensor.begin < position:
            raise _bad(path, f"lets {tensor.name!r} overlap the tensor before it")
        if tensor.begin > position:
            raise _bad(path, f"leaves {tensor.begin - position} bytes before {tensor.name!r} to no tensor")
        position = tensor.end
    if position > data_bytes:
        raise _bad(path, f"is truncated: its tensors end at byte {position} of the data, {data_bytes} are there")
    if position < data_bytes:
        raise _bad(path, f"has {data_bytes - position} bytes after its last tensor")


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name} {what}", where=str(path), fix=FIX)
