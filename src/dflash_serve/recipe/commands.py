"""`dflash-serve recipes`: list, show, lint, schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from dflash_serve import paths
from dflash_serve.errors import ExitCode, RecipeError
from dflash_serve.findings import Finding, Severity
from dflash_serve.recipe import catalogue
from dflash_serve.recipe.schema import Recipe


def _json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


@click.group()
def recipes() -> None:
    """What can be served: one recipe a target and drafter."""


@recipes.command("list")
@_json_option
def list_command(as_json: bool) -> None:
    """List all recipes with their target and drafter."""
    known: list[Recipe] = []
    broken: list[RecipeError] = []
    for name in catalogue.names():
        try:
            known.append(catalogue.find(name))
        except RecipeError as exc:
            broken.append(exc)
    if as_json:
        rows = [
            {
                "name": recipe.name,
                "title": recipe.title,
                "target": _place(recipe.target),
                "method": recipe.drafter.method.value if recipe.drafter else None,
                "drafter": _place(recipe.drafter.checkpoint) if recipe.drafter else None,
                "goal": recipe.serve.goal.value,
                "verified": len(recipe.verified or ()),
                "reported": len(recipe.reported),
            }
            for recipe in known
        ]
        errors = [{"what": error.what, "where": error.where, "fix": error.fix} for error in broken]
        click.echo(json.dumps({"recipes": rows, "errors": errors}, indent=2))
    else:
        width = max((len(recipe.name) for recipe in known), default=0)
        for recipe in known:
            method = recipe.drafter.method.value if recipe.drafter else "-"
            evidence = "verified" if recipe.verified else "reported" if recipe.reported else "-"
            click.echo(f"{recipe.name:<{width}}  {method:<7}  {evidence:<8}  {recipe.title}")
        for error in broken:
            click.echo("\n".join(error.lines()), err=True)
    if broken:
        sys.exit(ExitCode.BAD_INPUT)


def _place(checkpoint: Any) -> str | None:
    if checkpoint is None:
        return None
    place: str = checkpoint.repo or checkpoint.path
    return f"{place}/{checkpoint.subdirectory}" if checkpoint.subdirectory else place


@recipes.command()
@click.argument("name")
@_json_option
def show(name: str, as_json: bool) -> None:
    """Show one recipe as it stands with everything that it extends."""
    recipe = catalogue.find(name)
    data = recipe.model_dump(mode="json", by_alias=True)
    if as_json:
        click.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    import yaml

    from dflash_serve.recipe.loader import chain_of

    path = Path(name) if name.endswith((".yaml", ".yml")) else paths.recipes_dir() / f"{name}.yaml"
    click.echo(f"# {' < '.join(document.path.name for document in chain_of(path))}")
    click.echo(yaml.safe_dump(_without_none(data), sort_keys=False, allow_unicode=True, width=110), nl=False)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None and inner != []}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


@recipes.command()
@click.argument("names", nargs=-1)
@click.option("--directory", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Instead of recipes/.")
@_json_option
def lint(names: tuple[str, ...], directory: Path | None, as_json: bool) -> None:
    """Check recipes (all, or those named) against the pinned vLLM; exit 3 when one is refused."""
    from dflash_serve.recipe.lint import lint as lint_recipes

    root = directory or paths.recipes_dir()
    for name in names:
        if name not in catalogue.names(root):
            catalogue.find(name, root)  # raises, with the nearest names
    findings = lint_recipes(root, list(names) or None)
    refused = [finding for finding in findings if finding.severity is Severity.REFUSE]
    if as_json:
        click.echo(json.dumps({"findings": [f.model_dump(mode="json") for f in findings]}, indent=2))
    else:
        _print(findings)
        count = len(names) or len(catalogue.names(root))
        click.echo(f"{count} recipes, {len(refused)} refused, {len(findings) - len(refused)} other findings")
    if refused:
        sys.exit(ExitCode.BAD_INPUT)


def _print(findings: list[Finding]) -> None:
    order = list(Severity)
    for finding in sorted(findings, key=lambda f: order.index(f.severity)):
        click.echo("\n".join(finding.lines()))


@recipes.command()
@click.option("--write", is_flag=True, help="Write recipes/schema.json.")
@click.option("--check", is_flag=True, help="Exit 3 when recipes/schema.json is not current.")
@_json_option
def schema(write: bool, check: bool, as_json: bool) -> None:
    """Print the JSON Schema of recipe files, by which editors complete them."""
    from dflash_serve import fsio
    from dflash_serve.recipe.jsonschema import dump_schema

    text, path = dump_schema(), paths.recipes_dir() / "schema.json"
    if write:
        fsio.atomic_write(path, text)
    current = path.is_file() and path.read_text() == text
    if not write and not check:
        click.echo(text, nl=False)
    elif as_json:
        click.echo(json.dumps({"path": str(path), "current": current}))
    else:
        click.echo(f"{path} is {'current' if current else 'not current'}")
    if check and not current:
        raise RecipeError("recipes/schema.json is not current", fix="dflash-serve recipes schema --write")
