"""The two installers: uv where it is, else the environment's own pip. Both get the same few options."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.environment.marker import python_in
from dflash_serve.environment.process import CommandFailed, run_logged
from dflash_serve.progress import Step


@dataclass(frozen=True)
class Installer:
    """Installs into one environment.

    Attributes:
        directory: the environment.
        log: file that gets the installers' output.
        uv: path of uv, or None.
    """

    directory: Path
    log: Path
    uv: str | None

    @classmethod
    def into(cls, directory: Path, log: Path) -> Installer:
        """An installer for `directory`, with uv when it is on the PATH (`DFLASH_SERVE_NO_UV=1` ignores it)."""
        uv = None if os.environ.get("DFLASH_SERVE_NO_UV") == "1" else shutil.which("uv")
        return cls(directory, log, uv)

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return python_in(self.directory)

    @property
    def temporary(self) -> Path:
        """Scratch beside the packages: a small /tmp must not decide whether a wheel of a gigabyte unpacks."""
        return self.directory / ".tmp"

    def variables(self) -> dict[str, str]:
        """The user's variables, for proxies, certificates and indexes, less what would redirect an install."""
        dropped = (
            "PYTHONPATH",
            "PYTHONHOME",
            "VIRTUAL_ENV",
            "PIP_TARGET",
            "PIP_PREFIX",
            "PIP_USER",
            "PIP_REQUIRE_VIRTUALENV",
        )
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "TMPDIR": str(self.temporary), "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(self, argv: Sequence[str], step: Step) -> None:
        """Run any command with the installer's variables and log.

        Raises:
            CommandFailed: it failed.
        """
        self.temporary.mkdir(exist_ok=True)
        run_logged(argv, log=self.log, env=self.variables(), step=step)

    def pip(self, arguments: Sequence[str], step: Step) -> None:
        """`pip install` with these arguments.

        Raises:
            CommandFailed: it failed.
        """
        self.run([str(self.python), "-m", "pip", "install", "--progress-bar", "off", *arguments], step)

    def uv_pip(self, arguments: Sequence[str], step: Step) -> None:
        """`uv pip install` with these arguments.

        Raises:
            CommandFailed: it failed, or there is no uv.
        """
        if self.uv is None:
            raise CommandFailed(["uv"], 127, ["uv is not installed"])
        self.run([self.uv, "pip", "install", "--python", str(self.python), *arguments], step)

    def either(self, arguments: Sequence[str], step: Step, *, uv_extra: Sequence[str] = ()) -> None:
        """uv, and pip when there is no uv or it fails: pip may be configured for an index that uv doesn't know.

        Raises:
            CommandFailed: pip failed, or uv failed on a full disk.
        """
        if self.uv is not None:
            try:
                self.uv_pip([*uv_extra, *arguments], step)
            except CommandFailed as exc:
                if exc.disk_full or not self.has_pip():
                    raise
                step.line(f"uv could not ({exc.reason}); trying pip")
            else:
                return
        self.pip(arguments, step)

    def has_pip(self) -> bool:
        """Whether the environment has pip; one that uv made on a machine without ensurepip has none."""
        return any(self.directory.glob("lib/python3*/site-packages/pip"))

    def create(self, step: Step) -> None:
        """Make the virtual environment with the interpreter that runs the tool.

        Raises:
            CommandFailed: neither venv nor uv can.
        """
        base = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
        python = base if Path(base).exists() else sys.executable
        try:
            self.run([python, "-m", "venv", "--clear", str(self.directory / ".")], step)
        except CommandFailed as exc:
            if self.uv is None or exc.disk_full:
                raise
            self.run([self.uv, "venv", "--clear", "--python", python, str(self.directory)], step)
