"""What an image is, by content: the digests that name it, and the labels that it carries.

`engine` covers everything that decides how the engine computes: template, variant, locks, patches. Compiled kernels are
kept under it. `tool` covers our own code beside it. Equal references, equal inputs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve import paths
from dflash_serve.environment.spec import EnvironmentSpec, spec_for, tree_files
from dflash_serve.errors import BuildFailed
from dflash_serve.findings import Finding, refuse
from dflash_serve.image import variants
from dflash_serve.image.variants import Variant

REPOSITORY = "dflash-serve"
TEMPLATE = "docker/Dockerfile.j2"
PREFIX = "io.github.dflash-serve"
# What the image copies beside the engine; the trees that only the tool reads.
TOOL_TREES = ("src", "recipes", "overlays")
TOOL_FILES = ("docker/dflash-serve.sh", "docker/requirements/tool.txt")


@dataclass(frozen=True)
class Identity:
    """One image by its inputs.

    Attributes:
        engine: SHA-256 over template, variant data, the engine's lock and the patches; hex.
        tool: SHA-256 over our own code, recipes and overlays; hex.
        uid: user that it runs as.
        patches: ids of the patches that this vLLM gets.
    """

    variant: Variant
    spec: EnvironmentSpec
    engine: str
    tool: str
    uid: int
    patches: tuple[str, ...]

    @property
    def reference(self) -> str:
        """`dflash-serve:cuda-ENGINE-TOOL`, with `-uUID` when the user isn't the usual one."""
        usual = self.uid == variants.load().user.uid
        return f"{REPOSITORY}:{self.variant.name}-{self.engine[:12]}-{self.tool[:8]}{'' if usual else f'-u{self.uid}'}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels that the rendered file sets, in order."""
        return {
            f"{PREFIX}.variant": self.variant.name,
            f"{PREFIX}.engine-digest": self.engine,
            f"{PREFIX}.tool-digest": self.tool,
            f"{PREFIX}.vllm": self.spec.vllm_version,
            f"{PREFIX}.lock-sha256": self.spec.lock_sha256,
            f"{PREFIX}.patches-sha256": self.spec.patches_sha256,
            f"{PREFIX}.patches": " ".join(self.patches),
        }


def identity(name: str, *, uid: int | None = None) -> Identity:
    """The image that this checkout asks for.

    Raises:
        UsageError: no such variant.
        BuildFailed: the checkout lacks a part of it.
    """
    variant, spec = variants.find(name), spec_for(name)
    images = variants.load()
    root = paths.project_root()
    data = {
        "variant": variant.model_dump(mode="json"),
        "user": images.user.model_dump(mode="json"),
        "healthcheck": images.healthcheck.model_dump(mode="json"),
    }
    engine = hashlib.sha256()
    for part in (
        _read(root / TEMPLATE),
        json.dumps(data, sort_keys=True).encode(),
        spec.lock_sha256.encode(),
        spec.patches_sha256.encode(),
        _read(root / "docker" / "prebuild_flashinfer.py") if variant.cuda else b"",
    ):
        engine.update(len(part).to_bytes(8, "big") + part)
    return Identity(
        variant=variant,
        spec=spec,
        engine=engine.hexdigest(),
        tool=_tree_digest(root, _tool_files(root)),
        uid=images.user.uid if uid is None else uid,
        patches=patch_ids(spec.patches, spec.vllm_version),
    )


def patch_ids(patches: Path, vllm_version: str) -> tuple[str, ...]:
    """Patches whose record names this vLLM, sorted.

    Raises:
        BuildFailed: a record can't be read.
    """
    out = []
    for record in sorted((patches / "dflash2_patches" / "records").glob("*.toml")):
        try:
            if vllm_version in tomllib.loads(record.read_text("utf-8"))["applies_to"]:
                out.append(record.stem)
        except (OSError, KeyError, tomllib.TOMLDecodeError) as exc:
            raise BuildFailed(f"a patch record cannot be read: {exc}", where=str(record)) from None
    return tuple(out)


def revision() -> str:
    """The checkout's commit, with `-dirty` when files differ from it; `unknown` outside a Git checkout."""
    root = str(paths.project_root())
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run(
            ["git", "-C", root, "status", "--porcelain", "--", "src", "docker", "recipes", "overlays"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if state.stdout.strip() else "")


def compare(labels: Mapping[str, str], wanted: Identity, *, where: str) -> list[Finding]:
    """Whether an image (its labels) is the one that this checkout asks for; a tag alone doesn't say.

    Args:
        where: the image's name, for the message.
    """
    keys = ("variant", "vllm", "lock-sha256", "patches-sha256", "engine-digest", "tool-digest")
    expected = wanted.labels
    for key in keys:
        label = f"{PREFIX}.{key}"
        found = labels.get(label)
        if found != expected[label]:
            have = found[:12] if found else "none"
            return [
                refuse(
                    "image-stale",
                    f"the image is not of this checkout: its {key} is {have}, wanted {expected[label][:12]}",
                    where=where,
                    fix=f"dflash-serve build {wanted.variant.name}, and name the image by what it prints",
                )
            ]
    return []


def _tool_files(root: Path) -> list[Path]:
    found = [path for tree in TOOL_TREES for path in tree_files(root / tree)]
    return [*found, *(root / name for name in TOOL_FILES)]


def _tree_digest(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = _read(file)
        digest.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise BuildFailed(f"cannot read a part of the image: {exc.strerror}", where=str(file)) from None
