"""What a command, an image name, a load specification or a request in or around a recipe gets wrong."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.recipe.vllm_args import PINNED, check_argv, recorded_versions
from dflash_serve.recipe.yamlfile import read_yaml


def check_command(command: str, *, drafting: bool, version: str = PINNED) -> list[Finding]:
    """Findings about a shell command in a recipe: vLLM's flags, image tags, the prompts of a load run.

    Args:
        command: as a person would type it.
        drafting: whether the server that it talks to speculates.
        version: vLLM's; flags of one whose arguments are not recorded are not judged.
    """
    try:
        words = shlex.split(command)
    except ValueError as exc:
        return [refuse("command-unreadable", f"the command cannot be split into words: {exc}", fix="close its quotes")]
    out = [found for word in words if (found := check_image(word)) is not None]
    if any(words[i : i + 2] == ["vllm", "serve"] for i in range(len(words))) and version in recorded_versions():
        out += check_argv(words[words.index("serve") :], version)
    if "VLLM_USE_V2_MODEL_RUNNER=0" in words and drafting:
        out.append(
            refuse("v1-runner", f"vLLM {PINNED} drafts with DFlash2 only in its V2 runner", fix="drop the variable")
        )
    if drafting and _random_dataset(words):
        out.append(
            refuse(
                "random-prompts",
                "random tokens say nothing about a drafter: the same server gives 35, 83 or 151 tok/s by the text",
                fix="use real prompts",
            )
        )
    return out


def _random_dataset(words: list[str]) -> bool:
    joined = [*(f"{a}={b}" for a, b in pairwise(words)), *words]
    return any(re.fullmatch(r"--dataset(-name)?=random\w*", pair) for pair in joined)


_IMAGE = re.compile(
    r"(?:[\w.-]+(?::\d+)?/)+[\w.-]+:(?P<tag>[A-Za-z_][\w.-]*|v?\d[\w.-]*)(?P<digest>@sha256:[0-9a-f]{64})?"
)


def check_image(reference: str) -> Finding | None:
    """A finding when a container image reference floats: `latest`, `nightly`, or any tag without a digest."""
    match = _IMAGE.fullmatch(reference)
    if match is None or match["digest"]:
        return None
    if "nightly" in match["tag"]:
        return warn("image-nightly", f"{reference}: nightly tags are purged", fix="a release by digest")
    return warn("image-floats", f"{reference}: what a tag names can change", fix="add its @sha256: digest")


def check_bench_spec(spec: dict[str, Any], *, drafting: bool) -> list[Finding]:
    """Findings about a load specification: random prompts with speculation mislead."""
    dataset = str(spec.get("dataset", spec.get("dataset_name", "")))
    if drafting and dataset.startswith("random"):
        return [refuse("random-prompts", "random tokens say nothing about a drafter", fix="use real prompts")]
    return []


def check_request_fields(fields: set[str], version: str) -> list[Finding]:
    """Warnings about request fields that a vLLM version rejects (the field's first version is in the data)."""
    since = read_yaml(Path(__file__).with_name("request_fields.yaml")).data
    have = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return [
        warn("request-field", f"vLLM {version} rejects {name}, which {row['since']} implements", fix=row["fix"])
        for name, row in since.items()
        if name in fields and have < tuple(int(part) for part in row["since"].split("."))
    ]
