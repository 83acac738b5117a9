"""Verify drafts of gated delta net layers from one state a request (record `gdn-one-state`).

The kernels and the reasoning are in `dflash2_patches.gdn` (docs/gdn-verification.md); this module puts them at vLLM's
seams. A worker decides once, when its model is loaded; one that stays with stock says why in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from dflash2_patches import records
from dflash2_patches.seam import when_imported, wrap

ID = "gdn-one-state"
_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_active: list[Any] = []


def apply() -> None:
    """Put the seams in place when vLLM loads them."""
    when_imported("vllm.v1.worker.gpu.model_states.mamba_hybrid", _change_model_state)
    when_imported("vllm.v1.worker.mamba_utils", _change_block_boundaries)
    when_imported("vllm.v1.attention.backends.gdn_attn", _change_metadata)
    when_imported(_LAYER, _change_layer)


def active() -> Any | None:
    """The `OneState` of this worker; None while it stays with stock."""
    return _active[0] if _active else None


def _change_model_state(module: ModuleType) -> None:
    owner = module.MambaHybridModelState

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, model, *args, **kwargs)
            _decide(vllm_config, self.max_num_reqs, self.device)

        return init

    def make_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(self: Any, req_index: int, new_req_data: Any) -> None:
            original(self, req_index, new_req_data)
            if (state := active()) is not None:
                state.forget(req_index)

        return add_request

    def make_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_kv_cache(self: Any, kv_cache_config: Any, block_tables: Any) -> None:
            state = active()
            if state is None:
                return original(self, kv_cache_config, block_tables)
            if self._align_mode and self._mamba_state_copy_funcs is None:
                self._mamba_state_copy_funcs = _windows_only(self.model, module.get_mamba_groups(kv_cache_config))
            original(self, kv_cache_config, block_tables)
            _bind(self, state, module.get_mamba_group_ids(module.get_mamba_groups(kv_cache_config)), kv_cache_config)
            return None

        return initialize_kv_cache

    def make_preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
        def preprocess_state(self: Any, *args: Any, **kwargs: Any) -> None:
            # Dummy runs (capture, profiling, idle ranks) skip this function.
            if (state := active()) is not None:
                state.real = True
            original(self, *args, **kwargs)

        return preprocess_state

    def make_prepare(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            built = original(self, input_batch, *args, **kwargs)
            if (state := active()) is not None:
                count = input_batch.num_reqs
                slots = input_batch.idx_mapping_np[:count].tolist()
                state.prepare(built.get(state.names[0]), input_batch.idx_mapping, slots)
            return built

        return prepare_attn

    wrap(owner, "__init__", ID, make_init)
    wrap(owner, "add_request", ID, make_add_request)
    wrap(owner, "initialize_kv_cache", ID, make_initialize)
    wrap(owner, "preprocess_state", ID, make_preprocess)
    wrap(owner, "prepare_attn", ID, make_prepare)


def _change_block_boundaries(module: ModuleType) -> None:
    owner = module.MambaSpecDecodeGPUContext

    def make_precopy(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_fused_precopy(
            self: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, idx_mapping: Any
        ) -> None:
            original(self, num_reqs, state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping)
            if (state := active()) is not None and num_reqs:
                state.enter_blocks(idx_mapping[:num_reqs], src_col_gpu, state_idx_gpu, token_bias_gpu)

        return run_fused_precopy

    def make_postprocess(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_fused_postprocess_align(
            self: Any, num_reqs: int, num_accepted: Any, state_idx: Any, computed: Any, idx_mapping: Any
        ) -> None:
            if (state := active()) is not None and num_reqs:
                state.leave_blocks(idx_mapping[:num_reqs], state_idx, num_accepted, computed)
            original(self, num_reqs, num_accepted, state_idx, computed, idx_mapping)

        return run_fused_postprocess_align

    wrap(owner, "run_fused_precopy", ID, make_precopy)
    wrap(owner, "run_fused_postprocess_align", ID, make_postprocess)


def _change_metadata(module: ModuleType) -> None:
    from dflash2_patches.gdn.engine import widened

    owner = module.GDNAttentionMetadataBuilder

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def built(self: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = original(self, *args, **kwargs)
            if active() is not None:
                metadata.spec_state_indices_tensor = widened(metadata.spec_state_indices_tensor, self.num_spec + 1)
            return metadata

        return built

    wrap(owner, "build", ID, make)
    wrap(owner, "update_block_table", ID, make)


def _change_layer(module: ModuleType) -> None:
    owner = module.QwenGatedDeltaNetAttention

    def make_spec(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
            spec = original(self, vllm_config)
            return spec if spec is None or active() is None else replace(spec, num_speculative_blocks=0)

        return get_kv_cache_spec

    def make_fused(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            self: Any, mixed_qkv: Any, b: Any, a: Any, output_gate: Any, core_attn_out: Any, attn_metadata: Any
        ) -> None:
            if (state := active()) is None:
                return original(self, mixed_qkv, b, a, output_gate, core_attn_out, attn_metadata)
            from dflash2_patches.gdn.verify import GatedNorm

            count = attn_metadata.num_spec_decodes
            state.verify(
                state.index[self.prefix],
                mixed_qkv,
                a,
                b,
                (self.A_log, self.dt_bias, self.head_k_dim**-0.5),
                self.kv_cache[1],
                attn_metadata.spec_state_indices_tensor[:count, 0],
                attn_metadata.spec_query_start_loc[: count + 1],
                core_attn_out,
                GatedNorm(output_gate, self.norm.weight, self.layer_norm_epsilon, self.norm.activation),
            )
            return None

        return forward

    def make_unfused(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            state, accepted = active(), kwargs.get("num_accepted_tokens")
            if state is None or accepted is None:
                return original(*args, **kwargs)
            return _verify_unfused(state, **kwargs)

        return update

    # Both defined by the layer's class or its base: wrapped where this class finds them.
    wrap(owner, "get_kv_cache_spec", ID, make_spec)
    wrap(owner, "_forward_core_decode_spec_post_conv_fused_norm", ID, make_fused)
    wrap(module, "fused_sigmoid_gating_delta_rule_update", ID, make_unfused)


def _decide(config: Any, requests: int, device: Any) -> None:
    """Once a worker: keep one state a request, or say why not."""
    import sys

    from vllm.logger import init_logger

    from dflash2_patches.gdn import engine

    logger = init_logger("vllm.plugins.dflash2_patches")
    _active.clear()
    module = sys.modules.get(_LAYER)
    context = config.compilation_config.static_forward_context
    kind = getattr(module, "QwenGatedDeltaNetAttention", None)
    layers = {name: layer for name, layer in context.items() if kind is not None and isinstance(layer, kind)}
    shapes = [engine.shape_of(layer) for layer in layers.values()]
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    wish = engine.wish()
    others = sum(isinstance(layer, MambaBase) and name not in layers for name, layer in context.items())
    # vLLM wants one number of blocks a request over all recurrent layers.
    reason = f"{others} recurrent layers of another kind" if others else None
    measured = next(record.measured for record in records.load() if record.id == ID)
    reason = reason or engine.refused(config, shapes, _capability(device), wish, measured)
    if reason is not None:
        # Asked for and not given: the pool is smaller than planned, and this says why.
        log = logger.warning if wish == "on" else logger.info
        log("%s: stock verification stays: %s", ID, reason)
        return
    query = config.num_speculative_tokens + 1
    state = engine.OneState.allocate(tuple(layers), shapes[0], requests, query, device)
    _active.append(state)
    mebibytes = state.records.bytes_per_row() * requests / 2**20
    logger.info(
        "%s: %d layers keep one state a request instead of %d; records take %.1f MiB", ID, len(layers), query, mebibytes
    )


def _capability(device: Any) -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability(device) if torch.device(device).type == "cuda" else None


def _windows_only(model: Any, groups: Any) -> Any:
    """VLLM's copy functions without those of the recurrent states: it takes a prefix of a layer's states."""
    functions = model.get_mamba_state_copy_funcs({spec.mamba_type for spec in groups})
    return {kind: tuple(made[:1]) for kind, made in functions.items()}


def _bind(self: Any, state: Any, group_ids: list[int], kv_cache_config: Any) -> None:
    from dflash2_patches.gdn.align import Tables

    context = self.vllm_config.compilation_config.static_forward_context
    states = {name: context[name].kv_cache[1] for name in state.names}
    groups = {
        name: position
        for position, group in enumerate(group_ids)
        for name in kv_cache_config.kv_cache_groups[group].layer_names
    }
    tables = None
    if self._align_mode:
        made = self._mamba_ctx
        width = made.block_table_stride_req
        tables = Tables(made.block_table_ptrs, made.block_table_stride_req, width, made.block_size)
    state.bind(states, {name: context[name].A_log for name in state.names}, groups, tables)


def _verify_unfused(state: Any, **given: Any) -> tuple[Any, Any]:
    """In place of `fused_sigmoid_gating_delta_rule_update` with accepted counts: batches with prompts in them."""
    import torch

    q, k, v = given["q"][0], given["k"][0], given["v"][0]
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    out = torch.empty_like(v)
    recurrent = given["initial_state"]
    state.verify(
        state.by_parameter[given["A_log"].data_ptr()],
        mixed,
        given["a"],
        given["b"],
        (given["A_log"], given["dt_bias"], k.shape[-1] ** -0.5),
        recurrent,
        given["ssm_state_indices"][:, 0],
        given["cu_seqlens"],
        out,
        None,
    )
    return out[None], recurrent
