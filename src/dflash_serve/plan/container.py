"""Native or in a container, and how the container is run."""

from __future__ import annotations

import os

from dflash_serve.plan import model

# vLLM's ranks exchange tensors in /dev/shm, and Docker's own 64 MB are too few. It is a limit and costs nothing unused.
SHM_BYTES = 8 * 2**30
SHM_BYTES_ONE_RANK = 2**30


def decide_runtime(
    wanted: model.Runtime | None,
    variant: model.Variant,
    restarts: int,
    stop_seconds: int,
    *,
    hypothetical: bool = False,
) -> tuple[model.Runtime, str, model.ContainerChoice | None]:
    """The runtime, why, and what the container gets.

    A container is the choice for GPUs where its image is here or can be built, since compiler and CUDA headers are in
    it. On the CPU the native environment is smaller and quicker to make.
    """
    if wanted is None and hypothetical:
        # A plan for another machine must not depend on this one's Docker.
        return "native", "native: whether Docker can serve there is decided there", None
    if wanted is None:
        # Docker's client and the images' tables are a third of a plan's time: only where they are asked.
        from dflash_serve.image.available import why_not

        missing = why_not(variant) if variant == "cuda" else "on the CPU it is quicker"
        runtime: model.Runtime = "native" if missing else "docker"
        reason = f"native: {missing}" if missing else "docker: the image has compiler and kernels"
    else:
        runtime, reason = wanted, f"{wanted}: --runtime"
    if runtime == "native":
        return runtime, reason, None
    return runtime, reason, container(variant, restarts, stop_seconds)


def container(variant: model.Variant, restarts: int, stop_seconds: int) -> model.ContainerChoice:
    """What the container gets."""
    from dflash_serve.image.identity import identity

    image = identity(variant)
    uid, gid = (os.getuid(), os.getgid()) if os.getuid() else (image.uid, image.uid)
    return model.ContainerChoice(
        image=image.reference,
        user=f"{uid}:{gid}",
        shm_bytes=SHM_BYTES if variant == "cuda" else SHM_BYTES_ONE_RANK,
        restart=f"on-failure:{restarts}" if restarts else "no",
        # The server drains first; the engine's own limit has to be the shorter one.
        stop_seconds=stop_seconds + 30,
    )
