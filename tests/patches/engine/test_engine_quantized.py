"""Quantized drafters: names, fused modules, and the context K/V projection."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def compressed(ignore, targets=("Linear",)):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": list(targets), "weights": weights}},
            "ignore": list(ignore),
        }
    )


@pytest.fixture
def names():
    """Upstream's mapping and ours, both as `f(config)` for five draft layers after 64 of the target."""
    from vllm.model_executor.models import qwen3_dflash as module

    function = getattr(module, "map_draft_quant_config", None)
    if function is not None:
        args = (module.DFlashQwen3Model.hf_to_vllm_mapper, "model", 64, 5)
    else:
        function, args = module._add_global_draft_layer_exclusions, (64, 5)
    return (lambda config: function.__wrapped__(config, *args)), (lambda config: function(config, *args))


def fused(config):
    from dflash2_patches.patches.draft_quant_names import add_fused_modules

    return add_fused_modules(config)


LAYER = "model.layers.64.self_attn.qkv_proj"
SHARDS = [f"layers.0.self_attn.{p}_proj" for p in "qkv"]


def linear():
    import torch

    return torch.nn.Linear(8, 8)


def test_compressed_tensors_exclusions_reach_fused_layers(names):
    upstream, ours = names
    before = compressed(SHARDS)
    upstream(before)
    assert before.get_scheme_dict(linear(), LAYER) is not None  # the defect: an excluded layer has a scheme
    after = fused(compressed(SHARDS))
    ours(after)
    assert after.get_scheme_dict(linear(), LAYER) is None
    assert after.get_scheme_dict(linear(), "model.layers.65.self_attn.qkv_proj") is not None


@pytest.mark.parametrize(
    "name", ["fc", "layers.0.mlp.down_proj", r"re:.*layers\.0\.mlp\.down_proj", r"re:layers\.0\.mlp.*"]
)
def test_compressed_tensors_exclusions_of_single_modules(names, name):
    module = "model.fc" if name == "fc" else "model.layers.64.mlp.down_proj"
    config = fused(compressed([name]))
    names[1](config)
    assert config.get_scheme_dict(linear(), module) is None
    assert config.get_scheme_dict(linear(), "model.layers.66.mlp.down_proj") is not None


def test_partly_excluded_shards_are_an_error_not_a_guess(names):
    config = fused(compressed(SHARDS[:1]))
    names[1](config)
    with pytest.raises(ValueError, match="use the same scheme"):
        config.get_scheme_dict(linear(), LAYER)


def test_fp8_exclusions_reach_fused_layers(names):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    def skipped(config, prefix):
        return is_layer_skipped(
            prefix=prefix, ignored_layers=config.ignored_layers, fused_mapping=config.packed_modules_mapping
        )

    def config():
        return Fp8Config(ignored_layers=[*SHARDS, "fc", "lm_head"])

    upstream, ours = names
    before, after = config(), fused(config())
    upstream(before)
    ours(after)
    assert not skipped(before, LAYER)  # the defect
    assert skipped(after, LAYER)
    assert skipped(after, "model.fc")
    assert skipped(after, "lm_head")
    assert not skipped(after, "model.layers.65.self_attn.qkv_proj")


def inc(**extra):
    from vllm.model_executor.layers.quantization.inc.inc import INCConfig

    return INCConfig.from_config(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
        }
        | extra
    )


def test_inc_blocks_and_exceptions_reach_the_drafters_layers(names):
    def bits(config, name):
        return config.get_layer_config(linear(), name)[0]

    def config():
        return inc(
            block_name_to_quantize=["layers"],
            extra_config={"layers.1.mlp.down_proj": {"bits": 16}, **{name: {"bits": 16} for name in SHARDS}},
        )

    upstream, ours = names
    before, after = config(), fused(config())
    upstream(before)
    ours(after)
    assert bits(before, "model.layers.66.mlp.down_proj") == 16  # the defect: no layer counts as quantized
    assert bits(after, "model.layers.66.mlp.down_proj") == 4
    assert bits(after, "model.layers.65.mlp.down_proj") == 16
    assert bits(after, LAYER) == 16
    assert bits(after, "model.layers.65.self_attn.qkv_proj") == 4


def test_the_drafter_asks_for_the_fused_modules():
    from vllm.model_executor.models import qwen3_dflash as module

    held = compressed([])
    assert not held.packed_modules_mapping  # the defect: nobody sets it for a drafter
    get = module.get_draft_quant_config
    assert fused(held).packed_modules_mapping["gate_up_proj"] == ["gate_proj", "up_proj"]
    assert "draft-quant-names" in get._dflash2_patches


class Packed:
    """A quantization method whose `.weight` is packed (8 bits, transposed): only `apply` knows what it means."""

    def __init__(self, bits=8, clip=None):
        self.levels, self.clip = 2 ** (bits - 1) - 1, clip

    def pack(self, layer, weight):
        layer.scale = weight.abs().amax(dim=1, keepdim=True) / self.levels
        layer.weight = (weight / layer.scale).round().to(dtype=__import__("torch").int8).t().contiguous()

    def apply(self, layer, x, bias=None):
        import torch

        if self.clip is not None:  # a static activation scale that saturates
            x = x.clamp(-self.clip, self.clip)
        weight = layer.weight.t().to(x.dtype) * layer.scale.to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)


@pytest.fixture
def drafter(monkeypatch):
    """A drafter model with three packed QKV projections: `drafter(bias=..., method=...)`."""
    import torch
    from vllm.model_executor.models import qwen3_dflash
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def rms_norm(out, x, weight, eps):
        out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps))

    # In PyTorch, so that the test also runs on the sources of a release that isn't built for the CPU.
    monkeypatch.setattr(qwen3_dflash, "ops", SimpleNamespace(rms_norm=rms_norm))
    hidden, heads, kv_heads, head, layers = 64, 4, 2, 16, 3

    def make(bias=False, method=None, dtype=torch.float32):
        torch.manual_seed(0)
        method = method or Packed()
        attention = []
        for _ in range(layers):
            projection = torch.nn.Module()
            projection.quant_method = method
            method.pack(projection, torch.randn((heads + 2 * kv_heads) * head, hidden, dtype=dtype) * hidden**-0.5)
            projection.bias = torch.randn((heads + 2 * kv_heads) * head, dtype=dtype) if bias else None
            projection.forward = lambda x, p=projection: (p.quant_method.apply(p, x, p.bias), None)
            norm = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(head, dtype=dtype)))
            attention.append(SimpleNamespace(qkv_proj=projection, q_size=heads * head, k_norm=norm))
        model = DFlashQwen3Model.__new__(DFlashQwen3Model)
        torch.nn.Module.__init__(model)
        model.hidden_norm = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(hidden, dtype=dtype)))
        model._rms_norm_eps = 1e-6
        model._build_context_kv_buffers(attention, bias)
        states = torch.randn(11, hidden, dtype=dtype)
        return model, attention, lambda project: project(model, states, 11, layers, kv_heads, head)

    return make


def projections():
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    patched = DFlashQwen3Model._project_context_kv
    return patched.__wrapped__, patched


@pytest.mark.parametrize("bias", [False, True])
def test_one_gemm_gives_what_the_loop_gives(drafter, bias):
    import torch

    upstream, patched = projections()
    model, attention, run = drafter(bias=bias)
    assert attention[0].qkv_proj.weight.dtype == torch.int8
    expected = run(upstream)
    assert model._fused_kv_weight is None
    calls = []
    for held in attention:
        held.qkv_proj.forward = lambda x: calls.append(1)
    found = run(patched)
    assert calls == []  # the whole-QKV projections no longer run
    assert model._fused_kv_weight.shape == (3 * 2 * 2 * 16, 64)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_format_that_clips_the_identity_keeps_the_loop(drafter):
    import torch

    upstream, patched = projections()
    model, _, run = drafter(method=Packed(clip=0.4))
    expected, found = run(upstream), run(patched)
    assert model._fused_kv_weight is None
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_unquantized_drafter_is_untouched(drafter):
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Plain(UnquantizedLinearMethod):
        def pack(self, layer, weight):
            layer.weight = weight

        def apply(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, layer.weight, bias)

    upstream, patched = projections()
    model, _, run = drafter(method=Plain())
    weight = model._fused_kv_weight
    assert weight is not None
    expected, found = run(upstream), run(patched)
    assert model._fused_kv_weight is weight
    assert not hasattr(model, "_dflash2_fuse_tried")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
