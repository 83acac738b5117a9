"""One engine's records and plan, and what a step does with them: the part that knows vLLM's runner.

`patches/gdn_one_state.py` calls these functions at the seams; nothing here is wrapped or replaced.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash2_patches.gdn.align import Tables, after_step, before_step
from dflash2_patches.gdn.records import Plan, Records
from dflash2_patches.gdn.verify import (
    GatedNorm,
    Launch,
    Layers,
    Moves,
    commit,
    launch_for,
    plan_step,
    unsupported,
    verify,
)

SWITCH = "DFLASH2_GDN_ONE_STATE"


@dataclass(frozen=True)
class Shape:
    """A GDN layer of this rank.

    Attributes:
        key_heads, value_heads: of this rank.
        key_dim, value_dim: of a head.
        state, activations: dtypes.
        gate: activation of the output gate.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    state: torch.dtype
    activations: torch.dtype
    gate: str


def shape_of(layer: Any) -> Shape:
    """Of a vLLM layer (`QwenGatedDeltaNetAttention`)."""
    return Shape(
        layer.num_k_heads // layer.tp_size,
        layer.num_v_heads // layer.tp_size,
        layer.head_k_dim,
        layer.head_v_dim,
        layer.get_state_dtype()[1],
        layer.conv1d.weight.dtype,
        layer.norm.activation,
    )


def refused(
    config: Any, shapes: Sequence[Shape], capability: tuple[int, int] | None, wish: str, measured: Collection[str]
) -> str | None:
    """Why an engine stays with stock, in one line; None when it keeps one state a request.

    Args:
        config: the `VllmConfig`.
        shapes: one a GDN layer; empty when the target has none.
        capability: of the GPU; None without one.
        wish: `on` or `auto`.
        measured: compute capabilities of the patch's record, where `auto` is on.
    """
    if not shapes:
        return "the target has no gated delta net layers"
    if len(set(shapes)) > 1:
        return "its gated delta net layers differ in shape"
    if capability is None:
        return "no CUDA device"
    drafts = config.num_speculative_tokens
    if not drafts:
        return "no drafter"
    shape = shapes[0]
    reason = unsupported(
        shape.key_dim, shape.value_dim, shape.key_heads, shape.value_heads, drafts + 1, shape.state, shape.gate
    )
    if reason is not None:
        return reason
    parallel = config.parallel_config
    sizes = {
        "pipeline parallelism": parallel.pipeline_parallel_size,
        "decode context parallelism": parallel.decode_context_parallel_size,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    if wide := [name for name, size in sizes.items() if size > 1]:
        return f"{' and '.join(wide)}: a step's counts arrive after the next step began"
    if config.kv_transfer_config is not None:
        return "a KV connector would read states that still wait for their tokens"
    if config.cache_config.mamba_cache_mode not in ("none", "align"):
        return f"mamba cache mode {config.cache_config.mamba_cache_mode!r}; it handles none and align"
    number = f"{capability[0]}.{capability[1]}"
    if wish == "auto" and number not in measured:
        return f"it was not measured to win on compute capability {number}; {SWITCH}=on forces it"
    if wish == "auto" and shape.state != torch.float32:
        return f"with a state in bfloat16 vLLM's kernel is as fast; {SWITCH}=on forces it"
    return None


def wish(environ: Mapping[str, str] | None = None) -> str:
    """`on` or `auto` (any other setting is off, and then the patch isn't applied)."""
    value = (os.environ if environ is None else environ).get(SWITCH, "").strip().lower()
    return "auto" if value == "auto" else "on"


@dataclass
class OneState:
    """What the GDN layers of one worker share.

    Attributes:
        names: its GDN layers, in the order of the records.
        shape: of all of them.
        records: replay data, a row a request slot.
        plan: of the step that runs; graphs hold its tensors.
        query: 1 + k.
        verifies: request slots whose last step was a verification (host side), to notice one that leaves it.
        real: the batch that is being prepared holds real requests.
    """

    names: tuple[str, ...]
    shape: Shape
    records: Records
    plan: Plan
    query: int
    verifies: list[bool]
    index: dict[str, int] = field(default_factory=dict)
    by_parameter: dict[int, int] = field(default_factory=dict)
    layers: Layers | None = None
    tables: Tables | None = None
    moves: Moves | None = None
    real: bool = False

    @classmethod
    def allocate(
        cls, names: Sequence[str], shape: Shape, requests: int, query: int, device: torch.device | str
    ) -> OneState:
        """For `requests` request slots; nothing waits in any."""
        records = Records.allocate(
            len(names),
            requests,
            shape.key_heads,
            shape.value_heads,
            query,
            shape.key_dim,
            shape.value_dim,
            shape.activations,
            device,
        )
        # A graph is captured for a padded batch, which is never larger than this.
        plan = Plan.allocate(requests, device)
        index = {name: i for i, name in enumerate(names)}
        return cls(tuple(names), shape, records, plan, query, [False] * requests, index)

    def bind(
        self,
        states: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        groups: Mapping[str, int],
        tables: Tables | None,
    ) -> None:
        """Take note of the states that vLLM allocated.

        Args:
            states: recurrent state of each layer [S, HV, V, K]; layers of different groups share their memory.
            parameters: `A_log` of each layer, by which a function that isn't told the layer knows it.
            groups: position of each layer's group among the recurrent groups.
            tables: the groups' block tables in align mode, else None.
        """
        ordered = [states[name] for name in self.names]
        self.layers = Layers.of(ordered, [groups[name] for name in self.names])
        self.by_parameter = {parameters[name].data_ptr(): i for i, name in enumerate(self.names)}
        self.tables = tables
        requests = self.records.rows
        self.moves = Moves.allocate(1 + max(groups.values()), requests, ordered[0].device) if tables else None

    def forget(self, row: int) -> None:
        """A request slot has a new request."""
        self.records.forget(row)
        self.verifies[row] = False

    def enter_blocks(self, idx_mapping: Tensor, source: Tensor, target: Tensor, offset: Tensor) -> None:
        """Align mode, after vLLM's precopy: states whose request enters another block move there."""
        if self.layers is None or self.tables is None or self.moves is None:
            return
        before_step(self.moves, self.records, self.tables, idx_mapping, source, target, offset)
        commit(self.layers, self.moves, self.records, idx_mapping.shape[0])

    def leave_blocks(self, idx_mapping: Tensor, column: Tensor, accepted: Tensor, computed: Tensor) -> None:
        """Align mode, before vLLM's postprocessing: states at a boundary that was passed are kept for the cache."""
        if self.layers is None or self.tables is None or self.moves is None:
            return
        after_step(self.moves, self.records, self.tables, idx_mapping, column, accepted, computed)
        commit(self.layers, self.moves, self.records, idx_mapping.shape[0])

    def prepare(self, metadata: Any, idx_mapping: Tensor, slots: Sequence[int]) -> None:
        """Once a step, before the forward pass.

        Args:
            metadata: a GDN layer's metadata of this step; None or without verifications: nothing is replayed.
            idx_mapping: request slot of each request of the batch [N] int32, on the device.
            slots: the same, on the host.

        Raises:
            RuntimeError: a request left verification while its tokens wait: its state would be wrong.
        """
        self.plan.rows.fill_(-1)
        real, self.real = self.real, False
        if not real:
            return
        count = 0 if metadata is None or metadata.spec_sequence_masks is None else metadata.num_spec_decodes
        masks = None if count == 0 else metadata.spec_sequence_masks_cpu
        inside = [False] * len(slots) if masks is None else masks[: len(slots)].tolist()
        for slot, verified in zip(slots, inside, strict=True):
            if self.verifies[slot] and not verified:
                raise RuntimeError(
                    f"GDN verification with one state: the request in slot {slot} is computed as a prompt again while "
                    f"accepted tokens wait for their replay. Start with {SWITCH}=off and report this"
                )
            self.verifies[slot] = verified
        if not count:
            return
        if all(inside):
            rows = idx_mapping[:count]
        else:
            chosen = [i for i, verified in enumerate(inside) if verified]
            rows = idx_mapping[torch.tensor(chosen, dtype=torch.int64).to(idx_mapping.device, non_blocking=True)]
        self.plan.rows[:count].copy_(rows, non_blocking=True)
        plan_step(self.records, self.plan, metadata.num_accepted_tokens, metadata.spec_query_start_loc[: count + 1])

    def verify(
        self,
        layer: int,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        parameters: tuple[Tensor, Tensor, float],
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        out: Tensor,
        norm: GatedNorm | None,
        launch: Launch | None = None,
    ) -> Tensor:
        """One layer's verification; see `verify.verify`. `parameters`: A_log, dt_bias, scale."""
        requests = cu_seqlens.shape[0] - 1
        log, bias, scale = parameters
        return verify(
            mixed_qkv,
            a,
            b,
            log,
            bias,
            state,
            slots,
            self.plan,
            self.records,
            layer,
            cu_seqlens,
            out,
            scale,
            norm,
            launch or launch_for(requests, state.dtype),
        )


def widened(indices: Tensor | None, columns: int) -> Tensor | None:
    """State slots [N, >= 1] as [N, columns] with the first column in all: one slot a request.

    vLLM reads the number of columns as the longest query, and the first column as the convolution's slot.
    """
    if indices is None or indices.shape[1] == columns:
        return indices
    return indices[:, :1].expand(-1, columns)
