"""Docker's health check: does the server generate? Standard library only; it runs every half minute.

`/health` alone stays green while a request hangs. This makes one token, unless the server's own counter shows that it
made some for others since the last look: a full queue must not count as a dead server. Reads the file that
`dflash-serve serve` writes (`$DFLASH_SERVE_HEALTH`). Prints one line; exit 0 healthy, 1 not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PING_SECONDS = 5.0
# Less than the HEALTHCHECK's own timeout, so that the reason gets printed.
TOKEN_SECONDS = 45.0
_TOKENS = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
GPU_LOST = "Failed to initialize NVML"


def main() -> int:
    """Look once."""
    healthy, line = look(Path(os.environ.get("DFLASH_SERVE_HEALTH", "/tmp/dflash-serve-health.json")))  # noqa: S108
    if not healthy and gpu_lost():
        line = (
            "the GPU has left this container: make a new one, restarting it does not help "
            "(https://github.com/NVIDIA/nvidia-container-toolkit/issues/48)"
        )
    sys.stdout.write(line + "\n")
    return 0 if healthy else 1


def look(file: Path) -> tuple[bool, str]:
    """Whether the server that `file` describes generates, and one line that says why (not)."""
    try:
        server: dict[str, str] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return False, "no server was started yet"
    try:
        _call(server, "/health", None, PING_SECONDS)
        made = tokens(server)
    except (OSError, ValueError) as exc:
        return False, f"no answer: {_reason(exc)}"
    memory = file.with_suffix(".tokens")
    before = _remembered(memory)
    if before is not None and made > before:
        _remember(memory, made)
        return True, f"{made - before:.0f} tokens since the last look"
    try:
        body = {"model": server["model"], "prompt": "1", "max_tokens": 1, "temperature": 0}
        answer = _call(server, "/v1/completions", body, TOKEN_SECONDS)
        generated = json.loads(answer)["usage"]["completion_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        try:
            now = tokens(server)
        except (OSError, ValueError):
            now = made
        _remember(memory, now)
        if now > made:
            return True, f"busy: {now - made:.0f} tokens for others while it waited"
        return False, f"no token within {TOKEN_SECONDS:g} s: {_reason(exc)}"
    _remember(memory, made + generated)
    return (True, "generates") if generated else (False, "an empty completion")


def tokens(server: dict[str, str]) -> float:
    """Tokens generated since the start, over all engines. Raises ValueError when the counter isn't there."""
    found = _TOKENS.findall(_call(server, "/metrics", None, PING_SECONDS))
    if not found:
        raise ValueError("the metrics don't count generated tokens")
    return sum(float(value) for value in found)


def gpu_lost() -> bool:
    """Whether the driver can't be reached any more, as after a reload of the host's systemd."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return GPU_LOST in done.stdout + done.stderr


def _call(server: dict[str, str], path: str, body: dict[str, Any] | None, seconds: float) -> str:
    headers = {"Authorization": f"Bearer {server['key']}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server["url"] + path, data=data, headers=headers)  # noqa: S310 (our own http URL)
    # A proxy of the environment has no business with the server beside us.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=seconds) as answer:
        text: str = answer.read().decode("utf-8", "replace")
        return text


def _reason(exc: Exception) -> str:
    if isinstance(exc, urllib.error.HTTPError):
        return f"HTTP {exc.code}"
    return " ".join(str(getattr(exc, "reason", exc)).split())[:120] or type(exc).__name__


def _remembered(file: Path) -> float | None:
    try:
        return float(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _remember(file: Path, made: float) -> None:
    try:
        file.write_text(str(made), "utf-8")
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
