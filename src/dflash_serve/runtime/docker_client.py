"""The Docker engine's client: opened, closed, and its failures told as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import docker.errors
import requests

from dflash_serve.dockerd import REFUSES, connect, explanation, no_answer
from dflash_serve.errors import StartFailed

# Longer than any grace period: a stop answers when the container has ended.
SLOW_S = 3700
QUICK_S = 30
# A container with GPUs starts when the driver is ready, and that may have been unloaded.
START_S = 180

_kept: ContextVar[Any] = ContextVar("docker_client", default=None)


@contextmanager
def engine(timeout: int = QUICK_S) -> Iterator[Any]:
    """The engine's client; inside `kept_open` always the same one.

    Raises:
        StartFailed: no engine answers, or it refuses what the block did not catch itself.
    """
    with _told():
        client = _kept.get()
        if client is not None and timeout == QUICK_S:
            yield client
            return
        client = connect(timeout)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def kept_open() -> Iterator[None]:
    """Within this block quick questions share one client: opening one asks for the engine's version each time."""
    with engine() as client:
        token = _kept.set(client)
        try:
            yield
        finally:
            _kept.reset(token)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except docker.errors.APIError as exc:  # a RequestException too: it answered
        fix = "docker ps -a shows its state, and the log of the Docker service what it met"
        raise StartFailed(REFUSES, where=explanation(exc), fix=fix) from None
    except (docker.errors.DockerException, requests.RequestException) as exc:
        what, where, fix = no_answer(exc)
        raise StartFailed(what, where=where, fix=fix) from None
