"""Hashes of functions: what moves them and what doesn't."""

from __future__ import annotations

import pytest
from dflash2_patches.drift import Sources, version

SOURCE = """\
import functools


class A:
    @functools.cache
    def f(self):
        return 1   

    def g(self):
        return 2


if True:
    def h():
        return 3
else:
    def h_else():
        return 4


def twice():
    return 1


def twice():
    return 2
"""  # noqa: W291


class Texts(dict):
    def text(self, path):
        return self.get(path)


def sources(text: str) -> Sources:
    return Sources(Texts({"vllm/m.py": text, "vllm/p/__init__.py": "def x():\n    pass\n"}))


def test_lines_start_at_the_decorator_and_have_no_trailing_blanks():
    assert sources(SOURCE).at("vllm.m:A.f") == "    @functools.cache\n    def f(self):\n        return 1"


def test_a_known_hash():
    # SHA-256 of the lines themselves: the same on every Python version.
    assert sources("").digest("vllm.p:x") == "6514cb45ffced383"


@pytest.mark.parametrize(
    "change",
    [("functools.cache", "functools.lru_cache"), ("return 1   ", "return 9"), ("def f(self)", "def f(self, x)")],
)
def test_a_change_inside_moves_the_hash(change):
    assert sources(SOURCE.replace(*change)).digest("vllm.m:A.f") != sources(SOURCE).digest("vllm.m:A.f")


@pytest.mark.parametrize("change", [("return 2", "return 22"), ("return 1   ", "return 1"), ("import", "\n\nimport")])
def test_a_change_elsewhere_or_of_blanks_does_not(change):
    assert sources(SOURCE.replace(*change)).digest("vllm.m:A.f") == sources(SOURCE).digest("vllm.m:A.f")


def test_conditional_definitions_are_found_and_the_last_of_a_name_counts():
    found = sources(SOURCE)
    assert "return 3" in found.at("vllm.m:h")
    assert "return 4" in found.at("vllm.m:h_else")
    assert "return 2" in found.at("vllm.m:twice")


def test_absent_places_have_no_hash():
    found = sources(SOURCE)
    assert found.digest("vllm.m:nothing") is None
    assert found.digest("vllm.absent:f") is None
    assert found.digest("vllm.absent") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = version = '0.33.0'\n", "0.33.0"),
        ('__version__ = "0.33.0+cu129"\n', "0.33.0"),
        ("x = 1\n", None),
        (None, None),
    ],
)
def test_version(text, expected):
    assert version(Texts({"vllm/_version.py": text} if text else {})) == expected
