"""Facts that a worker learns at the start and the front end exports: one small file each.

vLLM has no way out of a worker for them. The front end makes the directory and names it in the environment
before it starts the other processes, which inherit it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

DIRECTORY = "DFLASH2_STATUS_DIR"


def prepare() -> Path:
    """The directory of this server, made once by the first process."""
    if DIRECTORY not in os.environ:
        os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="dflash2-")
        atexit.register(_remove, os.environ[DIRECTORY], os.getpid())
    return Path(os.environ[DIRECTORY])


def note(name: str, value: str) -> None:
    """Leave a fact. Several processes may leave the same; the last one stays."""
    file = prepare() / name
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(value, "utf-8")
    temporary.replace(file)


def read(name: str) -> str | None:
    """A fact that some process left, or None."""
    directory = os.environ.get(DIRECTORY)
    file = Path(directory) / name if directory else None
    return file.read_text("utf-8") if file is not None and file.is_file() else None


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the handler
        shutil.rmtree(directory, ignore_errors=True)
