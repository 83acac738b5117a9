"""A Prometheus text as samples: every line is looked at, and what isn't a whole metrics text is refused."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import requests
import urllib3

from dflash_serve.errors import DFlashError

MAX_BYTES = 32 * 2**20
# name{labels} value [timestamp], https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
# What has been read is never tried in another way (`*+`), so a line takes time in proportion to its length.
_PAIR = r'[a-zA-Z_][a-zA-Z0-9_]*+\s*+=\s*+"(?:[^"\\]|\\.)*+"'
_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*+)"
    rf"(?:\{{\s*+(?:({_PAIR}(?:\s*+,\s*+{_PAIR})*+)(?:\s*+,)?\s*+)?\}})?"
    r"[ \t]++([^ \t{}\"]++)(?:[ \t]++-?[0-9]++)?[ \t]*+$"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_USER = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/?#]*@")
# A server's address as people have it: the host alone, or the API's base that a start prints.
_BASE = re.compile(r"(https?://[^/?#]+)(?:/|/v1/?)?")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


class MetricsError(DFlashError):
    """The text is no metrics text, or not a whole one."""


@dataclass(frozen=True)
class Sample:
    """One line: a series and its value (NaN and infinities included)."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """What a text holds.

    Attributes:
        samples: the series asked for.
        names: sample names of the whole text, the ones that were not asked for too.
    """

    samples: tuple[Sample, ...]
    names: frozenset[str]


def read(text: str, wanted: frozenset[str]) -> Exposition:
    """Samples of `wanted` names, in the text's order.

    Raises:
        MetricsError: too large, cut off in the middle of a line, a line that is no sample, or a series twice.
    """
    if len(text) > MAX_BYTES:
        raise MetricsError(f"the metrics text has {len(text)} characters, more than {MAX_BYTES}")
    if text and not text.endswith("\n"):
        raise MetricsError("the metrics text ends in the middle of a line", fix="scrape it again")
    names: set[str] = set()
    series: set[tuple[str, str]] = set()
    samples: list[Sample] = []
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip(" \t\r")
        if not stripped or stripped.startswith("#"):
            continue
        match = _SAMPLE.match(stripped)
        value = _number(match[3]) if match else None
        if match is None or value is None:
            raise MetricsError(f"line {number} is not in the Prometheus text format", where=repr(stripped[:80]))
        name, labels = match[1], match[2] or ""
        names.add(name)
        if name not in wanted:
            continue
        if (name, labels) in series:
            raise MetricsError(f"{name} stands twice with the same labels: two texts in one, or a broken proxy")
        series.add((name, labels))
        samples.append(Sample(name, _labels(labels), value))
    return Exposition(tuple(samples), frozenset(names))


def _labels(text: str) -> dict[str, str]:
    found = dict(_LABEL.findall(text))
    if "\\" in text:
        found = {key: _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[0]), value) for key, value in found.items()}
    return found


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def displayed(url: str) -> str:
    """The URL without a user's name and password."""
    return _USER.sub(r"\1", url)


def metrics_url(url: str) -> str:
    """Where a server exports its metrics: `/metrics` of a base URL, with or without `/v1`; another URL as it is."""
    base = _BASE.fullmatch(url)
    return f"{base[1]}/metrics" if base else url


def fetch(url: str, *, timeout: float = 5.0, key: str | None = None) -> str:
    """The text at `url`.

    Args:
        timeout: seconds. Nothing is read when they have passed; a server that falls silent is waited for once more.

    Raises:
        MetricsError: no answer, not 200, too large, not there in time, or cut off on the way.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline, name = time.monotonic() + timeout, displayed(url)
    body = bytearray()
    try:
        with requests.get(url, timeout=timeout, headers=headers, stream=True) as answer:
            if answer.status_code in {401, 403}:
                raise MetricsError(f"{name} wants a key ({answer.status_code})", fix="name its file with --key-file")
            if answer.status_code != 200:
                raise MetricsError(f"{name} answers {answer.status_code}")
            # requests' own iterator waits until a piece is full, however slowly it fills.
            while piece := answer.raw.read1(1 << 16, decode_content=True):
                body += piece
                if len(body) > MAX_BYTES:
                    raise MetricsError(f"{name} sends more than {MAX_BYTES} bytes", fix="is that a /metrics page?")
                if time.monotonic() > deadline:
                    raise MetricsError(f"{name} did not send its metrics within {timeout:g} s")
    except (requests.RequestException, urllib3.exceptions.HTTPError) as exc:
        raise MetricsError(
            f"no metrics from {name}: {type(exc).__name__}", fix="is the server up? dflash-serve status"
        ) from None
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        raise MetricsError(f"{name} does not send text") from None
