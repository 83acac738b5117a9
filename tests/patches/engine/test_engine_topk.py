"""FlashInfer's top-k: found broken at the start, replaced by torch.topk."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """Make vLLM believe in CUDA and a FlashInfer whose top_k is the given function."""
    from dflash2_patches import status
    from dflash2_patches.patches import flashinfer_topk
    from vllm.model_executor.layers import logits_processor

    monkeypatch.setenv(status.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(logits_processor.current_platform, "is_cuda", lambda: True, raising=False)
    monkeypatch.setattr(logits_processor, "has_flashinfer", lambda: True)
    monkeypatch.setattr(flashinfer_topk, "_use", lambda top_k: lambda: top_k(None, 16, sorted=True, deterministic=True))
    logits_processor._flashinfer_topk.__wrapped__.cache_clear()
    logits_processor._flashinfer_topk.cache_clear()

    def install(top_k):
        module = ModuleType("flashinfer")
        module.top_k = top_k
        monkeypatch.setitem(sys.modules, "flashinfer", module)
        return logits_processor

    yield install
    logits_processor._flashinfer_topk.cache_clear()
    logits_processor._flashinfer_topk.__wrapped__.cache_clear()


def test_a_kernel_that_does_not_compile_is_replaced(flashinfer):
    import torch
    from dflash2_patches import status

    def broken(*args, **kwargs):
        raise RuntimeError("fatal error: curand.h: No such file or directory")

    module = flashinfer(broken)
    assert module._flashinfer_topk.__wrapped__() is broken  # the defect: upstream would use it
    assert module._flashinfer_topk() is None
    assert "curand.h" in status.read("topk_fallback")
    scores = torch.randn(3, 50)
    values, ids = module._topk(scores, 4)
    assert torch.equal(values, torch.topk(scores, 4).values)
    assert torch.equal(ids, torch.topk(scores, 4).indices)


def test_a_working_kernel_is_kept_and_tried_once(flashinfer):
    from dflash2_patches import status

    calls = []
    module = flashinfer(lambda *args, **kwargs: calls.append(kwargs))
    kept = module._flashinfer_topk()
    assert module._flashinfer_topk() is kept is not None
    assert calls == [{"sorted": True, "deterministic": True}]
    assert status.read("topk_fallback") is None


def test_the_trial_comes_with_the_drafter():
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    assert "flashinfer-topk" in DFlash2Speculator.load_draft_model._dflash2_patches
