"""`dflash-serve patches`: the host tool's view of the same gate."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from wheels import site

from dflash_serve.errors import BuildFailed, UsageError
from dflash_serve.image import patch_commands


def run(*arguments):
    return CliRunner().invoke(patch_commands.patches, [str(a) for a in arguments])


@pytest.fixture(scope="session")
def edited(tmp_path_factory):
    """0.33.0 with one line changed in a touched function."""
    copy = tmp_path_factory.mktemp("edited")
    shutil.copytree(site("0.33.0") / "vllm", copy / "vllm", copy_function=shutil.copyfile)
    file = copy / "vllm/v1/core/sched/scheduler.py"
    file.write_text(file.read_text().replace("next_block_boundary = (start", "next_block_boundary = (1 + start"))
    return copy


def test_status_of_a_release():
    result = run("status", "--site", site("0.33.0"))
    assert result.exit_code == 0, result.output
    assert "applied  align-split-block" in result.output
    assert "skipped  lm-head-guard" in result.output


def test_json_is_the_gates_report():
    result = run("check", "--site", site("0.31.0"), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["vllm"], report["ok"]) == (0, "0.31.0", True)
    assert {p["outcome"] for p in report["patches"]} == {"applied", "skipped"}


def test_drift_is_refused_with_exit_4(edited):
    result = run("check", "--site", edited)
    assert result.exit_code == 4
    assert "refused  align-split-block" in result.output
    report = json.loads(run("check", "--site", edited, "--json").stdout)
    assert [p["id"] for p in report["patches"] if p["outcome"] == "refused"] == ["align-split-block"]


def test_nothing_installed_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path))
    result = run("status")
    assert isinstance(result.exception, UsageError)
    assert "dflash-serve environment install" in result.exception.fix


def test_an_installed_environment_is_found(monkeypatch, tmp_path):
    from dflash_serve.environment.spec import spec_for

    sources = site("0.33.0")
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path))
    packages = spec_for("cuda").directory / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (packages / "vllm").symlink_to(sources / "vllm")
    result = run("check", "--variant", "cuda")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("vLLM 0.33.0")


def test_a_broken_wheel_is_a_usage_error(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"no zip")
    result = run("status", "--wheel", tmp_path / "x.whl")
    assert isinstance(result.exception, UsageError)


def test_choices_exclude_each_other(tmp_path):
    assert isinstance(run("status", "--wheel", "x", "--site", "y").exception, UsageError)


def test_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(tmp_path))
    with pytest.raises(BuildFailed, match="sources are missing"):
        patch_commands.evaluate(tmp_path)
