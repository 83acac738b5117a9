"""The matrix says only what is true: its nets exist, its tests exist, the document is current, nothing is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from dflash_serve.verify.silent import Failure, document, failures

ROOT = Path(__file__).resolve().parents[2]
# What the project set out to catch; more may follow.
AT_LEAST = {
    "causal-drafter", "fp16-nan-drafter", "k-over-the-block", "window-lowered", "pool-smaller", "concurrency-lowered",
    "prefix-cache-dead", "v1-fallback", "method-by-path", "drafter-inert", "acceptance-falls-with-context",
    "acceptance-after-a-bump", "flashinfer-top-k", "stale-compile-cache", "plugin-left-out", "speed-hides-it",
    "metrics-renamed", "grammar-rejected", "positions-under-dynamic-k", "restart-loop", "draining-gpu",
    "engine-wedged", "nan-logits", "revision-moved",
}  # fmt: skip


def test_all_of_them_are_there_once() -> None:
    ids = [entry.id for entry in failures()]
    assert len(ids) == len(set(ids))
    assert set(ids) >= AT_LEAST
    assert len(AT_LEAST) == 24


def test_the_document_is_current() -> None:
    assert (ROOT / "docs/silent-failures.md").read_text("utf-8") == document()


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@cache
def strings(path: Path) -> set[str]:
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return {node.value for node in found if isinstance(node.value, str)}


def exists(test: str) -> bool:
    """Whether a test with this node id is there; a parameter must be spelled in its file."""
    match = re.fullmatch(r"([\w/.]+)(?:::(\w+)(?:\[([\w-]+)\])?)?", test)
    if match is None or not (ROOT / match[1]).is_file():
        return False
    if match[1].endswith(".py") and match[2]:
        path = ROOT / match[1]
        return match[2] in functions(path) and (match[3] is None or match[3] in strings(path))
    return True


@pytest.mark.parametrize("entry", failures(), ids=lambda entry: entry.id)
def test_every_named_test_exists(entry: Failure) -> None:
    assert [test for catch in entry.caught for test in catch.tests if not exists(test)] == []


@cache
def named(room: str) -> set[str]:
    """Strings of a part of the sources."""
    return {value for path in (ROOT / "src/dflash_serve" / room).rglob("*.py") for value in strings(path)}


@cache
def alerts(file: str) -> set[str]:
    return set(re.findall(r"alert(?:name)?: (\w+)", (ROOT / file).read_text()))


@pytest.mark.parametrize("entry", failures(), ids=lambda entry: entry.id)
def test_every_net_exists(entry: Failure) -> None:
    for catch in (catch for catch in entry.caught if not catch.mechanism):
        if catch.how == "alerted":
            assert catch.by in alerts("docker/prometheus/rules/alerts.yml")
            assert catch.by in alerts("docker/prometheus/tests/alerts.yml")
        elif catch.how == "asserted":
            # A check that can't be made fails under its function's name.
            modules = {name for path in (ROOT / "src/dflash_serve/verify").glob("*.py") for name in functions(path)}
            assert catch.by in named("verify") | {name.replace("_", "-") for name in modules}
        else:
            assert catch.by in named("preflight") | named("shape") | named("overlay") | named("recipe")


@pytest.mark.parametrize("entry", failures(), ids=lambda entry: entry.id)
def test_what_is_not_real_says_what_is_open(entry: Failure) -> None:
    assert entry.reproduced != "recorded" or entry.note


def test_a_missing_test_would_be_seen() -> None:
    assert not exists("tests/silent/test_silent_matrix.py::test_that_is_not_there")
    assert not exists("tests/silent/test_silent_by_proxy.py::test_red_then_green[no-such-failure]")
    assert not exists("tests/nowhere.py")
    assert exists("tests/silent/test_silent_by_proxy.py::test_red_then_green[nan-logits]")


def test_the_data_is_sorted_out_by_the_schema() -> None:
    data = yaml.safe_load((ROOT / "src/dflash_serve/verify/silent.yaml").read_text())
    broken = {**data["failures"][0], "how": "hopefully"}
    with pytest.raises(ValueError, match="how"):
        Failure.model_validate(broken)
