"""Try FlashInfer's top-k at the start, and do without it where it fails (record `flashinfer-topk`)."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches import status
from dflash2_patches.seam import when_imported, wrap

ID = "flashinfer-topk"
SECONDS = "DFLASH2_TOPK_TRIAL_SECONDS"
_LOGITS = "vllm.model_executor.layers.logits_processor"


def apply() -> None:
    """Wrap the choice of the top-k, and make it right after the drafter is loaded: before any capture."""
    when_imported(_LOGITS, _choose)
    when_imported("vllm.v1.worker.gpu.spec_decode.dflash2.speculator", _trigger)


def trial(call: Callable[[], Any], seconds: float) -> str:
    """Why `call` can't be used: its error, or that it didn't return in time. Empty when it works.

    It runs in a thread of its own: a compilation that waits for a lock forever must not hold the start.
    """
    failures: list[str] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            failures.append(f"{type(error).__name__}: {text}")

    thread = threading.Thread(target=run, name="dflash2-topk-trial", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"no result within {seconds:g} s"
    return failures[0] if failures else ""


def _choose(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def flashinfer_topk() -> Any:
            top_k = original()
            if top_k is None:
                return None
            why = trial(_use(top_k), float(os.environ.get(SECONDS, "600")))
            if not why:
                return top_k
            module.logger.warning(
                "FlashInfer's top-k doesn't work here (%s); candidates come from torch.topk, which is slower. "
                "Prebuild the kernel in the image, or install nvcc and the cuRAND headers [%s]",
                why,
                ID,
            )
            status.note("topk_fallback", why)
            return None

        return flashinfer_topk

    wrap(module, "_flashinfer_topk", ID, make)


def _use(top_k: Callable[..., Any]) -> Callable[[], None]:
    """One use of the kernel, on this worker's device: a new thread would start on device 0."""
    import torch

    device = torch.cuda.current_device()

    def use() -> None:
        with torch.cuda.device(device):
            scores = torch.zeros(8, 4096, dtype=torch.bfloat16, device="cuda")
            top_k(scores, 16, sorted=True, deterministic=True)
            torch.cuda.synchronize()

    return use


def _trigger(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_draft_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm.model_executor.layers import logits_processor

            logits_processor._flashinfer_topk()
            return original(self, *args, **kwargs)

        return load_draft_model

    wrap(module.DFlash2Speculator, "load_draft_model", ID, make)
