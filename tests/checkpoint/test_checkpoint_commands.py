"""`fetch`, `manifest`, `pins` from the command line, against the local hub, in a checkout of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_server import Hub, Repo
from test_fetch import ONE, REPO, SHARD, repo_files

from dflash_serve.checkpoint.commands import fetch, manifest, pins
from dflash_serve.checkpoint.hub_cache import main_revision
from dflash_serve.errors import CheckpointError

RECIPE = f"""
name: mine
title: A recipe of the tests
target: {{repo: {REPO}, revision: "{ONE}"}}
drafter: {{method: dflash2, checkpoint: {{repo: {REPO}, revision: "{ONE}", subdirectory: drafter}}}}
verified: null
"""


@pytest.fixture
def files(tmp_path: Path, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    found = repo_files(tmp_path / "make")
    found |= {f"drafter/{name}": data for name, data in repo_files(tmp_path / "make", seed=5).items()}
    hub.repos[REPO] = Repo({ONE: found}, main=ONE)
    (tmp_path / "checkout" / "recipes").mkdir(parents=True)
    (tmp_path / "checkout" / "recipes" / "mine.yaml").write_text(RECIPE)
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(tmp_path / "checkout"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return found


def run(command, *arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_pin_fetch_export_import(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not pinned" in run(pins, "show", "mine")
    assert json.loads(run(pins, "show", "mine", "--json")) is None
    path = Path(run(pins, "refresh", "mine").strip())
    assert path == tmp_path / "checkout" / "recipes" / "pins" / "mine.yaml"
    assert f"target: {REPO} at {ONE}" in run(pins, "show", "mine")
    assert json.loads(run(pins, "show", "mine", "--json"))["target"]["revision"] == ONE
    target, drafter = json.loads(run(fetch, "mine", "--json"))
    assert target["received_bytes"] > 600_000
    assert drafter["received_bytes"] == 0, "its directory came with the target"
    assert Path(drafter["snapshot"]) == Path(target["snapshot"]) / "drafter"
    assert json.loads(run(fetch, "mine", "--offline", "--verify", "--json"))[0]["received_bytes"] == 0
    out = run(manifest, "export", "mine", str(tmp_path / "stick"))
    assert out.count(REPO) == 2
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="not in the cache"):
        run(fetch, "mine", "--offline")
    assert len(json.loads(run(manifest, "import", str(tmp_path / "stick"), "--json"))["manifests"]) == 2
    before = len(hub.requests)
    assert run(fetch, "mine", "--offline", "--verify").startswith("target: ")
    assert len(hub.requests) == before


def test_an_unpinned_recipe_is_found_on_the_host_it_was_carried_to(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkout" / "recipes" / "mine.yaml").write_text(RECIPE.replace(f', revision: "{ONE}"', ""))
    run(fetch, "mine")
    run(manifest, "export", "mine", str(tmp_path / "stick"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    run(manifest, "import", str(tmp_path / "stick"))
    assert main_revision(REPO) == ONE
    before = len(hub.requests)
    assert run(fetch, "mine", "--offline").startswith("target: ")
    assert len(hub.requests) == before


def test_what_is_pinned_does_not_move_main_where_it_is_carried(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkout" / "recipes" / "mine.yaml").write_text(RECIPE.replace(f', revision: "{ONE}"', ""))
    run(pins, "refresh", "mine")
    run(fetch, "mine")
    run(manifest, "export", "mine", str(tmp_path / "stick"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    run(manifest, "import", str(tmp_path / "stick"))
    assert main_revision(REPO) is None
    assert run(fetch, "mine", "--offline", "--verify").startswith("target: ")


def test_fixes_name_the_recipe(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    run(pins, "refresh", "mine")
    (row, _) = json.loads(run(fetch, "mine", "--json"))
    (Path(row["snapshot"]) / "config.json").resolve().write_bytes(b"x" * len(files["config.json"]))
    with pytest.raises(CheckpointError) as caught:
        run(fetch, "mine", "--offline", "--verify")
    assert "dflash-serve fetch mine --verify" in caught.value.fix
    (Path(row["snapshot"]) / "chat_template.jinja").resolve().write_bytes(b"{")
    with pytest.raises(CheckpointError) as caught:
        run(manifest, "export", "mine", str(cache / "stick"))
    assert "NAME" not in caught.value.fix


def test_a_drafter_in_a_subdirectory_is_fetched_alone(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    from dflash_serve.checkpoint.fetch import FetchOptions, fetch_checkpoint
    from dflash_serve.progress import SilentProgress
    from dflash_serve.recipe.schema import Checkpoint

    checkpoint = Checkpoint(repo=REPO, subdirectory="drafter")
    found = fetch_checkpoint("drafter", checkpoint, None, FetchOptions(), SilentProgress())
    assert found.received == sum(len(data) for name, data in files.items() if name.startswith("drafter/"))
    assert (found.snapshot / SHARD).read_bytes() == files[f"drafter/{SHARD}"]
    assert not (found.snapshot.parent / SHARD).exists()
    assert not list(cache.rglob("refs/main")), "a part of a revision is not main"
    pinned = checkpoint.model_copy(update={"revision": ONE})
    offline = fetch_checkpoint("drafter", pinned, None, FetchOptions(offline=True), SilentProgress())
    assert offline.snapshot == found.snapshot
    nowhere = checkpoint.model_copy(update={"subdirectory": "nowhere"})
    with pytest.raises(CheckpointError, match="no directory nowhere"):
        fetch_checkpoint("drafter", nowhere, None, FetchOptions(), SilentProgress())


def test_refreshing_pins_of_a_repo_that_is_not_there(hub: Hub, files: dict[str, bytes]) -> None:
    hub.repos.clear()
    with pytest.raises(CheckpointError, match="no repo"):
        run(pins, "refresh", "mine")


def test_findings_are_shown_and_do_not_stop(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    run(pins, "refresh", "mine")
    (row, _) = json.loads(run(fetch, "mine", "--json"))
    path = (Path(row["snapshot"]) / "chat_template.jinja").resolve()
    path.write_bytes(b"{{ MESSAGES }}")
    result = CliRunner().invoke(fetch, ["mine", "--verify", "--offline"])
    assert result.exit_code == 0
    assert "checkpoint-hash" in result.stderr
    result = CliRunner().invoke(fetch, ["mine", "--verify"])
    assert (result.exit_code, "is fetched again" in result.stderr, "checkpoint-hash" in result.stderr) == (
        0,
        True,
        False,
    )
