"""Compile FlashInfer's kernels into its package, where its loader looks before it compiles anything.

Runs with the engine's interpreter while the image is built; no GPU is needed. Standard library and FlashInfer only.

    prebuild_flashinfer.py --architectures "8.0 9.0" topk.gen_topk_module sampling.gen_sampling_module

Each name is a generator below `flashinfer.jit` that takes no arguments. One shared library holds the code of all
architectures. Exit 1 when a library is missing afterwards, or FlashInfer would not find it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architectures", required=True, help="compute capabilities, separated by blanks")
    parser.add_argument("modules", nargs="+", metavar="MODULE.GENERATOR")
    options = parser.parse_args()
    # Read when FlashInfer is imported: the architectures, and where it compiles.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.architectures
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = scratch
        return _build([tuple(name.rsplit(".", 1)) for name in options.modules])


def _build(generators: list[tuple[str, ...]]) -> int:
    environment = import_module("flashinfer.jit.env")
    core = import_module("flashinfer.jit.core")
    failed = 0
    for module, function in generators:
        spec = getattr(import_module(f"flashinfer.jit.{module}"), function)()
        core.build_jit_specs([spec], verbose=True, skip_prebuilt=False)
        target: Path = environment.FLASHINFER_AOT_DIR / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, target)
        found = spec.is_aot and Path(spec.aot_path) == target
        sys.stdout.write(f"{spec.name}: {target.stat().st_size:,} bytes, {'found' if found else 'NOT FOUND'}\n")
        failed += not found
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
