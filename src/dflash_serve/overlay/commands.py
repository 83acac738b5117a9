"""`dflash-serve overlay`: build, show, list, gc."""

from __future__ import annotations

import json
from typing import Any

import click

from dflash_serve import paths
from dflash_serve.overlay import inventory
from dflash_serve.overlay.build import BuiltOverlay, build
from dflash_serve.overlay.spec import OverlaySpec
from dflash_serve.recipe.naming import errors_for


def _json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


@click.group()
def overlay() -> None:
    """Checkpoints with another config.json: symlinks to the snapshot, no byte of weights copied."""


@overlay.command("build")
@click.argument("name")
@click.option("--window", type=click.IntRange(16), metavar="TOKENS", help="Served window; the recipe's when left out.")
@click.option("--gpu", metavar="NxNAME", help="Plan for these GPUs instead of this machine's, e.g. 2x5090.")
@_json_option
def build_command(name: str, window: int | None, gpu: str | None, as_json: bool) -> None:
    """Build the overlays that recipe NAME needs, and say why those that it doesn't need are not."""
    from dflash_serve.plan.planner import Request, make_plan

    overrides = {} if window is None else {"window": str(window)}
    plan = make_plan(Request(name=name, gpu=gpu, overrides=overrides))
    built: dict[str, BuiltOverlay] = {}
    for decided in plan.overlays:
        if decided.needed and decided.spec is not None:
            with errors_for(name):
                built[decided.kind] = build(OverlaySpec.from_dict(decided.spec), paths.overlays_home())
    if as_json:
        rows = [
            {
                "kind": decided.kind,
                "needed": decided.needed,
                "reason": decided.reason,
                "source": decided.source,
                "path": str(built[decided.kind].path) if decided.kind in built else None,
                "reused": built[decided.kind].reused if decided.kind in built else None,
                "bytes_written": built[decided.kind].bytes_written if decided.kind in built else None,
            }
            for decided in plan.overlays
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for decided in plan.overlays:
        made = built.get(decided.kind)
        if made is None:
            click.echo(f"{decided.kind}: not needed, {decided.reason}")
            continue
        state = "found" if made.reused else f"built in {made.seconds * 1000:.0f} ms"
        click.echo(f"{decided.kind}: {state}, {made.links} links, {decided.reason}")
        click.echo(f"  {made.path}")


@overlay.command("show")
@click.argument("name")
@_json_option
def show_command(name: str, as_json: bool) -> None:
    """Show one built overlay; NAME may be a unique beginning of its name."""
    found = inventory.overlay(paths.overlays_home(), name)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    click.echo(f"{found.name} ({found.kind} of {found.repo or 'a local directory'} {found.revision or ''})".rstrip())
    for key, change in found.changes.items():
        click.echo(f"  {key}: {json.dumps(change.get('from'))} -> {json.dumps(change.get('to'))}")
    for reason in found.reasons:
        click.echo(f"  because {reason}")
    click.echo(f"  state: {found.damage or 'whole'}; used by: {', '.join(found.used_by) or 'no run'}")
    click.echo(f"  {found.path}")


@overlay.command("list")
@_json_option
def list_command(as_json: bool) -> None:
    """List built overlays with the runs that use them."""
    found = inventory.overlays(paths.overlays_home())
    if as_json:
        click.echo(json.dumps([entry.as_dict() for entry in found], indent=2))
        return
    for entry in found:
        click.echo(f"{entry.name}  {entry.damage or 'whole'}  {', '.join(entry.used_by) or 'unused'}")
    if not found:
        click.echo(f"no overlays in {paths.overlays_home()}")


@overlay.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--keep", multiple=True, metavar="NAME", help="Keep this one besides.")
@_json_option
def gc_command(dry_run: bool, keep: tuple[str, ...], as_json: bool) -> None:
    """Remove overlays that no saved plan names, of a run or of compose."""
    removed = inventory.collect_garbage(paths.overlays_home(), keep=keep, dry_run=dry_run)
    if as_json:
        click.echo(json.dumps({"removed": removed, "dry_run": dry_run}, indent=2))
        return
    for name in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    if not removed:
        click.echo("nothing to remove")
