"""What a person sees while something long runs: timed steps, byte bars, and plain lines where no terminal is.

Rooms take a `Progress`; they never print. Output goes to stderr, so that stdout stays a machine's.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

EVERY_SECONDS = 10.0


class Step(Protocol):
    """One running step."""

    def update(self, text: str, fraction: float | None = None) -> None:
        """Say what it does now; `fraction` in 0..1 where it is known."""

    def line(self, text: str) -> None:
        """A line that stays."""


class Progress(Protocol):
    """A display of steps, one after the other."""

    def step(self, title: str) -> AbstractContextManager[Step]:
        """A context manager around one step; it prints the time it took, or that it failed."""

    def line(self, text: str) -> None:
        """A line that stays."""


class _PlainStep:
    """Lines only: for logs, pipes and CI. Of running figures a line each `EVERY_SECONDS`, whatever changes meanwhile.

    A text that begins otherwise, up to its first figure, is about another thing, and is printed when it comes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = "-"
        self._next = 0.0

    def update(self, text: str, fraction: float | None = None) -> None:
        now = time.monotonic()
        running = fraction is not None and _before_figures(text) == _before_figures(self._last)
        if text == self._last or (running and now < self._next):
            return
        self._last, self._next = text, now + EVERY_SECONDS
        print(f"    {text}", file=self._stream, flush=True)

    def line(self, text: str) -> None:
        print(f"    {text}", file=self._stream, flush=True)


class PlainProgress:
    """Progress as lines of text."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        started = time.monotonic()
        print(f"  … {title}", file=self._stream, flush=True)
        try:
            yield _PlainStep(self._stream)
        except BaseException:
            print(f"  ✗ {title} ({_seconds(started)})", file=self._stream, flush=True)
            raise
        print(f"  ✓ {title} ({_seconds(started)})", file=self._stream, flush=True)

    def line(self, text: str) -> None:
        print(f"  {text}", file=self._stream, flush=True)


class RichProgress:
    """Progress for a terminal: a spinner or a bar on the running step, a tick and its time behind finished ones."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        started = time.monotonic()
        bars = Bars(
            TextColumn(" "),
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("[dim]{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        task = bars.add_task(title, total=None, detail="")
        console = self._console

        class _RichStep:
            def update(self, text: str, fraction: float | None = None) -> None:
                total = None if fraction is None else 1.0
                bars.update(task, detail=text[:70], total=total, completed=fraction or 0.0)

            def line(self, text: str) -> None:
                console.print(f"    {text}", markup=False)

        try:
            with bars:
                yield _RichStep()
        except BaseException:
            console.print(f"  [red]✗[/red] {title} [dim]({_seconds(started)})[/dim]")
            raise
        console.print(f"  [green]✓[/green] {title} [dim]({_seconds(started)})[/dim]")

    def line(self, text: str) -> None:
        self._console.print(f"  {text}", markup=False)


class SilentProgress:
    """No display, for callers that speak JSON only."""

    class _Step:
        def update(self, text: str, fraction: float | None = None) -> None:
            """Nothing to show."""

        def line(self, text: str) -> None:
            """Nothing to show."""

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        yield self._Step()

    def line(self, text: str) -> None:
        """Nothing to show."""


def for_terminal() -> Progress:
    """Rich on a terminal, lines elsewhere."""
    return RichProgress() if sys.stderr.isatty() else PlainProgress()


def _before_figures(text: str) -> str:
    return "".join(itertools.takewhile(lambda character: not character.isdigit(), text))


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
