"""Precision and recall on labelled excerpts; `pytest -s` on this file prints the figures.

The held-out half was collected after the patterns were written; none was written or changed for it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.observe.doctor import Diagnosis, Doctor, Verdict
from dflash_serve.observe.fingerprints import by_id
from dflash_serve.observe.redact import Redactor

HERE = Path(__file__).parent
LABELLED: list[dict[str, Any]] = yaml.safe_load((HERE / "labelled.yaml").read_text())
HELD_OUT: list[dict[str, Any]] = yaml.safe_load((HERE / "heldout.yaml").read_text())
CASES = sorted({entry["case"] for entry in LABELLED if "case" in entry})


def diagnosed(entry: dict[str, Any], redact: Redactor | None = None) -> Diagnosis:
    hide = redact or (lambda text: text)
    doctor = Doctor()
    doctor.read(io.BytesIO(hide(entry["log"]).encode()), "server.log")
    if "kernel" in entry:
        doctor.read(io.BytesIO(hide(entry["kernel"]).encode()), "kernel", kernel=True)
    if "exit_code" in entry:
        doctor.exited(entry["exit_code"])
    doctor.restarted(entry.get("restarts", 0))
    return doctor.diagnosis()


def answer(found: Diagnosis) -> str:
    if found.verdict is Verdict.KNOWN and found.first is not None and found.first.fingerprint is not None:
        return found.first.fingerprint.id
    return "unknown" if found.verdict is Verdict.UNKNOWN else "none"


@dataclass(frozen=True)
class Figures:
    """Counts over excerpts.

    Attributes:
        named, right: excerpts for which a cause was named, and rightly.
        known: failures of a kind that has a fingerprint; failures: all of them.
        false_alarms: healthy logs for which a cause was named.
    """

    excerpts: int
    named: int
    right: int
    known: int
    failures: int
    healthy: int
    false_alarms: int

    def __str__(self) -> str:
        return (
            f"{self.excerpts} excerpts: precision {self.right}/{self.named}, recall {self.right}/{self.known} of the "
            f"kinds that have a fingerprint and {self.right}/{self.failures} of all failures, "
            f"{self.false_alarms} of {self.healthy} healthy logs given a cause"
        )


def figures(entries: list[dict[str, Any]]) -> Figures:
    answers = [(entry["expect"], answer(diagnosed(entry))) for entry in entries]
    named = [(expected, got) for expected, got in answers if got not in {"unknown", "none"}]
    healthy = [(expected, got) for expected, got in answers if expected == "none"]
    return Figures(
        excerpts=len(answers),
        named=len(named),
        right=sum(expected == got for expected, got in named),
        known=sum(expected not in {"unknown", "none"} for expected, _ in answers),
        failures=len(answers) - len(healthy),
        healthy=len(healthy),
        false_alarms=sum(got not in {"unknown", "none"} for _, got in healthy),
    )


def test_figures_of_the_held_out_half() -> None:
    found = figures(HELD_OUT)
    print(f"\nheld out: {found}")
    assert found.excerpts >= 30
    assert found.false_alarms == 0
    assert found.right / found.named >= 0.95
    assert found.right / found.known >= 0.64
    assert found.right / found.failures >= 0.33


def test_figures_of_the_other_half() -> None:
    found = figures(LABELLED)
    print(f"\npatterns were written with: {found}")
    assert found.excerpts >= 60
    assert found.false_alarms == 0
    assert found.right == found.named == found.known
    assert found.right / found.failures >= 0.9


@pytest.mark.parametrize(
    ("name", "entries"), [("held out", HELD_OUT), ("patterns were written with", LABELLED)], ids=["held-out", "other"]
)
def test_the_documentation_states_these_figures(name: str, entries: list[dict[str, Any]]) -> None:
    f = figures(entries)
    row = (
        f"| {name} | {f.excerpts} | {f.right} of {f.named} | {f.right} of {f.known} | {f.right} of {f.failures} "
        f"| {f.false_alarms} of {f.healthy} |"
    )
    assert row in (HERE.parents[1] / "docs" / "doctor.md").read_text()


@pytest.mark.parametrize("entry", LABELLED, ids=[entry["id"] for entry in LABELLED])
def test_an_excerpt_is_named(entry: dict[str, Any]) -> None:
    found = diagnosed(entry)
    assert answer(found) == entry["expect"]
    if "also" in entry:
        assert entry["also"] in {one.fingerprint.id for one in found.found if one.fingerprint}


@pytest.mark.parametrize("case", CASES)
def test_a_reported_failure_is_named(case: str) -> None:
    """Cases of tests/data/reports; docs/reports.md points here."""
    mine = [entry for entry in LABELLED if entry.get("case") == case]
    assert mine
    for entry in mine:
        found = diagnosed(entry)
        assert entry.get("also", entry["expect"]) in {one.fingerprint.id for one in found.found if one.fingerprint}
        assert found.found[0].fingerprint is not None
        assert found.found[0].fingerprint.fix


@pytest.mark.parametrize("entry", LABELLED + HELD_OUT, ids=lambda entry: entry["id"])
def test_redaction_keeps_what_names_the_failure(entry: dict[str, Any]) -> None:
    redact = Redactor(names=("quentin",), homes=("/home/quentin",))
    assert answer(diagnosed(entry, redact)) == answer(diagnosed(entry))


def test_labels_are_fingerprints() -> None:
    for entry in LABELLED + HELD_OUT:
        assert {entry["expect"], entry.get("also", entry["expect"])} <= {"none", "unknown", *by_id()}
        assert entry["source"].startswith("https://")
    ids = [entry["id"] for entry in LABELLED + HELD_OUT]
    assert len(ids) == len(set(ids))
