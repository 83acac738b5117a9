"""One template, two variants: the same inputs give the same bytes, and the bytes are a good Dockerfile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dflash_serve.cli import cli
from dflash_serve.errors import BuildFailed, UsageError
from dflash_serve.findings import Severity
from dflash_serve.hardware.hypothetical import hypothetical
from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.image import commands, variants
from dflash_serve.image.identity import identity
from dflash_serve.image.lint import instructions, lint
from dflash_serve.image.render import render

NAMES = ("cpu", "cuda")
DIGEST = "sha256:" + "5" * 64


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_render_the_same_bytes(name: str):
    code = (
        "import sys; from dflash_serve.image.identity import identity; from dflash_serve.image.render import render;"
        f"sys.stdout.write(render(identity({name!r})))"
    )
    out = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
        ).stdout
        for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo"))
    ]
    assert out[0] == out[1]
    assert out[0].decode() == render(identity(name))


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_and_our_own_lint_find_nothing(name: str, tmp_path: Path):
    text = render(identity(name))
    file = tmp_path / "Dockerfile"
    file.write_text(text)
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f for f in lint(text) if f.severity is Severity.REFUSE] == []


def test_hadolint_is_awake(tmp_path: Path):
    file = tmp_path / "Dockerfile"
    file.write_text("FROM debian\nRUN cd /tmp && apt-get install curl\n")
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), file], capture_output=True, text=True)
    assert done.returncode == 1
    assert "DL3006" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_often_comes_last(name: str):
    text = render(identity(name))
    order = [
        text.index(mark)
        for mark in (
            "apt-get install",
            "--require-hashes -r /opt/locks/engine.txt",
            "--require-hashes -r /opt/locks/tool.txt",
            "source=docker/patches",
            "COPY src ",
            "ENTRYPOINT",
            "ARG REVISION",
            "LABEL ",
        )
    ]
    assert order == sorted(order)
    # Nothing that a patch or a commit changes may stand before the wheels.
    image = identity(name)
    head = text[: text.index("source=docker/patches")]
    assert image.engine not in head
    assert image.spec.patches_sha256 not in head
    assert image.tool not in head


def test_the_cuda_variant_can_compile_for_flashinfer():
    text = render(identity("cuda"))
    apt = next(entry.text for entry in instructions(text) if "apt-get install" in entry.text)
    assert "cuda-nvcc-13-0" in apt
    assert "libcurand-dev-13-0" in apt
    assert "cuda-driver-dev-13-0" in apt
    build = next(
        entry.text for entry in instructions(text) if "prebuild_flashinfer.py" in entry.text and entry.word == "RUN"
    )
    assert '--architectures "8.0 8.6 8.9 9.0 10.0 12.0"' in build
    assert "topk.gen_topk_module" in build
    assert "torch==" not in text  # it is in the lock


def test_the_toolkit_is_the_one_that_the_locked_torch_was_built_with():
    lock = (Path(__file__).resolve().parents[2] / "docker/requirements/cuda.txt").read_text()
    cuda = variants.find("cuda")
    release = next(line.split("==")[1].split()[0] for line in lock.splitlines() if line.startswith("cuda-toolkit=="))
    major, minor = release.split(".")[:2]
    assert cuda.base.tag.startswith(f"{major}.{minor}.")
    assert {f"cuda-nvcc-{major}-{minor}", f"libcurand-dev-{major}-{minor}"} <= set(cuda.packages)


def test_every_architecture_is_in_the_wheel():
    table = yaml.safe_load(
        (Path(__file__).resolve().parents[2] / "src/dflash_serve/hardware/architectures.yaml").read_text()
    )
    cuda = variants.find("cuda").cuda
    assert cuda is not None
    assert set(cuda.architectures) <= set(table["wheel_sass"])


def test_the_start_period_allows_for_a_large_model(checkout: Path):
    assert "--start-period=1800s" in render(identity("cuda"))
    file = checkout / "docker/images.yaml"
    file.write_text(file.read_text().replace("start_period_s: 1800", "start_period_s: 60"))
    with pytest.raises(BuildFailed, match="900") as caught:
        identity("cuda")
    assert caught.value.where.endswith("healthcheck.start_period_s")


def test_a_pinned_base_is_named_by_tag_and_digest(checkout: Path):
    file = checkout / "docker/images.yaml"
    before = file.read_text()
    after = variants.write_digest("cpu", DIGEST)
    file.write_text(after)
    changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0][1].startswith("    base: {repository: docker.io/library/python")
    text = render(identity("cpu"))
    assert f"FROM docker.io/library/python:3.12-slim-bookworm@{DIGEST}\n" in text
    assert "Not pinned" not in text
    assert f'org.opencontainers.image.base.digest="{DIGEST}"' in text
    assert lint(text) == []
    assert "Not pinned" in render(identity("cuda"))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("uid: 10001", "uid: 0", "user.uid"),
        ("digest: null}", "digest: sha256:12}", "base.digest"),
        ("cuda: null", "cuda: null\n    kernel: x", "kernel"),
        ("schema: 1", "schema: [", "images.yaml"),
    ],
)
def test_broken_data_is_named_by_its_key(checkout: Path, old: str, new: str, what: str):
    file = checkout / "docker/images.yaml"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(BuildFailed) as caught:
        identity("cpu")
    assert what in caught.value.where


def test_a_template_with_an_unknown_name_is_refused(checkout: Path):
    file = checkout / "docker/Dockerfile.j2"
    file.write_text(file.read_text() + "{{ nobody }}\n")
    with pytest.raises(BuildFailed, match="nobody"):
        render(identity("cpu"))


def test_another_uid():
    image = identity("cpu", uid=4711)
    text = render(image)
    assert "USER 4711:4711" in text
    assert image.reference.endswith("-u4711")
    assert identity("cpu").reference in image.reference


def test_no_layer_keeps_a_secret_or_a_setting_of_one_machine():
    for name in NAMES:
        text = render(identity(name))
        assert "ENV PIP_" not in text
        assert "COPY" not in "".join(e.text for e in instructions(text) if "secret" in e.text)
        assert not any("proxy" in e.text.lower() for e in instructions(text))


def test_a_recipe_names_the_variant_that_it_would_be_served_with(monkeypatch: pytest.MonkeyPatch):
    for gpus, name in (("1xh100", "cuda"), (None, "cpu")):
        found = hypothetical(gpus) if gpus else Inventory(host=Host())
        monkeypatch.setattr(commands, "read_inventory", lambda found=found: found)
        assert commands.variant_of("tiny") == name
    assert commands.variant_of("cuda") == "cuda"


def test_the_command_line():
    done = CliRunner().invoke(cli, ["render", "cuda"])
    assert done.exit_code == 0
    assert done.stdout == render(identity("cuda"))
    with pytest.raises(UsageError, match="neither an image variant nor a recipe"):
        CliRunner().invoke(cli, ["render", "nonsense"], catch_exceptions=False)
