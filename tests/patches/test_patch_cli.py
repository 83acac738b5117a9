"""The command line, on an unpacked release and on a wheel file."""

from __future__ import annotations

import json
import zipfile

import pytest
from dflash2_patches import cli, records
from wheels import site


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel file of 0.33.0 that holds the modules the records look at."""
    root, file = site("0.33.0"), tmp_path_factory.mktemp("wheel") / "vllm-0.33.0-py3-none-any.whl"
    places = {p for r in records.load() for p in [*r.touches, *(c.at for c in r.fixed)]}
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(root / "vllm/_version.py", "vllm/_version.py")
        for module in sorted({place.partition(":")[0].replace(".", "/") for place in places}):
            if (root / f"{module}.py").exists():
                archive.write(root / f"{module}.py", f"{module}.py")
    return file


def test_status_lists_every_patch(capsys):
    assert cli.main(["status", "--site", str(site("0.33.0"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("vLLM 0.33.0\n")
    assert all(record.id in out for record in records.load())
    assert out.rstrip().endswith("0 refused")


def test_check_shows_only_what_is_wrong(capsys):
    assert cli.main(["check", "--site", str(site("0.33.0"))]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json_and_a_wheel_file(wheel, capsys):
    assert cli.main(["status", "--wheel", str(wheel), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["vllm"] == "0.33.0"
    assert report["ok"] is True
    assert {tuple(sorted(p)) for p in report["patches"]} == {("id", "kind", "outcome", "reason", "title")}


def test_an_edited_wheel_is_refused(wheel, tmp_path, capsys):
    edited = tmp_path / "edited.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(edited, "w") as new:
        for name in old.namelist():
            text = old.read(name).decode()
            if name.endswith("sched/scheduler.py"):
                text = text.replace(
                    "next_block_boundary = (start // block_size + 1)", "next_block_boundary = (start // block_size + 2)"
                )
            new.writestr(name, text)
    assert cli.main(["check", "--wheel", str(edited)]) == 1
    out = capsys.readouterr().out
    assert "refused  align-split-block  source moved: " in out
    assert "1 refused" in out


@pytest.mark.parametrize("content", [b"", b"not a zip"])
def test_a_file_that_is_no_wheel(content, tmp_path, capsys):
    file = tmp_path / "x.whl"
    file.write_bytes(content)
    assert cli.main(["check", "--wheel", str(file)]) == 2
    assert capsys.readouterr().err.startswith("dflash2-patches: ")


def test_a_directory_without_vllm(tmp_path, capsys):
    assert cli.main(["check", "--site", str(tmp_path)]) == 1
    assert "no vLLM found" in capsys.readouterr().out


def test_recording_a_release_writes_what_the_gate_reads(tmp_path, monkeypatch, capsys):
    file = tmp_path / "hashes.json"
    monkeypatch.setattr(records, "HASHES", file)
    for version in ("0.31.0", "0.32.0", "0.33.0"):
        assert cli.main(["record", "--site", str(site(version))]) == 0
    capsys.readouterr()
    written = json.loads(file.read_text())
    monkeypatch.undo()
    assert written == records.hashes()


def test_compare_lists_what_a_bump_has_to_review(capsys):
    assert cli.main(["compare", "--site", str(site("0.33.0")), "--base", "0.32.0"]) == 1
    out = capsys.readouterr().out
    assert "changed  align-split-block: vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split" in out
    assert "new      draft-quant-names: vllm.model_executor.models.utils:map_draft_quant_config" in out
    assert "gone     kv-grouping: vllm.v1.core.kv_cache_utils:_get_kv_cache_groups_uniform_page_size" in out
    assert "float16-drafter: vllm.model_executor.models.qwen3_dflash2" not in out  # the same in both
    assert out.splitlines()[-1] == f"{len(out.splitlines()) - 2} to review"


def test_compare_with_itself_finds_nothing(capsys):
    assert cli.main(["compare", "--site", str(site("0.33.0"))]) == 0
    assert capsys.readouterr().out == "vLLM 0.33.0 compared with 0.33.0\n0 to review\n"
