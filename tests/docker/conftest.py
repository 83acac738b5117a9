"""A real Docker engine and the cpu image, built once. `scripts/test_engine.sh start DIR` gives both variables."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.image import variants

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("DOCKER_HOST", "DFLASH_TEST_BASE")


def environment_of(state: Path) -> dict[str, str]:
    """This process's environment, with that state directory."""
    return {**os.environ, "DFLASH_SERVE_STATE": str(state)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Engine:
    """The engine under test, and how to build with it where no registry can be reached."""

    base: str
    state: Path

    @property
    def build_options(self) -> list[str]:
        mapped = f"{variants.find('cpu').base.reference}=docker-image://{self.base}"
        return ["--allow-unpinned", "--network", "host", "--build-context", mapped]

    def tool(
        self, *args: str, root: Path = ROOT, state: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """`dflash-serve ARGS` for the checkout `root`, with another state directory than the session's own if given."""
        done = subprocess.run(
            [sys.executable, "-c", "from dflash_serve.cli import main; main()", *args],
            capture_output=True,
            text=True,
            env={**environment_of(state or self.state), "DFLASH_SERVE_ROOT": str(root)},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{args} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done

    def build(self, *args: str, root: Path = ROOT) -> dict[str, Any]:
        """Build the cpu image of a checkout; what `--json` prints."""
        made: dict[str, Any] = json.loads(
            self.tool("build", "cpu", "--json", *self.build_options, *args, root=root).stdout
        )
        return made

    def docker(self, *args: str, check: bool = True) -> str:
        """What the docker command prints; for `logs` both streams of the container."""
        streams = subprocess.STDOUT if args[0] == "logs" else subprocess.PIPE
        done = subprocess.run(["docker", *args], stdout=subprocess.PIPE, stderr=streams, text=True)
        if check and done.returncode != 0:
            raise AssertionError(f"docker {args} ended with {done.returncode}: {done.stdout[-4000:]} {done.stderr}")
        return done.stdout


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.fail(f'{", ".join(missing)} not set: eval "$(scripts/test_engine.sh start DIR)"')
    return Engine(os.environ["DFLASH_TEST_BASE"], tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def built(engine: Engine) -> dict[str, Any]:
    return engine.build()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of everything that the build reads, to be changed."""
    root = tmp_path / "checkout"
    for name in ("docker", "src", "recipes", "overlays"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / ".dockerignore", root / ".dockerignore")
    return root
