"""A server with vLLM's HTTP surface and a toy model behind it: what a real small model can't do (tools, thinking,
images) and faults at exact points are shown on it. The real engine is used wherever it can show the same.

Its model: tokens are whitespace-led pieces; the next token is a function of the last one, so a greedy text and its
scores are known exactly. It answers as a recorded vLLM 0.32 does; tests/silent runs the same faults on a real one.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from itertools import pairwise
from typing import Any

from dflash_serve.observe.names import table

WORDS = 4096


def tokenize(text: str) -> list[int]:
    """Ids of the pieces of a text."""
    return [zlib.crc32(piece.encode()) % WORDS for piece in re.findall(r"\s*\S+", text)]


READ = set(pairwise(tokenize(resources.files("dflash_serve.verify").joinpath("canary.txt").read_text("utf-8"))))


def following(token: int) -> int:
    """The arg max after a token; never its own successor twice, so text does not repeat."""
    return (token * 31 + 7) % WORDS


@dataclass
class FakeEngine:
    """The server's state and knobs.

    Attributes:
        accept: accepted draft tokens of each draft, taken in turn; k is 7. None: no drafter.
        step: seconds a verification takes.
        slots: requests that run at once; others wait.
        prefix: whether the prefix cache works.
        accept_cached, accept_long: used instead of `accept` after a cached prompt, after one above 1,000 tokens.
        accept_chat: used instead of `accept` for chat.
        nan_drafts: drafts of the plugin's sample that are NaN, for every draft made.
    """

    model: str = "fake"
    window: int = 4096
    version: str = "0.32.0"
    accept: tuple[int, ...] | None = (3, 2, 4, 3)
    step: float = 0.002
    slots: int = 64
    prefix: bool = True
    reasoning: bool = False
    accept_cached: tuple[int, ...] | None = None
    accept_long: tuple[int, ...] | None = None
    accept_chat: tuple[int, ...] | None = None
    nan_drafts: int = 0
    patches: tuple[str, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    cached: set[tuple[int, ...]] = field(default_factory=set)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: str, value: float) -> None:
        with self.lock:
            self.counts[key] = self.counts.get(key, 0.0) + value

    def steps(self, wanted: int, accept: tuple[int, ...] | None = None) -> Iterator[int]:
        """Tokens of each verification, until `wanted` are made."""
        made = turn = 0
        pattern = accept or self.accept
        while made < wanted:
            accepted = 0 if pattern is None else pattern[turn % len(pattern)]
            turn += 1
            self.add("nan_drafts", self.nan_drafts)
            tokens = min(accepted + 1, wanted - made)
            if self.accept is not None:
                self.add("drafts", 1)
                self.add("draft_tokens", 7)
                self.add("accepted_tokens", accepted)
                for position in range(accepted):
                    self.add(f"position {position}", 1)
            made += tokens
            self.add("generation_tokens", tokens)
            yield tokens

    def prefill(self, ids: list[int]) -> tuple[int, ...] | None:
        """Wait as long as a prefill takes: a cached prompt takes a tenth. Returns what drafts after it are like."""
        self.add("prompt_tokens", len(ids))
        self.add("prefix_cache_queries", len(ids))
        known = self.prefix and tuple(ids) in self.cached
        if known:
            self.add("prefix_cache_hits", len(ids) - 1)
        self.cached.add(tuple(ids))
        time.sleep(len(ids) * (2e-6 if known else 2e-5))
        if known and self.accept_cached:
            return self.accept_cached
        return self.accept_long if self.accept_long and len(ids) > 1000 else None

    def metrics(self) -> str:
        """The exposition, with every name that every vLLM has."""
        labels = f'engine="0",model_name="{self.model}"'
        lines = []
        for key, name in table().metrics.items():
            stem, kind = name.names[0], name.kind if name.kind in ("counter", "histogram") else "gauge"
            drafting = key in ("drafts", "draft_tokens", "accepted_tokens", "accepted_per_position")
            if self.accept is None if drafting else not name.every:
                continue
            lines.append(f"# TYPE {stem.removesuffix('_total')} {kind}")
            if key == "accepted_per_position":
                counts = [self.counts.get(f"position {p}", 0) for p in range(7)]
                lines += [f'{stem}{{{labels},position="{p}"}} {count}' for p, count in enumerate(counts)]
            elif kind == "histogram":
                lines += [f'{stem}_bucket{{{labels},le="+Inf"}} 0']
                lines += [f"{stem}_{part}{{{labels}}} 0" for part in ("sum", "count")]
            else:
                lines.append(f"{stem}{{{labels}}} {self.counts.get(key, 0)}")
        lines.append("# TYPE dflash:watched_nan_drafts counter")
        lines.append(f"dflash:watched_nan_drafts_total {self.counts.get('nan_drafts', 0)}")
        if self.patches:
            lines.append("# TYPE dflash:patch_info gauge")
        for patch in self.patches:
            lines.append(f'dflash:patch_info{{outcome="applied",patch="{patch}",vllm_version="{self.version}"}} 1.0')
        return "\n".join(lines) + "\n"


@contextmanager
def serving(engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine behind a port of its own."""
    gate = threading.Semaphore(engine.slots)
    handler = type("Handler", (_Handler,), {"engine": engine, "gate": gate})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    engine.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine
    gate: threading.Semaphore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/metrics":
            return self.send(engine.metrics().encode(), "text/plain")
        if self.path == "/version":
            return self.json({"version": engine.version})
        if self.path == "/v1/models":
            return self.json({"data": [{"id": engine.model, "max_model_len": engine.window}]})
        return self.json({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = tokenize(body["prompt"])
            return self.json({"count": len(ids), "tokens": ids})
        if body["model"] != self.engine.model:
            return self.json({"error": "no such model"}, 404)
        with self.gate:
            if self.path == "/v1/chat/completions":
                return self.chat(body)
            return self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        engine, prompt = self.engine, body["prompt"]
        ids = list(prompt) if isinstance(prompt, list) else tokenize(prompt)
        accept = engine.prefill(ids)
        if body.get("prompt_logprobs"):
            rows: list[Any] = [None]
            for before, token in pairwise(ids):
                best = following(before)
                row = {str(best): {"logprob": -0.1, "rank": 1}}
                read = (before, token) in READ
                row.setdefault(str(token), {"logprob": -2.0 if read else -9.0, "rank": 3 if read else 40})
                rows.append(row)
            return self.json({"choices": [{"text": "", "prompt_logprobs": rows}]})
        stop = body.get("stop")
        wanted = 3 if stop else body["max_tokens"]
        last = ids[-1]

        def generate() -> Iterator[dict[str, Any]]:
            nonlocal last
            made, first = 0, True
            for tokens in engine.steps(wanted, accept):
                time.sleep(engine.step)
                new = []
                for _ in range(tokens):
                    last = following(last)
                    new.append(last)
                made += tokens
                choice: dict[str, Any] = {"text": "".join(f" w{t}" for t in new)}
                if body.get("return_token_ids"):
                    choice["token_ids"] = new
                    choice["prompt_token_ids"] = ids if first else None
                first = False
                if made >= wanted:
                    choice["finish_reason"] = "stop" if stop else "length"
                yield {"choices": [choice]}
            yield {"choices": [], "usage": {"completion_tokens": made, "prompt_tokens": len(ids)}}

        if not body.get("stream"):
            text = "".join(c["choices"][0]["text"] for c in generate() if c["choices"])
            return self.json({"choices": [{"text": text, "finish_reason": "length"}], "usage": {}})
        return self.stream(generate())

    def chat(self, body: dict[str, Any]) -> None:
        engine, content = self.engine, body["messages"][-1]["content"]
        seen = " ".join(p.get("text", "") for p in content) if isinstance(content, list) else content
        engine.prefill(tokenize(seen))
        thinks = engine.reasoning and body.get("chat_template_kwargs", {}).get("enable_thinking", True)
        delta: dict[str, Any] = {}
        if body.get("tools"):
            delta = {
                "tool_calls": [{"index": 0, "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]
            }
        elif body.get("response_format") or body.get("structured_outputs"):
            delta = {"content": '{"colour": "red", "number": 7}'}
        elif isinstance(content, list):
            delta = {"content": "Red."}
        elif "single word ready" in seen:
            delta = {"content": "ready"}
        elif "Explain" in seen or "Write" in seen:
            return self.stream(self.prose(body["max_tokens"]))
        else:
            delta = {"content": "2"}
        events = [{"choices": [{"delta": {"reasoning": "let me count the even ones"}}]}] if thinks else []
        events.append({"choices": [{"delta": delta, "finish_reason": "stop"}]})
        events.append({"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 9}})
        return self.stream(iter(events))

    def prose(self, wanted: int) -> Iterator[dict[str, Any]]:
        made, token = 0, 5
        for tokens in self.engine.steps(wanted, self.engine.accept_chat):
            time.sleep(self.engine.step)
            text = ""
            for _ in range(tokens):
                token = following(token)
                text += f" w{token}"
            made += tokens
            yield {"choices": [{"delta": {"content": text}, "finish_reason": "length" if made >= wanted else None}]}
        yield {"choices": [], "usage": {"completion_tokens": made, "prompt_tokens": 9}}

    def stream(self, events: Iterator[dict[str, Any]]) -> None:
        """Server-sent events, chunked as uvicorn does, so that each arrives at once."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                self.chunk(f"data: {json.dumps(event)}\n\n".encode())
            self.chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def json(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), "application/json", status)

    def send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
