"""Compose's `.env`: values that are read back unchanged, and a user's own lines kept as they are.

The syntax is that of https://github.com/compose-spec/compose-go/blob/v2.8.0/dotenv/parser.go: `NAME=value`, also with
`export` before it or a colon for the sign; a value in quotes may have many lines, and its quote behind a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from dflash_serve.errors import UsageError

WRITTEN = "# Written by `dflash-serve plan NAME --write`."
HEADER = f"{WRITTEN} Lines of yours are kept, those that set the same names excepted."
_NAME = re.compile(r"[ \t]*(?:export[ \t]+)?([\w.]+)[ \t]*(?:[=:][ \t]*(?P<quote>[\"'])?|(?=\n|\Z))")
_END = {quote: re.compile(rf"(?:[^\\{quote}]|\\.)*{quote}[ \t]*(?:#[^\n]*)?\n?", re.DOTALL) for quote in "\"'"}
_LINE = re.compile(r"[^\n]*\n?")


def dotenv(values: Mapping[str, str], kept: str = "") -> str:
    """The text of `.env`; `kept`, which is the user's own, comes last."""
    lines = [HEADER, *(f"{name}={quoted(value)}" for name, value in values.items())]
    end = "" if kept.endswith("\n") or not kept else "\n"
    return "\n".join(lines) + "\n" + kept + end


def quoted(value: str) -> str:
    r"""A value as compose reads it back unchanged: between single quotes nothing is expanded, and a single quote itself
    only stands between double ones, where `\`, `"`, `$` and line ends need a backslash.
    """
    if not set(value) & set("'\n\r\\"):
        return f"'{value}'"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'


def foreign(text: str, ours: Collection[str]) -> str:
    """What of a `.env` isn't ours: everything but assignments to those names and the line that we put on top.

    Raises:
        UsageError: a quote is not closed; nobody can tell what belongs to which name then.
    """
    return "".join(part for name, part in _statements(text) if name not in ours and not part.startswith(WRITTEN))


def _statements(text: str) -> Iterator[tuple[str | None, str]]:
    """Name and text of each assignment; None and the line for what is none."""
    at = 0
    while at < len(text):
        match = _NAME.match(text, at)
        if match is None or match["quote"] is None:
            end = _LINE.match(text, match.end() if match else at)
        else:
            end = _END[match["quote"]].match(text, match.end())
            if end is None:
                line = text.count("\n", 0, at) + 1
                fix = f"close the quote of {match[1]}"
                raise UsageError("a value's quote is not closed", where=f".env:{line}", fix=fix)
        assert end is not None  # a line matches everywhere
        yield match[1] if match else None, text[at : end.end()]
        at = end.end()
