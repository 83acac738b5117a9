#!/usr/bin/env python3
"""Measure the acceptance length of a running vLLM on held-out prompts at temperature 0. Standard library only.

    measure_acceptance.py --url http://127.0.0.1:8000 --key-file KEY --model tiny [--tokens 96] [--json]

Acceptance length is 1 + accepted / drafts between two scrapes of /metrics, as vLLM counts them, so nothing else may
use the server meanwhile. Exit code 1: less than --at-least; 2: the server cannot be measured (no answer, no drafter,
refused).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout_prompts.json"
SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+)_total(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
SETTLE_TRIES, SETTLE_SECONDS = 20, 0.25


class CannotMeasure(RuntimeError):
    """The server does not answer, refuses, or drafts nothing."""


@dataclass(frozen=True)
class Counters:
    """Speculation counters of one scrape, summed over engines."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    accepted_per_position: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """One measurement. `ids` are the generated token ids by prompt; without a drafter there is no acceptance."""

    prompts: int
    tokens: int
    seconds: float
    tok_s: float
    drafts: float
    acceptance_length: float | None
    acceptance_rate: float | None
    accepted_per_draft_by_position: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]


class Server:
    """HTTP to one server."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def _call(self, path: str, body: dict[str, object] | None = None, timeout: float = 600) -> str:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise CannotMeasure(f"{self.url}{path} answered {error.code}: {error.read()[:300]!r}") from error
        except OSError as error:
            raise CannotMeasure(f"{self.url}{path}: {error}") from error

    def counters(self) -> Counters:
        """Scrape /metrics."""
        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        for name, labels, value in SAMPLE.findall(self._call("/metrics", timeout=10)):
            if name == "accepted_tokens_per_pos":
                position = int(POSITION.search(labels)[1])  # type: ignore[index]
                positions[position] = positions.get(position, 0.0) + float(value)
            else:
                sums[name] = sums.get(name, 0.0) + float(value)
        return Counters(
            sums.get("drafts", 0.0),
            sums.get("draft_tokens", 0.0),
            sums.get("accepted_tokens", 0.0),
            tuple(positions[p] for p in sorted(positions)),
        )

    def settled_counters(self) -> Counters:
        """The counters once two scrapes agree: an engine publishes its last step a moment after the answer."""
        last = self.counters()
        for _ in range(SETTLE_TRIES):
            time.sleep(SETTLE_SECONDS)
            now = self.counters()
            if now == last:
                break
            last = now
        return last

    def greedy(self, prompt: str, tokens: int) -> tuple[int, ...]:
        """Token ids of a greedy continuation of exactly `tokens` tokens."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return tuple(json.loads(self._call("/v1/completions", body))["choices"][0]["token_ids"])


def measure(server: Server, prompts: Sequence[str], tokens: int, concurrency: int = 1) -> Measured:
    """Send every prompt once and read the counters before and after."""
    before = server.settled_counters()
    started = time.monotonic()
    if concurrency == 1:
        ids = [server.greedy(prompt, tokens) for prompt in prompts]
    else:
        with ThreadPoolExecutor(concurrency) as pool:
            ids = list(pool.map(lambda prompt: server.greedy(prompt, tokens), prompts))
    seconds = time.monotonic() - started
    after = server.settled_counters()
    drafts = after.drafts - before.drafts
    accepted = after.accepted_tokens - before.accepted_tokens
    offered = after.draft_tokens - before.draft_tokens
    earlier = before.accepted_per_position or (0.0,) * len(after.accepted_per_position)
    generated = sum(map(len, ids))
    return Measured(
        prompts=len(prompts),
        tokens=generated,
        seconds=round(seconds, 2),
        tok_s=round(generated / seconds, 1),
        drafts=drafts,
        acceptance_length=round(1 + accepted / drafts, 4) if drafts else None,
        acceptance_rate=round(accepted / offered, 4) if offered else None,
        accepted_per_draft_by_position=tuple(
            round((now - then) / drafts, 4) for now, then in zip(after.accepted_per_position, earlier, strict=True)
        )
        if drafts
        else (),
        ids=tuple(ids),
    )


def held_out(path: Path = PROMPTS, kind: str | None = None) -> list[str]:
    """The prompts of the held-out set, or those of one kind (`completion` or `chat`); chat prompts are rendered."""
    entries = json.loads(path.read_text())["prompts"]
    return [entry["prompt"] for entry in entries if kind in (None, entry["kind"])]


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--key-file", type=Path, help="a file that holds the server's key")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--kind", choices=("completion", "chat"), help="only prompts of this kind")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate a prompt")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--at-least", type=float, help="exit with 1 when the acceptance length is lower")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the token ids")
    args = parser.parse_args()
    key = args.key_file.read_text().strip() if args.key_file else None
    prompts = held_out(args.prompts, args.kind)
    try:
        found = measure(Server(args.url, args.model, key), prompts, args.tokens, args.concurrency)
        if found.acceptance_length is None:
            raise CannotMeasure("no draft was verified: the server has no drafter, or it is inert")
    except CannotMeasure as problem:
        print(f"measure_acceptance: {problem}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(asdict(found)))
    else:
        print(f"acceptance length {found.acceptance_length:.3f} over {found.drafts:.0f} drafts, {found.tok_s} tok/s")
        print("accepted per draft by position:", *found.accepted_per_draft_by_position)
    return int(args.at_least is not None and found.acceptance_length < args.at_least)


if __name__ == "__main__":
    sys.exit(main())
