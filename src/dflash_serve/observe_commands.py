"""`dflash-serve metrics`: what a server's metrics say, in words."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from dflash_serve.errors import ExitCode, UsageError
from dflash_serve.findings import Severity
from dflash_serve.observe import context
from dflash_serve.observe.check import Expected, Reading, check, regression
from dflash_serve.observe.exposition import MAX_BYTES, displayed, fetch, metrics_url
from dflash_serve.observe.metrics import MetricsError, Snapshot, parse


@click.group()
def metrics() -> None:
    """Read a vLLM's metrics, this project's or any other's from 0.20."""


@metrics.command("check")
@click.argument("source", required=False, metavar="[URL|FILE|-]")
@click.option("--recipe", metavar="NAME", help="Hold it against this recipe's bands.")
@click.option("--earlier", metavar="FILE", help="An earlier text of the same server: judge the time in between.")
@click.option("--watch", type=click.FloatRange(1, 3600), metavar="SECONDS", help="Read twice, so long apart.")
@click.option("--baseline", metavar="URL|FILE", help="Another version's text: fail when acceptance is 5 % lower.")
@click.option("--key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="API key, if asked for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def check_command(
    source: str | None,
    recipe: str | None,
    earlier: str | None,
    watch: float | None,
    baseline: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Say what is wrong; exit 0 when nothing is, 7 with findings, 2 when the text can't be judged.

    Without a source: the server that runs here. A URL is the server's, or its /metrics.
    Cron: dflash-serve metrics check >/dev/null || mail ...
    """
    source = metrics_url(source or served())
    key = read_key(key_file)
    if watch and earlier:
        raise UsageError("--watch reads twice itself", fix="leave --earlier out")
    before = _read(earlier, key) if earlier else None
    seconds: float | None = None
    if watch:
        before, started = _read(source, key), time.monotonic()
        time.sleep(watch)
        seconds = time.monotonic() - started
    now = _read(source, key)
    recent = now.since(before) if before else None
    reading = Reading(now, recent, seconds, expected(recipe))
    findings = check(reading)
    if baseline:
        findings += regression(now, _read(baseline, key))
    failed = [f for f in findings if f.severity is not Severity.NOTE]
    if as_json:
        click.echo(json.dumps({
            "source": displayed(source), "ok": not failed, "findings": [f.model_dump(mode="json") for f in findings],
            "figures": figures(reading.counted), "exit_code": int(ExitCode.VERIFY_FAILED if failed else ExitCode.DONE),
        }, indent=2))  # fmt: skip
    else:
        for finding in findings:
            click.echo("\n".join(finding.lines()))
        click.echo(summary(reading.counted) if failed else f"nothing wrong: {summary(reading.counted)}")
    sys.exit(ExitCode.VERIFY_FAILED if failed else ExitCode.DONE)


@metrics.command("lengths")
@click.argument("file", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def lengths(file: Any, as_json: bool) -> None:
    """Acceptance by prompt length, from a JSON Lines file: a line a request.

    A line is vLLM's own answer (0.33 with --per-request-spec-decode-metrics summary; streamed, the last chunk with its
    usage), or an object with prompt_len, accepted and drafts.
    """
    name = getattr(file, "name", "-")
    try:
        buckets = context.by_context(context.read_rows(io.TextIOWrapper(file, encoding="utf-8"), name))
    except UnicodeDecodeError:
        raise UsageError(f"{name} is no UTF-8 text", fix="give a JSON Lines file") from None
    if as_json:
        click.echo(json.dumps([
            {"up_to": None if b.end == float("inf") else b.end, "requests": b.requests, "drafts": b.drafts,
             "acceptance_length": b.acceptance_length} for b in buckets
        ], indent=2))  # fmt: skip
        return
    for b in buckets:
        end = "beyond" if b.end == float("inf") else f"to {b.end:,.0f}"
        length = "no drafts" if b.acceptance_length is None else f"{b.acceptance_length:.2f}"
        click.echo(f"{end:>12} tokens: {length} over {b.drafts:,.0f} drafts of {b.requests} requests")


def figures(snapshot: Snapshot) -> dict[str, Any]:
    """The figures of a snapshot for machines; None for what it doesn't tell."""
    ttft, tpot = snapshot.histogram("ttft"), snapshot.histogram("tpot")
    queries, hits = snapshot.total("prefix_cache_queries"), snapshot.total("prefix_cache_hits")
    return {
        "engines": [engine.label for engine in snapshot.engines],
        "acceptance_length": snapshot.acceptance_length,
        "acceptance_length_by_engine": {engine.label: engine.acceptance_length for engine in snapshot.engines},
        "drafts": snapshot.total("drafts"),
        "accepted_per_position": list(snapshot.accepted_per_position),
        "generation_tokens": snapshot.total("generation_tokens"),
        "prompt_tokens": snapshot.total("prompt_tokens"),
        "running": snapshot.total("running"),
        "waiting": snapshot.total("waiting"),
        "kv_cache_usage_max": snapshot.kv_cache_usage,
        "prefix_hit_rate": hits / queries if queries and hits is not None else None,
        "preemptions": snapshot.total("preemptions"),
        "ttft_p50_s": ttft.quantile(0.5) if ttft else None,
        "tpot_mean_s": tpot.mean if tpot else None,
    }


def summary(snapshot: Snapshot) -> str:
    """One line of figures."""
    shown = []
    length = snapshot.acceptance_length
    if length is not None:
        shown.append(f"acceptance length {length:.2f} over {snapshot.drafts:,.0f} drafts")
    for key, word in (("generation_tokens", "tokens generated"), ("running", "running"), ("waiting", "waiting")):
        if (value := snapshot.total(key)) is not None:
            shown.append(f"{value:,.0f} {word}")
    if (usage := snapshot.kv_cache_usage) is not None:
        shown.append(f"KV cache {usage:.0%} used")
    return ", ".join(shown)


def _read(source: str, key: str | None) -> Snapshot:
    if source.startswith(("http://", "https://")):
        return parse(fetch(metrics_url(source), key=key))
    try:
        with click.open_file(source, "rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"cannot read {source}: {exc.strerror}", fix="give a URL or a file") from None
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise MetricsError(f"{source} is no text") from None


def read_key(file: Path | None) -> str | None:
    """The API key in a file; None without one.

    Raises:
        UsageError: it can't be read, or holds what no header can carry.
    """
    if file is None:
        return None
    try:
        key = file.read_bytes().decode("ascii").strip()
    except OSError as exc:
        raise UsageError(f"cannot read the key: {exc.strerror}", where=str(file)) from None
    except UnicodeDecodeError:
        key = ""
    if not key or not all(" " < char < "\x7f" for char in key):
        raise UsageError("no API key is in this file", where=str(file), fix="one line of printable ASCII characters")
    return key


def served() -> str:
    from dflash_serve.runs import LIVE
    from dflash_serve.runtime import state

    for run in state.load_all():
        if run.state in LIVE:
            return run.metrics_url
    raise UsageError("nothing is served here", fix="name a URL or a file: dflash-serve metrics check URL")


def expected(name: str | None) -> Expected:
    if name is None:
        return Expected()
    from dflash_serve.recipe import catalogue

    recipe = catalogue.find(name)
    band = recipe.expect.acceptance_length if recipe.expect else None
    speed = recipe.expect.output_tok_s if recipe.expect else None
    return Expected(
        acceptance_min=band.min if band else None,
        acceptance_max=band.max if band else None,
        tok_s_min=speed.min if speed else None,
        drafter=recipe.drafter is not None,
    )
