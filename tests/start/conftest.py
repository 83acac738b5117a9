"""A checkout to start in, on a machine whose PATH holds exactly what a test puts there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE_TOOLS = (
    "bash", "cat", "chmod", "cksum", "cp", "env", "find", "flock", "grep", "ls", "mkdir", "readlink", "rm", "sed",
    "sleep", "sort", "tail", "touch", "uname",
)  # fmt: skip

# Stands for python3, for the virtual environment's python, and for pip: it notes each call, and makes what they make.
FAKE_PYTHON = r"""#!@BASH@
echo "python $*" >>"$CALLS"
case "$*" in
    "-c import platform"*) echo "$FAKE_VERSION" ;;
    "-c import sys; sys.exit"*) [ -z "${FAKE_UNFIT:-}" ] || [ "${0##*/}" != "$FAKE_UNFIT" ] ;;
    "-c import venv"*) [ -z "${FAKE_NO_VENV:-}" ] ;;
    "-c import sys; print"*) echo 3.12 ;;
    "-m venv --clear "*)
        mkdir -p "$4/bin" && touch "$4/pyvenv.cfg" && cp "$0" "$4/bin/python"
        ;;
    "-m pip --version") ;;
    "-m pip install"*"-e "*)
        cp "$STUB" "${0%/*}/dflash-serve"
        ;;
    "-m pip install"*)
        [ -z "${FAKE_PIP_OUTPUT:-}" ] || { echo "$FAKE_PIP_OUTPUT" >&2; exit 1; }
        [ -z "${FAKE_PIP_FILL:-}" ] || cat /dev/zero >"${0%/*}/../filler" || exit 1
        [ -z "${FAKE_PIP_SLEEP:-}" ] || sleep "$FAKE_PIP_SLEEP"
        ;;
    "-m pytest"*) echo "pytest in $PWD: $*" ;;
    *) exit 9 ;;
esac
"""

FAKE_UV = r"""#!@BASH@
echo "uv $*" >>"$CALLS"
[ -z "${FAKE_UV_FAILS:-}" ] || { echo "error: $FAKE_UV_FAILS" >&2; exit 2; }
if [ -n "$(ls -A "$UV_PROJECT_ENVIRONMENT" 2>/dev/null)" ] && [ ! -x "$UV_PROJECT_ENVIRONMENT/bin/python" ]; then
    echo "error: Project virtual environment directory cannot be used because it is not a valid Python environment" >&2
    exit 2
fi
mkdir -p "$UV_PROJECT_ENVIRONMENT/bin" && touch "$UV_PROJECT_ENVIRONMENT/pyvenv.cfg"
cp "$FAKE_PYTHON" "$UV_PROJECT_ENVIRONMENT/bin/python"
cp "$STUB" "$UV_PROJECT_ENVIRONMENT/bin/dflash-serve"
"""

# Stands for the tool: says how it was called, and what it inherited.
STUB = r"""#!@BASH@
echo "tool in $PWD:"
printf '<%s>' "$@"
echo
for fd in /proc/$$/fd/*; do readlink "$fd"; done | grep -c "^$CHECKOUT\$" || true
"""


@dataclass
class Machine:
    """A checkout with its PATH. `start(...)` runs start.sh there."""

    checkout: Path
    bin: Path
    calls_file: Path
    variables: dict[str, str] = field(default_factory=dict)

    def install(self, name: str, text: str) -> Path:
        """Put a program on the PATH."""
        return _program(self.bin / name, text)

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": str(self.bin),
            "HOME": str(self.checkout.parent),
            "CALLS": str(self.calls_file),
            "STUB": str(self.bin / ".stub"),
            "FAKE_PYTHON": str(self.bin / ".python"),
            "FAKE_VERSION": "3.12.1",
            "CHECKOUT": str(self.checkout),
            **self.variables,
            **extra,
        }

    def popen(
        self, *arguments: str, cwd: Path | None = None, program: Path | None = None, **extra: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(program or self.checkout / "start.sh"), *arguments],
            cwd=cwd or self.checkout,
            env=self.environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(
        self, *arguments: str, cwd: Path | None = None, program: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.popen(*arguments, cwd=cwd, program=program, **extra)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def calls(self) -> list[str]:
        """Every call of the fakes so far."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def installs(self) -> list[str]:
        """The calls that make or fill an environment."""
        return [call for call in self.calls if call.startswith(("python -m venv", "python -m pip install", "uv "))]


def _program(path: Path, text: str) -> Path:
    path.write_text(text.replace("@BASH@", shutil.which("bash") or "/bin/bash"))
    path.chmod(0o755)
    return path


def make_checkout(at: Path) -> Path:
    """What start.sh reads of a checkout."""
    (at / "docker" / "requirements").mkdir(parents=True)
    for name in (
        "start.sh",
        "pyproject.toml",
        "uv.lock",
        "docker/requirements/tool.txt",
        "docker/requirements/dev.txt",
    ):
        shutil.copy2(ROOT / name, at / name)
    return at


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """A machine with the basic tools, and neither Python nor uv."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in BASE_TOOLS:
        found = shutil.which(name)
        assert found, f"{name} is missing on this machine"
        (programs / name).symlink_to(found)
    _program(programs / ".stub", STUB)
    _program(programs / ".python", FAKE_PYTHON)
    return Machine(make_checkout(tmp_path / "check out"), programs, tmp_path / "calls")


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A machine with a python3 that fits, and no uv."""
    bare.install("python3", FAKE_PYTHON)
    return bare


@pytest.fixture
def with_uv(machine: Machine) -> Machine:
    """A machine with python3 and uv."""
    machine.install("uv", FAKE_UV)
    return machine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount file systems of a given size: `small_disk("2m")`. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def real_python() -> str:
    """The interpreter that runs the tests, outside of any virtual environment."""
    return str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
