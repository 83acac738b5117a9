"""Each fault is planted into the real Dockerfile, and found there; nothing else is."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.cli import cli
from dflash_serve.findings import Severity
from dflash_serve.image.identity import identity
from dflash_serve.image.lint import IDS, instructions, lint, seconds
from dflash_serve.image.render import render

DIGEST = "@sha256:" + "0" * 64


@pytest.fixture(scope="module")
def good() -> str:
    text = render(identity("cuda"))
    base = next(entry.text for entry in instructions(text) if entry.word == "FROM")
    text = text.replace(f"FROM {base}", f"FROM {base}{DIGEST}")
    assert lint(text) == []
    return text


@pytest.mark.parametrize(
    ("id", "severity", "old", "new"),
    [
        ("image-curand", Severity.REFUSE, "libcurand-dev-13-0 ", ""),
        ("image-curand", Severity.REFUSE, "libcurand-dev-13-0 ", "libcurand-dev-13-3 "),
        ("image-health", Severity.REFUSE, "--start-period=1800s", "--start-period=60s"),
        ("image-health", Severity.REFUSE, "--start-period=1800s", "--start-period=14m59s"),
        ("image-health", Severity.REFUSE, "--start-period=1800s ", ""),
        ("image-health", Severity.WARN, "STOPSIGNAL SIGTERM", "HEALTHCHECK NONE"),
        ("image-base", Severity.WARN, DIGEST, ""),
        ("image-base", Severity.REFUSE, f":13.0.2-base-ubuntu24.04{DIGEST}", ":latest"),
        ("image-base", Severity.REFUSE, f":13.0.2-base-ubuntu24.04{DIGEST}", ""),
        ("image-user", Severity.REFUSE, "USER 10001:10001", "USER root"),
        ("image-user", Severity.REFUSE, "USER 10001:10001\n", ""),
        ("image-user", Severity.REFUSE, "chmod 1777 /cache /state", "chmod 1777 /state"),
        ("image-user", Severity.REFUSE, "    USER=dflash \\\n", ""),
        ("image-allocator", Severity.REFUSE, "LANG=C.UTF-8", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("image-compat", Severity.REFUSE, "LANG=C.UTF-8", "LD_LIBRARY_PATH=/usr/local/cuda/compat"),
        ("image-compat", Severity.REFUSE, "libnuma1", "libnuma1 cuda-compat-13-0"),
        ("image-jobs", Severity.WARN, "MAX_JOBS=4 ", ""),
        ("image-gate", Severity.REFUSE, "dflash2-patches check", "dflash2-patches --help"),
        ("image-hashes", Severity.REFUSE, "--require-hashes -r /opt/locks/engine.txt", "-r /opt/locks/engine.txt"),
    ],
)
def test_a_planted_fault_is_found(good: str, id: str, severity: Severity, old: str, new: str):
    assert old in good
    findings = lint(good.replace(old, new), name="Dockerfile")
    assert {(finding.id, finding.severity) for finding in findings} == {(id, severity)}
    assert all(finding.id in IDS and finding.where.startswith("Dockerfile") for finding in findings)


@pytest.mark.parametrize("period", ["900s", "15m", "1h", "0.5h"])
def test_a_long_start_period_is_fine(good: str, period: str):
    assert lint(good.replace("--start-period=1800s", f"--start-period={period}")) == []


def test_a_devel_base_brings_the_headers(good: str):
    text = good.replace("libcurand-dev-13-0 ", "").replace("-base-ubuntu24.04", "-devel-ubuntu24.04")
    assert lint(text) == []


def test_continuations_comments_and_stages():
    text = "FROM a:1 AS one\n# remark\nRUN x \\\n  # inside\n  && y\n\nFROM one\nCMD z"
    assert [(e.line, e.word, e.text) for e in instructions(text)] == [
        (1, "FROM", "a:1 AS one"),
        (3, "RUN", "x && y"),
        (7, "FROM", "one"),
        (8, "CMD", "z"),
    ]
    assert [f.where for f in lint(text, name="x") if f.id == "image-base"] == ["x:1"]


@given(st.text(max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_text_is_linted(text: str):
    assert all(finding.id in IDS for finding in lint(text))


@given(st.text(max_size=12))
def test_durations(text: str):
    value = seconds(text)
    assert value is None or value >= 0 or "." in text


def test_the_command_line(tmp_path):
    file = tmp_path / "Dockerfile"
    file.write_text("FROM x\nRUN apt-get install cuda-nvcc-13-0\n")
    done = CliRunner().invoke(cli, ["image", "lint", str(file)])
    assert done.exit_code == 5
    assert "libcurand-dev-13-0" in done.output
    assert CliRunner().invoke(cli, ["image", "lint"]).exit_code == 0
