"""`dflash-serve top` and `dflash-serve dashboard`: a running server, watched."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import click

from dflash_serve.errors import UsageError
from dflash_serve.observe import gpu, metrics
from dflash_serve.observe.exposition import displayed, metrics_url
from dflash_serve.observe.live import View, Watcher
from dflash_serve.observe_commands import expected, read_key, served

_OPTIONS = (
    click.argument("source", required=False, metavar="[URL]"),
    click.option("--recipe", metavar="NAME", help="Hold it against this recipe's bands."),
    click.option("--key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="API key."),
    click.option("--interval", type=click.FloatRange(0.2, 60), default=2.0, show_default=True, metavar="SECONDS"),
)  # fmt: skip


def _options(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _watcher(source: str | None, recipe: str | None, key_file: Path | None) -> tuple[str, Watcher]:
    url = source or served()
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{displayed(url)} is no URL", fix="for example http://127.0.0.1:8000")
    url = metrics_url(url)
    key = read_key(key_file)
    # What is shown and printed is the address without a password that it holds.
    return displayed(url), Watcher(
        lambda: metrics.scrape(url, key=key, timeout=4.0), gpu.read, expected=expected(recipe)
    )


@click.command()
@_options
@click.option("--once", is_flag=True, help="Show one frame, of one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a look; with --once one document.")
def top(
    source: str | None, recipe: str | None, key_file: Path | None, interval: float, once: bool, as_json: bool
) -> None:
    """Watch a running server: tokens a second, acceptance by position, pool, queue, GPUs. Ends with Ctrl-C.

    Without a URL: the server that runs here. A server that stops answering stays on screen, marked, and comes back.
    """
    from rich.console import Console

    url, watcher = _watcher(source, recipe, key_file)
    console = Console()
    first = watcher.look()
    if first.error:
        raise metrics.MetricsError(first.error, where=url, fix="is the server up? dflash-serve status")
    if once or as_json or not console.is_terminal:
        _print(watcher, console, url, interval, once=once or not as_json, as_json=as_json)
        return
    _live(watcher, console, url, interval, first)


def _print(watcher: Watcher, console: Any, url: str, interval: float, *, once: bool, as_json: bool) -> None:
    from dflash_serve.observe.screen import render

    while True:
        time.sleep(interval)
        seen = watcher.look()
        if as_json:
            print(json.dumps(seen.as_dict(), indent=2 if once else None), flush=True)  # noqa: T201
        else:
            console.print(render(seen, _past(watcher), source=url, width=console.width))
        if once:
            return


def _live(watcher: Watcher, console: Any, url: str, interval: float, first: View) -> None:
    from rich.live import Live

    from dflash_serve.observe.screen import render

    def frame(seen: View) -> Any:
        return render(seen, _past(watcher), source=url, width=console.width)

    try:
        with Live(frame(first), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(frame(watcher.look()), refresh=True)
    except KeyboardInterrupt:
        return


def _past(watcher: Watcher) -> list[dict[str, float | None]]:
    return [point for _, point in deque(watcher.history, maxlen=60)]


@click.command()
@_options
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0: any.")
def dashboard(source: str | None, recipe: str | None, key_file: Path | None, interval: float, port: int) -> None:
    """Serve one read-only page with the same figures and small charts, on this machine only. Ends with Ctrl-C.

    From elsewhere: ssh -L 8765:127.0.0.1:8765 HOST
    """
    from dflash_serve.observe.page import PageServer

    url, watcher = _watcher(source, recipe, key_file)
    with PageServer(watcher, interval=interval, port=port, source=url) as page:
        click.echo(f"{page.url}  shows {url}; it ends with Ctrl-C")
        sys.stdout.flush()
        try:
            page.run()
        except KeyboardInterrupt:
            return
