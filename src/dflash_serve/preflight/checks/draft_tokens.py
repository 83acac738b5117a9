"""Draft tokens fit the drafter's block: vLLM checks neither, and drafts at positions nobody trained."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("draft-tokens",)


def check(context: Context) -> list[Finding]:
    if context.method not in {"dflash", "dflash2"}:
        return []
    tokens, block = context.num_speculative_tokens, context.block_size
    where = "https://github.com/vllm-project/recipes/pull/837"
    if tokens is None:
        what = "num_speculative_tokens is not set, and vLLM derives none for this method"
        fix = f"--set num_speculative_tokens={block - 1}" if block else "give it in the recipe"
        return [refuse("draft-tokens", what, where=where, fix=fix)]
    if block is not None and not 1 <= tokens <= block - 1:
        what = f"{tokens} draft tokens, but the drafter was trained for {block - 1} (block of {block} less the bonus)"
        return [refuse("draft-tokens", what, where=where, fix=f"--set num_speculative_tokens={block - 1}")]
    return []
