"""`dflash-serve fetch`, `manifest export|import`, `pins refresh|show`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from dflash_serve.checkpoint import manifest as carried
from dflash_serve.checkpoint.fetch import GIB, Fetched, FetchOptions, fetch_recipe
from dflash_serve.checkpoint.hub_cache import snapshot_dir
from dflash_serve.checkpoint.manifest import Bundle, Manifest, export_files, import_files, read_bundle, write_bundle
from dflash_serve.checkpoint.pins import load_pins, pinned, pins_path, refresh, save_pins
from dflash_serve.checkpoint.transfer import explain
from dflash_serve.errors import CheckpointError, DFlashError
from dflash_serve.progress import Progress, SilentProgress, for_terminal
from dflash_serve.recipe import catalogue
from dflash_serve.recipe.naming import errors_for


def _json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


def _progress(as_json: bool) -> Progress:
    return SilentProgress() if as_json else for_terminal()


@click.command()
@click.argument("name")
@click.option("--offline", is_flag=True, help="Touch no network: say what is missing.")
@click.option("--verify", is_flag=True, help="Hash every file, also those that were there.")
@click.option("--workers", type=click.IntRange(1, 32), default=4, show_default=True, help="Files at a time.")
@_json_option
def fetch(name: str, offline: bool, verify: bool, workers: int, as_json: bool) -> None:
    """Fetch target and drafter of recipe NAME into the Hugging Face cache, resuming what was begun.

    HF_TOKEN, HF_ENDPOINT, HF_HUB_CACHE and HF_HOME are honoured. An interrupted fetch goes on where it stopped.
    """
    options = FetchOptions(offline=offline, verify=verify, workers=workers)
    found = fetch_recipe(catalogue.find(name), options, _progress(as_json))
    if as_json:
        click.echo(json.dumps([_as_dict(one) for one in found], indent=2))
        return
    for one in found:
        click.echo(f"{one.side}: {one.snapshot}")
        for finding in one.findings:
            click.echo("\n".join(finding.lines()), err=True)


def _as_dict(found: Fetched) -> dict[str, Any]:
    return {
        "side": found.side,
        "repo": found.repo,
        "revision": found.revision,
        "snapshot": str(found.snapshot),
        "received_bytes": found.received,
        "present_bytes": found.present,
        "seconds": round(found.seconds, 3),
        "findings": [finding.model_dump(mode="json") for finding in found.findings],
    }


@click.group()
def manifest() -> None:
    """Carry checkpoints to a host without network, with every hash."""


@manifest.command("export")
@click.argument("name")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--list-only", is_flag=True, help="Write manifest.json without the files.")
@_json_option
def export_command(name: str, directory: Path, list_only: bool, as_json: bool) -> None:
    """Copy recipe NAME's checkpoints and their manifest to DIRECTORY, such as a disk that is carried."""
    recipe = pinned(catalogue.find(name))
    drafter = recipe.drafter.checkpoint if recipe.drafter is not None else None
    floating = {one.repo for one in (recipe.target, drafter) if one is not None and one.revision is None}
    found = fetch_recipe(recipe, FetchOptions(offline=True), _progress(as_json))
    manifests: list[Manifest] = []
    try:
        with errors_for(recipe.name):
            for one in found:
                if one.repo is None or one.revision is None:
                    continue
                root = snapshot_dir(one.repo, one.revision)
                made = one.manifest or carried.manifest_of_snapshot(one.repo, one.revision, root)
                manifests.append(made)
                if not list_only:
                    export_files(made, root, directory)
        if not manifests:
            raise CheckpointError(f"{name} has no checkpoint from the hub", fix="copy recipes/ instead")
        main = tuple(sorted({one.repo for one in manifests} & floating))
        write_bundle(directory / carried.FILE, Bundle(manifests=tuple(manifests), main=main))
    except OSError as exc:
        raise _unwritable(exc, directory) from None
    _report(manifests, directory, as_json)


@manifest.command("import")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_json_option
def import_command(directory: Path, as_json: bool) -> None:
    """Check every hash of an exported DIRECTORY and put its files into this host's Hugging Face cache."""
    bundle = read_bundle(directory)
    try:
        for one in bundle.manifests:
            import_files(one, directory, main=one.repo in bundle.main)
    except OSError as exc:
        raise _unwritable(exc, directory) from None
    _report(list(bundle.manifests), directory, as_json)


def _report(manifests: list[Manifest], directory: Path, as_json: bool) -> None:
    if as_json:
        rows = [{"repo": m.repo, "revision": m.revision, "files": len(m.files), "bytes": m.bytes} for m in manifests]
        click.echo(json.dumps({"directory": str(directory), "manifests": rows}, indent=2))
        return
    for one in manifests:
        click.echo(f"{one.repo} at {one.revision[:12]}: {len(one.files)} files, {one.bytes / GIB:.2f} GiB")


def _unwritable(exc: OSError, place: Path) -> DFlashError:
    return CheckpointError(
        f"cannot write: {exc.strerror or exc}",
        where=str(exc.filename or place),
        fix="make room or choose another place",
    )


@click.group()
def pins() -> None:
    """Revision, sizes and hashes that a recipe's checkpoints must have."""


@pins.command("refresh")
@click.argument("name")
@_json_option
def refresh_command(name: str, as_json: bool) -> None:
    """Ask the hub for recipe NAME's files and write recipes/pins/NAME.yaml."""
    from huggingface_hub import HfApi

    recipe = catalogue.find(name)
    try:
        found = refresh(recipe, HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None))
    except DFlashError:
        raise
    except Exception as exc:
        raise explain(exc, recipe.target.repo or name, recipe.target.revision) from None
    path = save_pins(found)
    click.echo(json.dumps({"path": str(path)}) if as_json else str(path))


@pins.command("show")
@click.argument("name")
@_json_option
def show_command(name: str, as_json: bool) -> None:
    """Show what recipe NAME is pinned to."""
    found = load_pins(name)
    if as_json:
        click.echo(
            json.dumps(None if found is None else found.model_dump(mode="json", by_alias=True, exclude_none=True))
        )
        return
    if found is None:
        click.echo(f"{name} is not pinned (no {pins_path(name)})")
        return
    for side in ("target", "drafter"):
        one = found.target if side == "target" else found.drafter
        if one is not None:
            click.echo(f"{side}: {one.repo} at {one.revision}, {len(one.files)} files, {one.bytes / GIB:.2f} GiB")
