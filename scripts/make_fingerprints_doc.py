#!/usr/bin/env python3
"""Write docs/fingerprints.md: every failure that `dflash-serve doctor` knows, from fingerprints.yaml.

    scripts/make_fingerprints_doc.py [--check]

Exit 1 with --check when the page is not current.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

from dflash_serve.observe.fingerprints import Fingerprint, Role, fingerprints

TARGET = Path(__file__).resolve().parents[1] / "docs" / "fingerprints.md"
HEAD = """\
# Failures that doctor knows

{count} fingerprints; the table is `src/dflash_serve/observe/fingerprints.yaml`, this page is made from it by
`scripts/make_fingerprints_doc.py`. A *symptom* is a failure whose reason may stand elsewhere, a *consequence* was
printed by a process that waited for the one that failed, a *request* error ends one request and not the server, and
with a *notice* nothing failed, but it is not what was asked for. How they are ranked: [doctor.md](doctor.md).
"""


def entry(known: Fingerprint) -> str:
    """One failure as Markdown."""
    role = "" if known.role is Role.CAUSE else f" ({known.role.value})"
    signs = [f"`{pattern}`" if "`" not in pattern else f"`` {pattern} ``" for pattern in known.patterns]
    if known.exit_codes:
        signs.append("exit code " + ", ".join(str(code) for code in known.exit_codes))
    lines = [f"### {known.id}{role}\n", f"{known.cause}\n", f"- fix: {known.fix}"]
    lines += [f"- sign: {sign}" for sign in signs]
    return "\n".join([*lines, f"- source: <{known.source}>\n"])


def render() -> str:
    """The page."""
    ordered = sorted(fingerprints(), key=lambda known: (known.layer, known.id))
    out = [HEAD.format(count=len(ordered))]
    for layer, members in groupby(ordered, key=lambda known: known.layer):
        out.append(f"## {layer}\n")
        out += [entry(known) for known in members]
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is not current")
    text = render()
    if parser.parse_args().check:
        current = TARGET.is_file() and TARGET.read_text() == text
        print("current" if current else "docs/fingerprints.md is not current: run scripts/make_fingerprints_doc.py")
        return 0 if current else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
