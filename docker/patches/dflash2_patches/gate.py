"""The version gate: which vLLM this package knows, and what each patch's outcome is on it.

`enforce()` runs first in every process. It refuses a vLLM that nobody compared with the records, and a known
version whose touched functions were edited, because a patch on unknown code is a guess.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dflash2_patches import drift, records
from dflash2_patches.records import Record

PIN = "0.33.0"
TOLERATED = ("0.31.0", "0.32.0")
KNOWN = (*TOLERATED, PIN)

# Why an older series is refused. Keys are (major, minor); a missing minor falls through to `_too_new`.
_REFUSED = {
    (0, 28): "a quantized drafter crashes or drafts from wrong values in the context K/V projection, and "
    "VLLM_USE_V2_MODEL_RUNNER=0 silently drafts without the candidate selector",
    (0, 29): "a quantized drafter crashes or drafts from wrong values in the context K/V projection",
    (0, 30): "a quantized drafter crashes or drafts from wrong values in the context K/V projection",
}


@dataclass(frozen=True)
class Outcome:
    """What happens to one patch: `applied`, `skipped` (with the proof or the reason) or `refused`."""

    id: str
    title: str
    kind: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Outcome of every patch for one vLLM.

    Attributes:
        version: public version, None when the tree holds no vLLM.
        refusal: why this vLLM as a whole is refused; empty when it is known.
    """

    version: str | None
    refusal: str
    patches: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is refused."""
        return not self.refusal and all(p.outcome != "refused" for p in self.patches)

    def applied(self) -> tuple[str, ...]:
        """Ids that are put in force."""
        return tuple(p.id for p in self.patches if p.outcome == "applied")

    def refusals(self) -> list[str]:
        """All reasons to refuse, the vLLM as a whole first."""
        out = [self.refusal] if self.refusal else []
        return out + [f"{p.id}: {p.reason}" for p in self.patches if p.outcome == "refused"]

    def data(self) -> dict[str, object]:
        """The report as JSON-ready data."""
        return {
            "vllm": self.version,
            "ok": self.ok,
            "refusal": self.refusal,
            "patches": [asdict(p) for p in self.patches],
        }


class GateError(RuntimeError):
    """A vLLM that is refused; the message lists every reason."""


def refusal(version: str | None) -> str:
    """Why a vLLM version as a whole is refused; empty when it is known."""
    if version is None:
        return "no vLLM found"
    if version in KNOWN:
        return ""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < (0, 28):
        return f"vLLM {version} has no DFlash2; install vllm=={PIN}"
    if numbers in _REFUSED:
        return f"vLLM {version}: {_REFUSED[numbers]}; install vllm=={PIN}"
    return (
        f"vLLM {version} is unknown: its functions were never compared with the patches. "
        f"Install vllm=={PIN}, or record this version (docs/patches.md, 'A new vLLM')"
    )


def evaluate(tree: drift.Tree, environ: Mapping[str, str] | None = None) -> Report:
    """Outcome of every patch for the vLLM in `tree`; reads source only and imports no vLLM."""
    env = os.environ if environ is None else environ
    sources, version = drift.Sources(tree), drift.version(tree)
    whole = refusal(version)
    known = records.hashes()
    outcomes = tuple(_outcome(record, sources, version, whole, known, env) for record in records.load())
    return Report(version, whole, outcomes)


_enforced: list[Report] = []


def enforce() -> Report:
    """Evaluate the installed vLLM once a process.

    Raises:
        GateError: something is refused; lists everything that is.
    """
    if not _enforced:
        report = evaluate(drift.installed())
        if not report.ok:
            lines = "\n".join(f"  - {line}" for line in report.refusals())
            raise GateError(f"dflash2_patches refuses this vLLM:\n{lines}")
        _enforced.append(report)
    return _enforced[0]


def _outcome(
    record: Record,
    sources: drift.Sources,
    version: str | None,
    whole: str,
    known: dict[str, dict[str, str]],
    env: Mapping[str, str],
) -> Outcome:
    def outcome(kind: str, reason: str) -> Outcome:
        return Outcome(record.id, record.title, record.kind, kind, reason)

    if whole or version is None:
        return outcome("refused", whole)
    if drifted := _drift(record, sources, version, known):
        return outcome("refused", f"source moved: {', '.join(drifted)}")
    if record.fixed and all(clause.holds(sources.at(clause.at)) for clause in record.fixed):
        return outcome("skipped", f"upstream has it: {'; '.join(map(str, record.fixed))}")
    if record.kind == "probe":
        missing = [str(c) for c in record.fixed if not c.holds(sources.at(c.at))]
        return outcome("refused", f"this vLLM lacks it and no patch exists: not so: {'; '.join(missing)}")
    if version not in record.applies_to:
        return outcome("skipped", f"not needed on {version}; concerns {', '.join(record.applies_to)}")
    if record.switch and env.get(record.switch, "0").strip().lower() in {"", "0", "false", "no", "off"}:
        return outcome("skipped", f"off by default; {record.switch}=1 turns it on")
    return outcome("applied", record.does)


def _drift(record: Record, sources: drift.Sources, version: str, known: dict[str, dict[str, str]]) -> list[str]:
    """Places whose source is not the one recorded for this version."""
    moved = []
    for place in record.touches:
        expected, found = known.get(place, {}).get(version), sources.digest(place)
        if found != expected:
            moved.append(f"{place} is {found or 'absent'}, recorded {expected or 'absent'}")
    return moved
