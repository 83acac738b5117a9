"""Whether an image can be had on this machine: it is here, or an engine can build it. Quick, and changes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dflash_serve.dockerd import REFUSES, SOCKET, connect, explanation, gives_gpus, no_answer

# A socket that isn't there answers at once; one that hangs must not hold up every plan.
TIMEOUT_S = 3


def why_not(name: str) -> str:
    """Why no container of that variant can be started here; empty when it can."""
    if "DFLASH_SERVE_IMAGE" in os.environ:
        return "this is inside a container already"
    if not _engine_listens():
        return "no Docker engine answers"
    import docker.errors

    from dflash_serve.image.identity import identity

    image = identity(name)
    try:
        client = connect(TIMEOUT_S)
    except docker.errors.DockerException as exc:
        return no_answer(exc)[0]
    try:
        info = client.info()
        if name == "cuda" and not gives_gpus(info):
            return "Docker has no NVIDIA runtime (nvidia-container-toolkit)"
        try:
            client.images.get(image.reference)
        except docker.errors.ImageNotFound:
            if image.variant.base.digest is None:
                return f"the image is not built, and its base is not pinned (dflash-serve image resolve {name})"
            if not _buildx():
                return "the image is not built, and docker has no buildx"
    except docker.errors.APIError as exc:
        return f"{REFUSES}: {explanation(exc)}"
    except (docker.errors.DockerException, OSError) as exc:
        return no_answer(exc)[0]
    finally:
        client.close()
    return ""


def _engine_listens() -> bool:
    """Whether there is anything to ask. Docker's client is not imported for that: it takes 0.2 s."""
    return "DOCKER_HOST" in os.environ or Path(SOCKET).exists()


def _buildx() -> bool:
    """Whether the docker command and its plugin are there, by the places where plugins live."""
    places = [
        Path.home() / ".docker/cli-plugins",
        *(
            Path(root) / "docker/cli-plugins"
            for root in ("/usr/libexec", "/usr/lib", "/usr/local/lib", "/usr/local/libexec")
        ),
    ]
    return shutil.which("docker") is not None and any((place / "docker-buildx").exists() for place in places)
