"""The live view on a terminal: everything that matters on 24 lines, bars and short curves where they help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_serve.observe.gpu import Gpu
from dflash_serve.observe.live import View

_BLOCKS = " ▁▂▃▄▅▆▇█"
_DIM, _BAD, _WARN, _GOOD = "dim", "bold red", "yellow", "green"
UNKNOWN = "–"


def render(view: View, history: Iterable[dict[str, float | None]], *, source: str, width: int) -> RenderableType:
    """One frame for a terminal of `width` columns.

    Args:
        history: charted figures, the oldest first.
    """
    past = list(history)
    spark = max(8, min(40, width - 62))
    body: list[RenderableType] = [_head(view, source, width)]
    grid = Table.grid(padding=(0, 2), expand=False)
    grid.add_column(style="bold", no_wrap=True, min_width=11)
    grid.add_column(no_wrap=True, min_width=9, justify="right")
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for title, value, more in _figures(view, past, spark):
        grid.add_row(title, value, more)
    body.append(grid)
    if view.positions:
        body.append(_positions(view, max(6, min(48, width - 42))))
    body += [_requests(view), *_gpus(view.gpus)]
    if view.engines:
        body.append(_engines(view))
    for name, severity, what in view.findings:
        sign, style = ("✗", _BAD) if severity == "refuse" else ("!", _WARN)
        body.append(Text(f"{sign} {what} [{name}]", style=style))
    return Group(*body)


def _head(view: View, source: str, width: int) -> Text:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(view.model or "no model", style="bold")
    head.append(f"  {source}", style=_DIM)
    if view.uptime is not None:
        head.append(f"  up {_duration(view.uptime)}", style=_DIM)
    if view.window:
        head.append(f"  over {view.window:.0f} s", style=_DIM)
    if view.error:
        head = Text(f"NO ANSWER for {view.age:.0f} s: {view.error}", style=_BAD, no_wrap=True, overflow="ellipsis")
    head.truncate(width, overflow="ellipsis")
    return head


def _figures(view: View, past: Sequence[dict[str, float | None]], spark: int) -> Iterable[tuple[str, Text, Text]]:
    def curve(key: str) -> str:
        return sparkline([point.get(key) for point in past], spark)

    low, high = view.band
    length = view.acceptance_length if view.acceptance_length is not None else view.acceptance_total
    outside = length is not None and low is not None and length < low
    band = "" if low is None else f"band {low:g}–{high:g}  " if high is not None else f"band from {low:g}  "
    since = "" if view.acceptance_length is not None else "since the start  "
    yield (
        "output",
        _number(view.output_tok_s, "tok/s"),
        Text.assemble(
            f"{curve('output_tok_s')}  ",
            (f"{_plain(view.request_tok_s)} a request, prompts {_plain(view.prompt_tok_s)}", _DIM),
        ),
    )
    yield (
        "acceptance",
        _number(length, "tokens", digits=2, style=_BAD if outside else _GOOD),
        Text.assemble(
            f"{curve('acceptance_length')}  ", (f"{since}{band}{_percent(view.acceptance_rate)} of drafted", _DIM)
        ),
    )
    if view.speedup is not None and view.draft_share is not None:
        yield (
            "speed-up",
            _number(view.speedup, "×", digits=2),
            Text(f"at most; drafting takes {view.draft_share:.0%} of a step", style=_DIM),
        )
    pool = f"of {view.kv_pool_tokens:,.0f} tokens  " if view.kv_pool_tokens else ""
    yield (
        "KV pool",
        Text(_percent(view.kv_usage), style=_level(view.kv_usage)),
        Text.assemble(f"{bar(view.kv_usage, 16)}  ", (f"{pool}prefix hits {_percent(view.prefix_hits)}", _DIM)),
    )
    waiting = view.waiting or 0
    yield (
        "requests",
        _number(view.running, "run", digits=0),
        Text.assemble(
            (f"{waiting:.0f} wait", _WARN if waiting else _DIM),
            (f", {_plain(view.preemptions)} preempted since the start", _BAD if view.preemptions_s else _DIM),
        ),
    )
    yield "first token", _seconds(view.ttft_p50), Text.assemble(
        (f"p95 {_seconds(view.ttft_p95)}   next token ", _DIM), _seconds(view.tpot_p50),
        (f"  p95 {_seconds(view.tpot_p95)}", _DIM),
    )  # fmt: skip


def _positions(view: View, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="bold", min_width=11)
    grid.add_column(justify="right", min_width=9)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for at, (rate, conditional) in enumerate(zip(view.positions, view.conditional, strict=True)):
        grid.add_row(
            ("position " if at == 0 else "") + str(at + 1),
            f"{rate:.0%}",
            Text.assemble((bar(rate, width), "cyan"), (f" {conditional:.0%} when reached" if at else "", _DIM)),
        )
    return grid


def _requests(view: View) -> Text:
    seen = view.requests
    if not seen.get("finished"):
        return _line(("finished    none in this window; /metrics has no rows of single requests", _DIM))
    took = f"took p50 {_seconds(seen['e2e_p50'])} p95 {_seconds(seen['e2e_p95'])}"
    took += f", queued {_seconds(seen['queue_time_p50'])}"
    sizes = f"prompt {_plain(seen['prompt_length_p50'])}, answer {_plain(seen['output_length_p50'])} tokens"
    return _line(("finished    ", "bold"), f"{seen['finished']:.0f}", (f"  {took}, {sizes}", _DIM))


def _gpus(gpus: Sequence[Gpu]) -> Iterable[Text]:
    for gpu in gpus:
        used = gpu.memory_used / gpu.memory_total if gpu.memory_used and gpu.memory_total else None
        memory = (
            ""
            if gpu.memory_total is None
            else f"{(gpu.memory_used or 0) / 2**30:.1f} of {gpu.memory_total / 2**30:.0f} GiB"
        )
        power = (
            ""
            if gpu.power is None
            else f"{gpu.power:.0f} W" + (f" of {gpu.power_limit:.0f}" if gpu.power_limit else "")
        )
        heat = "" if gpu.temperature is None else f"{gpu.temperature:.0f} °C"
        load = "" if gpu.utilization is None else f"{gpu.utilization:.0%} busy"
        yield _line(
            (f"GPU {gpu.index:<8}", "bold"), bar(used, 16), "  ",
            ", ".join(part for part in (memory, power, load, heat) if part), (f"  {gpu.name}", _DIM),
        )  # fmt: skip


def _engines(view: View) -> Table:
    grid = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("engine", "tok/s", "accept", "run", "wait", "KV"):
        grid.add_column(title, justify="left" if title == "engine" else "right")
    for row in view.engines:
        grid.add_row(
            row.label, _plain(row.output_tok_s), _plain(row.acceptance_length, 2), _plain(row.running),
            _plain(row.waiting), _percent(row.kv_usage),
        )  # fmt: skip
    return grid


def _line(*parts: str | tuple[str, str]) -> Text:
    """One line that is cut at the edge rather than wrapped."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as blocks, from 0 to the greatest; a gap where there is none."""
    shown = list(values[-width:])
    top = max((value for value in shown if value), default=0.0)
    out = ""
    for value in shown:
        if value is None or not top:
            out += " " if value is None else _BLOCKS[1]
        else:
            out += _BLOCKS[max(1, round(value / top * 8))]
    return out.rjust(width)


def bar(share: float | None, width: int) -> str:
    """A share, 0..1, as a bar."""
    if share is None:
        return "·" * width
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width, "·")


def _level(share: float | None) -> str:
    return "" if share is None or share < 0.8 else _WARN if share < 0.95 else _BAD


def _number(value: float | None, unit: str, *, digits: int = 1, style: str = "") -> Text:
    return Text(UNKNOWN, style=_DIM) if value is None else Text(f"{value:,.{digits}f} {unit}", style=style)


def _plain(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def _seconds(value: float | None) -> Text:
    if value is None:
        return Text(UNKNOWN)
    return Text(f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s")


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h"
