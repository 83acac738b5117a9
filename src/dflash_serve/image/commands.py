"""`dflash-serve build`, `render` and `image`: the container images."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click
import docker.errors

from dflash_serve.errors import BuildFailed, ExitCode, UsageError
from dflash_serve.findings import Severity
from dflash_serve.fsio import atomic_write
from dflash_serve.hardware.inventory import read as read_inventory
from dflash_serve.image import variants
from dflash_serve.image.build import BuildOptions, Built, connected, layers
from dflash_serve.image.build import build as build_image
from dflash_serve.image.builder import tidy
from dflash_serve.image.identity import compare, identity
from dflash_serve.image.lint import lint as lint_text
from dflash_serve.image.registry import resolve_digest
from dflash_serve.image.render import render as render_text
from dflash_serve.progress import for_terminal
from dflash_serve.recipe import catalogue

_uid = click.option(
    "--uid", type=click.IntRange(1), help="User that the server runs as; docker/images.yaml by default."
)


def variant_of(name: str) -> str:
    """A variant's name, or that of the variant that a recipe is served with.

    Raises:
        UsageError: neither.
    """
    known = tuple(variants.load().variants)
    if name in known:
        return name
    if name in catalogue.names():
        wanted = catalogue.find(name).engine.variant
        if wanted != "auto":
            return str(wanted)
        # As the planner decides on this machine; an image for another one is named by its variant.
        return "cuda" if any(gpu.healthy for gpu in read_inventory().gpus) else "cpu"
    raise UsageError(f"{name} is neither an image variant nor a recipe", fix=f"one of: {', '.join(known)}")


@click.command()
@click.argument("name", metavar="NAME")
@_uid
@click.option("--allow-unpinned", is_flag=True, help="Build from a base whose digest is unknown.")
@click.option("--build-context", "contexts", multiple=True, metavar="NAME=SOURCE", help="As docker buildx takes it.")
@click.option("--secret", "secrets", multiple=True, metavar="ca=FILE|pip=FILE", help="Certificates, pip.conf.")
@click.option("--network", type=click.Choice(["default", "host"]), default="default", show_default=True)
@click.option("--rebuild", is_flag=True, help="Build also when the image is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def build(
    name: str,
    uid: int | None,
    allow_unpinned: bool,
    contexts: tuple[str, ...],
    secrets: tuple[str, ...],
    network: str,
    rebuild: bool,
    as_json: bool,
) -> None:
    """Build the image of a variant (cpu, cuda) or of a recipe; prints its reference."""
    wanted = identity(variant_of(name), uid=uid)
    options = BuildOptions(
        allow_unpinned=allow_unpinned,
        contexts=_pairs(contexts, "--build-context"),
        secrets={key: Path(value).expanduser() for key, value in _pairs(secrets, "--secret").items()},
        network=network,
        rebuild=rebuild,
    )
    made = build_image(wanted, options, for_terminal())
    click.echo(_as_json(made) if as_json else made.reference)
    if not as_json:
        what = "found" if made.found else f"built in {made.seconds:.0f} s, {made.cached} of {made.steps} steps cached"
        click.echo(f"{what}; {made.size_bytes / 1e9:.2f} GB", err=True)


@click.command()
@click.argument("name", metavar="NAME")
@_uid
def render(name: str, uid: int | None) -> None:
    """Print the Dockerfile of a variant (cpu, cuda) or of a recipe."""
    click.echo(render_text(identity(variant_of(name), uid=uid)), nl=False)


@click.group()
def image() -> None:
    """Images: pin their bases, check Dockerfiles, look into what was built."""


@image.command()
@click.argument("name", metavar="VARIANT", required=False)
@click.option("--check", is_flag=True, help="Write nothing; fail when a tag has moved.")
def resolve(name: str | None, check: bool) -> None:
    """Ask the registry for the digests of the bases, and write them into docker/images.yaml."""
    moved = False
    for variant in [variants.find(name)] if name else list(variants.load().variants.values()):
        digest = resolve_digest(variant.base.tagged)
        same = digest == variant.base.digest
        moved = moved or not same
        click.echo(f"{variant.name}: {variant.base.tagged}@{digest}{' (as written)' if same else ''}")
        if not same and not check:
            atomic_write(variants.path(), variants.write_digest(variant.name, digest))
    if check and moved:
        raise BuildFailed("a base is not what docker/images.yaml says", fix="dflash-serve image resolve")


@image.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
def lint(file: Path | None) -> None:
    """Check a Dockerfile, or those of all variants. Exit 5 when something is refused."""
    if file is not None:
        findings = lint_text(file.read_text("utf-8", errors="replace"), name=str(file))
    else:
        findings = []
        for name in variants.load().variants:
            findings += lint_text(render_text(identity(name)), name=name)
    for finding in findings:
        click.echo("\n".join(finding.lines()))
    if any(finding.severity is Severity.REFUSE for finding in findings):
        sys.exit(ExitCode.BUILD_FAILED)


@image.command("layers")
@click.argument("name", metavar="NAME|REFERENCE")
def layers_command(name: str) -> None:
    """Size of each layer of a built image, the base first."""
    reference = name if ":" in name else identity(variant_of(name)).reference
    rows = layers(reference)
    for size, instruction in rows:
        click.echo(f"{size / 1e6:>10.1f} MB  {tidy(instruction)[:110]}")
    click.echo(f"{sum(size for size, _ in rows) / 1e6:>10.1f} MB  {reference}")


@image.command("check")
@click.argument("name", metavar="VARIANT")
@click.argument("reference", required=False)
def check_command(name: str, reference: str | None) -> None:
    """Whether an image is the one that this checkout asks for, by its labels; a tag does not tell."""
    wanted = identity(variant_of(name))
    place = reference or wanted.reference
    with connected() as engine:
        try:
            labels = engine.api.inspect_image(place)["Config"].get("Labels") or {}
        except docker.errors.NotFound:
            raise BuildFailed(f"there is no image {place} here", fix=f"dflash-serve build {name}") from None
    if findings := compare(labels, wanted, where=place):
        raise BuildFailed(findings[0].what, where=findings[0].where, fix=findings[0].fix)
    click.echo(f"{place} is of this checkout")


def _pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    out = {}
    for text in given:
        key, separator, value = text.partition("=")
        # A mapped base may hold an equals sign only behind its name.
        if not separator or not key or not value:
            raise UsageError(f"{option} takes NAME=VALUE, not {text!r}")
        out[key] = value
    return out


def _as_json(made: Built) -> str:
    return json.dumps(dataclasses.asdict(made), indent=2, default=str)
