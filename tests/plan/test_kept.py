"""What was parsed is kept, and counts only as long as nothing that it was made of changed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hub_checkout import Checkout

from dflash_serve import kept as kept_module
from dflash_serve import paths
from dflash_serve.errors import RecipeError
from dflash_serve.findings import Finding, note
from dflash_serve.hardware.tables import GpuTable, gpu_table
from dflash_serve.kept import kept
from dflash_serve.recipe import catalogue, loader

Make = Callable[[], list[Finding]]


class Maker:
    """Counts how often the source is read."""

    def __init__(self, source: Path) -> None:
        self.source, self.calls = source, 0

    def __call__(self) -> list[Finding]:
        self.calls += 1
        return [note("source", self.source.read_text())]

    def get(self, name: str = "mine") -> str:
        (found,) = kept(name, [self.source], self)
        return found.what


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "source").write_text("one")
    return Maker(tmp_path / "source")


def files() -> list[Path]:
    return sorted((paths.cache_home() / "kept").glob("*"))


def test_the_source_is_read_once_and_again_when_it_was_changed(maker: Maker) -> None:
    assert [maker.get(), maker.get(), maker.calls] == ["one", "one", 1]
    stamp = maker.source.stat()
    maker.source.write_text("two")
    os.utime(maker.source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert [maker.get(), maker.get(), maker.calls] == ["two", "two", 2], "content decides, not time"
    assert len(files()) == 1, "what is stale is replaced"
    assert files()[0].stat().st_mode & 0o777 == 0o600
    maker.get("other")
    assert (maker.calls, len(files())) == (3, 2)


@pytest.mark.parametrize("what", ["version", "python", "class"])
def test_another_version_or_class_reads_again(what: str, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    maker.get()
    if what == "version":
        monkeypatch.setattr(kept_module, "__version__", "99")
    elif what == "python":
        monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    else:
        stamps = kept_module._stamp
        monkeypatch.setattr(kept_module, "_stamp", lambda module: (*(stamps(module) or ()), "edited"))
    assert (maker.get(), maker.calls) == ("one", 2)
    assert (maker.get(), maker.calls) == ("one", 2)


@pytest.mark.parametrize("at", [0, 1, 10, 60, -40, -10, -1])
def test_a_damaged_file_is_made_anew(at: int, maker: Maker) -> None:
    maker.get()
    (file,) = files()
    whole = file.read_bytes()
    for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + (whole[at + 1 :] if at != -1 else b"")):
        file.write_bytes(damaged)
        before = maker.calls
        found = maker.get()
        assert maker.calls > before or found == "one"
        maker.get()
        file.write_bytes(whole)


class Evil:
    """Runs a program when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {os.environ['DFLASH_SERVE_CACHE']}/ran",)


@pytest.mark.parametrize("head", [True, False])
def test_a_file_that_names_a_function_runs_nothing(head: bool, maker: Maker) -> None:
    maker.get()
    (file,) = files()
    good = file.read_bytes()
    first = pickle.loads(good)
    assert set(first["modules"]) == {"dflash_serve.findings"}
    file.write_bytes(pickle.dumps(Evil()) if head else pickle.dumps(first) + pickle.dumps(Evil()))
    assert (maker.get(), maker.calls) == ("one", 2)
    assert not (paths.cache_home() / "ran").exists()


def test_a_file_of_another_user_does_not_count(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    maker.get()
    me = os.geteuid()
    os.chown(files()[0], 12345, -1) if me == 0 else monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert (maker.get(), maker.calls) == ("one", 2)


def test_a_cache_that_cannot_be_written_is_done_without(maker: Maker) -> None:
    paths.cache_home().write_text("in the way")
    assert [maker.get(), maker.get(), maker.calls] == ["one", "one", 2]


def test_a_user_without_a_home_does_without(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DFLASH_SERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert [maker.get(), maker.get(), maker.calls] == ["one", "one", 2]


def test_a_failure_is_not_kept(maker: Maker) -> None:
    def fail() -> list[Finding]:
        raise RecipeError("no", fix="never")

    for _ in range(2):
        with pytest.raises(RecipeError):
            kept("mine", [maker.source], fail)
    assert files() == []
    with pytest.raises(FileNotFoundError):
        Maker(maker.source.with_name("absent")).get()
    os.mkfifo(maker.source.with_name("pipe"))
    assert kept("mine", [maker.source.with_name("pipe")], lambda: 5) == 5
    assert files() == []


def test_a_source_that_changes_meanwhile_is_not_kept(maker: Maker) -> None:
    def edited() -> str:
        text = maker.source.read_text()
        maker.source.write_text("two")
        return text

    assert kept("mine", [maker.source], edited) == "one"
    assert files() == []


def test_a_table_is_the_same_from_the_cache(maker: Maker) -> None:
    gpu_table.cache_clear()
    made = gpu_table()
    gpu_table.cache_clear()
    found = gpu_table()
    assert found is not made
    assert found == made
    assert found.model_dump() == made.model_dump()
    assert GpuTable.model_validate(found.model_dump(by_alias=True)) == made
    with pytest.raises(ValueError, match="frozen"):
        found.gpus[0].name = "other"


def test_a_recipe_follows_what_it_extends(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = checkout.root / "recipes"
    data = yaml.safe_load((recipes / "mine.yaml").read_text())
    title = data.pop("title")
    (recipes / "_base.yaml").write_text(yaml.safe_dump({"title": title}))
    (recipes / "mine.yaml").write_text(yaml.safe_dump({**data, "extends": "_base"}))
    first = catalogue.find("mine")
    with monkeypatch.context() as patched:
        patched.setattr(loader, "load_with_chain", None)
        assert catalogue.find("mine") == first
    (recipes / "_base.yaml").write_text(yaml.safe_dump({"title": "Another title"}))
    assert catalogue.find("mine").title == "Another title"
    (recipes / "_base.yaml").unlink()
    with pytest.raises(RecipeError, match="does not exist"):
        catalogue.find("mine")


WARM = """
import json, sys
from dflash_serve.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
NEVER = {
    "docker",
    "requests",
    "rich",
    "filelock",
    "psutil",
    "httpx",
    "huggingface_hub",
    "dflash_serve.checkpoint.fetch",
}
ONCE = {"yaml", "tomllib", "importlib.metadata", "dflash_serve.recipe.loader"}


@pytest.mark.parametrize("arguments", [("tiny",), ("qwen3.8-27b-nvfp4", "--gpu", "2x5090")])
def test_what_a_plan_loads(arguments: tuple[str, ...], tmp_path: Path) -> None:
    environment = {**os.environ, "DFLASH_SERVE_CACHE": str(tmp_path / "cache"), "DFLASH_SERVE_STATE": str(tmp_path)}
    loaded, printed = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WARM, "plan", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        loaded.append(set(json.loads(done.stderr.splitlines()[-1])))
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert loaded[0] >= ONCE - {"importlib.metadata"}
    assert not loaded[0] & NEVER
    assert not loaded[1] & (NEVER | ONCE)


def test_pydantic_looks_for_no_plugins_and_has_the_rest_of_that_module() -> None:
    code = """
import sys
from dflash_serve import noplugins
noplugins.install()
from pydantic import BaseModel
class Model(BaseModel):
    value: int
assert Model(value="1").value == 1
assert "importlib.metadata" not in sys.modules
from pydantic.plugin._loader import PYDANTIC_ENTRY_POINT_GROUP
assert PYDANTIC_ENTRY_POINT_GROUP == "pydantic"
from pydantic.plugin import _loader
assert _loader.__file__
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_machine_without_a_driver_is_told_without_the_bindings() -> None:
    """And in the words of the bindings."""
    code = """
import sys
from dflash_serve.hardware import nvml
nvml.LIBRARY = "libnothing-of-that-name.so.1"
try:
    nvml.Nvml().__enter__()
except nvml.NvmlUnavailable as exc:
    assert "pynvml" not in sys.modules
    import pynvml
    known = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert str(exc) == f"NVML: {known}", exc
    assert "driver" in exc.fix
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
