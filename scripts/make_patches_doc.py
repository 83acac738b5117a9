#!/usr/bin/env python3
"""Write docs/patches.md from the records of the patches.

scripts/make_patches_doc.py            write the page
scripts/make_patches_doc.py --check    fail when the page is not what it would write
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "patches.md"
TEXT = ROOT / "docs" / "patches.in.md"
sys.path.insert(0, str(ROOT / "docker" / "patches"))

from dflash2_patches import gate, records  # noqa: E402
from dflash2_patches.records import Record  # noqa: E402

KINDS = {
    "patch": "changes what vLLM does",
    "guard": "refuses a start that would serve wrongly",
    "probe": "proves that upstream has the fix; a vLLM without it is refused",
}


def table(found: tuple[Record, ...]) -> str:
    """Overview, one line a record."""
    rows = ["| patch | kind | 0.31.0 | 0.32.0 | 0.33.0 | what it does |", "|---|---|---|---|---|---|"]
    for record in found:
        cells = [state(record, version) for version in gate.KNOWN]
        rows.append(f"| [{record.id}](#{record.id}) | {record.kind} | {' | '.join(cells)} | {record.does} |")
    return "\n".join(rows)


def state(record: Record, version: str) -> str:
    """A record's outcome on an unedited release."""
    if record.kind == "probe":
        return "skipped: upstream has it"
    if version not in record.applies_to:
        return "skipped"
    return "off by default" if record.switch else "applied"


def section(record: Record) -> str:
    """Everything one record says."""
    links = ", ".join(f"<{link}>" for link in record.links)
    out = [f"### {record.id}", "", f"{record.title}. *{record.kind}: {KINDS[record.kind]}.*", ""]
    out += [f"- **What users saw:** {record.saw}", f"- **What it does:** {record.does}."]
    if record.switch:
        where = f"on by plans for compute capability {', '.join(record.measured)}, where it was measured to win; "
        out.append(f"- **Switch:** `{record.switch}`, {where if record.measured else ''}off elsewhere.")
    out.append(f"- **Goes when:** {record.drop_when}.")
    out += ["- **Relies on:** " + ", ".join(f"`{place.removeprefix('vllm.')}`" for place in record.touches)]
    out.append(f"- **Upstream:** {links}")
    return "\n".join(out)


def page() -> str:
    """The whole page."""
    found = records.load()
    text = TEXT.read_text("utf-8")
    return text.replace("{{table}}", table(found)).replace("{{records}}", "\n\n".join(map(section, found)))


def main(argv: list[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is not current")
    if parser.parse_args(argv).check:
        if not DOC.is_file() or DOC.read_text("utf-8") != page():
            print("docs/patches.md is not current: run scripts/make_patches_doc.py", file=sys.stderr)
            return 1
        return 0
    DOC.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
