"""The page of reported problems: a case that names a test which doesn't exist must not build."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import yaml
from script_module import load_script


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_script("make_reports_doc")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "room" / "test_a.py").write_text(
        "def test_one(): ...\ndef helper(): ...\nclass TestB:\n    def test_two(self): ...\n"
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("text")
    data = tmp_path / "data"
    data.mkdir()
    rows = {
        key: {"title": f"Title of {key}", "class": "shape", "urls": ["https://example.org"]} for key in ("B01", "B02")
    }
    (data / "index.yaml").write_text(yaml.safe_dump(rows))
    return tmp_path


def problems(maker: ModuleType, tree: Path, **row: object) -> list[str]:
    (tree / "data" / "room.yaml").write_text(yaml.safe_dump({row.pop("case", "B01"): row}))
    found: list[str] = maker.read(tree / "data", tree)[1]
    return found


ONE = "tests/room/test_a.py::test_one"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "fixed", "how": "h", "tests": [ONE]}, ""),
        ({"answer": "fixed", "how": "h", "tests": ["tests/room/test_a.py::TestB::test_two"]}, ""),
        ({"answer": "fixed", "how": "h", "tests": [ONE + "[param]"]}, ""),
        ({"answer": "documented", "how": "h", "docs": ["docs/a.md"]}, ""),
        ({"answer": "fixed", "how": "h", "tests": ["tests/room/test_a.py::test_gone"]}, "has no such test"),
        ({"answer": "fixed", "how": "h", "tests": ["tests/room/test_a.py::helper"]}, "has no such test"),
        ({"answer": "fixed", "how": "h", "tests": ["tests/room/test_b.py::test_one"]}, "there is no"),
        ({"answer": "fixed", "how": "h", "tests": ["test_one"]}, "is not a node id"),
        ({"answer": "fixed", "how": "h"}, "names no test"),
        ({"answer": "documented", "how": "h"}, "names no document"),
        ({"answer": "documented", "how": "h", "docs": ["docs/b.md"]}, "no file docs/b.md"),
        ({"answer": "solved", "how": "h", "tests": [ONE]}, "needs how and answer"),
        ({"answer": "fixed", "tests": [ONE]}, "needs how and answer"),
        ({"answer": "fixed", "how": "h", "test": [ONE]}, "unknown: ['test']"),
        ({"case": "B99", "answer": "fixed", "how": "h", "tests": [ONE]}, "no case B99"),
    ],
)
def test_answers_are_checked(maker: ModuleType, tree: Path, row: dict[str, object], message: str) -> None:
    found = problems(maker, tree, **row)
    assert (found == []) if not message else (len(found) == 1 and message in found[0])


@pytest.mark.parametrize("as_list", [True, False])
def test_answers_may_stand_below_cases(maker: ModuleType, as_list: bool) -> None:
    row = {"answer": "fixed", "how": "h", "tests": [ONE]}
    cases: object = [{"id": "B01", **row}] if as_list else {"B01": row}
    ((key, found),) = maker.entries({"schema": 1, "cases": cases})
    assert key == "B01"
    assert found["tests"] == [ONE]


def test_the_page_shows_answers_and_what_is_missing(maker: ModuleType, tree: Path) -> None:
    assert problems(maker, tree, answer="refused", how="It says no.", tests=[ONE]) == []
    page = maker.render(maker.read(tree / "data", tree)[0])
    assert "### B01: Title of B01" in page
    assert f"test: `{ONE}`" in page
    assert "## Not answered yet" in page
    assert "- B02 (shape): Title of B02" in page


def test_our_own_answers_hold(maker: ModuleType) -> None:
    cases, found = maker.read(maker.DATA, maker.ROOT)
    assert found == []
    assert len(cases) > 80
