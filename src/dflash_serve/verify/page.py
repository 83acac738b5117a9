"""A report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from importlib import resources

from dflash_serve.verify import svg
from dflash_serve.verify.model import Check
from dflash_serve.verify.report import Report


def page(report: Report) -> str:
    """The page's text."""
    when = datetime.fromtimestamp(report.finished_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    good = report.passed
    verdict = "verified" if good else f"{len(report.failures)} of {len(report.asked)} checks failed"
    style = resources.files("dflash_serve.verify").joinpath("page.css").read_text("utf-8")
    charts = "".join(f"<figure><figcaption>{escape(t)}</figcaption>{chart}</figure>" for t, chart in _charts(report))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(report.recipe)}: {verdict}</title><style>{style}</style></head><body>
<h1>{escape(report.recipe)} <span class="verdict {"good" if good else "bad"}">{verdict}</span></h1>
<p class="meta">{escape(report.url)} · vLLM {escape(report.vllm_version or "unknown")} · {report.level} verification of
{when}, {report.seconds:.0f} s</p>
{_failures(report)}<h2>Figures</h2>{_figures(report)}
{f'<h2>Plots</h2><div class="charts">{charts}</div>' if charts else ""}
<h2>Checks</h2><table><tr><th></th><th>check</th><th>what was seen</th><th>s</th></tr>
{"".join(_row(check) for check in report.checks)}</table>
</body></html>
"""


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    return f"<h2>What failed</h2><table>{''.join(_row(check) for check in report.failures)}</table>"


SHOWN = {
    "acceptance_length": ("acceptance length", "tokens a verification"),
    "output_tok_s": ("output, one stream", "tok/s"),
    "output_tok_s_all": ("output, all streams", "tok/s"),
    "ttft_s": ("first token", "s"),
    "prefill_tok_s": ("prefill", "tok/s"),
    "prefix_hit_share": ("prefix reused", "of the prompt"),
    "kv_pool_tokens": ("KV pool", "tokens"),
    "max_model_len": ("window", "tokens"),
    "perplexity": ("perplexity of the canary", ""),
}


def _figures(report: Report) -> str:
    known = [(SHOWN[key], report.figures[key]) for key in SHOWN if key in report.figures]
    if not known:
        return "<p>none</p>"
    cells = "".join(
        f"<tr><td>{escape(title)}</td><td class='n'>{value:,.6g}</td><td>{escape(unit)}</td></tr>"
        for (title, unit), value in known
    )
    return f"<table>{cells}</table>"


def _row(check: Check) -> str:
    kind = "unchecked" if not check.checked else "" if check.passed else "failed"
    sign = "·" if not check.checked else "✓" if check.passed else "✗"
    more = ""
    if not check.passed:
        rows = [f"where: {check.where}" if check.where else "", f"fix: {check.fix}" if check.fix else ""]
        more = "".join(f'<div class="more">{escape(row)}</div>' for row in rows if row)
    return (
        f'<tr class="{kind}"><td>{sign}</td><td>{escape(check.id)}</td><td>{escape(check.detail)}{more}</td>'
        f'<td class="n">{check.seconds:.1f}</td></tr>\n'
    )


def _charts(report: Report) -> Iterator[tuple[str, str]]:
    by_id = {check.id: check for check in report.checks if check.series}
    if (check := by_id.get("drafter")) and (rates := check.series.get("accepted_by_position")):
        rows = {"accepted": rates, "once all before it are": check.series["conditional_by_position"]}
        labels = [str(i + 1) for i in range(len(rates))]
        yield "Acceptance by draft position", svg.bars(labels, rows, unit="share")
    if check := by_id.get("prefix-cache"):
        yield (
            "First token, the same prompt twice",
            svg.bars(["cold", "cached"], {"s": check.series["ttft_s"]}, unit="s"),
        )
    if check := by_id.get("concurrency"):
        ends = zip(check.series["ttft_s"], check.series["finished_s"], strict=True)
        yield "Streams at once", svg.spans([(f"{i + 1}", a, b) for i, (a, b) in enumerate(ends)], unit="s")
    if check := by_id.get("needle"):
        depth = check.series
        order = sorted(range(len(depth["tokens"])), key=lambda i: depth["tokens"][i])
        x = [depth["tokens"][i] for i in order]
        speed = [depth["prefill_tok_s"][i] for i in order]
        yield "Prefill by prompt length", svg.lines(x, {"tok/s": speed}, unit="tok/s", along="prompt tokens")
        if depth.get("acceptance_length"):
            length = [depth["acceptance_length"][i] for i in order]
            yield "Acceptance by prompt length", svg.lines(x, {"length": length}, unit="tokens", along="prompt tokens")
    if check := by_id.get("soak"):
        at = check.series["at_s"]
        yield (
            "Acceptance under load",
            svg.lines(at[1:], {"length": check.series["acceptance_length"][1:]}, unit="tokens", along="s"),
        )
        if any(check.series["memory_gib"]):
            yield "Memory under load", svg.lines(at, {"GiB": check.series["memory_gib"]}, unit="GiB", along="s")
