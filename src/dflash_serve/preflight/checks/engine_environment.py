"""No variable changes what the plan decided: vLLM reads many, and some switch the drafter off without a word."""

from __future__ import annotations

from dflash_serve.findings import Finding, note, refuse, warn
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.facts import facts

IDS = ("env-model-runner", "env-plugins", "env-vllm", "env-visible-devices")
RUNNER, PLUGINS, DEVICES = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"
# Where things are and how much is logged: these don't change what is served.
HARMLESS = ("VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_LOGGING_", "VLLM_NO_USAGE_STATS",
            "VLLM_DO_NOT_TRACK", "VLLM_HOST_IP")  # fmt: skip
OFF = {"0", "false", "no", ""}


def check(context: Context) -> list[Finding]:
    reaching = dict(context.engine_environment)
    strays = {key: value for key, value in context.user_environment.items() if key.startswith("VLLM_")}
    inherits = context.runtime == "container"
    if inherits:
        reaching = {**strays, **reaching}
    out: list[Finding] = []
    if context.method == "dflash2" and reaching.get(RUNNER, "1").strip().lower() in OFF:
        out.append(
            refuse(
                "env-model-runner",
                f"{RUNNER}={reaching[RUNNER]} takes the model runner that cannot draft with DFlash2",
                where="https://github.com/vllm-project/vllm/pull/52816",
                fix=f"unset {RUNNER}",
            )
        )
    plugin = facts().plugin
    if PLUGINS in reaching and plugin not in {name.strip() for name in reaching[PLUGINS].split(",")}:
        what = f"{PLUGINS}={reaching[PLUGINS]!r} leaves {plugin} out: the patches would not be applied"
        out.append(refuse("env-plugins", what, fix=f"unset {PLUGINS}, or add {plugin}"))
    changing = sorted(
        key
        for key in strays
        if key not in {RUNNER, PLUGINS} and key not in context.engine_environment and not key.startswith(HARMLESS)
    )
    if not inherits:
        changing = sorted({*changing, *({RUNNER, PLUGINS} & strays.keys() - context.engine_environment.keys())})
    if changing:
        names = ", ".join(changing)
        if inherits:
            out.append(
                warn("env-vllm", f"{names} may change what the plan decided", where="environment", fix="unset it")
            )
        else:
            what = f"{names} of your environment is not passed on to the engine"
            out.append(note("env-vllm", what, fix="say it in the recipe, or with --set"))
    mine = context.user_environment.get(DEVICES)
    if context.uses_gpus and not inherits and mine is not None and mine != context.engine_environment.get(DEVICES):
        gpus = ", ".join(gpu.label for gpu in context.chosen)
        what = f"{DEVICES}={mine} of your environment is not followed: the plan serves on {gpus}"
        out.append(warn("env-visible-devices", what, fix="choose GPUs with --gpus"))
    return out
