"""What a Dockerfile of a vLLM server gets wrong: faults that people met at the first request, hours after the build."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_serve.findings import Finding, refuse, warn

START_PERIOD_S = 900
IDS = ("image-base", "image-curand", "image-health", "image-user", "image-allocator", "image-compat", "image-jobs",
       "image-gate", "image-hashes")  # fmt: skip
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile.

    Attributes:
        line: number of its first line, from 1.
        word: `RUN`, `ENV` ..., upper case.
        text: everything behind it, continuation lines joined.
    """

    line: int
    word: str
    text: str


def instructions(dockerfile: str) -> list[Instruction]:
    """Instructions in order; comments and blank lines left out, also those inside a continued one."""
    out: list[Instruction] = []
    start, parts = 0, list[str]()
    for number, raw in enumerate(dockerfile.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start or number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            word, _, text = " ".join(parts).partition(" ")
            out.append(Instruction(start, word.upper(), text.strip()))
            start, parts = 0, []
    if parts:
        word, _, text = " ".join(parts).partition(" ")
        out.append(Instruction(start, word.upper(), text.strip()))
    return out


def lint(dockerfile: str, *, name: str = "Dockerfile") -> list[Finding]:
    """Every finding, in the order of the checks.

    Args:
        name: how to call the file in `where`.
    """
    found = instructions(dockerfile)
    return [
        finding.model_copy(update={"where": f"{name}{finding.where}"})
        for check in (_base, _curand, _health, _user, _allocator, _compat, _jobs, _gate, _hashes)
        for finding in check(found)
    ]


def seconds(text: str) -> float | None:
    """Docker's durations, `1m30s`, in seconds; None when it isn't one."""
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def variables(found: list[Instruction]) -> dict[str, tuple[str, int]]:
    """Value and line of each ENV variable; the last one wins."""
    out: dict[str, tuple[str, int]] = {}
    for entry in found:
        if entry.word == "ENV":
            for name, quoted, plain in re.findall(r'(\w+)=(?:"([^"]*)"|(\S*))', entry.text):
                out[name] = (quoted or plain, entry.line)
    return out


def _base(found: list[Instruction]) -> Iterator[Finding]:
    stages = {m[1].lower() for e in found if e.word == "FROM" and (m := re.search(r"\bas (\S+)$", e.text, re.I))}
    for entry in found:
        if entry.word != "FROM":
            continue
        reference = re.sub(r"--\S+ ", "", entry.text).split()[0]
        if reference.lower() in stages or reference == "scratch" or re.search(r"@sha256:[0-9a-f]{64}$", reference):
            continue
        what = f"the base {reference} is named by a tag, which may be another image tomorrow"
        fix = "dflash-serve image resolve, or REPOSITORY:TAG@sha256:DIGEST"
        if re.search(r":(latest|nightly)\b", reference) or ":" not in reference:
            yield refuse("image-base", what, where=f":{entry.line}", fix=fix)
        else:
            yield warn("image-base", what, where=f":{entry.line}", fix=fix)


def _curand(found: list[Instruction]) -> Iterator[Finding]:
    runs = [entry for entry in found if entry.word == "RUN"]
    devel = any(entry.word == "FROM" and "-devel" in entry.text for entry in found)
    compiler = next((entry for entry in runs if "cuda-nvcc" in entry.text), None)
    if compiler is None or devel:
        return
    wanted = [m[1] for m in re.finditer(r"cuda-nvcc-(\d+-\d+)", compiler.text)]
    have = {m[1] for entry in runs for m in re.finditer(r"libcurand-dev-(\d+-\d+)", entry.text)}
    if not have or (wanted and not set(wanted) <= have):
        release = wanted[0] if wanted else "MAJOR-MINOR"
        yield refuse(
            "image-curand",
            "nvcc without the headers of cuRAND: FlashInfer's kernels do not compile, and the first request hangs",
            where=f":{compiler.line}",
            fix=f"install libcurand-dev-{release} (https://github.com/syv-ai/qwen38-27b-rtx3090/pull/12)",
        )


def _health(found: list[Instruction]) -> Iterator[Finding]:
    entry = next((entry for entry in reversed(found) if entry.word == "HEALTHCHECK"), None)
    if entry is None or entry.text.upper() == "NONE":
        where = f":{entry.line}" if entry else ""
        yield warn("image-health", "no health check: a server that hangs counts as alive", where=where)
        return
    period = re.search(r"--start-period=(\S+)", entry.text)
    given = (seconds(period[1]) if period else 0.0) or 0.0
    if given < START_PERIOD_S:
        yield refuse(
            "image-health",
            f"a start period of {given:g} s ends before a large model is loaded; the container is killed meanwhile",
            where=f":{entry.line}",
            fix=f"--start-period={START_PERIOD_S}s or more (https://github.com/vllm-project/vllm/issues/4867)",
        )


def _user(found: list[Instruction]) -> Iterator[Finding]:
    user = next((entry for entry in reversed(found) if entry.word == "USER"), None)
    name = user.text.split(":")[0] if user else "root"
    if name in {"root", "0"}:
        yield refuse("image-user", "the server runs as root", where=f":{user.line}" if user else "", fix="USER 10001")
        return
    env, runs = variables(found), [entry.text for entry in found if entry.word == "RUN"]
    for variable in ("HOME", "USER"):
        if variable not in env:
            yield refuse(
                "image-user",
                f"{variable} is not set: with a uid that has no passwd entry PyTorch cannot name its cache",
                fix=f"ENV {variable}=... (https://github.com/huggingface/text-generation-inference/issues/3082)",
            )
    for variable in ("HOME", "DFLASH_SERVE_CACHE", "DFLASH_SERVE_STATE", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR",
                     "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):  # fmt: skip
        directory, line = env.get(variable, ("", 0))
        # Made by root and left to root, unless something opens or gives it.
        opened = any(re.search(rf"ch(?:mod|own)[^&;]*\s{re.escape(directory)}(?=\s|$)", run) for run in runs)
        if directory and not opened and not directory.startswith("/tmp"):  # noqa: S108
            yield refuse(
                "image-user",
                f"{directory} is root's: user {name} cannot write it",
                where=f":{line}",
                fix=f"RUN mkdir -p {directory} && chmod 1777 {directory} (or chown)",
            )


def _allocator(found: list[Instruction]) -> Iterator[Finding]:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value, line = variables(found).get(variable, ("", 0))
        if re.search(r"expandable_segments:true", value, re.I):
            yield refuse(
                "image-allocator",
                f"{variable} turns expandable segments on for every machine; some WSL drivers fail with them",
                where=f":{line}",
                fix="leave it out; who wants it gives it to docker run",
            )


def _compat(found: list[Instruction]) -> Iterator[Finding]:
    value, line = variables(found).get("LD_LIBRARY_PATH", ("", 0))
    installs = next(
        (e for e in found if e.word == "RUN" and re.search(r"\bcuda-compat-\d|ldconfig \S*compat", e.text)), None
    )
    if "compat" in value or installs:
        yield refuse(
            "image-compat",
            "CUDA's compatibility driver is put before the host's: initialization fails with error 803",
            where=f":{line or (installs.line if installs else 0)}",
            fix="leave the choice to the container toolkit (https://github.com/vllm-project/vllm/issues/33447)",
        )


def _jobs(found: list[Instruction]) -> Iterator[Finding]:
    env = variables(found)
    for entry in found:
        compiles = entry.word == "RUN" and re.search(r"prebuild_flashinfer|flashinfer\.aot|\bninja\b", entry.text)
        if compiles and "MAX_JOBS=" not in entry.text and "MAX_JOBS" not in env:
            yield warn(
                "image-jobs",
                "kernels are compiled with as many compilers as there are cores, gigabytes each",
                where=f":{entry.line}",
                fix="MAX_JOBS=4",
            )


def _gate(found: list[Instruction]) -> Iterator[Finding]:
    if not any(entry.word == "RUN" and "dflash2-patches check" in entry.text for entry in found):
        yield refuse("image-gate", "the build does not run the patches' gate", fix="RUN dflash2-patches check")


def _hashes(found: list[Instruction]) -> Iterator[Finding]:
    for entry in found:
        if entry.word == "RUN" and re.search(r"pip install\b[^&|;]*\s(-r|--requirement)\b", entry.text):
            for call in re.findall(r"pip install\b[^&|;]*", entry.text):
                if re.search(r"\s(-r|--requirement)\b", call) and "--require-hashes" not in call:
                    yield refuse(
                        "image-hashes",
                        "packages are installed without their hashes",
                        where=f":{entry.line}",
                        fix="--require-hashes",
                    )
