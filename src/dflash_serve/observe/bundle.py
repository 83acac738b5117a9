"""A bundle for a bug report: excerpts of the logs around what was found, the plan, versions; private things are out.

A line of a log stays only when it is the engine's (it names a level), a traceback's, or an error's; whatever else was
printed (a prompt, a generated text) is replaced by its length. What stays goes through `redact`.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import re
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.fsio import atomic_write
from dflash_serve.observe import doctor_lines
from dflash_serve.observe.doctor import Diagnosis
from dflash_serve.observe.redact import Redactor
from dflash_serve.version import __version__

HEAD_LINES = 400
TAIL_LINES = 600
AROUND_LINES = 80
MAX_LINE_CHARS = 2000

_KEPT = re.compile(
    r"^(?:Traceback \(most recent call last\):|During handling of the above|The above exception was|"
    r"  File \"|\w[\w.]*(?:Error|Exception|Exit|Interrupt)\b|(?:\S+: )?(?:[Ee]rror|fatal|FATAL|warning): |"
    r"Loading \w+ checkpoint shards|Capturing |\S+:\d+: \w*Warning: |usage: |.*\bNVRM: |.*\boom-kill:|"
    r".*Killed process \d+|.*segfault at |.*traps: |\s+Value error, )"
)
_FRAME = ("    ", "\t")
README = """\
A bundle of dflash-serve doctor for a bug report.

diagnosis.json  what was found, with versions
plan.json       what was to be served, when it was started by dflash-serve
logs/           the first {head} and last {tail} lines of each log and {around} around what was found; "..." marks gaps

Taken out: credentials, prompts and answers, user and host names, home directories, public addresses, e-mail addresses,
GPU serial ids. Please look through it before you publish it.
"""


@dataclass(frozen=True)
class Excerpt:
    """Some lines of a log, redacted."""

    name: str
    text: str


def excerpt(path: Path, around: Iterable[int], redactor: Redactor) -> Excerpt:
    """Head, tail and surroundings of a log of any size.

    Args:
        around: lines from 1 whose surroundings are kept.

    Raises:
        OSError: it can't be read.
    """
    total = _count(path)
    spans = [(1, HEAD_LINES), (total - TAIL_LINES + 1, total)]
    spans += [(line - AROUND_LINES, line + AROUND_LINES) for line in around if line]
    wanted = _merged(spans)
    kept: list[str] = []
    number, last = 0, 0
    frame = False
    with path.open("rb") as handle:
        for raws in doctor_lines.chunks(handle):
            if not any(first <= number + len(raws) and number < end for first, end in wanted):
                number += len(raws)
                continue
            for raw in raws:
                number += 1
                if not any(first <= number <= end for first, end in wanted):
                    frame = False
                    continue
                if number != last + 1:
                    kept.append(f"... {number - last - 1} lines ...")
                last = number
                text, frame = _line(raw, frame)
                kept.append(text)
    return Excerpt(redactor(path.name), redactor("\n".join(kept)) + "\n")


def write(
    target: Path, diagnosis: Diagnosis, logs: Sequence[Path], redactor: Redactor, *, plan: Path | None = None
) -> Path:
    """Write the bundle, a tar.gz that only its owner may read.

    Raises:
        OSError: a log can't be read, or the target can't be written.
    """
    parts = [
        Excerpt("README.txt", README.format(head=HEAD_LINES, tail=TAIL_LINES, around=AROUND_LINES)),
        Excerpt("diagnosis.json", json.dumps(redactor.json(_facts(diagnosis)), indent=2) + "\n"),
    ]
    if plan is not None and plan.is_file():
        parts.append(Excerpt("plan.json", _plan(plan.read_text(errors="replace"), redactor)))
    for index, path in enumerate(logs):
        lines = [one.evidence.line for one in diagnosis.found if one.evidence.source == path.name]
        made = excerpt(path, lines, redactor)
        parts.append(Excerpt(f"logs/{index}-{made.name}", made.text))
    packed = io.BytesIO()
    # No names, times or ids of this machine in the archive's own fields.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for part in parts:
            data = part.text.encode()
            info = tarfile.TarInfo(f"dflash-serve-bundle/{part.name}")
            info.size, info.mode = len(data), 0o600
            archive.addfile(info, io.BytesIO(data))
    atomic_write(target, packed.getvalue(), mode=0o600)
    return target


def _plan(text: str, redactor: Redactor) -> str:
    try:
        return json.dumps(redactor.json(json.loads(text)), indent=2) + "\n"
    except ValueError:  # a damaged plan may be what failed
        return redactor(text)


def _facts(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "dflash_serve": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "verdict": diagnosis.verdict.value,
        "lines": diagnosis.lines,
        "starts": diagnosis.starts,
        "ready": diagnosis.ready,
        "found": [
            {
                "id": one.fingerprint.id if one.fingerprint else None,
                "role": one.role.value,
                "where": one.evidence.where,
                "evidence": one.evidence.text,
            }
            for one in diagnosis.found
        ],
    }


def _line(raw: bytes, frame: bool) -> tuple[str, bool]:
    """What of a line may stay, and whether a traceback goes on below it."""
    line = doctor_lines.parse(0, raw)
    whole = raw.decode("utf-8", "replace").rstrip("\r\n")[:MAX_LINE_CHARS]
    if line.explicit:
        return whole, False
    if not line.text.strip():
        return "", frame
    if _KEPT.match(line.text):
        return whole, line.text.startswith(("Traceback", "  File"))
    if frame and line.text.startswith(_FRAME):
        return whole, True
    return f"<{len(line.text)} characters removed>", False


def _count(path: Path) -> int:
    with path.open("rb") as handle:
        return sum(len(raws) for raws in doctor_lines.chunks(handle))


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for first, end in sorted((max(1, first), end) for first, end in spans):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((first, end))
    return out
