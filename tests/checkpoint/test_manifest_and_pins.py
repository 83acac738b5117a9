"""Manifests, pins and verification: what must be exact, what may differ, and the way to a host without network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hub_server import Hub, Repo
from test_fetch import ONE, REPO, SHARD, fetch, options, pinned, repo_files

from dflash_serve.checkpoint.fetch import fetch_recipe
from dflash_serve.checkpoint.manifest import (
    FILE,
    Bundle,
    FileEntry,
    Manifest,
    carried_dir,
    export_files,
    import_files,
    manifest_of_snapshot,
    parse_bundle,
    read_bundle,
    write_bundle,
)
from dflash_serve.checkpoint.pins import Pins, load_pins, pins_path, refresh, save_pins
from dflash_serve.checkpoint.verify import verify_snapshot
from dflash_serve.errors import CheckpointError, RecipeError
from dflash_serve.progress import SilentProgress
from dflash_serve.recipe.schema import Recipe


@pytest.fixture
def files(tmp_path: Path, hub: Hub) -> dict[str, bytes]:
    found = repo_files(tmp_path / "make")
    hub.repos[REPO] = Repo({ONE: found}, main=ONE)
    return found


def recipe(revision: str | None = ONE) -> Recipe:
    checkpoint = {"repo": REPO, "revision": revision}
    return Recipe.model_validate(
        {
            "name": "mine",
            "title": "A recipe for tests",
            "target": checkpoint,
            "drafter": {"method": "dflash2", "checkpoint": checkpoint},
            "verified": None,
        }
    )


def edit(snapshot: Path, name: str) -> None:
    """Same size, other bytes."""
    path = (snapshot / name).resolve()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_the_manifest_of_a_snapshot_is_the_hub_list(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    assert manifest_of_snapshot(REPO, ONE, found.snapshot) == pinned(hub)
    assert pinned(hub).bytes == found.received


def test_weights_must_match_and_texts_may_differ(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    """A publisher's stale checksum of chat_template.jinja is a warning; of a shard or config.json, a refusal."""
    found = fetch(hub, cache)
    manifest = pinned(hub)
    assert verify_snapshot(manifest, found.snapshot, hashes=True) == []
    edit(found.snapshot, "chat_template.jinja")
    warned = verify_snapshot(manifest, found.snapshot, hashes=True)
    assert [(f.id, f.severity.value) for f in warned] == [("checkpoint-hash", "warn")]
    assert fetch(hub, cache, offline=True, verify=True, manifest=manifest).findings == tuple(warned)
    edit(found.snapshot, SHARD)
    assert [f.severity.value for f in verify_snapshot(manifest, found.snapshot, hashes=True)] == ["warn", "refuse"]
    assert len(verify_snapshot(manifest, found.snapshot)) == 0, "without hashing only sizes are known"


def test_config_is_as_exact_as_weights(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    edit(found.snapshot, "config.json")
    assert [f.severity.value for f in verify_snapshot(pinned(hub), found.snapshot, hashes=True)] == ["refuse"]


def test_missing_and_short_files(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    (found.snapshot / "chat_template.jinja").unlink()
    (found.snapshot / SHARD).resolve().write_bytes(b"short")
    ids = {f.id: f.severity.value for f in verify_snapshot(pinned(hub), found.snapshot)}
    assert ids == {"checkpoint-missing-file": "refuse", "checkpoint-size": "refuse"}
    nothing = verify_snapshot(pinned(hub), cache / "nowhere")
    assert len(nothing) == len(pinned(hub).files)


def test_export_and_import(hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    snapshot, manifest, stick = fetch(hub, cache).snapshot, pinned(hub), tmp_path / "stick"
    export_files(manifest, snapshot, stick)
    write_bundle(stick / FILE, Bundle(manifests=(manifest,)))
    assert read_bundle(stick).manifests == (manifest,)
    other = tmp_path / "other-cache"
    placed = import_files(manifest, stick, other)
    assert {p.relative_to(placed).as_posix() for p in placed.rglob("*") if p.is_file()} == {
        f.path for f in manifest.files
    }
    assert verify_snapshot(manifest, placed, hashes=True) == []
    sent = hub.sent()
    assert fetch(hub, other, offline=True, manifest=manifest, verify=True).received == 0
    assert hub.sent() == sent
    assert import_files(manifest, stick, other) == placed, "again changes nothing"
    assert not list(other.rglob("refs/main"))


def test_import_replaces_a_file_that_differs(hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    snapshot, manifest, stick = fetch(hub, cache).snapshot, pinned(hub), tmp_path / "stick"
    export_files(manifest, snapshot, stick)
    edit(snapshot, SHARD)
    import_files(manifest, stick, cache)
    assert verify_snapshot(manifest, snapshot, hashes=True) == []


def test_a_bundle_whose_main_is_not_carried_is_none() -> None:
    data = {"schema": 1, "manifests": [{"repo": REPO, "revision": ONE, "files": []}], "main": ["org/other"]}
    with pytest.raises(CheckpointError, match="no manifest"):
        parse_bundle(data, "here")


def test_pins_that_cannot_be_written_are_told(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    found = refresh(recipe(revision=None), HfApi(endpoint=hub.url))
    (tmp_path / "pins").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write the pins") as caught:
        save_pins(found, tmp_path / "pins")
    assert caught.value.fix
    pins_path("mine", tmp_path / "other").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot write the pins"):
        save_pins(found, tmp_path / "other")


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_a_bundle_that_was_harmed_on_the_way_is_refused_whole(
    harm: str, hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    snapshot, manifest, stick = fetch(hub, cache).snapshot, pinned(hub), tmp_path / "stick"
    carried = export_files(manifest, snapshot, stick)
    path = carried / SHARD
    if harm == "flip":
        edit(carried, SHARD)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=SHARD):
        import_files(manifest, stick, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_export_refuses_what_is_not_whole(hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    snapshot = fetch(hub, cache).snapshot
    (snapshot / SHARD).unlink()
    with pytest.raises(CheckpointError, match="not whole"):
        export_files(pinned(hub), snapshot, tmp_path / "stick")
    assert not (carried_dir(pinned(hub), tmp_path / "stick") / SHARD).exists()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"schema": 1, "manifests": []},
        {"schema": 2, "manifests": [{"repo": REPO, "revision": ONE, "files": []}]},
        {"schema": 1, "manifests": [{"repo": "x", "revision": ONE, "files": []}]},
        {
            "schema": 1,
            "manifests": [{"repo": REPO, "revision": ONE, "files": [{"path": "../x", "size": 1, "sha256": "0" * 64}]}],
        },
        {
            "schema": 1,
            "manifests": [{"repo": REPO, "revision": ONE, "files": [{"path": "/x", "size": 1, "sha256": "0" * 64}]}],
        },
        {
            "schema": 1,
            "manifests": [{"repo": REPO, "revision": ONE, "files": [{"path": "x", "size": -1, "sha256": "0" * 64}]}],
        },
        {"schema": 1, "manifests": [{"repo": REPO, "revision": ONE, "files": [{"path": "x", "size": 1}]}]},
        {
            "schema": 1,
            "manifests": [
                {"repo": REPO, "revision": ONE, "files": [{"path": "x", "size": 1, "blob_id": "0" * 40}] * 2}
            ],
        },
    ],
)
def test_bundles_that_are_none(data: dict) -> None:
    with pytest.raises(CheckpointError, match="no manifest"):
        parse_bundle(data, "here")


def test_pins_are_refreshed_saved_and_loaded(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    pins = refresh(recipe(revision=None), HfApi(endpoint=hub.url))
    assert pins.target == pins.drafter == pinned(hub)
    path = save_pins(pins, tmp_path)
    assert path == pins_path("mine", tmp_path)
    assert load_pins("mine", tmp_path) == pins
    text = yaml.safe_load(path.read_text())
    assert {entry["path"] for entry in text["target"]["files"]} == set(files) - {"README.md"}
    assert {"sha256" if "sha256" in entry else "blob_id" for entry in text["target"]["files"]} == {"sha256", "blob_id"}
    assert load_pins("other", tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"recipe": "other"}, "pins of 'other'"),
        (lambda d: d | {"target": {"repo": REPO, "revision": "main", "files": []}}, "revision"),
        (lambda d: d | {"extra": 1}, "extra"),
        (lambda d: {k: v for k, v in d.items() if k != "schema"}, "schema"),
    ],
)
def test_broken_pin_files_name_the_key(change, message: str, tmp_path: Path) -> None:
    good = {"schema": 1, "recipe": "mine", "target": None}
    pins_path("mine", tmp_path).write_text(yaml.safe_dump(change(good)))
    with pytest.raises(RecipeError) as caught:
        load_pins("mine", tmp_path)
    assert message in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_a_recipe_is_fetched_by_its_pins(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    pins = Pins.model_validate({"schema": 1, "recipe": "mine", "target": pinned(hub), "drafter": pinned(hub)})
    listed = [r for r in hub.requests if "/tree/" in r.path]
    target, drafter = fetch_recipe(recipe(), options(hub, cache), SilentProgress(), pins)
    assert (target.side, drafter.side) == ("target", "drafter")
    assert drafter.received == 0, "the same blobs serve both"
    assert [r for r in hub.requests if "/tree/" in r.path] == listed, "with pins nobody asks for the list"


def test_a_local_checkpoint_is_checked_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snapshot_maker import config, write_drafter

    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(tmp_path))
    place = write_drafter(tmp_path / "recipes" / "tiny" / "drafter", config("drafter-dflash2"))
    (tmp_path / "recipes" / "tiny" / "target").mkdir()
    local = recipe().model_copy(
        update={
            "target": recipe().target.model_copy(update={"repo": None, "revision": None, "path": "tiny/drafter"}),
            "drafter": None,
        }
    )
    from dflash_serve.checkpoint.fetch import FetchOptions

    (found,) = fetch_recipe(local, FetchOptions(), SilentProgress())
    assert (found.received, found.repo, found.snapshot) == (0, None, place)
    (place / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weight files"):
        fetch_recipe(local, FetchOptions(), SilentProgress())


def test_entries_have_exactly_one_hash() -> None:
    assert FileEntry(path="a/b.json", size=0, blob_id="0" * 40).expected == "0" * 40
    assert json.loads(json.dumps(Manifest(repo=REPO, revision=ONE, files=()).as_dict()))["files"] == []
