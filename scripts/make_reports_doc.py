#!/usr/bin/env python3
"""Join tests/data/reports/*.yaml to docs/reports.md: every reported problem with the product's answer and its tests.

    scripts/make_reports_doc.py [--check] [--strict]

`index.yaml` lists the problems (title, class, urls). Every other file answers some of them:

    B34:
      answer: refused            # fixed | refused | warned | detected | documented
      how: one or two sentences
      tests: [tests/recipe/test_recipe_lint.py::test_mtp_from_a_path_with_another_methods_name]
      docs: [docs/recipes.md]    # files that explain it

A file may also be a list of such entries, with their `id`, below `cases:`. A case may be answered in several
files. Exit 1 when a named test or document does not exist, a case or an answer is unknown, a case other than
`documented` has no test, with --check when docs/reports.md is not current, and with --strict when a case has no
answer at all.
"""

from __future__ import annotations

import argparse
import ast
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "reports"
TARGET = ROOT / "docs" / "reports.md"
ANSWERS = {
    "fixed": "fixed here",
    "refused": "refused with a clear error",
    "warned": "warned about",
    "detected": "detected when it happens",
    "documented": "documented",
}
HEAD = """\
# Reported problems and our answers

What people reported with DFlash drafters on vLLM, in our own words, and what this project does about each. The tests
named here are in the repository; this page is made by `scripts/make_reports_doc.py` from `tests/data/reports/` and
fails to build when one of them goes away.
"""


@dataclass
class Answer:
    """What one part of the product does about a case."""

    file: str
    answer: str
    how: str
    tests: list[str] = field(default_factory=list)
    docs: list[str] = field(default_factory=list)


@dataclass
class Case:
    """A reported problem."""

    id: str
    title: str
    kind: str
    urls: list[str]
    answers: list[Answer] = field(default_factory=list)


@cache
def tests_in(path: Path) -> frozenset[str]:
    """Names of test functions, methods as Class::name."""
    out = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            out.add(node.name)
        elif isinstance(node, ast.ClassDef):
            out |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return frozenset(name for name in out if name.split("::")[-1].startswith("test_"))


def problem_with_test(node_id: str, root: Path) -> str | None:
    """Why a pytest node id is no test of ours, or None. A parameter in brackets is not looked at."""
    file, separator, name = node_id.partition("::")
    path = root / file
    if not separator or not file.startswith("tests/"):
        return f"{node_id} is not a node id such as tests/room/test_x.py::test_name"
    if not path.is_file():
        return f"{node_id}: there is no {file}"
    if name.partition("[")[0] not in tests_in(path):
        return f"{node_id}: {file} has no such test"
    return None


def entries(content: Any) -> list[tuple[str, dict[str, Any]]]:
    """Answers of one file: a mapping from case to answer, or `cases:` as such a mapping or as a list with ids."""
    cases = content.get("cases", content)
    return [(row["id"], row) for row in cases] if isinstance(cases, list) else list(cases.items())


def read(data: Path, root: Path) -> tuple[list[Case], list[str]]:
    """All cases with their answers, and what is wrong with the files."""
    problems: list[str] = []
    cases = {
        key: Case(key, row["title"], row["class"], row["urls"])
        for key, row in yaml.safe_load((data / "index.yaml").read_text()).items()
    }
    for path in sorted(data.glob("*.yaml")):
        if path.name == "index.yaml":
            continue
        for key, row in entries(yaml.safe_load(path.read_text()) or {}):
            if key not in cases:
                problems.append(f"{path.name}: no case {key} in index.yaml")
                continue
            extra = set(row) - {"id", "title", "class", "answer", "how", "tests", "docs", "urls"}
            if extra or row.get("answer") not in ANSWERS or not row.get("how"):
                problems.append(
                    f"{path.name}: {key} needs how and answer ({', '.join(ANSWERS)}), unknown: {sorted(extra)}"
                )
                continue
            found = Answer(path.stem, row["answer"], row["how"], row.get("tests") or [], row.get("docs") or [])
            problems += [f"{path.name}: {key}: {why}" for t in found.tests if (why := problem_with_test(t, root))]
            problems += [f"{path.name}: {key}: no file {d}" for d in found.docs if not (root / d).is_file()]
            if not found.tests and found.answer != "documented":
                problems.append(f"{path.name}: {key} is {found.answer} but names no test")
            if found.answer == "documented" and not (found.docs or found.tests):
                problems.append(f"{path.name}: {key} is documented but names no document")
            cases[key].urls += [url for url in row.get("urls") or [] if url not in cases[key].urls]
            cases[key].answers.append(found)
    return list(cases.values()), problems


def render(cases: list[Case]) -> str:
    """The page."""
    out = [HEAD]
    kinds = list(dict.fromkeys(case.kind for case in cases))
    for kind in kinds:
        out.append(f"\n## {kind}\n")
        for case in (c for c in cases if c.kind == kind and c.answers):
            out.append(f"### {case.id}: {case.title}\n")
            for answer in case.answers:
                out.append(f"- **{ANSWERS[answer.answer]}** ({answer.file}): {' '.join(answer.how.split())}")
                out += [f"  - test: `{test}`" for test in answer.tests]
                out += [f"  - see [{doc}]({'../' + doc})" for doc in answer.docs]
            out.append(f"- reported: {', '.join(f'<{url}>' for url in case.urls)}\n")
    if missing := [case for case in cases if not case.answers]:
        out.append("\n## Not answered yet\n")
        out += [f"- {case.id} ({case.kind}): {case.title}" for case in missing]
    return "\n".join(out).rstrip() + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is not current")
    parser.add_argument("--strict", action="store_true", help="fail when a case has no answer")
    options = parser.parse_args(argv)
    cases, problems = read(DATA, ROOT)
    missing = [case.id for case in cases if not case.answers]
    if options.strict and missing:
        problems.append(f"{len(missing)} cases without an answer: {', '.join(missing)}")
    text = render(cases)
    if options.check and (not TARGET.is_file() or TARGET.read_text() != text):
        problems.append("docs/reports.md is not current: run scripts/make_reports_doc.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    if not options.check:
        TARGET.write_text(text)
    print(f"{len(cases) - len(missing)} of {len(cases)} cases answered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
