"""`dflash-serve fit`: where the memory goes and how much context fits, without any GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dflash_serve.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_serve.hardware.model import Inventory
    from dflash_serve.shape.patched import Patched


@click.command()
@click.argument("name")
@click.option("--gpu", metavar="NxNAME", help="GPUs to estimate for, e.g. 2x5090; this machine's when left out.")
@click.option("--window", type=click.IntRange(16), metavar="TOKENS", help="Context window.")
@click.option("--seqs", type=click.IntRange(1), metavar="N", help="Requests at once.")
@click.option("--kv", metavar="DTYPE", help="KV cache dtype, e.g. fp8.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override one value of the shape.")
@click.option("--vllm", "vllm_version", default="0.33.0", show_default=True, metavar="VERSION")
@click.option(
    "--patch",
    "wanted",
    multiple=True,
    metavar="ID=on|off",
    help="An optional patch, instead of what the plan would decide; `--patch all=off` is stock vLLM.",
)
@click.option("--explain", is_flag=True, help="Every part with its formula, every value with its reason.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def fit(
    name: str,
    gpu: str | None,
    window: int | None,
    seqs: int | None,
    kv: str | None,
    settings: tuple[str, ...],
    vllm_version: str,
    wanted: tuple[str, ...],
    explain: bool,
    as_json: bool,
) -> None:
    """Predict the KV pool of recipe NAME, and show where one GPU's memory goes.

    \b
    Examples:
      dflash-serve fit qwen3.8-27b-nvfp4 --gpu 2x5090
      dflash-serve fit qwen3.8-27b-fp8 --gpu 1xh200 --window 131072 --seqs 16 --explain
    """
    from dflash_serve.checkpoint.pins import pinned
    from dflash_serve.recipe.catalogue import find
    from dflash_serve.shape.choose import choose
    from dflash_serve.shape.lookup import pair_of
    from dflash_serve.shape.text import as_data, print_fit

    recipe = pinned(find(name))
    pair = pair_of(recipe)
    overrides = _overrides(settings)
    for key, value in (("window", window), ("max_num_seqs", seqs), ("kv_cache_dtype", kv)):
        if value is not None:
            overrides[key] = str(value)
    inventory: Inventory
    if gpu is not None:
        from dflash_serve.hardware.hypothetical import hypothetical

        inventory = hypothetical(gpu)
    else:
        from dflash_serve.hardware.devices import choose_devices
        from dflash_serve.hardware.inventory import read

        inventory, _, _ = choose_devices(read(), None)
    shape = choose(
        recipe,
        pair.target,
        pair.drafter,
        inventory,
        vllm_version=vllm_version,
        overrides=overrides,
        patched=_patched(inventory, vllm_version, recipe.engine.patches, wanted),
        target_dir=pair.target_dir,
        drafter_dir=pair.drafter_dir,
    )
    if as_json:
        click.echo(json.dumps(as_data(recipe.name, shape), indent=2))
    else:
        print_fit(recipe.name, shape, explain=explain)


def _patched(inventory: Inventory, version: str, recipe: Mapping[str, str], wanted: tuple[str, ...]) -> Patched:
    """The optional patches as the plan would decide them, with the command line's wishes over the recipe's."""
    from dflash_serve.plan.patches import optional_patches, patch_decisions
    from dflash_serve.shape.patched import Patched

    wishes = dict(recipe)
    for wish in wanted:
        name, _, value = wish.partition("=")
        if value not in ("on", "off", "auto"):
            raise UsageError(f"--patch takes ID=on or ID=off, not {wish!r}", fix="for example --patch kv-grouping=on")
        wishes |= dict.fromkeys(optional_patches(), value) if name == "all" else {name: value}
    found = {gpu.compute_capability for gpu in inventory.gpus if gpu.compute_capability}
    applied = [patch for patch in patch_decisions(version, found, wishes) if patch.outcome == "applied"]
    return Patched.of([patch.id for patch in applied], [patch.id for patch in applied if patch.setting == "on"])


def _overrides(settings: tuple[str, ...]) -> dict[str, str]:
    out: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set takes KEY=VALUE, not {setting!r}", fix="for example --set max_num_seqs=4")
        out[key.strip()] = value.strip()
    return out
