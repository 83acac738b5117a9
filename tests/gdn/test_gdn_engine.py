"""The patch at vLLM's own seams: the V2 runner's hybrid model state, its metadata and its block boundaries, on a CPU.

The runner is played: its order of calls and its request slots. The forward pass of a layer is the patched one for
verifications; a prompt writes a known state into the slot that the metadata names.
"""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dflash2_patches.gdn import reference
from dflash2_patches.gdn.engine import OneState, Shape, refused, widened, wish
from dflash2_patches.patches import gdn_one_state as patch
from gdn_cases import DIM, EPS, Layer, error

pytestmark = pytest.mark.engine

BLOCK, WIDTH, ROWS, DRAFTS = 6, 9, 3, 2
SHAPE = Shape(1, 2, DIM, DIM, torch.float32, torch.bfloat16, "silu")
TOLERANCE = 4e-3  # outputs are bf16


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as is read."""
    made = SimpleNamespace(
        num_speculative_tokens=DRAFTS,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        kv_transfer_config=None,
        cache_config=SimpleNamespace(mamba_cache_mode="align", mamba_block_size=BLOCK, use_kda_recoverssm=False),
    )
    for name, value in changes.items():
        owner = made
        *path, last = name.split("__")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return made


@pytest.mark.parametrize(
    ("changes", "capability", "shapes", "asked", "said"),
    [
        ({}, (9, 0), [SHAPE], "auto", None),
        ({}, (8, 6), [SHAPE], "on", None),
        ({}, (8, 6), [SHAPE], "auto", "capability 8.6"),
        ({}, (9, 0), [], "on", "no gated delta net"),
        ({}, (9, 0), [SHAPE, Shape(1, 4, DIM, DIM, torch.float32, torch.bfloat16, "silu")], "on", "differ in shape"),
        ({}, None, [SHAPE], "on", "no CUDA device"),
        ({"num_speculative_tokens": 0}, (9, 0), [SHAPE], "on", "no drafter"),
        ({"num_speculative_tokens": 16}, (9, 0), [SHAPE], "on", "17 tokens"),
        ({"parallel_config__pipeline_parallel_size": 2}, (9, 0), [SHAPE], "on", "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, (9, 0), [SHAPE], "on", "decode context"),
        ({"kv_transfer_config": object()}, (9, 0), [SHAPE], "on", "KV connector"),
        ({"cache_config__mamba_cache_mode": "all"}, (9, 0), [SHAPE], "on", "mamba cache mode"),
        ({}, (9, 0), [Shape(1, 2, 64, DIM, torch.float32, torch.bfloat16, "silu")], "on", "head sizes 64"),
        ({}, (9, 0), [Shape(1, 2, DIM, DIM, torch.float16, torch.bfloat16, "silu")], "on", "float16"),
        ({}, (9, 0), [Shape(1, 2, DIM, DIM, torch.bfloat16, torch.bfloat16, "silu")], "auto", "bfloat16"),
        ({}, (9, 0), [Shape(1, 2, DIM, DIM, torch.bfloat16, torch.bfloat16, "silu")], "on", None),
    ],
)
def test_what_stays_with_stock_says_why(
    changes: dict[str, Any], capability: tuple[int, int] | None, shapes: list[Shape], asked: str, said: str | None
) -> None:
    reason = refused(config(**changes), shapes, capability, asked, ("9.0",))
    assert reason is None if said is None else said in (reason or "")


def test_the_switch() -> None:
    assert (wish({"DFLASH2_GDN_ONE_STATE": "auto"}), wish({"DFLASH2_GDN_ONE_STATE": "1"})) == ("auto", "on")


def test_one_slot_stands_in_all_columns() -> None:
    slots = torch.arange(6, dtype=torch.int32).view(3, 2)
    assert widened(None, 4) is None
    assert widened(slots, 2) is slots
    assert torch.equal(widened(slots, 4), slots[:, :1].repeat(1, 4))  # type: ignore[arg-type]


class GatedLayer:
    """As much of vLLM's layer as the seams read; its seams are wrapped as those of the real class are."""

    def __init__(self, prefix: str, layer: Layer) -> None:
        self.prefix, self.layer = prefix, layer
        self.num_k_heads, self.num_v_heads, self.tp_size = *layer.heads, 1
        self.head_k_dim = self.head_v_dim = DIM
        self.A_log, self.dt_bias = layer.gates.A_log, layer.gates.dt_bias
        self.norm = SimpleNamespace(weight=layer.norm_weight, activation="silu")
        self.layer_norm_epsilon = EPS
        self.conv1d = SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16))
        self.kv_cache: tuple[torch.Tensor, ...] = ()

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.bfloat16, torch.float32

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
        from vllm.v1.kv_cache_interface import MambaSpec

        return MambaSpec(
            shapes=((3 + DRAFTS, 2), (2, DIM, DIM)),
            dtypes=(torch.float32, torch.float32),
            block_size=BLOCK,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align",
            num_speculative_blocks=vllm_config.num_speculative_tokens,
        )

    def _forward_core_decode_spec_post_conv_fused_norm(self, *args: Any) -> None:
        raise AssertionError("stock's kernel was called")


class Engine:
    """Two layers in two groups of blocks under the patched V2 model state, driven in the runner's order."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        import dflash2_patches.seam as seam
        from vllm.v1.attention.backends import gdn_attn
        from vllm.v1.worker import mamba_utils
        from vllm.v1.worker.gpu.model_states import mamba_hybrid

        self.hybrid = mamba_hybrid
        patch._change_model_state(mamba_hybrid)
        patch._change_block_boundaries(mamba_utils)
        patch._change_metadata(gdn_attn)
        module = ModuleType("layers")
        module.QwenGatedDeltaNetAttention = GatedLayer  # type: ignore[attr-defined]
        module.fused_sigmoid_gating_delta_rule_update = None  # type: ignore[attr-defined]
        self.unfused: dict[str, Any] = {}
        monkeypatch.setattr(seam, "_waiting", {})
        patch._change_layer(module)
        monkeypatch.setitem(__import__("sys").modules, patch._LAYER, module)
        monkeypatch.setattr(patch, "_capability", lambda device: (9, 0))
        monkeypatch.setattr(mamba_utils, "_TEMPORAL_TILES", 1)
        monkeypatch.setenv("DFLASH2_GDN_ONE_STATE", "on")

        self.dice = random.Random(seed)
        slots = 2 * ROWS * WIDTH + 1
        layers = [Layer.make(seed + i, (1, 2), slots=slots, query=DRAFTS + 1) for i in range(2)]
        layers[1].state = layers[0].state  # vLLM gives layers of different groups the same memory, in different blocks
        self.layers = [GatedLayer(str(i), layer) for i, layer in enumerate(layers)]
        for layer in self.layers:
            layer.kv_cache = (torch.zeros(slots, 3 + DRAFTS, 2), layer.layer.state)
        context = {layer.prefix: layer for layer in self.layers}
        self.config = config(compilation_config=SimpleNamespace(static_forward_context=context))
        self.config.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)
        patch._decide(self.config, ROWS, "cpu")
        self.one: OneState = patch.active()
        assert self.one is not None
        order = list(range(1, slots))
        self.dice.shuffle(order)
        self.tables = torch.tensor(order, dtype=torch.int32).view(2, ROWS, WIDTH)
        self.state = self._model_state()
        self.builders = [self._builder(gdn_attn, i) for i in range(2)]
        monkeypatch.setattr(mamba_hybrid, "build_attn_metadata", self._build)
        self.computed = torch.zeros(ROWS, dtype=torch.int32)
        self.truth: list[list[torch.Tensor]] = [[torch.empty(0)] * 2 for _ in range(ROWS)]
        self.prompts: dict[int, int] = {}
        self.verified = self.mixed = self.boundaries = 0

    def _model_state(self) -> Any:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        self.specs = [layer.get_kv_cache_spec(self.config) for layer in self.layers]
        assert [spec.num_speculative_blocks for spec in self.specs] == [0, 0]
        self.kv = KVCacheConfig(
            num_blocks=2 * ROWS * WIDTH + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(layer_names=[str(i)], kv_cache_spec=spec) for i, spec in enumerate(self.specs)
            ],
        )
        state = object.__new__(self.hybrid.MambaHybridModelState)
        copies = (get_conv_copy_spec, get_temporal_copy_spec)
        model = SimpleNamespace(get_mamba_state_copy_funcs=lambda kinds: dict.fromkeys(kinds, copies))
        given = {
            "vllm_config": self.config, "model": model, "device": torch.device("cpu"), "max_num_reqs": ROWS,
            "model_config": SimpleNamespace(max_model_len=WIDTH * BLOCK),
            "cache_config": self.config.cache_config, "recoverssm": None,
            "_align_mode": True, "_mamba_ctx": None, "_mamba_group_ids": [], "_mamba_spec": None,
            "_mamba_state_copy_funcs": None, "num_accepted_tokens_gpu": torch.ones(ROWS, dtype=torch.int32),
            "_mamba_state_idx_gpu": torch.zeros(ROWS, dtype=torch.int32),
            "_mamba_src_col_gpu": torch.full((ROWS,), -1, dtype=torch.int32),
            "_mamba_src_off_gpu": torch.zeros(ROWS, dtype=torch.int32),
        }  # fmt: skip
        vars(state).update(given)
        tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=table) for table in self.tables], input_block_tables=list(self.tables)
        )
        state.initialize_kv_cache(self.kv, tables)
        assert int(state._mamba_ctx.num_states) == 2  # windows only: the recurrent states are ours
        return state

    def _builder(self, gdn_attn: Any, i: int) -> Any:
        builder = object.__new__(gdn_attn.GDNAttentionMetadataBuilder)
        builder.kv_cache_spec, builder.vllm_config = self.specs[i], self.config
        builder.use_spec_decode, builder.num_spec = True, DRAFTS
        builder.use_full_cuda_graph, builder.gdn_prefill_backend = False, "triton"
        builder.checkpoint_builder = SimpleNamespace(build=lambda *given: None)
        builder._build_chunk_metadata = lambda *given: (None, None)
        return builder

    def _build(self, **given: Any) -> dict[str, Any]:
        """What vLLM's `build_attn_metadata` does with the two groups' builders."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        extra, built = given["model_specific_attn_metadata"], {}
        n = given["num_reqs"]
        for i, builder in enumerate(self.builders):
            common = CommonAttentionMetadata(
                query_start_loc=given["query_start_loc_gpu"],
                query_start_loc_cpu=given["query_start_loc_cpu"],
                seq_lens=given["seq_lens"],
                num_reqs=n,
                num_actual_tokens=given["num_tokens"],
                max_query_len=given["max_query_len"],
                max_seq_len=given["max_seq_len"],
                block_table_tensor=given["block_tables"][i],
                slot_mapping=torch.empty(0),
                seq_lens_cpu_upper_bound=given["seq_lens_cpu_upper_bound"],
                **extra.get_extra_common_attn_kwargs(i, n),
            )
            built[str(i)] = builder.build(0, common, **extra.get_extra_attn_kwargs(builder, n))
        return built

    def add(self, row: int, prompt: int) -> None:
        """A new or resumed request takes a slot."""
        self.state.num_accepted_tokens_gpu[row] = 1
        self.state._mamba_state_idx_gpu[row] = -1
        self.one.forget(row)
        self.computed[row] = 0
        self.prompts[row] = prompt

    def step(self, rows: list[int], dummy: bool = False) -> None:
        """One step of the runner over these slots; what isn't computed of a prompt is computed, others verify."""
        left = [max(self.prompts[row] - int(self.computed[row]), 0) for row in rows]
        prefills = np.array([n > 0 for n in left])
        lengths = [min(n, 7) if n else self.dice.randint(1, DRAFTS + 1) for n in left]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        index = torch.tensor(rows, dtype=torch.int32)
        seen = torch.tensor([int(self.computed[row]) + n for row, n in zip(rows, lengths, strict=True)])
        batch = SimpleNamespace(
            num_reqs=len(rows), num_tokens=int(starts[-1]), idx_mapping=index, idx_mapping_np=np.array(rows),
            query_start_loc=torch.from_numpy(starts), query_start_loc_np=starts, max_query_len=max(lengths),
            num_scheduled_tokens=np.array(lengths), seq_lens=seen.int(), seq_lens_cpu_upper_bound=seen.int(),
            is_prefilling_np=prefills, prefill_runs_as_decode_np=None, dcp_local_seq_lens=None, positions=None,
            prompt_lens=None, num_draft_tokens_per_req=np.where(prefills, 0, np.array(lengths) - 1),
        )  # fmt: skip
        inputs = tuple(table[index] for table in self.tables)
        if not dummy:
            self.state.preprocess_state(batch, inputs, self.kv, self.computed)
        from vllm.config.compilation import CUDAGraphMode

        built = self.state.prepare_attn(batch, CUDAGraphMode.NONE, inputs, None, [[], []], self.kv)
        if dummy:
            assert self.one.plan.rows.tolist() == [-1] * ROWS
            return
        queries = [self._forward(i, built[str(i)], rows, starts, prefills) for i in range(2)]
        kept = [1 if n else self.dice.randint(1, length) for n, length in zip(left, lengths, strict=True)]
        sampled = torch.tensor([int(n <= length) * k for n, length, k in zip(left, lengths, kept, strict=True)])
        for row, n, length, count in zip(rows, left, lengths, kept, strict=True):
            self.computed[row] += length if n else count
        self.state.postprocess_state(index, sampled.int(), self.computed)
        self._check(rows, prefills, kept, queries, starts)
        self.mixed += bool(prefills.any() and not prefills.all())

    def _forward(
        self, i: int, metadata: Any, rows: list[int], starts: np.ndarray, prefills: np.ndarray
    ) -> reference.Tokens:
        layer = self.layers[i]
        tokens = layer.layer.tokens(int(starts[-1]))
        state = layer.kv_cache[1]
        prompts = [n for n, prefill in enumerate(prefills) if prefill]
        for n, slot in zip(prompts, metadata.non_spec_state_indices_tensor if prompts else (), strict=False):
            # A prompt's kernel writes the state after its tokens.
            state[slot] = torch.randn(2, DIM, DIM, generator=layer.layer.generator) * 0.3
            self.truth[rows[n]][i] = state[slot].double()
        checks = [n for n, prefill in enumerate(prefills) if not prefill]
        if not checks:
            return tokens
        parts = [tokens.part(int(starts[n]), int(starts[n + 1])) for n in checks]
        mixed = torch.cat([torch.cat([x.flatten(1) for x in (p.q, p.k, p.v)], dim=1) for p in parts])
        a, b = torch.cat([p.a for p in parts]), torch.cat([p.b for p in parts])
        expected = torch.cat(
            [
                reference.decode(self.truth[rows[n]][i], p, layer.layer.gates, torch.float64)[0]
                for n, p in zip(checks, parts, strict=True)
            ]
        )
        assert metadata.spec_state_indices_tensor.shape[1] == DRAFTS + 1  # vLLM reads the longest query here
        if prompts:
            q, k, v = (torch.cat([getattr(p, name) for p in parts])[None] for name in ("q", "k", "v"))
            found, _ = patch._verify_unfused(
                self.one, q=q, k=k, v=v, a=a, b=b, A_log=layer.A_log, dt_bias=layer.dt_bias, initial_state=state,
                ssm_state_indices=metadata.spec_state_indices_tensor, cu_seqlens=metadata.spec_query_start_loc,
                num_accepted_tokens=metadata.num_accepted_tokens,
            )  # fmt: skip
            assert error(found[0], expected) < TOLERANCE
        else:
            gate, out = layer.layer.gate(len(mixed)), torch.full((len(mixed), 2, DIM), float("nan")).bfloat16()
            layer._forward_core_decode_spec_post_conv_fused_norm(
                mixed_qkv=mixed, b=b, a=a, output_gate=gate, core_attn_out=out, attn_metadata=metadata
            )
            wanted = reference.gated_norm(expected.float(), gate, layer.layer.norm_weight, EPS, "silu")
            assert error(out, wanted) < 2 * TOLERANCE
        self.verified += 1
        return tokens

    def _check(
        self,
        rows: list[int],
        prefills: np.ndarray,
        kept: list[int],
        queries: list[reference.Tokens],
        starts: np.ndarray,
    ) -> None:
        """States of accepted tokens, and those at block boundaries, which another request may start from."""
        for n, row in enumerate(rows):
            if prefills[n]:
                continue
            end = int(self.computed[row])
            boundary = end // BLOCK * BLOCK
            for i, layer in enumerate(self.layers):
                part = queries[i].part(int(starts[n]), int(starts[n + 1]))
                states = reference.decode(self.truth[row][i], part, layer.layer.gates, torch.float64)[2]
                self.truth[row][i] = states[kept[n] - 1]
                if boundary > end - kept[n]:
                    slot = self.tables[i, row, boundary // BLOCK - 1]
                    assert error(layer.kv_cache[1][slot], states[kept[n] - 1 - (end - boundary)]) < 5e-6
                    self.boundaries += 1


def test_requests_see_the_states_of_their_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(1000, monkeypatch)
    for row in range(ROWS):
        engine.add(row, engine.dice.randint(3, 12))
    for turn in range(6):
        rows = engine.dice.sample(range(ROWS), engine.dice.randint(2, ROWS))
        engine.step(rows)
        if turn == 3:  # finished or preempted: another request in that slot, its prompt beside verifications
            engine.add(rows[0], engine.dice.randint(3, 12))
        if turn % 3 == 0:  # an idle rank's dummy batch, or a warm-up: it must book nothing
            counts = engine.one.records.count.clone()
            engine.step(rows, dummy=True)
            assert torch.equal(counts, engine.one.records.count)
    assert min(engine.verified, engine.mixed, engine.boundaries) > 0


def test_a_request_that_leaves_verification_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(5, monkeypatch)
    for row in range(ROWS):
        engine.add(row, 3)
    engine.step([0, 1])
    engine.step([0, 1])
    engine.prompts[1] = int(engine.computed[1]) + 4  # more prompt for a running request, without a new request
    with pytest.raises(RuntimeError, match="slot 1 is computed as a prompt again"):
        engine.step([0, 1])


def test_without_the_switch_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(3, monkeypatch)
    monkeypatch.setattr(patch, "_active", [])
    layer = GatedLayer("0", Layer.make(1))
    assert layer.get_kv_cache_spec(config()).num_speculative_blocks == DRAFTS
    with pytest.raises(AssertionError, match="stock's kernel"):
        layer._forward_core_decode_spec_post_conv_fused_norm(None, None, None, None, None, None)
