"""Hard limits: each function returns the findings of one rule. Automatic values and overrides meet the same ones."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.findings import Finding, note, refuse, warn
from dflash_serve.hardware.tables import Architecture
from dflash_serve.shape.backends import expected_backend
from dflash_serve.shape.constants import GIB
from dflash_serve.shape.memory import MemoryBudget, Shape
from dflash_serve.shape.versions import at_least
from dflash_serve.values import dataclass

# Rope types whose position table merely grows with the window (vLLM 0.33.0: config/speculative.py).
TABLE_ROPES = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
FUSED_DRAFT_TOKENS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """What the rules look at.

    Attributes:
        drafter: None without a drafter checkpoint (also with the target's own MTP layer).
        target_backend: the attention back end that is asked for, or that vLLM is expected to pick.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    architecture: Architecture
    shape: Shape
    gpu_count: int
    target_backend: str
    draft_backend: str
    yarn_max_factor: float | None = None


def findings(case: Case, budget: MemoryBudget | None) -> tuple[Finding, ...]:
    """Everything that the rules have to say about a shape."""
    out = [
        *tensor_parallel(case),
        *batch_width(case),
        *draft_length(case),
        *attention(case),
        *window(case),
        *precision(case),
        *old_graphs(case),
    ]
    if budget is not None:
        out += memory(case, budget)
    return tuple(out)


def tensor_parallel(case: Case) -> Iterator[Finding]:
    """The tensor parallel size divides every head count (KV heads are replicated instead)."""
    tp = case.shape.tensor_parallel
    if tp > case.gpu_count:
        yield refuse("tensor-parallel", f"tensor_parallel_size {tp} on {case.gpu_count} GPUs", fix="use more GPUs")
    if problem := heads_problem(case.target, case.drafter, tp):
        sizes = [n for n in range(1, case.gpu_count + 1) if not heads_problem(case.target, case.drafter, n)]
        yield refuse(
            "tensor-parallel",
            f"tensor_parallel_size {tp} does not divide {problem}",
            fix=f"use one of {', '.join(map(str, sizes))}",
        )


def heads_problem(target: TargetFacts, drafter: DrafterFacts | None, tp: int) -> str:
    """The head count that `tp` does not divide, in words; empty when it divides all."""
    counts = [(target.dims.num_heads, "query heads")]
    if target.gdn is not None:
        counts += [(target.gdn.key_heads, "linear key heads"), (target.gdn.value_heads, "linear value heads")]
    if drafter is not None:
        counts.append((drafter.dims.num_heads, "query heads of the drafter"))
    for count, name in counts:
        if count % tp:
            return f"{count} {name}"
    for dims, name in ((target.dims, "KV heads"), (drafter.dims if drafter else None, "KV heads of the drafter")):
        if dims is not None and dims.num_kv_heads % tp and tp % dims.num_kv_heads:
            return f"{dims.num_kv_heads} {name}, nor is it a multiple"
    return ""


def batch_width(case: Case) -> Iterator[Finding]:
    """A draft pass of k + 1 tokens a request fits into one batch of tokens."""
    shape = case.shape
    width = shape.draft_tokens + 1
    if shape.draft_tokens and shape.max_num_seqs * width > shape.max_num_batched_tokens:
        active = shape.max_num_batched_tokens // width
        what = (
            f"{shape.max_num_seqs} sequences x {width} tokens are more than max_num_batched_tokens "
            f"{shape.max_num_batched_tokens}"
        )
        fix = f"at most {active} sequences, or max_num_batched_tokens of {shape.max_num_seqs * width}"
        if case.drafter is not None and at_least(shape.vllm_version, "0.33"):
            yield refuse("draft-batch-width", f"{what}: vLLM would run only {active} at once", fix=fix)
        else:
            yield refuse("draft-batch-width", f"{what}: the draft pass indexes past its buffers", fix=fix)


def draft_length(case: Case) -> Iterator[Finding]:
    """No more draft tokens than the drafter was trained for."""
    k = case.shape.draft_tokens
    if case.drafter is not None and case.drafter.max_draft_tokens is not None and k > case.drafter.max_draft_tokens:
        yield refuse(
            "draft-length",
            f"{k} draft tokens, but the drafter's block of {case.drafter.block_size} makes "
            f"{case.drafter.max_draft_tokens}",
            fix=f"num_speculative_tokens: {case.drafter.max_draft_tokens}",
        )
    elif k > FUSED_DRAFT_TOKENS and case.target.gdn is not None:
        yield warn("draft-length", f"more than {FUSED_DRAFT_TOKENS} draft tokens leave vLLM's fused recurrent kernel")


def attention(case: Case) -> Iterator[Finding]:
    """Back ends take the KV dtype, causal for the target and non-causal for the drafter."""
    if not case.architecture.backends:
        yield refuse(
            "architecture",
            f"vLLM's wheels carry no code for {case.architecture.name} GPUs",
            fix=f"{case.architecture.drafter.reason}; this project has no image of it",
        )
        return
    shape = case.shape
    if shape.kv_cache_dtype == "nvfp4" and case.drafter is not None and case.drafter.any_non_causal:
        yield refuse(
            "nvfp4-kv-drafter",
            "NVFP4 KV and a block drafter exclude each other (vllm#53979)",
            fix="kv_cache_dtype: fp8_e4m3",
        )
        return
    yield from _backend(case, "", case.target_backend, shape.kv_cache_dtype, non_causal=False)
    if case.drafter is None:
        return
    draft_kv = shape.kv_cache_dtype if shape.draft_kv_cache_dtype == "auto" else shape.draft_kv_cache_dtype
    non_causal = case.drafter.any_non_causal
    yield from _backend(case, "drafter: ", case.draft_backend, draft_kv, non_causal=non_causal)
    runs_on = case.draft_backend
    if runs_on == "auto":
        runs_on = expected_backend(case.architecture, draft_kv, non_causal=non_causal)
    if shape.draft_kv_cache_dtype.startswith("fp8") and shape.kv_cache_dtype == "auto" and runs_on == "FLASHINFER":
        yield refuse(
            "draft-kv-inherits",
            "FlashInfer reads the target's KV dtype: an fp8 drafter beside an automatic target raises",
            fix="give the target kv_cache_dtype: fp8 too, or the drafter bfloat16",
        )


def _backend(case: Case, who: str, backend: str, kv: str, *, non_causal: bool) -> Iterator[Finding]:
    """Whether the back end takes the KV dtype; `auto` means that any of the architecture's must."""
    fix = _kv_fix(case, kv, non_causal)
    if backend != "auto":
        verdict = case.architecture.kv_verdict(backend, kv, non_causal=non_causal)
        if not verdict.ok:
            yield refuse("kv-backend", f"{who}{verdict.reason}", where=verdict.source, fix=fix)
    elif not expected_backend(case.architecture, kv, non_causal=non_causal):
        what = f"{who}no attention back end of {case.architecture.name} takes {kv} KV"
        yield refuse("kv-backend", what + (" for non-causal layers" if non_causal else ""), fix=fix)


def _kv_fix(case: Case, kv: str, non_causal: bool) -> str:
    able = [
        name for name in case.architecture.backends if case.architecture.kv_verdict(name, kv, non_causal=non_causal).ok
    ]
    return f"attention_backend {' or '.join(able)}" if able else "kv_cache_dtype: auto"


def window(case: Case) -> Iterator[Finding]:
    """The window lies in what the target was trained for, or in documented YaRN reach; the drafter's table grows."""
    native, wanted = case.target.native_window, case.shape.window
    if wanted > native:
        factor = case.yarn_max_factor
        if factor is None:
            yield refuse(
                "window",
                f"a window of {wanted} tokens is beyond the {native} that the target was trained for",
                fix=f"window: {native} (its publisher documents no YaRN factor)",
            )
        elif wanted > native * factor:
            yield refuse(
                "window",
                f"a window of {wanted} tokens needs YaRN {wanted / native:.3g}; {factor:g} is documented",
                fix=f"window: {int(native * factor)}",
            )
    drafter = case.drafter
    if drafter is None or wanted <= drafter.max_position_embeddings:
        return
    if drafter.rope.type not in TABLE_ROPES:
        yield refuse(
            "window",
            f"a drafter with {drafter.rope.type} rope makes vLLM lower max_model_len to "
            f"{drafter.max_position_embeddings}",
            fix=f"window: {drafter.max_position_embeddings}",
        )
    elif not at_least(case.shape.vllm_version, "0.33"):
        yield note(
            "drafter-positions",
            f"vLLM {case.shape.vllm_version} needs an overlay that raises the drafter's position table to {wanted}",
        )


def precision(case: Case) -> Iterator[Finding]:
    """A DFlash2 drafter overflows in float16; formats that the tensor cores don't take are named."""
    from dflash_serve.shape.tables import mlp_format

    if case.shape.model_dtype == "float16" and case.drafter is not None:
        yield refuse(
            "draft-float16",
            "in float16 the bfloat16-trained drafter yields NaN and every draft is rejected (vllm#55250)",
            fix="serve bfloat16, or without a drafter: --set drafter=none",
        )
    if case.shape.model_dtype == "bfloat16" and not case.architecture.bf16:
        yield refuse(
            "dtype",
            f"{case.architecture.name} GPUs have no bfloat16, and vLLM does not start with it there",
            where="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/platforms/cuda.py#L651",
            fix="--set dtype=float16",
        )
    if reason := case.architecture.weight_note(mlp_format(case.target)):
        what = f"{mlp_format(case.target)} weights: {reason}"
        fix = "an int4 checkpoint is the better choice here" if "fp4" in mlp_format(case.target) else ""
        yield warn("weights-fallback", what, fix=fix)


def old_graphs(case: Case) -> Iterator[Finding]:
    """Known trouble of old releases with concurrent drafting under full graphs (vllm#41190)."""
    shape = case.shape
    old = not at_least(shape.vllm_version, "0.28")
    if case.drafter is not None and old and shape.max_num_seqs >= 16 and not shape.eager:
        yield warn(
            "full-graphs",
            f"vLLM {shape.vllm_version} crashes with a DFlash drafter, full graphs and 16 to 32 short requests at once",
            where="https://github.com/vllm-project/vllm/issues/41190",
            fix="vLLM 0.28 or newer, fewer sequences, or enforce_eager",
        )


def memory(case: Case, budget: MemoryBudget) -> Iterator[Finding]:
    """One whole window fits, and the running server keeps head room."""
    if not budget.fits:
        need = budget.layout.request_bytes + budget.layout.block_bytes
        yield refuse(
            "does-not-fit",
            f"{budget.used / GIB:.1f} GiB a GPU before the KV pool leave {max(0, budget.available) / GIB:.1f} of "
            f"{case.shape.utilization * budget.gpu_bytes / GIB:.1f}; one window of {case.shape.window} takes "
            f"{need / GIB:.1f}",
        )
    if budget.fits and not budget.fits_surely:
        times = f"{budget.max_full_windows:.2f} times"
        yield warn(
            "tight-pool",
            f"one window fits {times} by an estimate that may be off by 3 %: vLLM may refuse to start",
            fix=f"window: {int(case.shape.window * 0.95) // 1024 * 1024}, or kv_cache_dtype: fp8",
        )
    blocks, short = budget.layout.blocks(budget.available), budget.layout.short_requests(budget.available)
    sequences = case.shape.max_num_seqs
    if budget.fits and case.target.gdn is not None and blocks < sequences:
        yield refuse(
            "sequences",
            f"{sequences} sequences need a recurrent block each and the pool has {blocks}: vLLM does not start",
            fix=f"max_num_seqs: {max(1, short)}",
        )
    elif budget.fits and short < sequences:
        yield warn(
            "sequences",
            f"of {sequences} sequences only {short} fit at once: each holds its recurrent states, however short it is",
            fix=f"max_num_seqs: {max(1, short)}",
        )
    if budget.head_room < budget.head_room_needed:
        missing = budget.head_room_needed - budget.head_room
        pool = max(0, (case.shape.kv_cache_bytes or 0) - missing) / GIB
        lower = f"kv_cache_gib: {int(pool * 10) / 10:g}" if case.shape.kv_cache_bytes else ""
        yield refuse(
            "head-room",
            f"utilization {case.shape.utilization} leaves {budget.head_room / GIB:.1f} GiB to the running server; "
            f"a long prefill or prompt_logprobs takes {budget.head_room_needed / GIB:.1f}",
            fix=f"{lower or f'gpu_memory_utilization: {safe_utilization(budget):.2f}'} or lower",
        )
    for text in budget.notes:
        yield note("kv-page-padding", text)


def safe_utilization(budget: MemoryBudget) -> float:
    """The highest utilization, two decimals, with the head room that is needed."""
    outside = sum(part.bytes for part in budget.parts if part.kind == "outside")
    missing = budget.head_room_needed - budget.head_room
    return max(0.0, int(100 * (1 - (outside + missing) / budget.gpu_bytes)) / 100)
