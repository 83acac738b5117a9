"""`python -m dflash_serve.environment install cpu`: the same commands, without the rest of the tool."""

from __future__ import annotations

import sys

import click

from dflash_serve.environment.commands import environment
from dflash_serve.errors import DFlashError

if __name__ == "__main__":
    try:
        environment(prog_name="python -m dflash_serve.environment")
    except DFlashError as exc:
        click.echo(exc, err=True)
        sys.exit(exc.exit_code)
