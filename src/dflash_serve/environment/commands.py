"""`dflash-serve environment`: the engine's own virtual environments."""

from __future__ import annotations

import json
import shutil
from typing import Any

import click

from dflash_serve import paths
from dflash_serve.environment.install import add_tests, ensure
from dflash_serve.environment.marker import locate, python_in, read_marker
from dflash_serve.environment.spec import VARIANTS, spec_for
from dflash_serve.errors import BuildFailed
from dflash_serve.fsio import locked
from dflash_serve.progress import for_terminal


@click.group()
def environment() -> None:
    """Engine environments: vLLM with the DFlash2 plugin, apart from this tool's own packages."""


_variant = click.argument("variant", type=click.Choice(VARIANTS))


@environment.command()
@_variant
@click.option("--tests", is_flag=True, help="Add pytest, for the tests that run inside the environment.")
def install(variant: str, tests: bool) -> None:
    """Install what is missing; prints the environment's interpreter."""
    spec, progress = spec_for(variant), for_terminal()
    python = ensure(spec, progress)
    if tests:
        add_tests(spec, progress)
    click.echo(python)


@environment.command("python")
@_variant
def python_command(variant: str) -> None:
    """Print the interpreter of a whole environment, or fail."""
    python = locate(spec_for(variant))
    if python is None:
        raise BuildFailed(
            f"the {variant} environment is not installed", fix=f"dflash-serve environment install {variant}"
        )
    click.echo(python)


@environment.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def list_command(as_json: bool) -> None:
    """What this checkout asks for, and what lies in the cache."""
    rows = _rows()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        size = f"{row['size_bytes'] / 1e9:.1f} GB" if row["size_bytes"] else "-"
        click.echo(f"{row['name']:<30} {row['state']:<14} {size:>8}  {row['directory']}")


@environment.command()
@click.argument("name", required=False)
def prune(name: str | None) -> None:
    """Remove the environments that no variant of this checkout asks for, or the one of that NAME."""
    current = {spec_for(variant).name for variant in VARIANTS}
    doomed = [row for row in _rows() if (row["name"] == name if name else row["name"] not in current)]
    for row in doomed:
        directory = paths.environments_home() / row["name"]
        try:
            with locked(paths.environments_home() / f"{row['name']}.lock", timeout=0):
                shutil.rmtree(directory, ignore_errors=True)
        except TimeoutError:
            raise BuildFailed(f"{row['name']} is being installed by another process", where=str(directory)) from None
        click.echo(f"removed {directory}")
    if not doomed:
        click.echo("nothing to remove")


def _rows() -> list[dict[str, Any]]:
    wanted = {spec.name: spec for spec in map(spec_for, VARIANTS)}
    home = paths.environments_home()
    present = {entry.name for entry in home.iterdir() if entry.is_dir()} if home.is_dir() else set()
    rows = []
    for name in sorted(present | wanted.keys()):
        marker, spec = read_marker(home / name), wanted.get(name)
        if name not in present:
            state = "not installed"
        elif marker is None:
            state = "incomplete"
        elif spec is None:
            state = "unused"
        else:
            state = "ready" if locate(spec) else "plugin changed"
        rows.append(
            {
                "name": name,
                "state": state,
                "variant": spec.variant if spec else marker.variant if marker else None,
                "vllm": spec.vllm_version if spec else None,
                "torch_build": marker.torch_build if marker else None,
                "size_bytes": marker.size_bytes if marker else None,
                "directory": str(home / name),
                "python": str(python_in(home / name)) if state == "ready" else None,
            }
        )
    return rows
