"""What verification will assert of a server: made with the plan, so that nobody decides it later."""

from __future__ import annotations

from dflash_serve.plan.model import Expectations
from dflash_serve.recipe.schema import Method, Recipe
from dflash_serve.shape.model import ServingShape


def expectations(recipe: Recipe, shape: ServingShape) -> Expectations:
    """Expectations of a recipe in a shape."""
    band = recipe.expect.acceptance_length if recipe.expect else None
    speed = recipe.expect.output_tok_s if recipe.expect else None
    lines = [r"dflash2_patches active: "]
    if shape.drafting and shape.text("drafter") == Method.DFLASH2.value:
        # The V1 runner has no candidate selector: it would draft as DFlash1.
        lines += [r"Using V2 Model Runner", r"Resolved architecture: DFlash2DraftModel"]
    return Expectations(
        max_model_len=shape.integer("window"),
        max_num_seqs=shape.integer("max_num_seqs"),
        kv_pool_tokens=shape.budget.kv_pool_tokens if shape.budget else None,
        acceptance_length_min=band.min if band and shape.drafting else None,
        acceptance_length_max=band.max if band and shape.drafting else None,
        output_tok_s_min=speed.min if speed else None,
        output_tok_s_max=speed.max if speed else None,
        drafter_active=shape.drafting,
        log_lines=tuple(lines),
    )


def exported(expected: Expectations) -> dict[str, str]:
    """The variable from which the server exports its own bands (`dflash:expected_*`) for alert rules."""
    values = expected.model_dump(exclude={"log_lines"}, exclude_none=True)
    return {"DFLASH2_EXPECTED": ",".join(f"{name}={float(value)!r}" for name, value in sorted(values.items()))}
