"""docker/images.yaml: what each image variant is made of."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_serve import paths
from dflash_serve.errors import BuildFailed, UsageError

FILE = "docker/images.yaml"
_CHECKOUT = "run from a checkout of the project, or set DFLASH_SERVE_ROOT to one"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Base(_Part):
    """The image that a variant starts from.

    Attributes:
        digest: `sha256:...` of the tag's manifest (the index, where there are several platforms); None: unknown.
    """

    repository: str
    tag: str
    digest: str | None = Field(pattern=r"^sha256:[0-9a-f]{64}$")

    @property
    def tagged(self) -> str:
        """`repository:tag`, which may be another image tomorrow."""
        return f"{self.repository}:{self.tag}"

    @property
    def reference(self) -> str:
        """`repository:tag@digest`; only the tag where the digest is unknown."""
        return f"{self.tagged}@{self.digest}" if self.digest else self.tagged


class Cuda(_Part):
    """What the CUDA variant compiles at build time.

    Attributes:
        architectures: compute capabilities, `9.0`.
        flashinfer: generators below `flashinfer.jit`.
        build_jobs: parallel compilers; each takes gigabytes.
    """

    home: str
    architectures: tuple[str, ...]
    flashinfer: tuple[str, ...]
    build_jobs: int = Field(ge=1)


class User(_Part):
    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    uid: int = Field(ge=1, le=2**31)


class Healthcheck(_Part):
    """Docker's health check, seconds. Below 900 s of start period a loading 27B server counts as dead."""

    interval_s: int = Field(ge=1)
    timeout_s: int = Field(ge=1)
    start_period_s: int = Field(ge=900)
    retries: int = Field(ge=1)


class Variant(_Part):
    """One image.

    Attributes:
        python: interpreter of the base, once `packages` are installed.
        packages: of the base's distribution.
        torch_index: where PyTorch's CPU build is, when it is installed apart from the lock.
    """

    name: str
    title: str
    base: Base
    python: str
    packages: tuple[str, ...]
    torch_index: str | None
    cuda: Cuda | None


class Images(_Part):
    schema_version: Literal[1] = Field(alias="schema")
    user: User
    healthcheck: Healthcheck
    variants: dict[str, Variant]


def path() -> Path:
    """The file in this checkout."""
    return paths.project_root() / FILE


def load() -> Images:
    """All variants.

    Raises:
        BuildFailed: the checkout lacks the file, or it breaks its schema.
    """
    return _parse(path(), _text(path()))


def find(name: str) -> Variant:
    """One variant.

    Raises:
        UsageError: there is none of that name.
    """
    variants = load().variants
    if name not in variants:
        raise UsageError(f"no image variant named {name!r}", where=str(path()), fix=f"one of: {', '.join(variants)}")
    return variants[name]


def write_digest(name: str, digest: str) -> str:
    """The file's text with that variant's base pinned; comments and everything else stay.

    Raises:
        BuildFailed: the variant's `base:` isn't one line with a `digest`.
    """
    text = _text(path())
    pattern = rf"(?m)(^  {re.escape(name)}:\n(?:    .*\n|\n)*?    base: \{{[^\n]*digest: )(null|sha256:[0-9a-f]{{64}})"
    changed, count = re.subn(pattern, rf"\g<1>{digest}", text, count=1)
    if count != 1 or _parse(path(), changed).variants[name].base.digest != digest:
        raise BuildFailed(f"cannot find the digest of {name}'s base", where=str(path()), fix="write it by hand")
    return changed


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as exc:
        raise BuildFailed(f"cannot read the image variants: {exc.strerror}", where=str(file), fix=_CHECKOUT) from None


@cache
def _parse(file: Path, text: str) -> Images:
    try:
        data = yaml.safe_load(text)
        for name, variant in data["variants"].items():
            variant["name"] = name
        return Images.model_validate(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = f"{file}: {'.'.join(str(part) for part in first['loc'])}"
        raise BuildFailed(f"images.yaml is not valid: {first['msg']}", where=where) from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as exc:
        raise BuildFailed(f"images.yaml is not valid: {exc}", where=str(file)) from None
