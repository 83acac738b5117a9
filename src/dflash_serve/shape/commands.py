"""`dflash-serve fit`: where the memory goes and how much context fits, without any GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dflash_serve.errors import UsageError

if TYPE_CHECKING:
    from dflash_serve.shape.kv_groups import Grouping


@click.command()
@click.argument("name")
@click.option("--gpu", metavar="NxNAME", help="GPUs to estimate for, e.g. 2x5090; this machine's when left out.")
@click.option("--window", type=click.IntRange(16), metavar="TOKENS", help="Context window.")
@click.option("--seqs", type=click.IntRange(1), metavar="N", help="Requests at once.")
@click.option("--kv", metavar="DTYPE", help="KV cache dtype, e.g. fp8.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override one value of the shape.")
@click.option("--vllm", "vllm_version", default="0.33.0", show_default=True, metavar="VERSION")
@click.option(
    "--grouping",
    type=click.Choice(["vllm", "balanced"]),
    default="vllm",
    show_default=True,
    help="Who groups the KV layers: stock vLLM, or our plugin.",
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
    grouping: Grouping,
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
    from dflash_serve.hardware.model import Inventory
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
        grouping=grouping,
        target_dir=pair.target_dir,
        drafter_dir=pair.drafter_dir,
    )
    if as_json:
        click.echo(json.dumps(as_data(recipe.name, shape), indent=2))
    else:
        print_fit(recipe.name, shape, explain=explain)


def _overrides(settings: tuple[str, ...]) -> dict[str, str]:
    out: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set takes KEY=VALUE, not {setting!r}", fix="for example --set max_num_seqs=4")
        out[key.strip()] = value.strip()
    return out
