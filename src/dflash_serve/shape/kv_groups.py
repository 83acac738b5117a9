"""How vLLM groups layers into block tables, and how many tokens a pool of bytes then holds.

All groups draw blocks from one pool, so every block is as large as the widest group: a group with fewer layers
wastes the rest ("padding layers" in vLLM's log). `vllm` is vLLM's own rule of v1/core/kv_cache_planning.py
(0.24 to 0.33); `balanced` is the rule of our plugin (docker/patches, record `kv-grouping`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from dflash_serve.checkpoint.facts import DrafterFacts, LayerKind, TargetFacts
from dflash_serve.shape.kv_pages import (
    KERNEL_BLOCK,
    attention_bytes_per_token,
    ceil_div,
    hybrid_block_tokens,
    kv_dtype,
    state_bytes,
)
from dflash_serve.values import dataclass

# A request besides the full window is counted with this many tokens.
SHORT_REQUEST = 4096

Grouping = Literal["vllm", "balanced"]
Role = Literal["full", "state", "sliding"]


@dataclass(frozen=True, slots=True)
class CacheInputs:
    """Everything that decides the cache layout of one GPU.

    Attributes:
        draft_tokens: k; 0 without speculation.
        batches_in_flight: 2 with async scheduling (vLLM's default), 1 without.
        mtp_layers: layers of the target's own draft head that are run (each keeps full-attention KV).
        state_checkpoint: whether the GDN prefill kernel exports states (FlashInfer, vLLM 0.33): one more slot.
        one_state: our plugin keeps one recurrent state a request (its record `gdn-one-state`), vLLM 1 + k.
        drafter_block: tokens a block of the drafter's sliding layers; None is the target's own block (0.31 to 0.33);
            older releases left it at 16.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    tensor_parallel: int
    window: int
    max_num_batched_tokens: int
    draft_tokens: int
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    ssm_cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    prefix_caching: bool = True
    batches_in_flight: int = 2
    mtp_layers: int = 0
    state_checkpoint: bool = False
    kernel_block: int = KERNEL_BLOCK
    drafter_block: int | None = None
    grouping: Grouping = "vllm"
    one_state: bool = False


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Layers that share a cache specification.

    Attributes:
        blocks: blocks that one request of the whole window takes in each of the set's groups.
        own_bytes: page bytes before padding to the common page.
    """

    role: Role
    of: Literal["target", "drafter", "mtp"]
    layers: int
    block_tokens: int
    own_bytes: int
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Groups, pages and blocks of one GPU.

    Attributes:
        page_bytes: bytes of one page (one block of one layer), padding included.
        block_bytes: bytes that one block takes from the pool: the widest group's pages.
        blocks_per_request: blocks of one request of the whole window, all groups together.
    """

    sets: tuple[LayerSet, ...]
    group_size: int
    page_bytes: int
    block_bytes: int
    blocks_per_request: int
    window: int
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> int:
        """Number of block tables a request has."""
        if self.group_size == 0:
            return 1
        return sum(ceil_div(layers.layers, self.group_size) for layers in self.sets)

    @property
    def padding_layers(self) -> int:
        """Layers that exist only to fill groups up."""
        return self.groups * self.group_size - sum(layers.layers for layers in self.sets)

    @property
    def block_tokens(self) -> int:
        """Tokens a block of the full-attention layers (the prefix cache's grain)."""
        full = [layers.block_tokens for layers in self.sets if layers.role == "full"]
        return full[0] if full else self.sets[0].block_tokens

    @property
    def request_bytes(self) -> int:
        """Bytes that one request of the whole window takes from the pool."""
        return self.blocks_per_request * self.block_bytes

    @property
    def short_request_blocks(self) -> int:
        """Blocks of a request of 4,096 tokens: its recurrent states are as large as a long one's."""
        total = 0
        for layers in self.sets:
            blocks = layers.blocks
            if layers.role != "state":
                blocks = min(blocks, ceil_div(SHORT_REQUEST, layers.block_tokens) + (layers.role == "sliding"))
            groups = ceil_div(layers.layers, self.group_size) if self.group_size else 1
            total += groups * blocks
        return total

    def short_requests(self, available: int) -> int:
        """Short requests that fit at once; vLLM keeps one block back."""
        return max(0, self.blocks(available) - 1) // self.short_request_blocks

    def blocks(self, available: int) -> int:
        """Blocks in a pool of that many bytes."""
        return max(0, available // self.block_bytes)

    def pool_tokens(self, available: int) -> int:
        """What vLLM prints as "GPU KV cache size" for that many bytes: concurrency times the window."""
        return int(self.blocks(available) / self.blocks_per_request * self.window)

    def full_windows(self, available: int) -> float:
        """Requests of the whole window that fit at once ("Maximum concurrency")."""
        return self.blocks(available) / self.blocks_per_request

    def share(self, layers: LayerSet) -> int:
        """Bytes of one full-window request that the set takes, padding included."""
        groups = ceil_div(layers.layers, self.group_size) if self.group_size else 1
        return groups * layers.blocks * self.block_bytes


def cache_layout(inputs: CacheInputs) -> CacheLayout:
    """The layout that vLLM would use for these inputs.

    Raises:
        UsageError: a KV dtype whose pages are not known.
    """
    sets, notes = _layer_sets(inputs)
    if all(layers.role == "full" for layers in sets) or len(sets) == 1:
        return _one_group(sets, inputs.window, notes)
    page = max(layers.own_bytes for layers in sets)
    sets = tuple(_unify(layers, page, notes) for layers in sets)
    sets = tuple(replace(layers, blocks=_blocks(layers, inputs)) for layers in sets)
    sets = _merge(sets)
    size = balanced_group_size(sets) if inputs.grouping == "balanced" else vllm_group_size(sets)
    return CacheLayout(
        sets=sets,
        group_size=size,
        page_bytes=page,
        block_bytes=size * page,
        blocks_per_request=sum(ceil_div(s.layers, size) * s.blocks for s in sets),
        window=inputs.window,
        notes=tuple(notes),
    )


def vllm_group_size(sets: tuple[LayerSet, ...]) -> int:
    """Layers a group by vLLM's rule: the smallest set, or the largest one when it is less than 1.5 times that."""
    smallest = min(layers.layers for layers in sets)
    largest = max(layers.layers for layers in sets)
    return largest if largest < smallest * 1.5 else smallest


def balanced_group_size(sets: tuple[LayerSet, ...]) -> int:
    """Layers a group by our plugin's rule (its record `kv-grouping`): padding of layers that keep the whole context
    costs the most and counts first, then padding of the others, then the number of groups.
    """
    growing = [layers.layers for layers in sets if layers.role == "full"]
    bounded = [layers.layers for layers in sets if layers.role != "full"]
    counts = [*growing, *bounded]

    def waste(size: int) -> tuple[int, int, int]:
        return sum(-n % size for n in growing), sum(-n % size for n in bounded), -size

    return min(range(min(counts), max(counts) + 1), key=waste)


def _layer_sets(inputs: CacheInputs) -> tuple[tuple[LayerSet, ...], list[str]]:
    target, notes = inputs.target, list[str]()
    dtype = kv_dtype(inputs.kv_cache_dtype, inputs.model_dtype)
    per_token = attention_bytes_per_token(target.dims.num_kv_heads, target.dims.head_dim, dtype, inputs.tensor_parallel)
    block = inputs.kernel_block
    sets: list[LayerSet] = []
    linear = target.dims.count(LayerKind.LINEAR)
    state = 0
    if target.gdn is not None and linear:
        state = state_bytes(
            target.gdn,
            tensor_parallel=inputs.tensor_parallel,
            draft_tokens=inputs.draft_tokens,
            conv_dtype=inputs.model_dtype,
            ssm_dtype=target.gdn.ssm_dtype if inputs.ssm_cache_dtype == "auto" else inputs.ssm_cache_dtype,
        )
        block = hybrid_block_tokens(state, per_token, inputs.kernel_block)
    full = target.dims.count(LayerKind.FULL)
    if full:
        sets.append(LayerSet("full", "target", full, block, block * per_token))
    if sliding := target.dims.count(LayerKind.SLIDING):
        sets.append(LayerSet("sliding", "target", sliding, block, block * per_token))
    if state:
        page = max(state, block * per_token) if full else state
        sets.append(LayerSet("state", "target", linear, block, page))
    if inputs.mtp_layers:
        sets.append(LayerSet("full", "mtp", inputs.mtp_layers, block, block * per_token))
    if inputs.drafter is not None:
        sets += _drafter_sets(inputs, inputs.drafter, block)
    return tuple(sets), notes


def _drafter_sets(inputs: CacheInputs, drafter: DrafterFacts, block: int) -> list[LayerSet]:
    wanted = inputs.draft_kv_cache_dtype
    dtype = kv_dtype(inputs.kv_cache_dtype if wanted == "auto" else wanted, inputs.model_dtype)
    per_token = attention_bytes_per_token(
        drafter.dims.num_kv_heads, drafter.dims.head_dim, dtype, inputs.tensor_parallel
    )
    sets: list[LayerSet] = []
    sliding = sum(layer.sliding_window is not None for layer in drafter.attention)
    if full := len(drafter.attention) - sliding:
        sets.append(LayerSet("full", "drafter", full, block, block * per_token))
    if sliding:
        own = inputs.drafter_block or block
        sets.append(LayerSet("sliding", "drafter", sliding, own, own * per_token))
    return sets


def _unify(layers: LayerSet, page: int, notes: list[str]) -> LayerSet:
    """Give the set the common page: more tokens a block where the page divides it, else padding."""
    if layers.own_bytes == page or layers.role == "state":
        return layers
    if page % layers.own_bytes == 0:
        return replace(layers, block_tokens=layers.block_tokens * (page // layers.own_bytes))
    waste = 100 * (page - layers.own_bytes) / page
    notes.append(
        f"the {layers.of}'s page of {layers.own_bytes} bytes does not divide the common page of {page}: "
        f"vLLM pads it and wastes {waste:.1f} % of each"
    )
    return layers


def _merge(sets: tuple[LayerSet, ...]) -> tuple[LayerSet, ...]:
    """Sets with the same specification share groups (a target's and its MTP head's full-attention layers)."""
    out: list[LayerSet] = []
    for layers in sets:
        for i, known in enumerate(out):
            same = (known.role, known.block_tokens, known.own_bytes, known.blocks)
            if same == (layers.role, layers.block_tokens, layers.own_bytes, layers.blocks):
                out[i] = replace(known, layers=known.layers + layers.layers)
                break
        else:
            out.append(layers)
    return tuple(out)


def _blocks(layers: LayerSet, inputs: CacheInputs) -> int:
    """Blocks of one full-window request in one group of the set."""
    if layers.role == "full":
        return ceil_div(inputs.window, layers.block_tokens)
    if layers.role == "state":
        slots = 2 if inputs.prefix_caching else 1
        per_draft = 0 if inputs.one_state else inputs.draft_tokens
        return slots + per_draft + (1 if inputs.prefix_caching and inputs.state_checkpoint else 0)
    retained = _sliding_window(layers, inputs) - 1
    in_flight = inputs.batches_in_flight * inputs.max_num_batched_tokens
    return ceil_div(min(retained + in_flight, inputs.window), layers.block_tokens) + 1


def _sliding_window(layers: LayerSet, inputs: CacheInputs) -> int:
    if layers.of == "target":
        return inputs.target.sliding_window or inputs.window
    assert inputs.drafter is not None
    return max(layer.sliding_window or 0 for layer in inputs.drafter.attention)


def _one_group(sets: tuple[LayerSet, ...], window: int, notes: list[str]) -> CacheLayout:
    """Only full attention: one group in which each layer has its own page."""
    blocks = ceil_div(window, sets[0].block_tokens)
    total = sum(layers.layers * layers.own_bytes for layers in sets)
    return CacheLayout(
        sets=tuple(replace(layers, blocks=blocks) for layers in sets),
        group_size=sum(layers.layers for layers in sets),
        page_bytes=max(layers.own_bytes for layers in sets),
        block_bytes=total,
        blocks_per_request=blocks,
        window=window,
        notes=tuple(notes),
    )
