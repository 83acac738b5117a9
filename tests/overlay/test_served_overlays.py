"""The tiny pair, really served from the overlay that its plan builds: a prompt past the drafter's own table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import requests

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dflash_serve.checkpoint.config_reader import read_drafter  # noqa: E402
from dflash_serve.observe.metrics import parse  # noqa: E402
from dflash_serve.overlay.build import damage_of  # noqa: E402
from tests.serve.conftest import Api, Tiny  # noqa: E402

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

PROMPT = 3000  # tokens, past the drafter's table of 2048


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> tuple[Api, dict[str, Any]]:
    """The server and its plan."""
    return tiny.api, json.loads((tiny.shell.state / "runs" / "tiny" / "plan.json").read_text())


def test_the_drafter_is_served_from_its_overlay(served: tuple[Api, dict[str, Any]]) -> None:
    _, plan = served
    own = read_drafter(ROOT / "recipes" / "tiny" / "drafter").max_position_embeddings
    window = plan["shape"]["window"]["value"]
    assert own < PROMPT < window
    (decided,) = [entry for entry in plan["overlays"] if entry["kind"] == "drafter"]
    assert decided["needed"]
    assert plan["drafter"]["served_from"] == decided["path"]
    assert damage_of(Path(decided["path"])) is None
    assert read_drafter(Path(decided["path"])).max_position_embeddings == window


def test_a_prompt_past_the_drafter_table_is_served_and_drafted(served: tuple[Api, dict[str, Any]]) -> None:
    """From the drafter's own directory vLLM 0.32 dies of this request: it reads past the rotary table."""
    api, _ = served
    prompts = [
        entry["prompt"] for entry in json.loads((ROOT / "tests/data/heldout_prompts.json").read_text())["prompts"]
    ]
    tokens: list[int] = []
    while len(tokens) < PROMPT:
        for prompt in prompts:
            tokens += api.post("/tokenize", {"model": "tiny", "prompt": prompt}).json()["tokens"]
    before = parse(api.metrics())
    body = {"model": "tiny", "prompt": tokens[:PROMPT], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    answer = api.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT, 48)
    length = parse(api.metrics()).since(before).acceptance_length
    print(f"acceptance length {length:.2f} at position {PROMPT}")
    assert length > 1.2
    assert requests.get(api.url + "/health", timeout=10).status_code == 200
