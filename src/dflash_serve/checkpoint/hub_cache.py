"""The user's ordinary Hugging Face cache: where a snapshot lies, without importing the client.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dflash_serve.errors import CheckpointError

PARTIAL = ".dflash-serve.incomplete"
COMMIT = re.compile(rb"[0-9a-f]{40}")


def hub_cache() -> Path:
    """`$HF_HUB_CACHE`, else `$HF_HOME/hub`, else `$XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub`."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return _expanded(value)
    return hf_home(os.environ) / "hub"


def hf_home(environment: Mapping[str, str]) -> Path:
    """`$HF_HOME`, else `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`."""
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(environment.get("HF_HOME") or f"{base}/huggingface")


def token_file(environment: Mapping[str, str]) -> Path:
    """Where the client keeps the token: `$HF_TOKEN_PATH`, else `token` in `hf_home`, wherever the cache is."""
    return _expanded(environment.get("HF_TOKEN_PATH") or str(hf_home(environment) / "token"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def repo_folder(repo: str, cache: Path | None = None) -> Path:
    """`models--ORG--NAME` in the cache."""
    return (cache or hub_cache()) / f"models--{repo.replace('/', '--')}"


def snapshot_dir(repo: str, revision: str, cache: Path | None = None) -> Path:
    """Where the snapshot of a commit is, or will be."""
    return repo_folder(repo, cache) / "snapshots" / revision


def lock_path(repo: str, etag: str, cache: Path | None = None) -> Path:
    """The lock that huggingface_hub takes for a blob: sharing it keeps other programs from fetching it twice."""
    root = cache or hub_cache()
    return root / ".locks" / repo_folder(repo, root).name / f"{etag}.lock"


def main_revision(repo: str, cache: Path | None = None) -> str | None:
    """The commit that `refs/main` names; None without one, and where the file holds anything else."""
    try:
        with (repo_folder(repo, cache) / "refs" / "main").open("rb") as handle:
            found = handle.read(64).strip()
    except OSError:
        return None
    return found.decode() if COMMIT.fullmatch(found) else None


def safe_name(path: str) -> str:
    """The path of a repo's file, refused when it would leave the snapshot.

    Raises:
        CheckpointError: absolute, with `..`, empty parts, backslashes or control characters.
    """
    parts = path.split("/")
    odd = any(part in ("", ".", "..") for part in parts) or "\\" in path or any(ord(c) < 32 for c in path)
    if odd or len(path) > 512:
        raise CheckpointError(f"{path[:80]!r} is no file name inside a repo", fix="do not use this repo")
    return path
