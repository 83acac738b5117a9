"""Facts that a worker learns at the start and the front end exports: one small file each.

vLLM has no way out of a worker for them. The front end makes the directory and names it in the environment
before it starts the other processes, which inherit it. They are figures for the operator, no part of serving: a file
that can't be written or read is told in the log, once a process, and nothing else happens.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

DIRECTORY = "DFLASH2_STATUS_DIR"
# Under vLLM's own logger name, so that its handler and level apply.
_log = logging.getLogger("vllm.plugins.dflash2_patches")
_told: set[str] = set()


def prepare() -> Path:
    """The directory of this server, made once by the first process."""
    if DIRECTORY not in os.environ:
        os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="dflash2-")
        atexit.register(_remove, os.environ[DIRECTORY], os.getpid())
    return Path(os.environ[DIRECTORY])


def note(name: str, value: str) -> None:
    """Leave a fact. Several processes may leave the same; the last one stays."""
    try:
        file = prepare() / name
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(value, "utf-8")
        temporary.replace(file)
    except OSError as exc:
        warn_once(name, f"{name} can't be left for the metrics ({exc}): its figures stand still")


def read(name: str) -> str | None:
    """A fact that some process left, or None."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return None
    try:
        return (Path(directory) / name).read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        warn_once(name, f"{name} can't be read for the metrics ({exc}): its figures stand still")
        return None


def warn_once(about: str, text: str) -> None:
    """Log a warning, the first one of this process about it."""
    if about not in _told:
        _told.add(about)
        _log.warning("%s", text)


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the handler
        shutil.rmtree(directory, ignore_errors=True)
