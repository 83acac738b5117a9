"""Lint: every check refuses what it should and passes what is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve import paths
from dflash_serve.errors import UsageError
from dflash_serve.findings import Finding, Severity
from dflash_serve.recipe.command_lint import check_bench_spec, check_command, check_image, check_request_fields
from dflash_serve.recipe.lint import SCHEMA_LINE, lint
from dflash_serve.recipe.vllm_args import LOCKS, PINNED, check_argv, load_args, pinned_versions, recorded_versions

GOOD = f"""\
{SCHEMA_LINE}
name: good
title: A recipe that lint has nothing to say about
target:
  repo: owner/target
  revision: 0123456789abcdef0123456789abcdef01234567
  size_bytes: 10
  native_window: 4096
  yarn_max_factor: 4.0
  sources: [https://huggingface.co/owner/target]
drafter:
  method: dflash2
  block_size: 8
  checkpoint:
    repo: owner/drafter
    revision: 0123456789abcdef0123456789abcdef01234568
    size_bytes: 10
    sources: [https://huggingface.co/owner/drafter]
serve:
  window: 16384
  reasoning_parser: qwen3
  tool_call_parser: qwen3_coder
  kv_cache_dtype: fp8
  attention_backend: FLASHINFER
expect:
  acceptance_length: {{min: 2, max: 4}}
  source: https://example.org/figures
verified: null
"""
RUN = """\
verified:
  - hardware: 1x RTX 3090
    date: 2026-11-01
    vllm: 0.33.0
    command: COMMAND
    figures: {acceptance_length: 3.5, output_tok_s: 100}
"""
WIDE_BLOCK = "  block_size: 8\n  num_speculative_tokens: 8"
OVERRIDE = "verified: null\ngpu_overrides: [{when: {wsl2: true}, serve: {window: 64}, reason: r}]"
FIGURE = "verified: null\nreported: [{figure: speed, value: 3}]"
UNPINNED = "  revision: 0123456789abcdef0123456789abcdef01234567\n"
MTP = "drafter: {method: mtp, num_speculative_tokens: 3}\n"


def findings(tmp_path: Path, text: str) -> list[Finding]:
    (tmp_path / "good.yaml").write_text(text)
    return lint(tmp_path)


def without(text: str, start: str, end: str) -> str:
    return text[: text.index(start)] + text[text.index(end) :]


def test_a_good_recipe_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD) == []


def test_the_real_recipes_are_not_refused() -> None:
    found = lint(paths.recipes_dir())
    assert [finding for finding in found if finding.severity is Severity.REFUSE] == []
    assert {finding.id for finding in found} <= {"unpinned", "block-size-unknown", "checkpoint-absent"}


@pytest.mark.parametrize(
    ("old", "new", "identifier", "key"),
    [
        ("reasoning_parser: qwen3\n", "reasoning_parser: qwen4\n", "unknown-choice", "serve.reasoning_parser"),
        ("tool_call_parser: qwen3_coder", "tool_call_parser: qwen", "unknown-choice", "serve.tool_call_parser"),
        ("kv_cache_dtype: fp8", "kv_cache_dtype: fp7", "unknown-choice", "serve.kv_cache_dtype"),
        ("attention_backend: FLASHINFER", "attention_backend: flashinfer", "unknown-choice", "serve.attention_backend"),
        ("  block_size: 8", WIDE_BLOCK, "draft-tokens-beyond-block", "drafter.num_speculative_tokens"),
        ("  window: 16384", "  window: 16385", "window-beyond-yarn", "serve.window"),
        ("kv_cache_dtype: fp8", "kv_cache_dtype: nvfp4", "nvfp4-kv-drafter", "serve.kv_cache_dtype"),
        ("serve:\n", "serve:\n  dtype: float16\n", "fp16-drafter", "serve.dtype"),
        ("  source: https://example.org/figures\n", "", "band-without-source", "expect.acceptance_length"),
        ("  sources: [https://huggingface.co/owner/target]\n", "", "no-source", "target.repo"),
        ("  size_bytes: 10\n  native", "  native", "unknown-unnoted", "target.size_bytes"),
        ("verified: null", FIGURE, "figure-without-source", "reported.0"),
        ("verified: null", OVERRIDE, "override-without-source", "gpu_overrides.0"),
        ("name: good", "nmae: good", "recipe-invalid", "nmae"),
    ],
)  # fmt: skip
def test_each_check_refuses(tmp_path: Path, old: str, new: str, identifier: str, key: str) -> None:
    assert old in GOOD
    found = [f for f in findings(tmp_path, GOOD.replace(old, new, 1)) if f.severity is Severity.REFUSE]
    assert [f.id for f in found] == [identifier]
    assert found[0].where.startswith(f"{tmp_path / 'good.yaml'}:")
    assert found[0].where.endswith(f": {key}")


@pytest.mark.parametrize(
    ("old", "new", "identifier", "severity"),
    [
        ("  yarn_max_factor: 4.0\n", "", "window-without-yarn", Severity.WARN),
        (SCHEMA_LINE, "# a recipe", "schema-line", Severity.WARN),
        (UNPINNED, "  notes: [not looked up]\n", "unpinned", Severity.NOTE),
        ("  block_size: 8\n", "", "block-size-unknown", Severity.NOTE),
        ("  block_size: 8\n", "  block_size: 8\n  kv_cache_dtype: fp8\n", None, None),
        ("  repo: owner/target\n", "  repo: owner/dflash-target\n", None, None),
    ],
)  # fmt: skip
def test_lesser_findings(tmp_path: Path, old: str, new: str, identifier: str | None, severity: Severity | None) -> None:
    found = findings(tmp_path, GOOD.replace(old, new, 1))
    assert [(f.id, f.severity) for f in found] == ([(identifier, severity)] if identifier else [])


def test_a_long_window_without_yarn_is_refused_beyond_four_times(tmp_path: Path) -> None:
    text = GOOD.replace("  yarn_max_factor: 4.0\n", "").replace("window: 16384", "window: 16400")
    assert [f.id for f in findings(tmp_path, text)] == ["window-beyond-yarn"]


@pytest.mark.parametrize("repo", ["owner/dflash-lab", "owner/X-DFlash", "owner/eagle3-x", "owner/my-dspark"])
def test_mtp_from_a_path_with_another_methods_name(tmp_path: Path, repo: str) -> None:
    mtp = without(GOOD, "drafter:", "serve:").replace("serve:", MTP + "serve:")
    assert findings(tmp_path, mtp) == []
    assert [f.id for f in findings(tmp_path, mtp.replace("owner/target", repo, 1))] == ["mtp-path"]


def test_draft_tokens_against_a_config_beside_the_recipe(tmp_path: Path) -> None:
    """The block size is nested for DFlash2, at the top for other drafters; a wrong file is no crash."""
    drafter = tmp_path / "pair" / "drafter"
    drafter.mkdir(parents=True)
    (tmp_path / "pair" / "config.json").write_text("{}")
    local = without(GOOD, "  block_size", "serve:").replace(
        "serve:", "  num_speculative_tokens: 8\n  checkpoint: {path: pair/drafter}\nserve:"
    )
    for config, refused in [
        ({"dflash_config": {"block_size": 8}}, True),
        ({"dflash_config": {"block_size": 9}}, False),
        ({"block_size": 16}, False),
        ({"block_size": 8}, True),
        ([], False),
    ]:
        (drafter / "config.json").write_text(json.dumps(config))
        ids = [f.id for f in findings(tmp_path, local)]
        assert ("draft-tokens-beyond-block" in ids) is refused, config
    (drafter / "config.json").write_text("{")
    assert findings(tmp_path, local) == []
    (drafter / "config.json").unlink()
    assert [f.id for f in findings(tmp_path, local)] == ["checkpoint-absent"]


def test_a_draft_pass_wider_than_the_budget(tmp_path: Path) -> None:
    wide = GOOD.replace("serve:", "serve:\n  max_num_seqs: 256\n  max_num_batched_tokens: 1024")
    (found,) = findings(tmp_path, wide)
    assert found.id == "draft-wider-than-budget"
    assert "would run 128 at a time" in found.what
    assert findings(tmp_path, wide.replace("1024", "2048")) == []


def test_fp8_drafter_cache_beside_another(tmp_path: Path) -> None:
    text = GOOD.replace("  kv_cache_dtype: fp8\n", "").replace(
        "  block_size: 8\n", "  block_size: 8\n  kv_cache_dtype: fp8\n"
    )
    assert [(f.id, f.severity) for f in findings(tmp_path, text)] == [("fp8-drafter-cache", Severity.WARN)]
    text = text.replace("  block_size: 8\n", "  block_size: 8\n  attention_backend: FLASHINFER\n")
    assert [(f.id, f.severity) for f in findings(tmp_path, text)] == [("fp8-drafter-cache", Severity.REFUSE)]


def test_values_in_gpu_overrides_are_linted(tmp_path: Path) -> None:
    override = "{when: {wsl2: true}, serve: {kv_cache_dtype: fp7}, reason: r, source: https://example.org}"
    (found,) = findings(tmp_path, GOOD + f"gpu_overrides: [{override}]\n")
    assert found.id == "unknown-choice"
    override = "{when: {wsl2: true}, num_speculative_tokens: 9, reason: r, source: https://example.org}"
    (found,) = findings(tmp_path, GOOD + f"gpu_overrides: [{override}]\n")
    assert found.id == "draft-tokens-beyond-block"
    assert found.where.endswith("gpu_overrides.0.num_speculative_tokens")


@pytest.mark.parametrize(
    ("old", "new", "identifier"),
    [
        ("", "", None),
        ("acceptance_length: 3.5, ", "", "verified-incomplete"),
        ("output_tok_s: 100", "output_tok_s: fast", "verified-incomplete"),
        ("date: 2026-11-01", "date: 2999-01-01", "verified-future"),
        ("COMMAND", "vllm serve x --swap-space 4", "unknown-flag"),
        ("COMMAND", "docker run vllm/vllm-openai:nightly-0539b7e", "image-nightly"),
        ("COMMAND", "'unclosed \" quote'", "command-unreadable"),
    ],
)
def test_verified_runs(tmp_path: Path, old: str, new: str, identifier: str | None) -> None:
    text = GOOD.replace("verified: null\n", RUN).replace(old, new, 1) if old else GOOD.replace("verified: null\n", RUN)
    assert [f.id for f in findings(tmp_path, text)] == ([identifier] if identifier else [])


def test_a_broken_recipe_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: [")
    (tmp_path / "b.yaml").write_text("extends: nothing\nname: b\n")
    found = findings(tmp_path, GOOD.replace("kv_cache_dtype: fp8", "kv_cache_dtype: fp7"))
    assert sorted(f.id for f in found) == ["recipe-invalid", "recipe-invalid", "unknown-choice"]
    assert lint(tmp_path, ["good"])[0].id == "unknown-choice"


def test_a_base_that_nobody_extends(tmp_path: Path) -> None:
    (tmp_path / "_base.yaml").write_text(f"{SCHEMA_LINE}\nserve: {{window: 64}}\n")
    assert [f.id for f in findings(tmp_path, GOOD)] == ["unused-base"]


def test_pins_of_another_revision(tmp_path: Path) -> None:
    (tmp_path / "pins").mkdir()
    pins = tmp_path / "pins" / "good.yaml"
    pins.write_text("target: {repo: owner/target, revision: 0123456789abcdef0123456789abcdef01234567}\n")
    assert findings(tmp_path, GOOD) == []
    pins.write_text(f"drafter: {{repo: owner/drafter, revision: {'ab' * 20}}}\n")
    (found,) = findings(tmp_path, GOOD)
    assert found.id == "pins-stale"
    assert found.where.endswith("drafter.checkpoint.revision")
    unpinned = GOOD.replace(UNPINNED, "  notes: [not looked up]\n")
    pins.write_text(f"target: {{repo: owner/target, revision: {'ab' * 20}}}\n")
    assert findings(tmp_path, unpinned) == []
    pins.write_text("[")
    assert [f.id for f in findings(tmp_path, unpinned)] == ["unpinned"]


# Commands, images, load specifications


@pytest.mark.parametrize(
    ("reference", "identifier"),
    [
        ("vllm/vllm-openai:nightly-0539b7e121748a245859f58a519ec2fd4e77543c", "image-nightly"),
        ("vllm/vllm-openai:nightly", "image-nightly"),
        ("vllm/vllm-openai:latest", "image-floats"),
        ("vllm/vllm-openai:v0.33.0", "image-floats"),
        ("localhost:5000/a/b:1.2", "image-floats"),
        ("vllm/vllm-openai:v0.33.0@sha256:" + "a" * 64, None),
        ("http://127.0.0.1:8000", None),
        ("/data/models:/models", None),
        ("tiny", None),
    ],
)
def test_image_references(reference: str, identifier: str | None) -> None:
    found = check_image(reference)
    assert (found.id if found else None) == identifier


@pytest.mark.parametrize(
    ("command", "drafting", "identifiers"),
    [
        ("vllm bench serve --dataset-name random --num-prompts 8", True, ["random-prompts"]),
        ("vllm bench serve --dataset-name=random --num-prompts 8", True, ["random-prompts"]),
        ("vllm bench serve --dataset-name random", False, []),
        ("vllm bench serve --dataset-name sharegpt", True, []),
        ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m --port 1", True, ["v1-runner"]),
        ("vllm serve m --max-model-len 4096 --no-enable-prefix-caching -tp 2", True, []),
    ],
)
def test_commands(command: str, drafting: bool, identifiers: list[str]) -> None:
    assert [f.id for f in check_command(command, drafting=drafting)] == identifiers


def test_load_specifications_with_random_prompts() -> None:
    assert [f.id for f in check_bench_spec({"dataset": "random"}, drafting=True)] == ["random-prompts"]
    assert check_bench_spec({"dataset": "random"}, drafting=False) == []
    assert check_bench_spec({"dataset": "prompts/code.jsonl"}, drafting=True) == []


def test_request_fields_by_version() -> None:
    assert [f.id for f in check_request_fields({"thinking_token_budget"}, "0.27.1")] == ["request-field"]
    assert check_request_fields({"thinking_token_budget"}, "0.28.0") == []
    assert check_request_fields({"temperature"}, "0.27.1") == []


# The pinned version's arguments


@pytest.mark.parametrize(
    ("argv", "identifiers"),
    [
        (["m", "--port", "8000", "--served-model-name", "m"], []),
        (["m", "--kv-cache-dtype", "fp8", "--attention-backend", "FLASHINFER"], []),
        (["m", "--kv-cache-dtype=fp8", "--no-enable-prefix-caching", "--enable_auto_tool_choice"], []),
        (["m", "--speculative-config", '{"method": "dflash"}', "--compilation-config.mode", "3"], []),
        (["m", "--distributed-executor-backend", "my.module.Executor"], []),
        (["m", "--dtype", "bfloat17"], ["unknown-choice"]),
        (["m", "--mamba-ssm-cache-dtype=fp8"], ["unknown-choice"]),
        (["m", "--swap-space", "4"], ["unknown-flag"]),
        (["m", "--disable-log-requests"], ["unknown-flag"]),
        (["m", "--speculative-model", "x"], ["unknown-flag"]),
        (["m", "--no-port"], ["unknown-flag"]),
        (["m", "--max-model-length", "4"], ["unknown-flag"]),
        (["m", "--mamba-cache-mode", "align"], ["deprecated-flag"]),
    ],
)
def test_argument_vectors(argv: list[str], identifiers: list[str]) -> None:
    assert [f.id for f in check_argv(argv)] == identifiers


def test_an_unknown_flag_gets_the_nearest() -> None:
    (found,) = check_argv(["m", "--max-model-length", "4"])
    assert "--max-model-len" in found.fix


def test_the_recorded_arguments_are_of_the_pinned_version() -> None:
    args = load_args()
    assert args.version == PINNED
    assert len(args.flags) > 300
    assert {"dflash", "mtp"} <= set(args.speculative_config["method"].choices)
    assert {"fp8", "nvfp4", "bfloat16"} <= set(args.kv_cache_dtypes)
    assert all(len(digest) == 64 for digest in args.sources.values())
    assert "vllm/engine/arg_utils.py" in args.sources


@pytest.mark.parametrize("variant", [*LOCKS, "auto"])
def test_the_arguments_of_every_pinned_version_are_recorded(variant: str) -> None:
    assert set(pinned_versions(variant)) <= set(recorded_versions())
    assert len(pinned_versions(variant)) == (2 if variant == "auto" else 1)
    assert PINNED in pinned_versions("cuda")


@pytest.mark.parametrize(("variant", "refused_by"), [("cuda", []), ("cpu", ["0.32.0"]), ("auto", ["0.32.0"])])
def test_words_are_judged_by_the_version_of_the_recipes_engine(
    tmp_path: Path, variant: str, refused_by: list[str]
) -> None:
    # The parser `muse` came with 0.33.0; the CPU's lock pins 0.32.0.
    text = GOOD.replace("reasoning_parser: qwen3", "reasoning_parser: muse") + f"engine: {{variant: {variant}}}\n"
    found = findings(tmp_path, text)
    assert [f.id for f in found] == ["unknown-choice"] * len(refused_by)
    assert all(f"vLLM {version} " in f.what for f, version in zip(found, refused_by, strict=True))


def test_a_run_is_judged_by_the_version_that_it_was_made_with(tmp_path: Path) -> None:
    run = RUN.replace("COMMAND", "vllm serve m --monokernel")
    assert findings(tmp_path, GOOD.replace("verified: null\n", run)) == []
    older = run.replace("vllm: 0.33.0", "vllm: 0.32.0")
    assert [f.id for f in findings(tmp_path, GOOD.replace("verified: null\n", older))] == ["unknown-flag"]
    unrecorded = run.replace("vllm: 0.33.0", "vllm: 0.27.1")
    assert findings(tmp_path, GOOD.replace("verified: null\n", unrecorded)) == []


def test_a_version_that_nobody_recorded() -> None:
    with pytest.raises(UsageError) as caught:
        load_args("0.1.0")
    assert "0.33.0" in caught.value.fix
