"""The engine and the image of the image's own tests."""

from __future__ import annotations

from ..docker.conftest import built, engine

__all__ = ["built", "engine"]
