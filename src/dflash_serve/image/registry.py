"""Digests from a registry, asked through the Docker engine, which knows credentials, mirrors and proxies."""

from __future__ import annotations

import re

import docker.errors

from dflash_serve.dockerd import explanation
from dflash_serve.errors import BuildFailed
from dflash_serve.image.build import connected


def resolve_digest(reference: str) -> str:
    """The digest that `repository:tag` names now: of the index where there are several platforms.

    Raises:
        BuildFailed: no engine, or the registry doesn't answer or doesn't know the tag.
    """
    with connected() as engine:
        try:
            digest = str(engine.images.get_registry_data(reference).id)
        except docker.errors.APIError as exc:
            raise BuildFailed(
                f"the registry does not tell the digest of {reference}",
                where=explanation(exc),
                fix="try it on a machine that reaches the registry, and commit docker/images.yaml",
            ) from None
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise BuildFailed(f"the registry answered with something that is no digest: {digest[:80]}", where=reference)
    return digest
