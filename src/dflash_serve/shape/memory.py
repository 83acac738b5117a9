"""Where one GPU's memory goes, part by part, and the KV pool that vLLM will then print.

vLLM takes `gpu_memory_utilization` of the memory that CUDA reports, subtracts what loading consumed, the peak of a
profiling run and an estimate for CUDA graphs, and gives the rest to the KV pool (v1/worker/gpu_worker.py,
`determine_available_memory`). The parts follow that; docs/fit.md compares them with measured runs.
"""

from __future__ import annotations

from dataclasses import field, replace

from dflash_serve.checkpoint.facts import DrafterFacts, LayerKind, TargetFacts
from dflash_serve.shape.constants import GIB, MIB, constants
from dflash_serve.shape.draft_fp8 import body_bytes, head_bytes, takes_fp8
from dflash_serve.shape.graphs import GraphCount, graph_count
from dflash_serve.shape.kv_groups import CacheInputs, CacheLayout, Grouping, cache_layout
from dflash_serve.shape.kv_pages import KERNEL_BLOCK
from dflash_serve.shape.versions import at_least
from dflash_serve.shape.weights import Checkpoints, weight_parts
from dflash_serve.values import dataclass

POOL = "KV pool"
# Where the prefill kernel exports states, blocks are multiples of its stride (gdn_attn.py).
STATE_CHECKPOINT_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One slice of a GPU's memory.

    Attributes:
        kind: `inside` counts against the utilization, `pool` is what that leaves, `outside` is the rest.
        formula: how the bytes came about, with the numbers put in.
    """

    name: str
    bytes: int
    formula: str
    kind: str = "inside"


@dataclass(frozen=True, slots=True)
class Shape:
    """The values of a serving shape that decide memory. All sizes in tokens, requests or GPUs.

    Attributes:
        flashinfer: whether the target's or the drafter's attention runs on FlashInfer (its workspace).
        state_checkpoint: see `CacheInputs`.
        kv_cache_bytes: a pool of fixed size instead of what the utilization leaves.
        weight_factor: how many times the stored bytes the engine holds.
    """

    tensor_parallel: int
    window: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    draft_tokens: int = 0
    draft_widths: tuple[int, ...] = ()
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    ssm_cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    prefix_caching: bool = True
    eager: bool = False
    text_only: bool = False
    mtp: bool = False
    probabilistic: bool = False
    prompt_logprobs: bool = True
    flashinfer: bool = False
    state_checkpoint: bool = False
    async_scheduling: bool = True
    grouping: Grouping = "vllm"
    one_state: bool = False
    fp8_head: bool = False
    fp8_body: bool = False
    kv_cache_bytes: int | None = None
    weight_factor: float = 1.0
    vllm_version: str = "0.33.0"


@dataclass(frozen=True)
class MemoryBudget:
    """One GPU's memory by part, in bytes, and what it holds.

    Attributes:
        parts: they add up to `gpu_bytes`, but for a pool that would be negative.
        available: bytes left for the KV pool (negative: the shape does not fit).
        head_room: bytes outside the utilization that a running server leaves free.
        head_room_needed: bytes that the first long prefill, or one prompt_logprobs request, takes of it.
        fixed: the pool's bytes were given and not estimated.
    """

    gpu_bytes: int
    parts: tuple[Part, ...]
    layout: CacheLayout
    graphs: GraphCount
    available: int
    head_room: int
    head_room_needed: int
    fixed: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def kv_pool_tokens(self) -> int:
        """What vLLM prints as "GPU KV cache size"."""
        return self.layout.pool_tokens(max(0, self.available))

    @property
    def max_full_windows(self) -> float:
        """Requests of the whole window that fit at once."""
        return self.layout.full_windows(max(0, self.available))

    @property
    def fits_surely(self) -> bool:
        """Whether it still fits when the pool is smaller by what an estimate may be off."""
        margin = 0 if self.fixed else constants().pool_margin.value
        least = int(self.available * (1 - margin)) - self.layout.block_bytes
        return self.layout.blocks(least) >= self.layout.blocks_per_request

    @property
    def fits(self) -> bool:
        """Whether one request of the whole window fits (vLLM keeps one block back)."""
        return self.layout.blocks(self.available - self.layout.block_bytes) >= self.layout.blocks_per_request

    def part(self, name: str) -> int:
        """Bytes of one part; 0 when the shape has none of that name."""
        return sum(part.bytes for part in self.parts if part.name == name)

    @property
    def used(self) -> int:
        """Bytes inside the utilization that aren't KV pool."""
        return sum(part.bytes for part in self.parts if part.kind == "inside")


def memory_budget(
    target: TargetFacts,
    drafter: DrafterFacts | None,
    checkpoints: Checkpoints,
    shape: Shape,
    gpu_bytes: int,
    in_use: int = 0,
) -> MemoryBudget:
    """The budget of one GPU of `gpu_bytes` (as CUDA reports its total) for a shape.

    Args:
        in_use: bytes that a display or other processes hold; they come out of what the utilization leaves.

    Raises:
        UsageError: a KV dtype whose pages are not known.
        CheckpointError: a checkpoint whose tensor sizes are not known.
    """
    factor = shape.weight_factor
    times = f" x {factor} (layouts that the engine keeps)" if factor != 1 else ""
    parts = [
        Part(part.name, int(part.bytes * factor), part.formula + times)
        for part in weight_parts(
            target,
            drafter,
            checkpoints,
            tensor_parallel=shape.tensor_parallel,
            window=shape.window,
            text_only=shape.text_only,
            mtp=shape.mtp,
        )
    ]
    if drafter is not None and shape.fp8_body and takes_fp8(drafter):
        parts = [_rounded(part, drafter, shape) if part.name == "drafter weights" else part for part in parts]
    parts += _runtime(drafter, target, shape)
    peak, text = activation_peak(target, drafter, shape)
    parts.append(Part("activation peak", peak, text))
    graphs = graph_count(
        shape.max_num_seqs, shape.draft_tokens, shape.max_num_batched_tokens, widths=shape.draft_widths
    )
    if graphs_reserved(shape, drafter):
        mib = constants().graph_mib.value
        text = f"{graphs.piecewise} piecewise + {graphs.full} full + {graphs.draft} draft graphs x {mib} MiB"
        parts.append(Part("CUDA graphs", int(graphs.total * mib * MIB), text))
    layout = _layout(target, drafter, shape)
    requested = int(gpu_bytes * shape.utilization)
    inside = sum(part.bytes for part in parts)
    available = shape.kv_cache_bytes if shape.kv_cache_bytes is not None else requested - inside
    parts += _pool(layout, available, requested, shape)
    outside = gpu_bytes - inside - available
    beyond = beyond_budget(shape, drafter)
    needed = head_room_needed(target, shape, peak)
    parts += _outside(outside, in_use, beyond, needed, gpu_bytes, shape)
    return MemoryBudget(
        gpu_bytes=gpu_bytes,
        parts=tuple(parts),
        layout=layout,
        graphs=graphs,
        available=available,
        head_room=outside - beyond - in_use,
        head_room_needed=needed,
        fixed=shape.kv_cache_bytes is not None,
        notes=layout.notes,
    )


def head_room_needed(target: TargetFacts, shape: Shape, activation_peak: int) -> int:
    """Bytes outside the budget that the largest allowed request takes, in bytes.

    A prompt_logprobs request may use the activation memory, which is idle then; a first prefill may not.
    """
    table = constants()
    needed = int(table.first_prefill_gib.value * GIB)
    if shape.prompt_logprobs:
        rows = min(table.prompt_logprobs_rows.value, shape.max_num_batched_tokens)
        logits = int(rows * target.dims.vocab_size * table.prompt_logprobs_bytes_per_logit.value)
        needed = max(needed, logits - activation_peak)
    return needed


def highest_utilization(
    target: TargetFacts, drafter: DrafterFacts | None, shape: Shape, gpu_bytes: int, free_bytes: int | None
) -> tuple[float, str]:
    """The utilization (two decimals) that leaves the head room, and what bounds it."""
    table = constants()
    cap, why = table.utilization_without_prompt_logprobs.value, "0.94 is the most that people served with"
    if shape.prompt_logprobs:
        cap = table.utilization_with_prompt_logprobs.value
        why = "a prompt_logprobs request ends a server at 0.94, not at 0.92 (vllm#52883)"
    peak = activation_peak(target, drafter, shape)[0]
    needed = beyond_budget(shape, drafter) + head_room_needed(target, shape, peak)
    in_use = 0 if free_bytes is None else max(0, gpu_bytes - free_bytes)
    by_room = int(100 * (1 - (needed + in_use) / gpu_bytes)) / 100
    if by_room < cap:
        cap = by_room
        why = f"{needed / GIB:.1f} GiB stay outside for a long prefill and prompt_logprobs"
        if in_use:
            why += f", and {in_use / GIB:.1f} are in use already"
    if free_bytes is not None:
        context = table.context_at_start_gib.value * GIB
        by_free = int(100 * max(0.0, free_bytes - context) / gpu_bytes) / 100
        if by_free < cap:
            cap, why = by_free, f"only {free_bytes / GIB:.1f} GiB of {gpu_bytes / GIB:.1f} are free now"
    return max(cap, 0.01), why


def graphs_reserved(shape: Shape, drafter: DrafterFacts | None) -> bool:
    """Whether vLLM keeps memory for CUDA graphs: its V2 runner, which block drafters need, did not before 0.29."""
    return not shape.eager and (drafter is None or at_least(shape.vllm_version, "0.29"))


def beyond_budget(shape: Shape, drafter: DrafterFacts | None) -> int:
    """Bytes that a running server takes outside its utilization."""
    table = constants()
    gib = table.beyond_budget_gib.value
    if not shape.eager and not graphs_reserved(shape, drafter):
        gib += table.unreserved_graphs_gib.value
    return int(gib * GIB)


def _outside(outside: int, in_use: int, beyond: int, needed: int, gpu_bytes: int, shape: Shape) -> list[Part]:
    """What the utilization leaves, by what takes it: others, the server itself, the largest request, nobody."""
    text = f"{gpu_bytes} B - {shape.utilization} of it"
    parts, rest = [], outside
    for name, size in (
        ("display and other processes", in_use),
        ("running server beyond its budget", beyond),
        ("long prefill and prompt_logprobs", needed),
    ):
        taken = max(0, min(rest, size))
        rest -= taken
        if taken:
            parts.append(Part(name, taken, text, "outside"))
    if rest or not parts:
        parts.append(Part("left free", rest, text, "outside"))
    return parts


def _runtime(drafter: DrafterFacts | None, target: TargetFacts, shape: Shape) -> list[Part]:
    table = constants()
    many = shape.tensor_parallel > 1
    gib = (table.runtime_gib_many_gpus if many else table.runtime_gib_one_gpu).value
    name = "CUDA context and NCCL" if many else "CUDA context"
    parts = [Part(name, int(gib * GIB), f"{gib} GiB, measured with TP {'2' if many else '1'}")]
    if shape.flashinfer:
        mib = table.flashinfer_workspace_mib.value
        parts.append(Part("FlashInfer workspace", int(mib * MIB), f"{mib:.0f} MiB, vLLM's default"))
    if drafter is not None:
        vectors = table.draft_buffer_vectors_per_token.value
        tokens, hidden = shape.max_num_batched_tokens, target.dims.hidden_size
        text = f"{tokens} tokens x {vectors} x {hidden} x 2 B"
        parts.append(Part("draft buffers", int(tokens * vectors * hidden * 2), text))
    if drafter is not None and shape.probabilistic:
        vocab = target.dims.vocab_size
        text = f"{shape.max_num_seqs} requests x {shape.draft_tokens} x {vocab} x 4 B"
        cache = shape.max_num_seqs * shape.draft_tokens * vocab * 4
        parts.append(Part("draft probabilities", cache, text))
    if shape.one_state:
        parts.append(_replay_records(target, shape))
    if drafter is not None and takes_fp8(drafter):
        tp = shape.tensor_parallel
        if shape.fp8_head:
            text = f"{drafter.dims.vocab_size} / TP {tp} rows x ({drafter.dims.hidden_size} + 4) B"
            parts.append(Part("fp8 copy of the LM head", head_bytes(drafter, tp), text))
    return parts


def _rounded(part: Part, drafter: DrafterFacts, shape: Shape) -> Part:
    """The drafter's weights when its matrices are in fp8."""
    less = body_bytes(drafter, shape.tensor_parallel)
    return replace(part, bytes=part.bytes + less, formula=f"{part.formula}; in fp8 {-less / 1e9:.2f} GB less")


def _replay_records(target: TargetFacts, shape: Shape) -> Part:
    """What our plugin keeps of a verification instead of states: two sides of a key, a delta and a decay a token."""
    assert target.gdn is not None
    layers, gdn, tokens = target.dims.count(LayerKind.LINEAR), target.gdn, shape.draft_tokens + 1
    key = gdn.key_heads * gdn.key_head_dim * 2
    delta = gdn.value_heads * (gdn.value_head_dim + 1) * 4
    size = shape.max_num_seqs * layers * 2 * tokens * (key + delta) // shape.tensor_parallel
    text = (
        f"{shape.max_num_seqs} requests x {layers} layers x 2 x {tokens} tokens x ({key} + {delta}) B"
        f" / TP {shape.tensor_parallel}"
    )
    return Part("replay records", size, text)


def activation_peak(target: TargetFacts, drafter: DrafterFacts | None, shape: Shape) -> tuple[int, str]:
    """Bytes of the largest of three phases of vLLM's profiling run, which aren't live together, and its formula."""
    table = constants()
    tokens, hidden, vocab = shape.max_num_batched_tokens, target.dims.hidden_size, target.dims.vocab_size
    vectors = table.forward_vectors_per_token.value
    forward = int(tokens * vectors * hidden * 2 / shape.tensor_parallel)
    text = f"forward: {tokens} tokens x {vectors} x {hidden} x 2 B / TP {shape.tensor_parallel}"
    if drafter is not None:
        draft = table.draft_vectors_per_token.value
        forward += int(tokens * draft * hidden * 2)
        text += f" + draft: {tokens} x {draft} x {hidden} x 2 B"
    phases = [(forward, text)]
    rows = min(shape.max_num_seqs, tokens)
    newer = at_least(shape.vllm_version, "0.27")
    logit = (table.sampler_bytes_per_logit_since_027 if newer else table.sampler_bytes_per_logit).value
    phases.append((int(rows * vocab * logit), f"sampler: {rows} requests x {vocab} x {logit:.0f} B"))
    if target.vision is not None and not shape.text_only:
        whole, divided = table.vision_peak_gib.value, table.vision_peak_gib_divided.value
        gib = whole + divided / shape.tensor_parallel
        text = f"vision tower: {whole} GiB + {divided} GiB / TP {shape.tensor_parallel}, its largest image"
        phases.append((int(gib * GIB), text))
    peak, text = max(phases)
    others = [other.split(":")[0] for _, other in phases if other != text]
    return peak, f"{text} (more than {' and '.join(others)})"


def _layout(target: TargetFacts, drafter: DrafterFacts | None, shape: Shape) -> CacheLayout:
    return cache_layout(
        CacheInputs(
            target=target,
            drafter=drafter,
            tensor_parallel=shape.tensor_parallel,
            window=shape.window,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            draft_tokens=shape.draft_tokens,
            kv_cache_dtype=shape.kv_cache_dtype,
            draft_kv_cache_dtype=shape.draft_kv_cache_dtype,
            ssm_cache_dtype=shape.ssm_cache_dtype,
            model_dtype=shape.model_dtype,
            prefix_caching=shape.prefix_caching,
            batches_in_flight=2 if shape.async_scheduling else 1,
            mtp_layers=target.mtp_layers if shape.mtp else 0,
            state_checkpoint=shape.state_checkpoint,
            kernel_block=STATE_CHECKPOINT_BLOCK if shape.state_checkpoint else KERNEL_BLOCK,
            drafter_block=None if at_least(shape.vllm_version, "0.28") else 16,
            grouping=shape.grouping,
            one_state=shape.one_state,
        )
    )


_NAMES = {
    ("full", "target"): "KV: full attention",
    ("sliding", "target"): "KV: sliding window",
    ("state", "target"): "KV: recurrent state",
    ("full", "mtp"): "KV: MTP layer",
    ("full", "drafter"): "KV: drafter",
    ("sliding", "drafter"): "KV: drafter",
}


def _pool(layout: CacheLayout, available: int, requested: int, shape: Shape) -> list[Part]:
    """The pool divided as full-window requests would use it."""
    if available <= 0:
        return [Part(POOL, available, f"{requested} B requested: nothing is left", "pool")]
    parts = []
    for layers in layout.sets:
        share = layout.share(layers) / layout.request_bytes
        text = (
            f"{layers.layers} layers, {layers.blocks} blocks of {layers.block_tokens} tokens a request of "
            f"{layout.window}, groups of {layout.group_size}"
        )
        parts.append(Part(_NAMES[layers.role, layers.of], int(available * share), text, "pool"))
    rest = available - sum(part.bytes for part in parts)
    parts[0] = Part(parts[0].name, parts[0].bytes + rest, parts[0].formula, "pool")
    return parts
