"""A small client of the served OpenAI-compatible API: just what verification asks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from dflash_serve.errors import VerifyFailed


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: what the user sees; reasoning: what the reasoning parser set apart.
        tokens, prompt_tokens: as the server counted them.
        ttft: seconds to the first token; seconds: to the last.
        arrivals: seconds at which a piece arrived; with a drafter one piece is one verification.
        token_ids, prompt_ids: where the request asked for them.
        tool_calls: name and arguments of each.
    """

    text: str
    finish_reason: str | None
    tokens: int
    ttft: float
    seconds: float
    reasoning: str = ""
    prompt_tokens: int = 0
    arrivals: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    tool_calls: tuple[tuple[str, str], ...] = ()

    @property
    def tok_s(self) -> float | None:
        """Output tokens a second after the first token (1 / TPOT)."""
        decode = self.seconds - self.ttft
        return (self.tokens - 1) / decode if self.tokens > 1 and decode > 0 else None

    @property
    def longest_gap(self) -> float:
        """Longest wait between two pieces, seconds; the wait for the first does not count."""
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)


@dataclass(frozen=True)
class TokenScore:
    """One token of a prompt under the target.

    Attributes:
        rank: 1 is the arg max.
        top: logprob of the arg max.
    """

    token: int
    logprob: float
    rank: int
    top: float

    @property
    def margin(self) -> float:
        """How far the arg max is ahead, in nats; 0 for the arg max."""
        return self.top - self.logprob


class Client:
    """Requests to one server with its key.

    Args:
        timeout: seconds without a byte after which a request is given up.
    """

    def __init__(
        self, url: str, model: str, key_file: Path | None = None, *, key: str | None = None, timeout: float = 300.0
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._timeout = timeout
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=64))
        if key is None and key_file is not None and key_file.is_file():
            key = key_file.read_text().strip()
        self.key = key
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def patient(self, timeout: float) -> Client:
        """The same server, waited for longer: a prompt of the whole window is prefilled without a byte in between."""
        return Client(self.url, self.model, key=self.key, timeout=timeout)

    def get(self, path: str) -> Any:
        """JSON of a GET.

        Raises:
            VerifyFailed: no answer, not 200, or no JSON.
        """
        return self._json(self._checked(self._request("GET", path)))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON of a POST; the model's name is added.

        Raises:
            VerifyFailed: no answer, not 200, or no JSON.
        """
        return self._json(self._checked(self._request("POST", path, json={"model": self.model, **body})))

    def status(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of a POST, whatever they are."""
        answer = self._request("POST", path, json={"model": self.model, **body})
        return answer.status_code, answer.text

    def models(self) -> list[dict[str, Any]]:
        """Entries of /v1/models."""
        answer = self.get("/v1/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
            fix = "it must be vLLM's own server, without a proxy that changes answers"
            raise VerifyFailed("the server does not name its models", where=f"{self.url}/v1/models", fix=fix)
        return entries

    def count(self, text: str) -> int:
        """Tokens of a text, by the server's tokenizer."""
        return int(self.post("/tokenize", {"prompt": text})["count"])

    def chat(self, content: str | list[dict[str, Any]], *, max_tokens: int, **extra: Any) -> Completion:
        """One user message, streamed."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, **extra}
        return self._stream("/v1/chat/completions", body)

    def complete(self, prompt: str, *, max_tokens: int, **extra: Any) -> Completion:
        """One plain completion, streamed."""
        return self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **extra})

    def score(self, ids: Sequence[int]) -> list[TokenScore]:
        """Every token of a prompt but the first, scored by the target in one prefill.

        Raises:
            VerifyFailed: the server refuses prompt_logprobs, or answers no numbers.
        """
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        answer = self.post("/v1/completions", body)
        rows = answer["choices"][0].get("prompt_logprobs") or []
        if len(rows) != len(ids):
            raise VerifyFailed(
                f"the server scored {len(rows)} of {len(ids)} tokens",
                where=f"{self.url}/v1/completions, prompt_logprobs=1",
                fix="it must be vLLM's own server, without a proxy that drops fields",
            )
        out = []
        for token, row in zip(ids[1:], rows[1:], strict=True):
            own = row[str(token)]
            top = max(entry["logprob"] for entry in row.values())
            out.append(TokenScore(token, own["logprob"], own["rank"], top))
        return out

    def _stream(self, path: str, body: dict[str, Any]) -> Completion:
        started = time.monotonic()
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        answer = self._checked(self._request("POST", path, json=body, stream=True))
        pieces = _Pieces(self.url + path, started)
        try:
            for raw in answer.iter_lines():
                if raw.startswith(b"data: ") and raw != b"data: [DONE]":
                    pieces.take(json.loads(raw.removeprefix(b"data: ")))
        except (requests.RequestException, ValueError) as exc:
            stalled = isinstance(exc, requests.exceptions.ConnectionError | requests.exceptions.Timeout)
            raise VerifyFailed(
                f"no token for {self._timeout:g} s: the engine hangs"
                if stalled and "timed out" in str(exc).lower()
                else f"the stream broke off: {type(exc).__name__}",
                where=self.url + path,
                fix="dflash-serve doctor, then restart it: ./start.sh down, ./start.sh NAME",
            ) from None
        return pieces.completion()

    def _request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        try:
            return self._session.request(method, self.url + path, timeout=self._timeout, **kwargs)
        except requests.exceptions.Timeout:
            raise VerifyFailed(
                f"no answer for {self._timeout:g} s: the engine hangs",
                where=self.url + path,
                fix="dflash-serve doctor, then restart it: ./start.sh down, ./start.sh NAME",
            ) from None
        except requests.RequestException as exc:
            raise VerifyFailed(
                f"no answer: {type(exc).__name__}", where=self.url + path, fix="is it up? dflash-serve status"
            ) from None

    def _checked(self, answer: requests.Response) -> requests.Response:
        if answer.status_code == 401:
            raise VerifyFailed(
                "the server refuses the key",
                where=str(answer.url),
                fix="give its key: --key-file FILE, or VLLM_API_KEY",
            )
        if answer.status_code != 200:
            raise VerifyFailed(
                f"{answer.request.method} answers {answer.status_code}: {answer.text[:160]}",
                where=str(answer.url),
                fix="the server's log says more: dflash-serve logs",
            )
        return answer

    def _json(self, answer: requests.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise VerifyFailed(
                f"the answer is no JSON: {answer.text[:80]!r}",
                where=str(answer.url),
                fix="it must be vLLM's own server",
            ) from None


class _Pieces:
    """What a stream has brought so far."""

    def __init__(self, where: str, started: float) -> None:
        self._where, self._started = where, started
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._arrivals: list[float] = []
        self._ids: list[int] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._calls: dict[int, list[str]] = {}
        self._usage: dict[str, Any] = {}
        self._reason: str | None = None

    def take(self, chunk: dict[str, Any]) -> None:
        """Add one event."""
        if "error" in chunk:
            raise VerifyFailed(
                f"the server broke off a request: {str(chunk['error'])[:160]}",
                where=self._where,
                fix="the server's log says more: dflash-serve logs",
            )
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            ids = choice.get("token_ids") or ()
            if choice.get("prompt_token_ids"):
                self._prompt_ids = tuple(choice["prompt_token_ids"])
            for call in delta.get("tool_calls") or ():
                held = self._calls.setdefault(call.get("index", 0), ["", ""])
                function = call.get("function") or {}
                held[0] += function.get("name") or ""
                held[1] += function.get("arguments") or ""
            if text or reasoning or ids or delta.get("tool_calls"):
                self._arrivals.append(time.monotonic() - self._started)
            self._text.append(text)
            self._reasoning.append(reasoning)
            self._ids += ids
            self._reason = choice.get("finish_reason") or self._reason
        if chunk.get("prompt_token_ids"):
            self._prompt_ids = tuple(chunk["prompt_token_ids"])

    def completion(self) -> Completion:
        """All of it."""
        ended = time.monotonic() - self._started
        return Completion(
            text="".join(self._text),
            finish_reason=self._reason,
            tokens=int(self._usage.get("completion_tokens") or 0),
            ttft=self._arrivals[0] if self._arrivals else ended,
            seconds=ended,
            reasoning="".join(self._reasoning),
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            arrivals=tuple(self._arrivals),
            token_ids=tuple(self._ids),
            prompt_ids=self._prompt_ids,
            tool_calls=tuple((name, arguments) for name, arguments in self._calls.values()),
        )
