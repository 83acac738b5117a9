"""What the plugin does in a CPU engine that doesn't interpret, and beside a GPU."""

from __future__ import annotations

import json


def test_the_backend_steps_aside(fresh):
    """Without TRITON_INTERPRET, vLLM runs as if the backend weren't installed, and PyTorch has no Triton."""
    out = fresh("""
        import logging
        logging.disable(logging.CRITICAL)
        from vllm.triton_utils import HAS_TRITON
        from torch.utils._triton import has_triton_package
        print(HAS_TRITON, has_triton_package())
    """)
    assert out.split() == ["False", "False"]


def test_the_backend_is_there_for_the_interpreter(fresh):
    out = fresh(
        """
        from triton.backends import backends
        from vllm.triton_utils import HAS_TRITON
        print(HAS_TRITON, backends["cpu"].driver.is_active())
        """,
        TRITON_INTERPRET="1",
    )
    assert out.split() == ["True", "True"]


def test_the_backend_is_inert_in_a_cuda_engine(fresh):
    """With vLLM's CUDA distribution the backend loads, is not active, and raises nothing, interpreter or not."""
    code = """
        from importlib import metadata
        real = metadata.version
        metadata.version = lambda name: "0.33.0" if name == "vllm" else real(name)
        import torch
        torch.cuda.is_available = lambda: {gpu}
        from triton.backends import backends
        print(backends["cpu"].driver.is_active())
    """
    assert fresh(code.format(gpu=True)).strip() == "False"
    assert fresh(code.format(gpu=True), TRITON_INTERPRET="1").strip() == "False"
    assert fresh(code.format(gpu=False)).strip() == "False"


def test_nothing_is_changed_in_a_cuda_engine(fresh):
    out = fresh(
        """
        from importlib import metadata
        real = metadata.version
        metadata.version = lambda name: "0.33.0" if name == "vllm" else real(name)
        import sys
        from dflash2_patches import cpu
        print(cpu.apply(), "vllm" in sys.modules, "torch" in sys.modules)
        """,
        TRITON_INTERPRET="1",
    )
    assert out.strip() == "[] False False"


def test_importing_the_entry_point_imports_nothing(fresh):
    out = fresh("""
        import sys
        import dflash2_patches.plugin
        print([name for name in ("torch", "triton", "vllm", "numpy", "yaml") if name in sys.modules])
    """)
    assert out.strip() == "[]"


def test_the_interpreter_without_triton_is_refused(fresh):
    out = fresh(
        """
        import vllm.triton_utils
        vllm.triton_utils.HAS_TRITON = False
        from dflash2_patches import cpu
        try:
            cpu.apply()
        except RuntimeError as error:
            print(error)
        """,
        TRITON_INTERPRET="1",
    )
    assert out.startswith("TRITON_INTERPRET=1 is set, but vLLM found no usable Triton")


def test_a_dflash2_drafter_without_the_interpreter_is_refused(fresh):
    out = fresh("""
        from dflash2_patches import cpu
        cpu.apply()
        from vllm.config import VllmConfig
        class Fake:
            def __init__(self, dflash2): self.dflash2 = dflash2
            def _is_dflash_candidate_draft(self): return self.dflash2
            def _get_v1_model_runner_unsupported_features(self): return []
        VllmConfig._validate_v1_model_runner(Fake(False))
        try:
            VllmConfig._validate_v1_model_runner(Fake(True))
        except ValueError as error:
            print(error)
    """)
    assert "start with TRITON_INTERPRET=1" in out


def test_without_a_compiler_nothing_is_compiled(fresh, tmp_path):
    code = """
        import os, torch
        from dflash2_patches import cpu
        ids = cpu.apply()
        from vllm.v1.sample.ops.logprobs import batched_count_greater_than
        x = torch.tensor([[0.1, 0.5, 0.9]])
        print(ids, batched_count_greater_than(x, torch.tensor([[0.4]])).tolist())
    """
    (tmp_path / "bin").mkdir()
    variables = {"PATH": str(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ids = ["cpu-v1-sampling", "cpu-require-interpreter", "cpu-context-k-norm", "cpu-no-compiler"]
    assert fresh(code, **variables).strip() == f"{ids} [2]"
    # And that is needed: without the plugin the same call ends in inductor's error.
    without = """
        import torch
        from vllm.v1.sample.ops.logprobs import batched_count_greater_than
        try:
            batched_count_greater_than(torch.tensor([[0.1, 0.5]]), torch.tensor([[0.4]]))
        except Exception as error:
            print(error)
    """
    assert "No working C++ compiler found" in fresh(without, **variables)


SAMPLING = """
    import json, torch
    torch.manual_seed(0)
    from dflash2_patches import cpu
    if {patched}:
        cpu.apply()
    from vllm.platforms import current_platform
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler as R
    # Memory that a wrong kernel would leave as it is.
    counts = torch.tensor([2, 5, 6], dtype=torch.int32)
    result = {{}}
    for name, dtype, values in (("temperature", torch.float32, [0.7, 0.0, 1.3]), ("top_k", torch.int32, [5, 0, 40])):
        x = torch.tensor(values, dtype=dtype)
        expanded = R.expand_batch_to_tokens(x, counts, 6, replace_from=0, replace_to=1)
        result[name] = [round(value, 4) for value in expanded.tolist()]
    print(json.dumps(result))
"""
EXPANDED = {"temperature": [0.7, 0.7, 1.0, 1.0, 1.0, 1.3], "top_k": [5, 5, 1, 1, 1, 40]}


def test_sampling_parameters_reach_the_draft_tokens(fresh):
    assert json.loads(fresh(SAMPLING.format(patched=True)).splitlines()[-1]) == EXPANDED


def test_upstream_still_loses_them(fresh):
    """When this fails, vLLM has fixed vllm#55005 and cpu/v1_sampling.py can go."""
    assert json.loads(fresh(SAMPLING.format(patched=False)).splitlines()[-1]) != EXPANDED


FREQUENCIES = """
    import json, torch
    torch.manual_seed(0)
    from dflash2_patches import cpu
    cpu.apply()
    from vllm.platforms import current_platform
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample.rejection_sampler import rejection_sample
    draws, vocabulary = 4000, 6
    target = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.07, 0.03])
    draft = torch.tensor([0.1, 0.3, 0.1, 0.3, 0.1, 0.1])
    tokens = torch.multinomial(draft, draws, replacement=True).to(torch.int32)
    from types import SimpleNamespace
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(draws), generators={}, top_k=None, top_p=None,
    )
    out = rejection_sample(
        tokens, [1] * draws, 1, torch.arange(1, draws + 1, dtype=torch.int32), draft.expand(draws, -1).contiguous(),
        target.log().expand(draws, -1).contiguous(), torch.zeros(draws, 1, dtype=torch.int32), metadata,
    )
    counts = torch.bincount(out[:, 0].long(), minlength=vocabulary)
    print(json.dumps([counts.tolist(), target.tolist(), draws]))
"""


def test_verified_samples_follow_the_target(fresh):
    counts, target, draws = json.loads(fresh(FREQUENCIES).splitlines()[-1])
    assert sum(counts) == draws
    # Chi-squared with 5 degrees of freedom: 20.5 is passed once in a thousand runs, and the seed is fixed.
    chi2 = sum((count - draws * p) ** 2 / (draws * p) for count, p in zip(counts, target, strict=True))
    assert chi2 < 20.5, counts


def test_a_step_without_rows_samples_nothing(fresh):
    out = fresh("""
        import torch
        from dflash2_patches import cpu
        cpu.apply()
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        print(apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), None).shape)
    """)
    assert "torch.Size([0, 8])" in out
