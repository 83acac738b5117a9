"""The report's page, and what is kept for the next verification."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.plan.model import Plan
from dflash_serve.verify import drafting, perplexity, svg
from dflash_serve.verify.client import Client, TokenScore
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked
from dflash_serve.verify.page import page
from dflash_serve.verify.report import Report, history, keep, verify

POSITIVE = st.floats(0, 1e7, allow_nan=False)


def report(*checks: Check, version: str = "") -> Report:
    return Report(
        recipe="tiny <b>",
        url="http://h:1",
        passed=all(c.passed for c in checks),
        checks=checks,
        figures={"acceptance_length": 4.48},
        vllm_version=version,
    )


def test_the_page_shows_checks_figures_and_plots_and_needs_nothing_else() -> None:
    rates = {"accepted_by_position": (0.9, 0.6, 0.2), "conditional_by_position": (0.9, 0.67, 0.33)}
    made = report(
        passed("drafter", "acceptance length 4.48", series=rates),
        passed("prefix-cache", "reused", series={"ttft_s": (2.0, 0.5)}),
        passed("concurrency", "4 streams", series={"ttft_s": (0.1, 0.2), "finished_s": (1.0, 2.0)}),
        passed(
            "needle",
            "found",
            series={"tokens": (500.0, 4000.0), "prefill_tok_s": (300.0, 280.0), "acceptance_length": (3.0, 2.9)},
        ),
        unchecked("image", "text only"),
        failed("window-served", "a window of 2048 tokens, planned were 4096", fix="raise <it>", where="GET /v1/models"),
    )
    text = page(made)
    assert text.count("<figure>") == 5
    assert "1 of 5 checks failed" in text
    assert "where: GET /v1/models" in text
    assert "fix: raise &lt;it&gt;" in text
    assert "tiny &lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    parser = HTMLParser()
    parser.feed(text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


@given(st.lists(POSITIVE, min_size=1, max_size=12), st.lists(POSITIVE, min_size=1, max_size=12))
def test_charts_stay_inside_their_frame(first: list[float], second: list[float]) -> None:
    both = min(len(first), len(second))
    rows = {"a": first[:both], "b": second[:both]}
    x = [float(i) for i in range(both)]
    spans = [(str(i), a, a + b) for i, (a, b) in enumerate(zip(first, second, strict=False))]
    for drawing in (
        svg.bars([str(i) for i in x], rows, unit="s"),
        svg.lines(x, rows, unit="s", along="n"),
        svg.spans(spans, unit="s"),
    ):
        root = ElementTree.fromstring(drawing.split("</svg>")[0] + "</svg>")
        for box in root.iter("rect"):
            left, top = float(box.attrib["x"]), float(box.attrib["y"])
            assert -0.1 <= left <= left + float(box.attrib["width"]) <= svg.WIDTH + 0.1
            assert -0.1 <= top <= top + float(box.attrib["height"]) <= svg.HEIGHT + 0.1


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (4.7e-7, "0"), (0.75, "0.75"), (1.875, "1.88"), (1250.0, "1,250"), (25_000.0, "25k"), (2.5e6, "2.5M")],
)
def test_ticks_are_short(value: float, shown: str) -> None:
    assert svg._number(value) == shown


def test_a_passed_verification_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path))
    assert history("tiny") == {}
    keep("tiny", report(version="0.31.0"))
    keep("tiny", report(version="0.32.0"))
    assert history("tiny")["acceptance_length"] == {"0.31.0": 4.48, "0.32.0": 4.48}
    (tmp_path / "runs/tiny/verified.json").write_text("[1]")
    assert history("tiny") == {}


@pytest.mark.parametrize(("length", "good"), [(3.19, True), (2.95, True), (2.66, False)])
def test_acceptance_against_another_version(length: float, good: bool) -> None:
    """3.19 to 2.66 tokens a step is what a version bump once cost (syv-ai/qwen38-27b-rtx3090#73)."""
    subject = Subject(Client("http://h:1", "m"), "", history={"acceptance_length": {"0.27.1": 3.19}})
    subject.kept["version"] = "0.28.0"
    assert drafting._history(subject, length).passed is good


class Scoring(Client):
    """Scores in one way for tokens in order and in another for disorder."""

    def __init__(self, ordered: float, shuffled: float) -> None:
        super().__init__("http://h:1", "m")
        self._values = ordered, shuffled

    def post(self, path: str, body: dict[str, object]) -> object:
        return {"tokens": list(range(600))}

    def score(self, ids: object) -> list[TokenScore]:
        rows = list(ids)  # type: ignore[call-overload]
        value = self._values[0] if rows == sorted(rows) else self._values[1]
        return [TokenScore(token, value, 1, value) for token in rows[1:]]


@pytest.mark.parametrize(
    ("ordered", "shuffled", "kept", "red"),
    [
        (-2.0, -6.0, None, []),
        (-2.0, -2.1, None, ["perplexity"]),
        (float("nan"), -6.0, None, ["perplexity"]),
        (-2.0, -6.0, 7.38, []),
        (-2.0, -6.0, 7.0, ["perplexity-history"]),
    ],
)
def test_perplexity(ordered: float, shuffled: float, kept: float | None, red: list[str]) -> None:
    remembered = {} if kept is None else {"perplexity": {"0.31.0": kept}}
    subject = Subject(Scoring(ordered, shuffled), "", history=remembered)
    subject.kept["window"] = 4096
    assert [c.id for c in perplexity.perplexity(subject) if not c.passed] == red


def test_up_calls_it_like_this(tiny_plan: Plan) -> None:
    """`lifecycle.up` passes run, plan and step, and ends with the report's failure."""
    import inspect

    assert list(inspect.signature(verify).parameters)[:3] == ["run", "plan", "step"]
    error = report(failed("window-served", "lowered", fix="raise it", where="GET /v1/models")).failure()
    assert error is not None
    assert error.exit_code == 7
    assert len(error.lines()) == 3
    assert tiny_plan.expectations.max_model_len == 4096
