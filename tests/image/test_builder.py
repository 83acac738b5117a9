"""BuildKit's events to steps: whole lines and indented objects, and the step that failed with its reason."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.cli import cli
from dflash_serve.errors import BuildFailed
from dflash_serve.image.build import BuildOptions, build
from dflash_serve.image.builder import Log, reason
from dflash_serve.image.identity import identity
from dflash_serve.progress import SilentProgress

RUN = "[stage-0 7/9] RUN --mount=type=secret,id=ca [ ! -s /c ] || export PIP_CERT=/c; /opt/engine/bin/pip install -r x"


def vertex(name: str, number: int, **fields: Any) -> dict[str, Any]:
    return {"digest": f"sha256:{number}", "name": name, **fields}


def output(number: int, text: str) -> dict[str, Any]:
    return {"vertex": f"sha256:{number}", "stream": 1, "data": base64.b64encode(text.encode()).decode()}


EVENTS: list[dict[str, Any]] = [
    {"vertexes": [vertex("[internal] load build definition", 1, started="t", completed="t")]},
    {"vertexes": [vertex("[stage-0 1/9] FROM x", 2, started="t", completed="t", cached=True)]},
    {"vertexes": [vertex(RUN, 3, started="t")], "statuses": [{"id": "x"}]},
    {"logs": [output(3, "Collecting torch\n"), output(3, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n")]},
    {"vertexes": [vertex("[other 2/2] RUN y", 4, started="t", error="context canceled")]},
    {"vertexes": [vertex(RUN, 3, started="t", completed="t", error="process did not complete: exit code: 1")]},
]


def test_the_log_says_what_a_step_took():
    log = Log()
    times = {"started": "2026-11-30T07:00:00.1Z", "completed": "2026-11-30T07:01:02.623456789Z"}
    lines = log.feed(json.dumps({"vertexes": [vertex(RUN, 1, **times)]}))
    assert lines == [RUN, f"DONE {RUN} (62.5 s)"]
    lines = log.feed(json.dumps({"vertexes": [vertex("[2/2] COPY x", 2, started="t", completed="t")]}))
    assert lines[-1] == "DONE [2/2] COPY x"


@pytest.mark.parametrize("indent", [None, 2])
def test_the_failing_step_is_found(indent: int | None):
    log, lines = Log(), []
    for event in EVENTS:
        for line in json.dumps(event, indent=indent).splitlines():
            lines += log.feed(line + "\n")
    failed = log.failed
    assert failed is not None
    assert failed.name == RUN
    assert failed.short == "[stage-0 7/9] RUN /opt/engine/bin/pip install x"
    why, fix = reason(failed.output)
    assert why == "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
    assert "mirror" in fix
    assert log.count() == (2, 1)
    assert "    Collecting torch" in lines
    assert "CACHED [stage-0 1/9] FROM x" in lines


def test_while_it_runs():
    log = Log()
    for event in EVENTS[:3]:
        log.feed(json.dumps(event))
    assert log.running is not None
    assert log.running.name == RUN
    assert log.failed is None


def test_what_is_no_event_is_kept():
    log = Log()
    assert log.feed("ERROR: failed to connect\n") == ["ERROR: failed to connect"]
    assert reason(log.stray)[0] == "ERROR: failed to connect"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("OSError: [Errno 28] No space left on device", "free disk"),
        ("SSLError: CERTIFICATE_VERIFY_FAILED", "--secret ca="),
        ("topk.cu:20:10: fatal error: curand.h: No such file or directory", "libcurand-dev"),
        ("socket.gaierror: Temporary failure in name resolution", "--network host"),
        ("refused: vLLM 0.34.0 is unknown", "docs/patches.md"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "build_jobs"),
        ("docker.io/library/x: pull access denied", "--build-context"),
        ("did not complete successfully: runc did not terminate successfully: exit status -1", "build again"),
    ],
)
def test_known_reasons_have_a_remedy(line: str, fix: str):
    why, remedy = reason(["something", line, "The command returned 1"])
    assert why == line
    assert fix in remedy


@given(st.lists(st.text(max_size=80), max_size=20))
@settings(max_examples=150, deadline=None)
def test_any_output_is_taken(lines: list[str]):
    log = Log()
    for line in lines:
        log.feed(line)
    reason([*lines, *log.stray])


def test_an_unpinned_base_needs_a_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    image = identity("cpu")
    with pytest.raises(BuildFailed, match="not pinned") as caught:
        build(image, BuildOptions(), SilentProgress())
    assert "--allow-unpinned" in caught.value.fix
    with pytest.raises(BuildFailed, match="no Docker engine answers"):
        build(image, BuildOptions(allow_unpinned=True), SilentProgress())


def test_a_file_that_the_lint_refuses_is_not_built(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    data = checkout / "docker/images.yaml"
    data.write_text(data.read_text().replace("      - libcurand-dev-13-0\n", ""))
    with pytest.raises(BuildFailed, match="cuRAND"):
        build(identity("cuda"), BuildOptions(allow_unpinned=True), SilentProgress())


def test_the_command_line_says_it_in_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    done = CliRunner().invoke(cli, ["build", "cpu"])
    assert isinstance(done.exception, BuildFailed)
    assert int(done.exception.exit_code) == 5
