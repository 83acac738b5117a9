"""A small client of the served OpenAI-compatible API: just what verification asks."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from dflash_serve.errors import VerifyFailed


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        ttft: seconds to the first token; seconds: to the last.
        tokens: completion tokens, as the server counted them.
    """

    text: str
    finish_reason: str | None
    tokens: int
    ttft: float
    seconds: float

    @property
    def tok_s(self) -> float | None:
        """Output tokens a second after the first token (1 / TPOT)."""
        decode = self.seconds - self.ttft
        return (self.tokens - 1) / decode if self.tokens > 1 and decode > 0 else None


class Client:
    """Requests to one server with its key."""

    def __init__(self, url: str, model: str, key_file: Path | None = None, *, timeout: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._timeout = timeout
        self._session = requests.Session()
        if key_file is not None and key_file.is_file():
            self._session.headers["Authorization"] = f"Bearer {key_file.read_text().strip()}"

    def get(self, path: str) -> Any:
        """JSON of a GET.

        Raises:
            VerifyFailed: no answer, or not 200.
        """
        return self._checked(self._request("GET", path)).json()

    def models(self) -> list[dict[str, Any]]:
        """Entries of /v1/models."""
        entries: list[dict[str, Any]] = self.get("/v1/models")["data"]
        return entries

    def chat(self, content: str, *, max_tokens: int, **extra: Any) -> Completion:
        """One user message, streamed."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, **extra}
        return self._stream("/v1/chat/completions", body)

    def complete(self, prompt: str, *, max_tokens: int, **extra: Any) -> Completion:
        """One plain completion, streamed."""
        return self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **extra})

    def _stream(self, path: str, body: dict[str, Any]) -> Completion:
        started = time.monotonic()
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        answer = self._checked(self._request("POST", path, json=body, stream=True))
        text, reason, tokens, first = "", None, 0, None
        try:
            for raw in answer.iter_lines():
                if not raw.startswith(b"data: ") or raw == b"data: [DONE]":
                    continue
                chunk = json.loads(raw.removeprefix(b"data: "))
                if "error" in chunk:
                    raise VerifyFailed(f"the server broke off a request: {chunk['error']}", where=self.url + path)
                if usage := chunk.get("usage"):
                    tokens = usage["completion_tokens"]
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta") or {}
                    piece = (
                        choice.get("text")
                        or delta.get("content")
                        or delta.get("reasoning_content")
                        or delta.get("reasoning")
                        or ""
                    )
                    if piece and first is None:
                        first = time.monotonic()
                    text += piece
                    reason = choice.get("finish_reason") or reason
        except (requests.RequestException, ValueError) as exc:
            raise VerifyFailed(f"the stream broke off: {type(exc).__name__}", where=self.url + path) from None
        ended = time.monotonic()
        return Completion(text, reason, tokens, (first or ended) - started, ended - started)

    def _request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        try:
            return self._session.request(method, self.url + path, timeout=self._timeout, **kwargs)
        except requests.RequestException as exc:
            raise VerifyFailed(f"no answer: {type(exc).__name__}", where=self.url + path) from None

    def _checked(self, answer: requests.Response) -> requests.Response:
        if answer.status_code != 200:
            raise VerifyFailed(
                f"{answer.request.method} answers {answer.status_code}: {answer.text[:160]}", where=str(answer.url)
            )
        return answer
