"""Boot facts: what the server says about itself against the plan. Upstream lowers each of them with only a warning."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from dflash_serve.observe.names import table
from dflash_serve.verify import telemetry
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked

KV_POOL_TOLERANCE = 0.03
NO_LOG = "the server's log is not at hand (--log FILE)"
NO_PLAN = "the server's plan is not known (--plan FILE)"


def engine_version(subject: Subject) -> list[Check]:
    """/version against the plan."""
    served = str(subject.client.get("/version")["version"]).split("+")[0]
    subject.kept["version"] = served
    if subject.plan is None:
        return [unchecked("engine-version", f"{NO_PLAN}; vLLM {served} serves")]
    if served == subject.plan.engine.vllm_version:
        return [passed("engine-version", f"vLLM {served}")]
    return [
        failed(
            "engine-version",
            f"vLLM {served} serves, planned was {subject.plan.engine.vllm_version}",
            where="GET /version",
            fix=f"dflash-serve environment install {subject.plan.engine.variant}",
        )
    ]


def window_served(subject: Subject) -> list[Check]:
    """/v1/models tells the window that is really served; vLLM lowers it with only a warning."""
    expected, name = subject.expectations.max_model_len, subject.client.model
    entries = subject.client.models()
    entry = next((m for m in entries if m["id"] == name), None)
    if entry is None:
        return [
            failed(
                "model-served",
                f"the server does not serve a model named {name}",
                where="GET /v1/models",
                fix=f"it serves {', '.join(str(m['id']) for m in entries) or 'nothing'}",
            )
        ]
    served = entry.get("max_model_len")
    figures = {"max_model_len": float(served or 0)}
    if expected is None:
        return [unchecked("window-served", f"{NO_PLAN}; the window is {served} tokens", figures=figures)]
    if served == expected:
        return [passed("window-served", f"window {served} tokens", figures=figures)]
    return [
        failed(
            "window-served",
            f"the server serves a window of {served} tokens, planned were {expected}",
            where="GET /v1/models",
            fix="its log says who lowered it; a drafter's position table is raised by its overlay",
            figures=figures,
        )
    ]


def log_facts(subject: Subject) -> list[Check]:
    """Lines that must stand in the log: our plugin is in, the V2 runner runs, the drafter's architecture is built."""
    if subject.log is None:
        return [unchecked("log-lines", NO_LOG)]
    if not subject.expectations.log_lines:
        return [unchecked("log-lines", NO_PLAN)]
    missing = [p for p in subject.expectations.log_lines if re.search(p, subject.log) is None]
    if not missing:
        return [passed("log-lines", f"the log says all {len(subject.expectations.log_lines)} lines that it must say")]
    return [
        failed(
            "log-line",
            f"the log never says {pattern!r}",
            where="server.log",
            fix="reinstall the engine's environment, and keep VLLM_PLUGINS and VLLM_USE_V2_MODEL_RUNNER unset",
        )
        for pattern in missing
    ]


def drafter_served(subject: Subject) -> list[Check]:
    """The engine drafts with the planned directory, and a DFlash2 drafter there says that it is not causal.

    A causal block may be accepted almost as often, as on the tiny pair, so its acceptance alone does not tell.
    """
    plan = subject.plan
    if plan is None or plan.drafter is None:
        return [unchecked("drafter-served", NO_PLAN if plan is None else "there is no drafter")]
    if subject.log is None:
        return [unchecked("drafter-served", NO_LOG)]
    match = re.search(r"speculative_config=SpeculativeConfig\([^)]*?model='([^']*)'", subject.log)
    if match is None:
        return [unchecked("drafter-served", "the log does not name the drafter's directory")]
    place = match.group(1)
    if place != plan.drafter.served_from:
        return [
            failed(
                "drafter-served",
                f"the engine drafts with {place}, planned was {plan.drafter.served_from}",
                where="server.log: speculative_config",
                fix=f"stop it and start it from its plan: ./start.sh down, ./start.sh {plan.recipe}",
            )
        ]
    causal = _causal(Path(place)) if plan.drafter.method == "dflash2" else False
    if causal is None:
        return [
            unchecked("drafter-served", f"it is the planned drafter, but its config is not readable here ({place})")
        ]
    if not causal:
        return [passed("drafter-served", "the planned drafter, not causal")]
    return [
        failed(
            "drafter-served",
            "the drafter's config makes its blocks causal, and a DFlash2 drafter is trained without",
            where=f"{place}/config.json: is_causal",
            fix="compare it with the publisher's: dflash-serve fetch --verify; is_causal must be false",
        )
    ]


def _causal(place: Path) -> bool | None:
    """Whether vLLM makes any block causal: is_causal, else dflash_config.causal, else where a layer slides; None: not
    readable.
    """
    try:
        config = json.loads((place / "config.json").read_text())
    except (OSError, ValueError):
        return None
    for said in (config.get("is_causal"), (config.get("dflash_config") or {}).get("causal")):
        if said is not None:
            return bool(said)
    return "sliding_attention" in (config.get("layer_types") or ())


def sequences(subject: Subject) -> list[Check]:
    """VLLM 0.33 lowers the number of active sequences when seqs x (k + 1) passes the token budget."""
    if subject.log is None:
        return [unchecked("sequences-served", NO_LOG)]
    planned = subject.expectations.max_num_seqs
    if planned is None:
        return [unchecked("sequences-served", NO_PLAN)]
    match = re.search(r"max_num_active_seqs from \d+ to (\d+)", subject.log)
    if match is None or int(match.group(1)) >= planned:
        return [passed("sequences-served", f"{planned} sequences may be active")]
    return [
        failed(
            "sequences-served",
            f"the engine runs {match.group(1)} sequences at most, planned were {planned}",
            where=f"server.log: {match.group(0)}",
            fix="raise max_num_batched_tokens to max_num_seqs x (draft tokens + 1)",
        )
    ]


def kv_pool(subject: Subject) -> list[Check]:
    """The pool that the engine made, at most 3 % below the planned one."""
    pool = _pool(subject)
    if pool is None and subject.log is None:
        return [unchecked("kv-pool", NO_LOG)]
    if pool is None:
        return [
            failed(
                "kv-pool",
                "the log does not name the size of the KV cache",
                where="server.log",
                fix="is it the log of this server, from its start? dflash-serve logs",
            )
        ]
    planned = subject.expectations.kv_pool_tokens
    figures = {"kv_pool_tokens": float(pool)}
    if planned is None:
        return [unchecked("kv-pool", f"no pool was planned; it is {pool:,} tokens", figures=figures)]
    off = pool / planned - 1
    detail = f"KV pool {pool:,} tokens, planned {planned:,} ({off:+.1%})"
    if off >= -KV_POOL_TOLERANCE:
        return [passed("kv-pool", detail, figures=figures)]
    return [
        failed(
            "kv-pool",
            detail,
            where="server.log: KV cache size",
            fix="something else holds memory of this GPU, or the estimate is off: dflash-serve fit --explain",
            figures=figures,
        )
    ]


def _pool(subject: Subject) -> int | None:
    """Tokens of the pool: the log's line, else the plugin's gauge."""
    if subject.log is not None and (match := re.search(r"KV cache size: ([\d,]+) tokens", subject.log)):
        return int(match.group(1).replace(",", ""))
    value = telemetry.process_value(telemetry.scrape(subject), "kv_pool_tokens") if subject.log is None else None
    return None if value is None else int(value)


def patches(subject: Subject) -> list[Check]:
    """Patches that the plan counts on are in force, as the server itself exports them."""
    if subject.plan is None:
        return [unchecked("patches-active", NO_PLAN)]
    planned = {patch.id for patch in subject.plan.patches if patch.outcome == "applied"}
    if not planned:
        return [passed("patches-active", "the plan applies no patch")]
    outcomes = telemetry.scrape(subject).server.patches
    if not outcomes:
        return [
            failed(
                "patches-active",
                "the plugin is not loaded: the metrics name no patch",
                where=f"{subject.metrics_url}: dflash:patch_info",
                fix="vLLM swallows a plugin whose import fails, and VLLM_PLUGINS excludes it; reinstall, and unset it",
            )
        ]
    absent = sorted(patch for patch in planned if outcomes.get(patch) != "applied")
    if absent:
        return [
            failed(
                "patches-active",
                f"planned patches are not in force: {', '.join(absent)}",
                where=f"{subject.metrics_url}: dflash:patch_info",
                fix="engine and plan are of different checkouts: dflash-serve environment install, or build",
            )
        ]
    return [passed("patches-active", f"{len(planned)} patches in force")]


def topk(subject: Subject) -> list[Check]:
    """FlashInfer's top-k picks the candidates; vLLM falls back to torch.topk at half its speed without a word."""
    if subject.plan is None or not subject.plan.hardware.gpus or subject.plan.drafter is None:
        return [unchecked("flashinfer-topk", "it is used on a GPU, by a drafter")]
    fallback = telemetry.process_value(telemetry.scrape(subject), "topk_fallback")
    missing = subject.log is not None and "top-k uses torch.topk" in subject.log
    if missing or fallback:
        why = "FlashInfer is not installed" if missing else "its trial failed"
        return [
            failed(
                "flashinfer-topk",
                f"candidates come from torch.topk instead of FlashInfer ({why})",
                where="server.log" if missing else f"{subject.metrics_url}: dflash:topk_fallback",
                fix="serve from the image, which has the kernel prebuilt: dflash-serve build",
            )
        ]
    if fallback is None:
        return [unchecked("flashinfer-topk", "the plugin that tries it is not loaded")]
    return [passed("flashinfer-topk", "FlashInfer's top-k picks the candidates")]


def graphs(subject: Subject) -> list[Check]:
    """CUDA graphs were captured where the plan wants them."""
    if subject.plan is None or not subject.plan.hardware.gpus:
        return [unchecked("graphs", "CUDA graphs are a GPU's")]
    if "--enforce-eager" in subject.plan.argv:
        return [passed("graphs", "eager, as planned")]
    if subject.log is None:
        return [unchecked("graphs", NO_LOG)]
    lowered = re.search(r"CUDAGraphMode\.\w+ is not supported.*?setting cudagraph_mode=(\w+)", subject.log)
    if lowered and (lowered.group(1) == "NONE" or "cudagraph_mode" in " ".join(subject.plan.argv)):
        return [
            failed(
                "graphs",
                f"vLLM lowered the CUDA graphs to {lowered.group(1)}: an attention back end can't be captured",
                where=f"server.log: {lowered.group(0)[:120]}",
                fix="another back end (--set attention_backend=...), or plan it so: --set enforce_eager=true",
            )
        ]
    if lowered:
        return [passed("graphs", f"captured, lowered by vLLM to {lowered.group(1)}: a back end can't do more")]
    if match := re.search(r"Graph capturing finished in \d+ secs, took [\d.-]+ GiB", subject.log):
        return [passed("graphs", match.group(0)[0].lower() + match.group(0)[1:])]
    return [
        failed(
            "graphs",
            "no CUDA graph was captured, and the plan is not eager",
            where="server.log",
            fix="look for 'cudagraph' and 'eager' in the log: a back end that can't be captured turns them off",
        )
    ]


def backends(subject: Subject) -> list[Check]:
    """The attention back ends that the plan names are the ones that vLLM took."""
    if subject.plan is None or not subject.plan.hardware.gpus:
        return [unchecked("attention-backend", "the CPU build has one back end")]
    if subject.log is None:
        return [unchecked("attention-backend", NO_LOG)]
    used = set(re.findall(r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) (?:attention )?backend", subject.log))
    for key in ("attention_backend", "draft_attention_backend"):
        decision = subject.plan.shape.get(key)
        wanted = decision.value if decision else None
        if wanted not in (None, "", "auto") and wanted not in used:
            return [
                failed(
                    "attention-backend",
                    f"{key} {wanted} was planned, the engine took {', '.join(sorted(used)) or 'none that it names'}",
                    where="server.log",
                    fix="the log says why the planned one was not valid; see docs/shapes.md",
                )
            ]
    return [passed("attention-backend", f"attention by {', '.join(sorted(used)) or 'the default back end'}")]


def metric_names(subject: Subject) -> list[Check]:
    """The counters that everything else reads are there under a known name."""
    seen = telemetry.scrape(subject)
    known = [entry for entry in table().metrics.values() if entry.every]
    absent = [entry.names[0] for entry in known if not _exported(entry.names, seen.names)]
    if subject.expectations.drafter_active and not seen.speculative:
        absent.append("vllm:spec_decode_num_drafts_total")
    if not absent:
        return [passed("metric-names", "the metrics have the names that alerts and dashboards read")]
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return [
        failed(
            "metric-names",
            f"the metrics lack {', '.join(absent[:3])}{more}",
            where=subject.metrics_url,
            fix="a vLLM that renamed them, or a drafter that was never built: compare the log's speculative_config",
        )
    ]


def _exported(stems: tuple[str, ...], names: frozenset[str]) -> bool:
    return any(stem in names or f"{stem}_count" in names for stem in stems)


def non_increasing(rates: tuple[float, ...], slack: float = 1e-9) -> bool:
    """Whether no rate is above the one before it."""
    return all(b <= a + slack for a, b in pairwise(rates))


CHECKS = (
    engine_version, window_served, log_facts, drafter_served, sequences, kv_pool, patches, metric_names, topk, graphs,
    backends,
)  # fmt: skip
