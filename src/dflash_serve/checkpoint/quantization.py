"""Quantization schemes as published in config files, and which one each module has.

Source: vLLM's readers (model_executor/layers/quantization/{compressed_tensors,modelopt,fp8,inc,auto_gptq,
auto_awq}), which name the tensors that the exporters write. Shapes are (rows, columns) = (out, in features).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from dflash_serve.values import dataclass

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

TORCH_TO_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint8": "U8", "int8": "I8",
}  # fmt: skip


class Layout(StrEnum):
    """How a linear layer's weight is stored."""

    PLAIN = "plain"
    TENSOR = "tensor"  # one scale
    CHANNEL = "channel"  # a scale a row
    BLOCK = "block"  # a scale a rectangle
    GROUP = "group"  # a scale for `group_size` columns, 8-bit elements (MX formats)
    NVFP4 = "nvfp4"  # packed 4-bit floats, fp8 scales, one or two global scales
    PACKED_INT = "packed-int"  # compressed-tensors pack-quantized
    GPTQ = "gptq"
    AWQ = "awq"
    UNKNOWN = "unknown"


Part = tuple[str, str, tuple[int, ...]]  # name after the module's, safetensors dtype, shape


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of one linear weight.

    Attributes:
        name: short label, such as bf16, fp8-block-128x128, nvfp4, int4-g128.
        bits: bits an element, without scales.
        scale_dtype: safetensors dtype of the group, row or block scales.
        static_activations: an input scale is stored too.
    """

    name: str
    bits: int
    layout: Layout
    group_size: int | None = None
    block: tuple[int, int] | None = None
    scale_dtype: str = "F32"
    symmetric: bool = True
    static_activations: bool = False
    dialect: str = ""  # whose tensor names: ct (compressed-tensors), modelopt, fp8
    element: str = "F8_E4M3"  # dtype of unpacked elements

    @property
    def quantized(self) -> bool:
        """Whether the weight is stored below the model's own dtype."""
        return self.layout is not Layout.PLAIN

    @property
    def scale_bytes(self) -> int:
        """Bytes of one group, row or block scale; 0 for a plain weight."""
        return 0 if self.layout is Layout.PLAIN else DTYPE_BYTES[self.scale_dtype]

    def parts(self, rows: int, columns: int) -> tuple[Part, ...]:
        """The tensors that one linear layer of that shape is stored as.

        Raises:
            ValueError: the layout is unknown.
        """
        match self.layout:
            case Layout.PLAIN:
                return (("weight", self.element, (rows, columns)),)
            case Layout.TENSOR:
                scalar = () if self.dialect == "modelopt" else (1,)
                found: list[Part] = [
                    ("weight", self.element, (rows, columns)),
                    ("weight_scale", self.scale_dtype, scalar),
                ]
                if self.static_activations:
                    found.append(("input_scale", "F32", scalar))
                return tuple(found)
            case Layout.CHANNEL:
                shape = (rows,) if self.dialect == "modelopt" else (rows, 1)
                return (("weight", self.element, (rows, columns)), ("weight_scale", self.scale_dtype, shape))
            case Layout.BLOCK:
                assert self.block is not None
                grid = (math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1]))
                name = "weight_scale" if self.dialect == "ct" else "weight_scale_inv"
                return (("weight", self.element, (rows, columns)), (name, self.scale_dtype, grid))
            case Layout.GROUP:
                width = math.ceil(columns * self.bits / 8)
                return (
                    ("weight", self.element, (rows, width)),
                    ("weight_scale", self.scale_dtype, (rows, self._groups(columns))),
                )
            case Layout.NVFP4:
                return self._nvfp4(rows, columns)
            case Layout.PACKED_INT:
                packed: list[Part] = [
                    ("weight_packed", "I32", (rows, math.ceil(columns * self.bits / 32))),
                    ("weight_scale", self.scale_dtype, (rows, self._groups(columns))),
                    ("weight_shape", "I64", (2,)),
                ]
                if not self.symmetric:
                    zeros = (math.ceil(rows * self.bits / 32), self._groups(columns))
                    packed.append(("weight_zero_point", "I32", zeros))
                return tuple(packed)
            case Layout.GPTQ | Layout.AWQ:
                groups = self._groups(columns)
                shape = (
                    (math.ceil(columns * self.bits / 32), rows)
                    if self.layout is Layout.GPTQ
                    else (columns, math.ceil(rows * self.bits / 32))
                )
                return (
                    ("qweight", "I32", shape),
                    ("qzeros", "I32", (groups, math.ceil(rows * self.bits / 32))),
                    ("scales", self.scale_dtype, (groups, rows)),
                )
            case Layout.UNKNOWN:
                raise ValueError(f"the storage of {self.name} is not known")

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of one linear layer of that shape, scales included."""
        return sum(part_bytes(part) for part in self.parts(rows, columns))

    def _groups(self, columns: int) -> int:
        return math.ceil(columns / self.group_size) if self.group_size else 1

    def _nvfp4(self, rows: int, columns: int) -> tuple[Part, ...]:
        modelopt = self.dialect == "modelopt"
        shape: tuple[int, ...] = () if modelopt else (1,)
        found: list[Part] = [
            ("weight" if modelopt else "weight_packed", "U8", (rows, math.ceil(columns / 2))),
            ("weight_scale", self.scale_dtype, (rows, self._groups(columns))),
            ("weight_scale_2" if modelopt else "weight_global_scale", "F32", shape),
        ]
        if self.static_activations:
            found.append(("input_scale" if modelopt else "input_global_scale", "F32", shape))
        return tuple(found)


def part_bytes(part: Part) -> int:
    """Bytes of one stored tensor."""
    return DTYPE_BYTES[part[1]] * math.prod(part[2])


def plain(dtype: str) -> WeightFormat:
    """Weights in the model's own dtype, given in torch's spelling.

    Raises:
        ValueError: a dtype that safetensors has no name for.
    """
    element = TORCH_TO_SAFETENSORS.get(dtype)
    if element is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    short = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(element, element.lower())
    return WeightFormat(name=short, bits=8 * DTYPE_BYTES[element], layout=Layout.PLAIN, element=element)


class Matching(StrEnum):
    """How a method writes module names into its lists."""

    COMPRESSED_TENSORS = "compressed-tensors"  # equal, `re:` pattern, or a class name
    PREFIX = "prefix"  # the module or one of its parents, or its last part
    WILDCARD = "wildcard"  # shell wildcards; a bare name also covers what is below it
    REGEX = "regex"  # equal or regular expression


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that share a format. The first group that names a module decides."""

    targets: tuple[str, ...]
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which format each module has.

    Attributes:
        method: `quant_method` as written; none for an unquantized checkpoint.
        groups: tried in order.
        ignore: modules left in the model's dtype.
        blocks: when not empty, only modules below one of these names are quantized.
        heads: whether the LM head follows the groups (else it is plain unless a group names it).
        kv_cache_dtype: what the checkpoint's own scales ask for, such as fp8; empty: nothing.
    """

    method: str
    plain: WeightFormat
    groups: tuple[Group, ...] = ()
    ignore: tuple[str, ...] = ()
    matching: Matching = Matching.COMPRESSED_TENSORS
    blocks: tuple[str, ...] = ()
    heads: bool = True
    kv_cache_dtype: str = ""
    known: bool = True

    def format_of(self, module: str) -> WeightFormat:
        """The format of a linear module, named as in the checkpoint (without `.weight`)."""
        if not self.groups:
            return self.plain
        if _names(module, self.ignore, self.matching):
            return self.plain
        if self.blocks and not any(module.startswith(f"{block}.") for block in self.blocks):
            inside_blocks = False
        else:
            inside_blocks = True
        is_head = module.rpartition(".")[2] == "lm_head"
        for group in self.groups:
            by_name = tuple(t for t in group.targets if t not in _CLASS_NAMES)
            if _names(module, by_name, self.matching):
                return group.format
            if len(by_name) < len(group.targets) and inside_blocks and (self.heads or not is_head):
                return group.format
        return self.plain

    def formats(self, modules: Iterable[str]) -> dict[str, int]:
        """How many of the modules have each format, by its name."""
        out: dict[str, int] = {}
        for module in modules:
            name = self.format_of(module).name
            out[name] = out.get(name, 0) + 1
        return out

    @property
    def label(self) -> str:
        """One line for people: the method and its formats."""
        names = list(dict.fromkeys(group.format.name for group in self.groups))
        return f"{self.method} ({', '.join(names)})" if names else self.method


EVERY_LINEAR = "Linear"
_CLASS_NAMES = {EVERY_LINEAR}


def _names(module: str, patterns: tuple[str, ...], matching: Matching) -> bool:
    exact, rest = _index(patterns, matching)
    if module in exact:
        return True
    match matching:
        case Matching.PREFIX:
            parts = module.split(".")
            return any(".".join(parts[:end]) in exact for end in range(1, len(parts))) or parts[-1] in exact
        case Matching.WILDCARD:
            parts = module.split(".")
            if any(".".join(parts[:end]) in exact for end in range(1, len(parts))):
                return True
    return any(pattern.match(module) for pattern in rest)


@lru_cache(maxsize=64)
def _index(patterns: tuple[str, ...], matching: Matching) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    exact: set[str] = set()
    rest: list[re.Pattern[str]] = []
    for pattern in patterns:
        if matching is Matching.COMPRESSED_TENSORS and pattern.startswith("re:"):
            rest.append(re.compile(pattern[3:]))
        elif matching is Matching.WILDCARD and any(c in pattern for c in "*?["):
            rest.append(re.compile(fnmatch.translate(pattern)))
        elif matching is Matching.REGEX and not re.fullmatch(r"[\w.-]+", pattern):
            try:
                rest.append(re.compile(pattern))
            except re.error:  # a name with odd characters
                exact.add(pattern)
        else:
            exact.add(pattern)
    return frozenset(exact), tuple(rest)
