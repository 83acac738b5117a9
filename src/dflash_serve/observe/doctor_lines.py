"""Lines of a server's log with their level, read in pieces: a log may be larger than memory."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 2**20
# What of one line is looked at; a dumped configuration or a logged prompt can be megabytes.
LINE_BYTES = 16 * 2**10
# An INFO line's level stands within this many bytes, after the prefixes of compose, Docker and the process.
HEAD_BYTES = 110

ERROR, WARNING, INFO = "error", "warning", "info"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OUTER = re.compile(
    r"^(?:[\w./-]+ +\| )?"  # compose
    r"(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? )?"  # docker logs -t
    r"(?:std(?:out|err) [FP] )?"  # Kubernetes
)
_PROCESS = re.compile(r"^(?:\([\w .-]+?(?: pid=\d+)?(?:, ip=[\w.:]+)?\) ?)+")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)(?::\s+|\s+\d\d-\d\d \d\d:\d\d:\d\d \[?[^\]\s]*\] ?)")
_GLOG = re.compile(r"^(?:\[rank\d+\]: ?)?\[?([WIEF])\d{4} \d\d:\d\d:\d\d[^\]]*\] ?")
_WARNING = re.compile(r"^\S+:\d+: (?:\w+\.)*\w*Warning: ")
_LEVELS = {"DEBUG": INFO, "INFO": INFO, "I": INFO, "WARNING": WARNING, "W": WARNING}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log.

    Attributes:
        number: from 1.
        level: `error` (also for a line that names no level), `warning`, `info`.
        text: without the prefixes of Docker, the process and the logger.
        explicit: whether the line names its level.
    """

    number: int
    level: str
    text: str
    explicit: bool


def parse(number: int, raw: bytes) -> Line:
    """A line from its bytes; a docker json-file record is unwrapped, a progress bar counts with its last state."""
    if raw.startswith(b'{"log":'):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            raw = str(json.loads(raw)["log"]).encode()
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n ")
    if "\r" in text:
        text = text.rsplit("\r", 1)[1]
    text = _OUTER.sub("", text, count=1)
    text = _PROCESS.sub("", text, count=1)
    if match := _LEVEL.match(text):
        return Line(number, _LEVELS.get(match[1], ERROR), text[match.end() :], True)
    if match := _GLOG.match(text):
        return Line(number, _LEVELS.get(match[1], ERROR), text[match.end() :], True)
    if _WARNING.match(text):
        return Line(number, WARNING, text, True)
    return Line(number, ERROR, text, False)


def is_info(raw: bytes) -> bool:
    """Whether a line is at INFO for certain; the quick look that makes most of a log cheap."""
    if raw.startswith(b"INFO"):
        return True
    at = raw.find(b" INFO ", 0, HEAD_BYTES)
    return at >= 0 and raw.find(b"ERROR", 0, at) < 0 and raw.find(b"WARNING", 0, at) < 0


def is_frame(raw: bytes) -> bool:
    """Whether a line is part of a traceback's frames; most lines of a log full of errors are, and none is evidence."""
    if raw.startswith((b"    ", b'  File "')):
        return True
    at = raw.find(b"] ", 0, HEAD_BYTES) + 2
    return at > 1 and raw.startswith((b"    ", b'  File "'), at)


def chunks(handle: BinaryIO) -> Iterator[list[bytes]]:
    """Lines of a binary file, without their ends, in lists of about a megabyte. Overlong lines lose their middle."""
    rest = b""
    while data := handle.read(CHUNK_BYTES):
        lines = (rest + data).split(b"\n")
        rest = _shortened(lines.pop())
        yield [line if len(line) <= LINE_BYTES else _shortened(line) for line in lines]
    if rest:
        yield [rest]


def _shortened(line: bytes) -> bytes:
    return line if len(line) <= LINE_BYTES else line[: LINE_BYTES // 2] + b" ... " + line[-LINE_BYTES // 2 + 5 :]
