"""The prompts that measure acceptance come from files that no training step read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SET: dict[str, Any] = json.loads((ROOT / "tests/data/heldout_prompts.json").read_text())
LOCK: dict[str, Any] = json.loads((ROOT / "scripts/tiny_pair/corpus.lock.json").read_text())


def test_every_prompt_is_held_out() -> None:
    assert SET["manifest_sha256"] == LOCK["manifest_sha256"]
    for prompt in SET["prompts"]:
        assert prompt["file"] in LOCK["heldout"]
        assert hashlib.sha256(prompt["file"].encode()).digest()[0] % 20 == 0


def test_the_set_is_large_enough_and_has_both_kinds() -> None:
    kinds = [prompt["kind"] for prompt in SET["prompts"]]
    assert kinds.count("completion") >= 20
    assert kinds.count("chat") >= 10
    assert len({prompt["id"] for prompt in SET["prompts"]}) == len(kinds)


def test_conversations_are_rendered_by_the_template() -> None:
    for prompt in SET["prompts"]:
        if prompt["kind"] == "chat":
            wanted = f"<|im_start|>user\n{prompt['user']}<|im_end|>\n<|im_start|>assistant\n"
            assert prompt["prompt"] == wanted
