"""Every check on the toy server: abilities that a small real model lacks, and the report around them."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_serve.errors import DFlashError, UsageError, VerifyFailed
from dflash_serve.plan.model import Plan
from dflash_serve.progress import SilentProgress
from dflash_serve.recipe import catalogue
from dflash_serve.verify import boot, drafting, generation, load, lossless, reuse, telemetry
from dflash_serve.verify.client import Client, Completion
from dflash_serve.verify.commands import verify as command
from dflash_serve.verify.model import Abilities, Check, Level, Subject, failed, passed
from dflash_serve.verify.report import Report, ask, examine

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
    # Without a plan there is nothing to hold version and window against.
    assert not {"engine-version", "window-served"} & ids
    assert {"metric-names", "generation", "stops", "structured-output", "drafter",
            "positions", "lossless", "prefix-cache", "cached-drafts", "concurrency"} <= ids  # fmt: skip
    assert report.figures["acceptance_length"] == pytest.approx(3.9, abs=0.4)
    assert report.figures["prefix_hit_share"] > 0.9
    assert report.figures["rescored_tokens"] == 96


def test_what_is_not_asked_says_why(engine: FakeEngine) -> None:
    report = look(subject_of(engine))
    silent = {c.id: c.detail for c in report.checks if not c.checked}
    assert silent["engine-version"] == "not checked: the server's plan is not known (--plan FILE); vLLM 0.32.0 serves"
    assert (
        silent["window-served"]
        == "not checked: the server's plan is not known (--plan FILE); the window is 4096 tokens"
    )
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


def seeded(alphabet: str, length: int = 100) -> list[str]:
    return ["".join(random.Random(seed).choices(alphabet, k=length)) for seed in range(200)]


# What a small model trained on code really said: hardly a blank in it.
JOINED = "```\ndef _check_check_with_with_with_check_with_with_check_with_check_with_check_with_with"


@pytest.mark.parametrize(
    "text",
    [JOINED, "self.assertEqual(value.readLine(),expectedValue.fromBytes(otherName))", "A colour is blue and 4."],
)
def test_text_has_words_with_blanks_and_without(text: str) -> None:
    assert len(generation.words_of(text)) >= 3


@pytest.mark.parametrize(
    "texts",
    [
        seeded(string.ascii_letters + string.digits + string.punctuation),
        seeded(string.ascii_letters),
        seeded(string.ascii_lowercase),
        seeded(string.hexdigits),
        # Another vocabulary's pieces, and code pieces of several scripts.
        [
            "textodhen22NOTÒrupt->unttop'*sivesecondzzBOsueposixaddrÓ°aysinf",
            "ynamodbìĿ´.ControllerёSOURCE/日本getElement",
        ],
        ["checkcheckcheckwithwithwithcheckwithcheckcheck", "name_name_name_path_name_path_name", "()[]{}==//\\--++"],
    ],
    ids=["printable", "letters", "lower", "hex", "pieces", "too-few"],
)
def test_what_broken_weights_give_has_none(texts: list[str]) -> None:
    for text in texts:
        assert len(generation.words_of(text)) < 3, text


@pytest.mark.parametrize(("said", "sound"), [(JOINED, True), (seeded(string.ascii_letters)[0], False)])
def test_the_canary_takes_code_for_text(engine: FakeEngine, said: str, sound: bool) -> None:
    subject = subject_of(engine)
    subject.client.chat = lambda *a, **k: Completion(said, "length", 48, 0.1, 0.5)  # type: ignore[method-assign]
    (check,) = generation.generation(subject)
    assert check.passed is sound
    assert sound or "is no text" in check.lines()[0]


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


@pytest.mark.parametrize("length", [1.9, 5.2, 7.9])
def test_above_the_band_only_what_hardly_rejects_is_red(tiny_plan: Plan, engine: FakeEngine, length: float) -> None:
    """Published bands are of other prompts; a rejection that accepts everything reaches 1 + k."""
    expected = tiny_plan.expectations.model_copy(update={"acceptance_length_min": 2.0, "acceptance_length_max": 4.7})
    subject = subject_of(engine, plan=tiny_plan.model_copy(update={"expectations": expected}))
    check = drafting._band(subject, length, 8.0, {}, {})
    assert check.passed is (length == 5.2)
    assert ("above the band" in check.detail) is (length == 5.2)


def test_rates_may_rise_where_counts_do_not() -> None:
    """Ten drafts, nine of which have a second token: only the better ones reach it."""
    assert drafting._positions((6 / 10, 6 / 9), (6.0, 6.0)).passed
    assert not drafting._positions((0.6, 0.7), (6.0, 7.0)).passed


def test_every_recipes_reasoning_parser_is_asked_sensibly(tiny_plan: Plan) -> None:
    """A parser whose template has no known switch is not called red for thinking as it does."""
    parsers = {recipe.serve.reasoning_parser for recipe in catalogue.load_all()} - {None}
    assert {"qwen3", "gemma4", "glm45"} <= parsers
    for parser in sorted(str(p) for p in parsers):
        plan = tiny_plan.model_copy(update={"argv": (*tiny_plan.argv, "--reasoning-parser", parser)})
        for thinks_unasked in (True, False):
            with serving(FakeEngine(reasoning=thinks_unasked)) as engine:
                subject = subject_of(engine, plan=plan, abilities=Abilities(reasoning=True))
                if generation._switch(subject) is None:
                    assert all(c.passed for c in generation.thinking(subject)), (parser, thinks_unasked)


def test_thinking_is_asked_with_the_models_own_sampling(tiny_plan: Plan) -> None:
    plan = tiny_plan.model_copy(update={"argv": (*tiny_plan.argv, "--reasoning-parser", "qwen3")})
    asked: list[dict[str, object]] = []
    with serving(FakeEngine(reasoning=True)) as engine:
        subject = subject_of(engine, plan=plan, abilities=Abilities(reasoning=True, tools=True))
        chat = subject.client.chat
        subject.client.chat = lambda *a, **k: asked.append(k) or chat(*a, **k)  # type: ignore[method-assign,func-returns-value]
        for check in (generation.stops, generation.structured, generation.tool_call, generation.thinking):
            check(subject)
    for sent in asked:
        thinks = sent["chat_template_kwargs"] == {"enable_thinking": True}
        assert ("temperature" in sent) is not thinks
    assert {len(sent["chat_template_kwargs"]) for sent in asked} == {1}  # type: ignore[arg-type]


def test_greedy_is_free_of_penalties(engine: FakeEngine) -> None:
    sent: list[dict[str, object]] = []
    subject = subject_of(engine)
    complete = subject.client.complete
    subject.client.complete = lambda *a, **k: sent.append(k) or complete(*a, **k)  # type: ignore[method-assign,func-returns-value]
    lossless.lossless(subject)
    assert sent
    assert all(row["repetition_penalty"] == 1.0 and row["presence_penalty"] == 0.0 for row in sent)


@pytest.mark.parametrize(
    ("behind", "tokens", "good"), [((0.3,), 96, True), ((0.3, 0.3), 96, False), ((1.1,), 96, False)]
)
def test_a_near_tie_is_no_broken_verification(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, behind: tuple[float, ...], tokens: int, good: bool
) -> None:
    found = [lossless.Mismatch(0, at, 7, margin) for at, margin in enumerate(behind)]
    monkeypatch.setattr(lossless, "tie_margin", lambda *_: 0.25)
    monkeypatch.setattr(lossless, "mismatches", lambda number, *_: found if number == 0 else [])
    (check,) = lossless.lossless(subject_of(engine))
    assert check.figures["rescored_tokens"] == tokens
    assert check.passed is good


def test_a_stall_that_does_not_come_again_is_a_compilation(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(gap: float) -> list[Check]:
        more = {"figures": {"longest_gap_s": gap}}
        return [passed("concurrency", "fine", **more) if gap < 5 else failed("concurrency", "stood", fix="x", **more)]

    for gaps, good in (([9.0, 0.1], True), ([9.0, 9.0], False)):
        runs = iter(gaps)
        monkeypatch.setattr(load, "_streams", lambda *_, runs=runs: stalled(next(runs)))
        (check,) = load.concurrency(subject_of(engine))
        assert check.passed is good
        assert "at first a stream stood still for 9.0 s" in check.detail


def test_few_drafts_say_nothing_about_the_cache() -> None:
    (check,) = reuse._drafts([2.0, 4.0], [8.0, 4.0])
    assert not check.checked
    (check,) = reuse._drafts([12.0, 20.0], [5.3, 2.5])
    assert not check.passed


def test_an_answer_that_is_not_vllms_is_a_failed_check(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(engine)
    for strange in ({}, [], {"version": None}, 5):
        monkeypatch.setattr(Client, "get", lambda *_, strange=strange: strange)
        for check in (boot.engine_version, boot.window_served):
            (found,) = ask(check, subject)
            assert found.fix or not found.checked


def test_a_url_that_is_none_and_a_key_that_is_no_text(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"\xff\xfe")
    for arguments in (["http://[::1"], ["http://127.0.0.1:9", "--key-file", str(key), "--model", "m"]):
        with pytest.raises(UsageError) as caught:
            CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
        assert caught.value.fix
