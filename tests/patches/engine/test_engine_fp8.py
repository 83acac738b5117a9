"""Draft-only fp8 weights: rows, products, candidates, and a converted drafter, against plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture
def matrix():
    """`matrix(rows, columns, dtype)`: normally distributed, with rows of different size."""
    import torch

    torch.manual_seed(0)

    def make(rows, columns, dtype=torch.bfloat16):
        size = torch.logspace(-2, 2, rows)[:, None]
        return (torch.randn(rows, columns) * size * columns**-0.5).to(dtype)

    return make


def test_rows_keep_their_values_within_the_format(matrix):
    import torch
    from dflash2_patches.fp8 import rows

    weight = matrix(96, 200)
    weight[5] = 0
    values, scales = rows.quantize_rows(weight)
    assert values.dtype == torch.float8_e4m3fn
    again = rows.dequantize_rows(values, scales, torch.float32)
    allowed = torch.maximum(weight.float().abs() / 16, weight.float().abs().amax(1, keepdim=True) / 229376)
    assert ((again - weight.float()).abs() <= allowed * 1.001 + 1e-12).all()
    assert (again[5] == 0).all()


def test_quantizing_in_chunks_changes_nothing(matrix, monkeypatch):
    import torch
    from dflash2_patches.fp8 import rows

    weight = matrix(50, 64)
    whole = rows.quantize_rows(weight)
    monkeypatch.setattr(rows, "_CHUNK", 64 * 7)
    for a, b in zip(whole, rows.quantize_rows(weight), strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("shape", [(7, 128, 256, 1), (33, 192, 512, 2), (16, 64, 1280, 4), (5, 96, 200, 3)])
@pytest.mark.parametrize("a16", [True, False])
def test_the_kernel_multiplies_as_the_reference(matrix, shape, a16):
    # float16, because the interpreter widens e4m3 to bfloat16 wrongly; with a16=False it also rounds to e4m3 towards
    # zero, so twice a GPU's error is allowed.
    import torch
    from dflash2_patches.fp8 import gemm, rows

    tokens, num_rows, columns, split = shape
    values, scales = rows.quantize_rows(matrix(num_rows, columns, torch.float16))
    x = torch.randn(tokens, columns).to(torch.float16)
    expected = x.double() @ rows.dequantize_rows(values, scales, torch.float64).t()
    launch = gemm.Tile(16, 64, 128, split, 4, 2)
    found = [gemm.rows_product(x, values, scales, a16, launch) for _ in range(2)]
    assert relative(found[0], expected) < (1e-3 if a16 else 0.08)
    assert torch.equal(found[0], found[1])  # the second launch finds its counters at zero
    assert not gemm.arrivals(x.device).any()


def test_nan_stays_visible(matrix):
    import torch
    from dflash2_patches.fp8 import gemm, rows

    values, scales = rows.quantize_rows(matrix(64, 128, torch.float16))
    x = torch.randn(4, 128).to(torch.float16)
    x[2, 3] = float("nan")
    out = gemm.rows_product(x, values, scales, True, gemm.Tile(16, 64, 128, 1, 4, 2))
    assert out[2].isnan().all()
    assert not out[[0, 1, 3]].isnan().any()


def test_the_operator_is_opaque_and_has_a_shape(matrix):
    import torch
    from dflash2_patches.fp8 import gemm

    packed = gemm.pack(matrix(128, 256, torch.float16), "triton")
    x = torch.randn(3, 2, 256).to(torch.float16)
    out = gemm.multiply(packed, x, torch.ones(128, dtype=torch.float16))
    assert out.shape == (3, 2, 128)
    assert relative(out - 1, gemm.rows.product(x.view(6, 256), packed.weight, packed.scale).view(3, 2, 128)) < 2e-3
    fake = torch.ops.vllm.dflash2_fp8_rows(
        x.view(6, 256).to("meta"), packed.weight.to("meta"), packed.scale.to("meta"), True
    )
    assert fake.shape == (6, 128)
    assert fake.dtype == torch.float16


@pytest.mark.parametrize("form", ["plain", "triton", "triton8"])
def test_a_layers_product_is_one_graph_for_any_number_of_tokens(matrix, form):
    import torch
    from dflash2_patches.fp8 import body, gemm
    from vllm.model_executor.layers.linear import LinearMethodBase

    packed = gemm.pack(matrix(128, 256, torch.float16), form)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(packed.weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(packed.scale, requires_grad=False)
    method, graphs = body.fp8_method(LinearMethodBase)(packed), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def forward(x):
        return method.apply(layer, x, None).relu()

    compiled = torch.compile(forward, backend=keep, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 5):
            x = torch.randn(tokens, 256).to(torch.float16)
            assert torch.equal(compiled(x), forward(x))
    assert len(graphs) == 1


@pytest.fixture
def scaled(monkeypatch):
    """VLLM's two functions in PyTorch, with 9.0's table in force; `scaled` holds the rows of each product."""
    import torch
    from dflash2_patches.fp8 import choice, gemm
    from vllm import _custom_ops as ops

    multiplied, original = [], choice.padded

    def quant(x, num_token_padding=None, use_per_token_if_dynamic=False):
        assert use_per_token_if_dynamic
        rows = max(num_token_padding or 0, x.shape[0])
        values = torch.full((rows, x.shape[1]), float("nan")).to(torch.float8_e4m3fn)
        scales = torch.full((rows, 1), float("nan"))
        values[: x.shape[0]], held = gemm.rows.quantize_rows(x)
        scales[: x.shape[0]] = held[:, None]
        return values, scales

    def product(a, b, scale_a, scale_b, out_dtype, bias):
        multiplied.append(a.shape[0])
        return ((a.float() @ b.float()) * scale_a * scale_b.t()).to(out_dtype)

    monkeypatch.setattr(ops, "scaled_fp8_quant", quant)
    monkeypatch.setattr(ops, "cutlass_scaled_mm", product)
    monkeypatch.setattr(gemm.choice, "padded", lambda form, rows, capability: original(form, rows, (9, 0)))
    return multiplied


def test_the_scaled_product_pads_and_shows_no_row_of_it(matrix, scaled):
    import torch
    from dflash2_patches.fp8 import gemm

    packed = gemm.pack(matrix(128, 256), "cutlass")
    for tokens in (1, 16, 17, 63, 64, 100):
        x = torch.randn(tokens, 256).to(torch.bfloat16)
        found = gemm.multiply(packed, x)
        assert found.shape == (tokens, 128)
        assert found.is_contiguous()
        assert relative(found, gemm.rows.product(x, packed.weight, packed.scale)) < 0.045
    assert scaled == [1, 16, 64, 64, 64, 100]
    assert gemm.multiply(packed, torch.empty(0, 256, dtype=torch.bfloat16)).shape == (0, 128)


def test_one_graph_pads_each_number_of_tokens_by_itself(matrix, scaled):
    import torch
    from dflash2_patches.fp8 import gemm

    packed, graphs = gemm.pack(matrix(128, 256), "cutlass"), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: gemm.multiply(packed, x).relu(), backend=keep, fullgraph=True, dynamic=True)
    inputs = [torch.randn(tokens, 256).to(torch.bfloat16) for tokens in (8, 32, 200)]
    with torch.no_grad():
        found = [compiled(x) for x in inputs]
    assert scaled == [8, 64, 200]
    assert len(graphs) == 1
    assert all(torch.equal(out, gemm.multiply(packed, x).relu()) for out, x in zip(found, inputs, strict=True))


@pytest.mark.parametrize("columns", [512, 300])
def test_the_short_list_is_scored_as_the_head_scores(matrix, columns):
    import torch
    from dflash2_patches.fp8 import head
    from dflash2_patches.fp8.kernels import shortlist_kernel

    weight, x = matrix(500, columns), torch.randn(5, columns).to(torch.bfloat16)
    listed = torch.stack([torch.randperm(500)[:32] for _ in range(5)]).int()
    weight[listed[1, 4]] = weight[listed[1, 9]]  # equal scores keep the list's order
    expected_ids, expected = head.exact_reference(x, weight, listed, 16, 1000)
    ids, values = torch.empty(5, 16, dtype=torch.int64), torch.empty(5, 16)
    shapes = {"K": columns, "LISTED": 32, "TOP": 16, "BK": 256}
    shortlist_kernel[(5,)](x, weight, listed, ids, values, x.stride(0), 1000, 500, **shapes)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected)
    # Ids that a top-k of NaN left are read inside the head, and NaN stays visible.
    listed[2, 7], listed[3, 1], x[4, 9] = 2**30, -5, float("nan")
    shortlist_kernel[(5,)](x, weight, listed, ids, values, x.stride(0), 0, 500, **shapes)
    assert ((ids >= 0) & (ids < 500)).all()
    assert values[4].isnan().all()
    assert not values[:4].isnan().any()


@pytest.fixture
def drafter(matrix, monkeypatch):
    """The parts of a drafter that compute candidates: vLLM's own code, a head of 320 rows, 4 of them padding."""
    import torch
    from dflash2_patches.fp8 import gemm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

    class Plain(UnquantizedEmbeddingMethod):
        def apply(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, layer.weight, bias)

    Plain.__name__ = "UnquantizedEmbeddingMethod"
    monkeypatch.setenv(gemm.FORM, "plain")

    def make(scale=1.0, soft_cap=None):
        head = torch.nn.Module()
        head.weight = torch.nn.Parameter(matrix(320, 64).roll(17, 0), requires_grad=False)
        head.quant_method, head.tp_size = Plain(), 1
        head.shard_indices = SimpleNamespace(num_org_vocab_padding=4, org_vocab_start_index=0)
        processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        processor.scale, processor.soft_cap, processor.head_dtype = scale, soft_cap, None
        model = DFlash2Qwen3ForCausalLM.__new__(DFlash2Qwen3ForCausalLM)
        torch.nn.Module.__init__(model)
        model.lm_head, model.candidate_logits_processor = head, processor
        model.model = SimpleNamespace(candidate_selector=SimpleNamespace(top_k=16))
        return model

    return make


@pytest.fixture
def in_force():
    """The hooks of both patches on this process's vLLM: they are off in it, as by default."""
    from dflash2_patches.patches import fp8_draft_body, fp8_draft_head
    from vllm.model_executor.models import qwen3_dflash, qwen3_dflash2

    originals = qwen3_dflash2.DFlash2Qwen3ForCausalLM.compute_candidates, qwen3_dflash.DFlashQwen3Model
    projects = originals[1]._project_context_kv
    fp8_draft_head._candidates(qwen3_dflash2)
    fp8_draft_body._context(qwen3_dflash)
    yield SimpleNamespace(candidates=originals[0], project=projects)
    qwen3_dflash2.DFlash2Qwen3ForCausalLM.compute_candidates = originals[0]
    qwen3_dflash.DFlashQwen3Model._project_context_kv = projects


@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.5, 30.0)])
def test_candidates_with_a_short_list_are_stocks(drafter, in_force, scale, soft_cap):
    import torch
    from dflash2_patches.patches import fp8_draft_head

    model, hidden = drafter(scale, soft_cap), torch.randn(21, 64).to(torch.bfloat16)
    expected_ids, expected = in_force.candidates(model, hidden)
    said = fp8_draft_head.attach(model)
    assert "fp8 copy of the LM head (plain, " in said
    assert "the best 32 scored exactly" in said
    calls = []
    model.lm_head.quant_method.apply = lambda *args, **kwargs: calls.append(1)
    ids, values = model.compute_candidates(hidden)
    assert calls == []  # the shared head's product no longer runs
    assert ids.dtype == torch.int64
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)
    # Among equal scores at the list's end, which candidates stay is open in stock too.
    for row in range(21):
        certain = expected[row] > expected[row, -1]
        assert set(ids[row, certain].tolist()) == set(expected_ids[row, certain].tolist())
    assert (ids < 316).all()


def test_candidates_without_a_short_list_are_the_copys(drafter, in_force, monkeypatch):
    import torch
    from dflash2_patches.fp8 import rows
    from dflash2_patches.patches import fp8_draft_head

    monkeypatch.setenv(fp8_draft_head.SHORTLIST, "0")
    model, hidden = drafter(), torch.randn(21, 64).to(torch.bfloat16)
    assert "scores of the copy" in fp8_draft_head.attach(model)
    ids, values = model.compute_candidates(hidden)
    logits = rows.product(hidden, *rows.quantize_rows(model.lm_head.weight.data))
    assert torch.equal(values, logits[:, :316].float().topk(16)[0])
    assert (ids < 316).all()
    stock, _ = in_force.candidates(model, hidden)
    shared = sum(len(set(a) & set(b)) for a, b in zip(ids.tolist(), stock.tolist(), strict=True))
    assert 0.9 * ids.numel() < shared


def test_more_rows_than_the_copy_wins_at_go_to_the_shared_head(drafter, in_force, monkeypatch):
    import torch
    from dflash2_patches.fp8 import choice
    from dflash2_patches.patches import fp8_draft_head

    monkeypatch.setitem(choice.table().head_rows, "plain", 6)
    model, calls = drafter(), []
    assert "up to 6 rows" in fp8_draft_head.attach(model)
    apply = model.lm_head.quant_method.apply
    model.lm_head.quant_method.apply = lambda *args, **kwargs: calls.append(1) or apply(*args, **kwargs)
    for rows, shared in ((6, 0), (7, 1)):
        hidden = torch.randn(rows, 64).to(torch.bfloat16)
        ids, values = model.compute_candidates(hidden)
        assert len(calls) == shared
        assert torch.equal(values, in_force.candidates(model, hidden)[1])
        assert ids.shape == (rows, 16)
        calls.clear()


def test_a_head_that_cannot_have_a_copy_is_left_alone(drafter, in_force, monkeypatch):
    import torch
    from dflash2_patches.patches import fp8_draft_head

    def said(change):
        model = drafter()
        change(model)
        text = fp8_draft_head.attach(model)
        assert "_dflash2_head" not in model.__dict__
        assert text.startswith("candidates come from the shared LM head: ")
        return text

    def quantized(model):
        model.lm_head.quant_method = SimpleNamespace(apply=None)

    assert "quantized already" in said(quantized)
    assert "float32, not bfloat16" in said(lambda m: m.lm_head.float())
    assert "evaluated in float32" in said(lambda m: setattr(m.candidate_logits_processor, "head_dtype", torch.float32))
    assert "bias" in said(lambda m: setattr(m.lm_head, "bias", torch.zeros(1)))
    monkeypatch.setenv("DFLASH2_FP8_DRAFT_HEAD_SHORTLIST", "24")
    assert "power of two" in said(lambda m: None)
    monkeypatch.setenv("DFLASH2_FP8_DRAFT_HEAD_SHORTLIST", "32")
    monkeypatch.delenv("DFLASH2_FP8_GEMM")
    assert "no fp8 product for (320, 64) on this device" in said(lambda m: None)
    model, hidden = drafter(), torch.randn(3, 64).to(torch.bfloat16)
    for ours, stock in zip(model.compute_candidates(hidden), in_force.candidates(model, hidden), strict=True):
        assert torch.equal(ours, stock)


@pytest.fixture
def body(matrix, monkeypatch):
    """A drafter model of vLLM's class with two layers, and its context states."""
    import torch
    from dflash2_patches.fp8 import gemm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.models import qwen3_dflash

    def rms_norm(out, x, weight, eps):
        out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps))

    monkeypatch.setattr(qwen3_dflash, "ops", SimpleNamespace(rms_norm=rms_norm))
    monkeypatch.setattr(
        UnquantizedLinearMethod,
        "apply",
        lambda self, layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias),
    )
    monkeypatch.setenv(gemm.FORM, "plain")
    hidden, heads, kv_heads, size, layers = 64, 4, 2, 16, 2

    class Linear(LinearBase):
        def __init__(self, rows, columns):
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(matrix(rows, columns), requires_grad=False)
            self.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
            self.bias = None

        def forward(self, x):
            return self.quant_method.apply(self, x, self.bias), None

    def make():
        model = qwen3_dflash.DFlashQwen3Model.__new__(qwen3_dflash.DFlashQwen3Model)
        torch.nn.Module.__init__(model)
        model.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer, attention = torch.nn.Module(), torch.nn.Module()
            attention.qkv_proj, attention.q_size = Linear((heads + 2 * kv_heads) * size, hidden), heads * size
            attention.k_norm = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(size)))
            layer.self_attn, layer.down_proj = attention, Linear(hidden, 128)
            model.layers.append(layer)
        model.fc, model.candidate_selector = Linear(hidden, 5 * hidden), torch.nn.Module()
        model.candidate_selector.hidden_projection = Linear(8, hidden)
        model.hidden_norm = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16)))
        model._rms_norm_eps = 1e-6

        def build():
            model._build_context_kv_buffers([layer.self_attn for layer in model.layers], False)
            model._num_attn_layers = layers

        model._build_fused_kv_buffers = build
        return model

    states = torch.randn(11, hidden).to(torch.bfloat16)
    return make, lambda project, model: project(model, states, 11, layers, kv_heads, size)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_drafter_is_converted_and_computes_nearly_the_same(body, in_force, loaded):
    import torch
    from dflash2_patches.patches import fp8_draft_body

    make, run = body
    model = make()
    model._build_fused_kv_buffers()
    expected = run(in_force.project, model)
    x = torch.randn(3, 64).to(torch.bfloat16)
    stock = model.layers[0].self_attn.qkv_proj(x)[0]
    kept = model.candidate_selector.hidden_projection.weight
    if not loaded:  # dummy weights: no loader has built the context's buffers
        del model._num_attn_layers, model._fused_kv_weight
    said = fp8_draft_body.convert(SimpleNamespace(model=model))
    assert said.startswith("6 matrices in fp8 (6 by plain)")
    assert "stay as they are" not in said
    assert model.fc.weight.dtype == model._fused_kv_weight.dtype == torch.float8_e4m3fn
    assert model.candidate_selector.hidden_projection.weight is kept
    assert 0 < relative(model.layers[0].self_attn.qkv_proj(x)[0], stock) < 0.05
    found = run(type(model)._project_context_kv, model)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.is_contiguous()
        assert 0 < relative(ours, theirs) < 0.05


def test_what_is_faster_in_bf16_stays_unless_a_product_is_asked_for(body, monkeypatch):
    from dflash2_patches.fp8 import gemm
    from dflash2_patches.patches import fp8_draft_body

    for asked in (False, True):
        model = body[0]()
        model._build_fused_kv_buffers()
        convolution = type(model.fc)(64, 64)
        model.layers[1].mlp_conv = type(model.layers[1])()
        model.layers[1].mlp_conv.kernel_projection = convolution
        kept = convolution.weight
        if not asked:
            monkeypatch.delenv(gemm.FORM)
            monkeypatch.setattr(gemm, "choose", lambda *args: "plain")
        else:
            monkeypatch.setenv(gemm.FORM, "plain")
        said = fp8_draft_body.convert(SimpleNamespace(model=model))
        assert (convolution.weight is kept) == (not asked)
        assert ("1 stay as they are (layers.1.mlp_conv.kernel_projection: faster in" in said) == (not asked)


def test_a_quantized_drafter_keeps_its_own_weights(body):
    import torch
    from dflash2_patches.patches import fp8_draft_body

    make, _ = body
    model = make()
    model._build_fused_kv_buffers()
    del model.fc
    for layer in model.layers:
        layer.self_attn.qkv_proj.quant_method = SimpleNamespace(apply=torch.nn.functional.linear)
        layer.down_proj.float()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    model._fused_kv_weight = model._fused_kv_weight.float()
    said = fp8_draft_body.convert(SimpleNamespace(model=model))
    assert said.startswith("0 matrices in fp8 (none)")
    assert "5 stay as they are (layers.0.self_attn.qkv_proj: quantized already (SimpleNamespace))" in said
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert not hasattr(model, "_dflash2_context")


@pytest.mark.parametrize("fault", ["raises", "wrong", "nan"])
def test_a_product_that_does_not_work_here_leaves_everything_as_it_is(body, drafter, fault, monkeypatch):
    import dataclasses

    from dflash2_patches.fp8 import gemm, rows
    from dflash2_patches.patches import fp8_draft_body, fp8_draft_head

    def product(x, weight, scale, num_rows, num_columns):
        if fault == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        return rows.product(x, weight, scale) * (1.1 if fault == "wrong" else float("nan"))

    says = "RuntimeError: no kernel image" if fault == "raises" else "its relative error is"
    monkeypatch.setitem(gemm.FORMS, "plain", dataclasses.replace(gemm.FORMS["plain"], product=product))
    gemm.trial.cache_clear()
    try:
        model, heads = body[0](), drafter()
        weights = {name: p.data_ptr() for name, p in model.named_parameters()}
        said = fp8_draft_body.convert(SimpleNamespace(model=model))
        assert said.startswith(f"its own weights: the product plain doesn't work here ({says}")
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights
        assert f"the product plain doesn't work here ({says}" in fp8_draft_head.attach(heads)
        assert "_dflash2_head" not in heads.__dict__
    finally:
        gemm.trial.cache_clear()


def test_another_kind_of_drafter_is_left_alone():
    from dflash2_patches.patches import fp8_draft_body, fp8_draft_head

    other = SimpleNamespace(model=SimpleNamespace())
    assert "built in another way" in fp8_draft_body.convert(other)
    assert "has its own way" in fp8_draft_head.attach(other)


def test_compiled_graphs_have_a_key_of_their_own(configure, monkeypatch):
    from dflash2_patches.fp8 import gemm
    from dflash2_patches.patches import fp8_draft_body
    from vllm.config import vllm as module

    config = configure(k=7)
    original = module.VllmConfig.compute_hash
    stock = config.compute_hash()
    try:
        fp8_draft_body._compile_key(module)
        monkeypatch.delenv(gemm.FORM, raising=False)
        ours = config.compute_hash()
        assert ours == config.compute_hash()
        monkeypatch.setenv(gemm.FORM, "triton")
        assert len({stock, ours, config.compute_hash()}) == 3
    finally:
        module.VllmConfig.compute_hash = original


@pytest.mark.parametrize("patch", ["fp8_draft_head", "fp8_draft_body"])
def test_the_conversion_comes_with_the_drafter(patch, monkeypatch):
    import importlib

    from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator

    module = importlib.import_module(f"dflash2_patches.patches.{patch}")
    made, done = SimpleNamespace(), []
    monkeypatch.setattr(
        module, "attach" if patch == "fp8_draft_head" else "convert", lambda m: done.append(m) or "done"
    )
    fake = SimpleNamespace(DFlash2Speculator=type("Speculator", (), {"load_draft_model": lambda self, *a: made}))
    module._load(fake)
    assert fake.DFlash2Speculator().load_draft_model("target", set()) is made
    assert done == [made]
    assert hasattr(speculator.DFlash2Speculator, "load_draft_model")
