"""Names by content: what changes an image changes its reference, and the directory of its compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_serve.image.caches import compile_jobs, compiled_environment, compiled_key
from dflash_serve.image.identity import PREFIX, compare, identity, patch_ids

H100 = [("NVIDIA H100 80GB HBM3", "9.0")]


def flip(file: Path) -> None:
    """Change one byte at the end of a file, staying valid in each of the formats."""
    file.write_bytes(file.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("file", "engine", "tool"),
    [
        ("docker/patches/dflash2_patches/gate.py", True, False),
        ("docker/patches/dflash2_patches/records/draft-length.toml", True, False),
        ("docker/requirements/cuda.txt", True, False),
        ("docker/Dockerfile.j2", True, False),
        ("docker/prebuild_flashinfer.py", True, False),
        ("src/dflash_serve/cli.py", False, True),
        ("recipes/tiny.yaml", False, True),
        ("docker/requirements/tool.txt", False, True),
        ("docker/requirements/cpu.txt", False, False),
    ],
)
def test_one_byte(checkout: Path, file: str, engine: bool, tool: bool):
    before = identity("cuda")
    flip(checkout / file)
    after = identity("cuda")
    assert (before.engine != after.engine, before.tool != after.tool) == (engine, tool)
    assert (before.reference != after.reference) == (engine or tool)
    # One byte of a patch, another directory of compiled graphs.
    same = compiled_key(before.engine, H100, "p") == compiled_key(after.engine, H100, "p")
    assert same is not engine


def test_comments_in_the_data_change_nothing(checkout: Path):
    before = identity("cuda")
    file = checkout / "docker/images.yaml"
    file.write_text("# a remark\n" + file.read_text())
    assert identity("cuda") == before
    file.write_text(file.read_text().replace("build_jobs: 4", "build_jobs: 2"))
    assert identity("cuda").engine != before.engine


def test_where_the_checkout_lies_does_not_matter(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    there = identity("cpu")
    moved = checkout.rename(checkout.with_name("elsewhere"))
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(moved))
    assert identity("cpu").reference == there.reference


def test_labels_name_versions_and_patches():
    image = identity("cuda")
    labels = image.labels
    assert labels[f"{PREFIX}.vllm"] == "0.33.0"
    assert "flashinfer-topk" in labels[f"{PREFIX}.patches"].split()
    # Fixed upstream before 0.33: known, and not carried.
    assert "v2-runner" not in labels[f"{PREFIX}.patches"].split()
    assert set(image.patches) == set(patch_ids(image.spec.patches, "0.33.0"))


def test_an_image_behind_a_floating_tag_is_told_by_its_labels():
    image = identity("cuda")
    assert compare(image.labels, image, where="web:latest") == []
    stale = {**image.labels, f"{PREFIX}.patches-sha256": "0" * 64, f"{PREFIX}.engine-digest": "1" * 64}
    (finding,) = compare(stale, image, where="web:latest")
    assert finding.id == "image-stale"
    assert "patches-sha256 is 000000000000" in finding.what
    assert finding.where == "web:latest"
    (finding,) = compare({}, image, where="vllm/vllm-openai:latest")
    assert "none" in finding.what


@pytest.mark.parametrize(
    "change",
    [
        lambda: compiled_key("f" * 64, H100, "p"),
        lambda: compiled_key("e" * 64, [("NVIDIA L40S", "8.9")], "p"),
        lambda: compiled_key("e" * 64, H100 * 2, "p"),
        lambda: compiled_key("e" * 64, H100, "q"),
        lambda: compiled_key("e" * 64, [], "p"),
    ],
)
def test_image_gpu_and_plan_each_have_a_directory(change: Callable[[], str]):
    usual = compiled_key("e" * 64, H100, "p")
    assert usual.startswith("e" * 16)
    assert change() != usual
    assert "/" not in usual
    assert " " not in usual


def test_everything_that_compiles_goes_there():
    variables = compiled_environment(Path("/cache/compiled/k"))
    assert {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"} <= set(
        variables
    )
    assert all(value.startswith("/cache/compiled/k/") for value in variables.values())
    assert len(set(variables.values())) == len(variables)


@pytest.mark.parametrize(
    ("cores", "gib", "unified", "jobs"),
    [
        (20, 128, True, 2),
        (20, 128, False, 8),
        (8, 16, False, 4),
        (64, 8, False, 2),
        (1, 2, False, 1),
        (128, 3, True, 1),
    ],
)
def test_compilers_at_once(cores: int, gib: int, unified: bool, jobs: int):
    assert compile_jobs(cores=cores, ram_bytes=gib * 2**30, unified=unified) == jobs
