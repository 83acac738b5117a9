"""The chosen GPUs are of the class that the recipe and the engine need, and alike."""

from __future__ import annotations

from dflash_serve.errors import UsageError
from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.hardware.model import Gpu, amount
from dflash_serve.hardware.tables import architecture_of
from dflash_serve.preflight.context import Context
from dflash_serve.recipe.schema import holds

IDS = ("gpu-count", "gpu-capability", "gpu-architecture", "gpu-memory", "gpu-mixed")
GIB = 2**30


def check(context: Context) -> list[Finding]:
    gpus = [gpu for gpu in context.chosen if gpu.healthy]
    if not context.uses_gpus or not gpus:
        return []
    out: list[Finding] = []
    if len(context.gpus) < context.tensor_parallel_size:
        out.append(
            refuse(
                "gpu-count",
                f"tensor parallel size {context.tensor_parallel_size} needs as many GPUs; {len(context.gpus)} chosen",
                fix="choose more with --gpus, or --set tensor_parallel_size=1",
            )
        )
    for gpu in gpus:
        out += _capability(context, gpu)
    out += _memory(context, gpus)
    capabilities = sorted({gpu.compute_capability for gpu in gpus if gpu.compute_capability})
    where = ", ".join(f"{gpu.label} {gpu.compute_capability}" for gpu in gpus)
    if context.tensor_parallel_size > 1 and len(capabilities) > 1:
        out.append(
            refuse(
                "gpu-mixed",
                f"tensor parallelism over compute capabilities {' and '.join(capabilities)}: kernels built for one "
                "do not run on the other",
                where=where,
                fix="choose GPUs of one kind with --gpus, or --set tensor_parallel_size=1",
            )
        )
    elif context.tensor_parallel_size > 1 and len({gpu.name for gpu in gpus}) > 1:
        out.append(warn("gpu-mixed", "the slowest and smallest of unlike GPUs sets the pace and the pool", where=where))
    return out


def _capability(context: Context, gpu: Gpu) -> list[Finding]:
    if gpu.compute_capability is None:
        return [warn("gpu-capability", "the driver does not tell the compute capability", where=gpu.label)]
    if context.requires_capability and not holds(context.requires_capability, float(gpu.compute_capability)):
        return [
            refuse(
                "gpu-capability",
                f"{context.recipe} needs compute capability {context.requires_capability}; "
                f"this is {gpu.compute_capability}",
                where=gpu.label,
                fix="choose another GPU with --gpus, or another recipe: dflash-serve recipes list",
            )
        ]
    try:
        architecture = architecture_of(gpu.compute_capability)
    except UsageError as exc:
        return [warn("gpu-architecture", exc.what, where=gpu.label, fix="expect surprises; report what you see")]
    if architecture.in_wheel:
        return []
    return [
        refuse(
            "gpu-architecture",
            f"vLLM's wheels carry no code for compute capability {gpu.compute_capability} ({architecture.name})",
            where=gpu.label,
            fix=architecture.drafter.reason,
        )
    ]


def _memory(context: Context, gpus: list[Gpu]) -> list[Finding]:
    known = [context.inventory.usable_bytes(gpu) for gpu in gpus]
    total = sum(size for size in known if size is not None)
    if context.requires_memory_gib is None or None in known or total >= context.requires_memory_gib * GIB:
        return []
    return [
        refuse(
            "gpu-memory",
            f"{context.recipe} needs {context.requires_memory_gib:g} GiB of GPU memory; here are {amount(total)}",
            where=", ".join(gpu.label for gpu in gpus),
            fix="choose more GPUs with --gpus, or a smaller recipe: dflash-serve recipes list",
        )
    ]
