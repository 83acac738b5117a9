"""Every check on the toy server: abilities that a small real model lacks, and the report around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_serve.errors import DFlashError, UsageError, VerifyFailed
from dflash_serve.plan.model import Plan
from dflash_serve.progress import SilentProgress
from dflash_serve.verify import boot, generation, telemetry
from dflash_serve.verify.client import Client
from dflash_serve.verify.commands import verify as command
from dflash_serve.verify.model import Abilities, Level, Subject
from dflash_serve.verify.report import Report, examine

from .fake_engine import FakeEngine, serving


def look(subject: Subject) -> Report:
    with SilentProgress().step("") as step:
        return examine(subject, step, recipe="fake")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with serving(FakeEngine()) as made:
        yield made


def subject_of(engine: FakeEngine, **more: object) -> Subject:
    return Subject(client=Client(engine.url, engine.model, timeout=10), metrics_url=engine.url + "/metrics", **more)  # type: ignore[arg-type]


def test_a_sound_server_passes_every_check(engine: FakeEngine) -> None:
    report = look(subject_of(engine))
    assert [c.lines() for c in report.failures] == []
    ids = {c.id for c in report.asked}
    assert {"engine-version", "window-served", "metric-names", "generation", "stops", "structured-output", "drafter",
            "positions", "lossless", "prefix-cache", "cached-drafts", "concurrency"} <= ids  # fmt: skip
    assert report.figures["acceptance_length"] == pytest.approx(3.9, abs=0.4)
    assert report.figures["prefix_hit_share"] > 0.9
    assert report.figures["rescored_tokens"] == 96


def test_what_is_not_asked_says_why(engine: FakeEngine) -> None:
    report = look(subject_of(engine))
    silent = {c.id: c.detail for c in report.checks if not c.checked}
    assert silent["kv-pool"] == "not checked: the server's log is not at hand (--log FILE)"
    assert silent["tool-call"] == "not checked: no tool-call parser is set"
    assert report.passed


def test_abilities_of_an_instructed_model_that_sees(tiny_plan: Plan) -> None:
    plan = tiny_plan.model_copy(update={"argv": (*tiny_plan.argv, "--reasoning-parser", "qwen3")})
    with serving(FakeEngine(reasoning=True)) as engine:
        subject = subject_of(engine, plan=plan, abilities=Abilities(reasoning=True, tools=True, images=True))
        found = {c.id: c for check in generation.CHECKS for c in check(subject)}
    assert all(c.passed and c.checked for c in found.values()), found
    assert set(found) == {
        "generation", "stops", "structured-output", "tool-call", "thinking-on", "thinking-off", "image"
    }  # fmt: skip


@pytest.mark.parametrize(("reasoning", "red"), [(False, "thinking-on"), (None, "thinking-off")])
def test_thinking_that_is_not_set_apart_or_not_turned_off(tiny_plan: Plan, reasoning: bool | None, red: str) -> None:
    plan = tiny_plan.model_copy(update={"argv": (*tiny_plan.argv, "--reasoning-parser", "qwen3")})
    with serving(FakeEngine(reasoning=reasoning is None)) as engine:
        subject = subject_of(engine, plan=plan, abilities=Abilities(reasoning=True))
        if reasoning is None:  # a template that ignores the switch
            chat = subject.client.chat
            subject.client.chat = lambda *a, **k: chat(*a, **{**k, "chat_template_kwargs": {}})  # type: ignore[method-assign]
        found = {c.id: c.passed for c in generation.thinking(subject)}
    assert found[red] is False
    assert sum(not ok for ok in found.values()) == 1


def test_abilities_come_from_the_arguments(tiny_plan: Plan) -> None:
    assert Abilities.of(None, has_vision=None) == Abilities(None, None, None)
    assert Abilities.of(tiny_plan, has_vision=False) == Abilities(False, False, False)
    more = tiny_plan.model_copy(update={"argv": (*tiny_plan.argv, "--tool-call-parser", "x", "--language-model-only")})
    assert Abilities.of(more, has_vision=True) == Abilities(False, True, False)


def test_rates_by_position_divide_by_what_was_drafted_there() -> None:
    """Under a dynamic k a draft may have no token at a late position; dividing by all drafts makes it look bad."""
    labels = 'engine="0",model_name="m"'
    rows = ["# TYPE vllm:spec_decode_num_drafts counter", f"vllm:spec_decode_num_drafts_total{{{labels}}} 100"]
    for name, values in {
        "vllm:spec_decode_num_accepted_tokens_per_pos": (80, 60, 18),
        "dflash:spec_decode_num_draft_tokens_per_pos": (100, 100, 30),
    }.items():
        rows.append(f"# TYPE {name} counter")
        rows += [f'{name}_total{{{labels},position="{p}"}} {v}' for p, v in enumerate(values)]
    from dflash_serve.observe.metrics import parse

    seen = parse("\n".join(rows) + "\n")
    assert telemetry.rates(seen) == (0.8, 0.6, 0.6)
    assert telemetry.conditional_rates(seen) == pytest.approx((0.8, 0.75, 1.0))
    plain = parse("\n".join(row for row in rows if "dflash" not in row) + "\n")
    assert telemetry.rates(plain) == (0.8, 0.6, 0.18)


@pytest.mark.parametrize(
    ("rates", "good"), [((0.9, 0.5, 0.5, 0.1), True), ((), True), ((0.5, 0.6), False), ((0.0, 0.0, 0.01), False)]
)
def test_non_increasing(rates: tuple[float, ...], good: bool) -> None:
    assert boot.non_increasing(rates) is good


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("!!!!!!!!!!!!!!!!!!!!", True),
        ("ab ab ab ab ab ab ab ab ab ab ab ab ab ab", True),
        ("def f(x): return x", False),
    ],
)
def test_repetition(text: str, bad: bool) -> None:
    assert generation.repeats(text) is bad


def test_the_picture_is_a_png_of_that_colour() -> None:
    import struct
    import zlib

    data = generation.png(3, 2, (1, 2, 3))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    length = struct.unpack(">I", data[33:37])[0]
    assert zlib.decompress(data[41 : 41 + length]) == (b"\0" + bytes((1, 2, 3)) * 3) * 2


def test_the_command_on_a_url(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path))
    done = CliRunner().invoke(command, [engine.url + "/v1"])
    assert done.exit_code == 0, done.output
    assert "✓ drafter: acceptance length" in done.stdout
    assert "\nfake: verified (" in done.stdout
    done = CliRunner().invoke(command, [engine.url, "--json"])
    assert json.loads(done.stdout)["passed"]


def test_the_command_fails_with_seven_and_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path))
    with serving(FakeEngine(prefix=False)) as engine:
        done = CliRunner().invoke(command, [engine.url])
    assert done.exit_code == 7
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("✗"))
    assert lines[at].startswith("✗ prefix-cache: ")
    assert [line.split(":")[0] for line in lines[at + 1 : at + 3]] == ["  where", "  fix"]
    assert "1 of " in lines[-1]


def test_full_asks_for_more(engine: FakeEngine) -> None:
    quick = look(subject_of(engine))
    full = look(subject_of(engine, level=Level.FULL))
    assert full.passed, [c.lines() for c in full.failures]
    assert full.figures["rescored_tokens"] > quick.figures["rescored_tokens"]


@pytest.mark.parametrize(
    ("server", "code", "says"),
    [
        ("http://127.0.0.1:1", 7, "no answer"),
        ("http://", 2, "not a URL of a server"),
        ("never-started", 2, "never-started was never started here"),
    ],
)
def test_a_server_that_is_not_there_takes_three_lines(
    server: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path))
    done = CliRunner().invoke(command, [server])
    assert isinstance(done.exception, DFlashError)
    assert done.exception.exit_code == code
    assert says in done.exception.what
    assert len(done.exception.lines()) <= 3


@pytest.mark.parametrize("arguments", [["--soak", "soon"], ["--eval", "nope"]])
def test_bad_options_are_refused_before_any_request(
    arguments: list[str], engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path))
    done = CliRunner().invoke(command, [engine.url, "--model", "fake", *arguments])
    assert isinstance(done.exception, UsageError)
    assert engine.counts == {}


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers.get("Authorization") == "Bearer right" else 401)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(VerifyFailed, match="refuses the key"):
            Client(url, "m", key="wrong").models()
        (tmp_path / "key").write_text("right\n")
        assert Client(url, "m", tmp_path / "key").models() == []
    finally:
        server.shutdown()
        server.server_close()
