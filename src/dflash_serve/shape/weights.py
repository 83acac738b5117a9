"""Bytes that one GPU holds before any request: weights by group, and position tables.

Linear layers and vocabularies are divided by the tensor parallel size; norms, and of the drafter `fc`, the
convolutions and the selector, are whole on every GPU (vLLM 0.33.0: qwen3_dflash.py, qwen3_dflash2.py use
ReplicatedLinear and plain parameters there).
"""

from __future__ import annotations

from pathlib import Path

from dflash_serve.checkpoint.facts import DrafterFacts, LayerKind, TargetFacts
from dflash_serve.checkpoint.tensor_bytes import TensorBytes, TensorGroup, drafter_bytes, target_bytes
from dflash_serve.shape.kv_pages import DTYPE_BYTES
from dflash_serve.values import dataclass

REPLICATED = frozenset(
    {TensorGroup.NORMS, TensorGroup.FC, TensorGroup.CONV, TensorGroup.SELECTOR, TensorGroup.SELECTOR_CODEBOOKS}
)
# The rotary tables of M-RoPE models are made four times as long (vLLM: rotary_embedding/mrope.py).
MROPE_POSITIONS = 4


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Bytes of one GPU and where they come from."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The stored bytes of both sides; made once, used for every candidate."""

    target: TensorBytes
    drafter: TensorBytes | None

    @classmethod
    def of(
        cls,
        target: TargetFacts,
        drafter: DrafterFacts | None,
        target_dir: Path | None = None,
        drafter_dir: Path | None = None,
    ) -> Checkpoints:
        """From safetensors headers where a directory holds weights, else from the configs.

        Raises:
            CheckpointError: neither says how large the tensors are.
        """
        return cls(
            target_bytes(target, target_dir),
            drafter_bytes(drafter, drafter_dir) if drafter is not None else None,
        )


def split(stored: TensorBytes, groups: frozenset[TensorGroup], tensor_parallel: int) -> int:
    """Bytes on one GPU of these groups."""
    total = 0
    for group in groups:
        size = stored.of(group)
        total += size if group in REPLICATED else -(-size // tensor_parallel)
    return total


def replicated_kv_bytes(target: TargetFacts, stored: TensorBytes, tensor_parallel: int) -> int:
    """Extra bytes a GPU because K and V projections are replicated when there are fewer heads than GPUs."""
    dims = target.dims
    if tensor_parallel <= dims.num_kv_heads:
        return 0
    query = dims.num_heads * (2 if target.gated_attention else 1)
    rows = query + 2 * dims.num_kv_heads + dims.num_heads
    kv = stored.of(TensorGroup.ATTENTION) * 2 * dims.num_kv_heads / rows
    return int(kv * (1 / dims.num_kv_heads - 1 / tensor_parallel))


def weight_parts(
    target: TargetFacts,
    drafter: DrafterFacts | None,
    checkpoints: Checkpoints,
    *,
    tensor_parallel: int,
    window: int,
    text_only: bool = False,
    mtp: bool = False,
) -> tuple[WeightPart, ...]:
    """Everything that loading puts on one GPU, in bytes."""
    stored, tp = checkpoints.target, tensor_parallel
    language = frozenset(TensorGroup) - {TensorGroup.VISION, TensorGroup.MTP}
    body = split(stored, language, tp) + replicated_kv_bytes(target, stored, tp)
    label = f"{stored.of(*language) / 1e9:.2f} GB / TP {tp}, norms on every GPU"
    if tp > target.dims.num_kv_heads:
        label += ", K and V projections replicated"
    parts = [WeightPart("target weights", body, label)]
    if target.vision is not None and not text_only:
        size = stored.of(TensorGroup.VISION)
        parts.append(WeightPart("vision tower", -(-size // tp), f"{size / 1e9:.2f} GB / TP {tp}"))
    if mtp and target.mtp_layers:
        size = stored.of(TensorGroup.MTP)
        parts.append(WeightPart("MTP layer", -(-size // tp), f"{size / 1e9:.2f} GB / TP {tp}"))
    if drafter is not None and checkpoints.drafter is not None:
        parts += _drafter_parts(checkpoints.drafter, tp)
    parts.append(_positions(target, drafter, window))
    return tuple(parts)


def _drafter_parts(stored: TensorBytes, tp: int) -> list[WeightPart]:
    books = frozenset({TensorGroup.SELECTOR_CODEBOOKS})
    heads = frozenset({TensorGroup.LM_HEAD, TensorGroup.EMBED})
    rest = frozenset(TensorGroup) - books - heads
    shared = stored.of(*(rest & REPLICATED))
    parts = [
        WeightPart(
            "drafter weights",
            split(stored, rest, tp),
            f"{stored.of(*(rest - REPLICATED)) / 1e9:.2f} GB / TP {tp} + {shared / 1e9:.2f} GB "
            "(fc, convolutions, norms) on every GPU",
        )
    ]
    if size := stored.of(*books):
        parts.append(WeightPart("selector codebooks", size, f"{size / 1e9:.2f} GB on every GPU"))
    if size := stored.of(*heads):
        parts.append(WeightPart("draft head", -(-size // tp), f"{size / 1e9:.2f} GB / TP {tp}"))
    return parts


def _positions(target: TargetFacts, drafter: DrafterFacts | None, window: int) -> WeightPart:
    """Rotary tables: positions x rotated dimensions x 2 bytes; the drafter's grows with the window."""
    element = DTYPE_BYTES.get(target.dtype, 2)
    size, text = 0, []
    if target.dims.count(LayerKind.FULL) + target.dims.count(LayerKind.SLIDING):
        rotated = int(target.dims.head_dim * (target.rope.partial_rotary_factor or 1.0))
        stretch = MROPE_POSITIONS if target.rope.mrope_section else 1
        positions = max(target.native_window, window) * stretch
        size += positions * rotated * element
        text.append(f"target {positions} x {rotated} x {element} B")
    if drafter is not None:
        positions = max(drafter.max_position_embeddings, window)
        rotated = int(drafter.dims.head_dim * (drafter.rope.partial_rotary_factor or 1.0))
        size += positions * rotated * element
        text.append(f"drafter {positions} x {rotated} x {element} B")
    return WeightPart("position tables", size, " + ".join(text))
