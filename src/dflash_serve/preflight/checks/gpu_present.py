"""There is a GPU where one is needed, it is the one that was chosen, and it is alive."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse
from dflash_serve.hardware.model import Gpu
from dflash_serve.preflight.context import Context

IDS = ("no-gpu", "gpu-missing", "gpu-dead", "gpu-mig", "gpu-mig-index")


def check(context: Context) -> list[Finding]:
    if not context.uses_gpus:
        return []
    inventory = context.inventory
    if not inventory.gpus:
        need = f"{context.requires_memory_gib:g} GiB of GPU memory" if context.requires_memory_gib else "an NVIDIA GPU"
        capability = f", compute capability {context.requires_capability}" if context.requires_capability else ""
        return [
            refuse(
                "no-gpu",
                f"{context.recipe} needs {need}{capability}, and no NVIDIA GPU is found",
                where=inventory.nvml_error or "NVML lists no GPU",
                fix=f"{inventory.nvml_fix or 'check nvidia-smi'}; without a GPU this runs: ./start.sh tiny",
            )
        ]
    out: list[Finding] = []
    present = ", ".join(gpu.label for gpu in inventory.gpus)
    for position, index in enumerate(context.gpus):
        gpu = context.device(inventory, position)
        if gpu is None:
            out.append(
                refuse("gpu-missing", f"GPU {index} is not in this machine", where=present, fix="choose others: --gpus")
            )
        elif not gpu.healthy:
            out.append(
                refuse(
                    "gpu-dead",
                    f"{gpu.label} does not answer: it fell off the bus or needs a reset",
                    where="sudo dmesg | grep -i xid",
                    fix="reboot, or choose others: --gpus",
                )
            )
        elif gpu.mig_enabled:
            slices = ", ".join(part.uuid for part in gpu.mig) or "it has none"
            out.append(
                refuse(
                    "gpu-mig",
                    f"{gpu.label} is in MIG mode: only its slices can be used",
                    where=f"slices: {slices}",
                    fix="choose a slice by its UUID with --gpus, or turn MIG off: sudo nvidia-smi -mig 0",
                )
            )
        elif gpu.slice is not None and gpu.slice >= len(inventory.gpus) and context.runtime == "native":
            out.append(_slice_number(gpu, len(inventory.gpus), context.vllm_version))
    return out


def _slice_number(gpu: Gpu, count: int, vllm: str | None) -> Finding:
    """NVML's index of a slice's UUID is the slice's number on its GPU, which vLLM takes for a GPU's index.

    vLLM 0.33.0, platforms/cuda.py, device_control_id_to_physical_device_id.
    """
    return refuse(
        "gpu-mig-index",
        f"vLLM {vllm or ''} takes the number of a MIG slice for a GPU's: it looks for GPU {gpu.slice} of {count}",
        where=f"{gpu.label}, {gpu.uuid}; https://github.com/vllm-project/vllm/issues/41848",
        fix=f"serve on a slice with a number below {count} (--gpus {gpu.index}:0), or in a container: --runtime docker",
    )
