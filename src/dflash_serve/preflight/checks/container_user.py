"""The container's user can write its caches: a directory made by root is not its own."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("container-user",)


def check(context: Context) -> list[Finding]:
    uid = context.image.uid
    if context.runtime == "native" or uid is None:
        return []
    out: list[Finding] = []
    for directory in context.writable:
        try:
            info = directory.stat()
        except OSError:
            continue
        if not may_write(info, uid):
            out.append(
                refuse(
                    "container-user",
                    f"the container's user {uid} cannot write here (owner {info.st_uid}, {info.st_mode & 0o777:o})",
                    where=str(directory),
                    fix=f"sudo chown -R {uid} {quoted(directory)}",
                )
            )
    return out


def may_write(info: os.stat_result, uid: int) -> bool:
    """Whether `uid`, with the group of the same number, can create files there."""
    if uid == 0:
        return True
    if info.st_uid == uid:
        return info.st_mode & 0o300 == 0o300
    if info.st_gid == uid:
        return info.st_mode & 0o030 == 0o030
    return info.st_mode & 0o003 == 0o003


def quoted(path: Path) -> str:
    """The path for a shell."""
    text = str(path)
    return text if text.replace("/", "").replace("-", "").replace("_", "").replace(".", "").isalnum() else f"'{text}'"
