"""Fetching with the real client over real HTTP: whole, resumed, checked, and never half announced."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import Fault, Hub, Repo, corrupt, ignore_range, slow, stall, status, too_long, truncate
from snapshot_maker import write_shards

from dflash_serve.checkpoint import fetch as fetch_module
from dflash_serve.checkpoint.fetch import Fetched, FetchOptions, fetch_checkpoint
from dflash_serve.checkpoint.hub_cache import PARTIAL, hub_cache, lock_path, repo_folder, snapshot_dir
from dflash_serve.checkpoint.manifest import FileEntry, Manifest
from dflash_serve.checkpoint.pins import list_files
from dflash_serve.checkpoint.tensor_bytes import Tensor
from dflash_serve.checkpoint.transfer import Patience
from dflash_serve.errors import CheckpointError, PreflightRefused
from dflash_serve.progress import SilentProgress
from dflash_serve.recipe.schema import Checkpoint

REPO = "org/model"
ONE, TWO = "1" * 40, "2" * 40
SHARD = "model-00002-of-00002.safetensors"


def repo_files(place: Path, seed: int = 0) -> dict[str, bytes]:
    """A checkpoint with real headers and random weights, two LFS shards of 300 kB."""
    tensors = [Tensor(f"layers.{i}.w", "BF16", (150, 100)) for i in range(20)]
    write_shards(place, tensors, 2)
    dice = random.Random(seed)
    out = {}
    for path in sorted(place.iterdir()):
        data = path.read_bytes()
        if path.name.endswith(".safetensors"):
            header = 8 + int.from_bytes(data[:8], "little")
            data = data[:header] + dice.randbytes(len(data) - header)
        out[path.name] = data
    shutil.rmtree(place)
    out["config.json"] = json.dumps({"architectures": ["X"], "seed": seed}).encode()
    out["chat_template.jinja"] = b"{{ messages }}"
    out["README.md"] = b"not fetched"
    out["assets/picture.png"] = b"png" * 10
    return out


@pytest.fixture
def files(tmp_path: Path, hub: Hub) -> dict[str, bytes]:
    found = repo_files(tmp_path / "make")
    hub.repos[REPO] = Repo({ONE: found}, main=ONE)
    return found


def options(hub: Hub, cache: Path, **changes: object) -> FetchOptions:
    patience = Patience(attempts=4, first_wait=0.01, longest_wait=0.02, stall=5)
    return FetchOptions(**({"cache": cache, "endpoint": hub.url, "patience": patience} | changes))  # type: ignore[arg-type]


def fetch(
    hub: Hub, cache: Path, revision: str | None = ONE, manifest: Manifest | None = None, **changes: object
) -> Fetched:
    checkpoint = Checkpoint(repo=REPO, revision=revision)
    return fetch_checkpoint("target", checkpoint, manifest, options(hub, cache, **changes), SilentProgress())


def pinned(hub: Hub) -> Manifest:
    from huggingface_hub import HfApi

    return list_files(HfApi(endpoint=hub.url), REPO, ONE)


def partials(cache: Path) -> list[Path]:
    return list(cache.rglob(f"*{PARTIAL}"))


def refs_main(cache: Path) -> str | None:
    path = repo_folder(REPO, cache) / "refs" / "main"
    return path.read_text() if path.exists() else None


def test_a_whole_fetch(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    assert found.snapshot == snapshot_dir(REPO, ONE, cache)
    names = {path.relative_to(found.snapshot).as_posix() for path in found.snapshot.rglob("*") if path.is_file()}
    assert names == set(files) - {"README.md"}
    for name in names:
        assert (found.snapshot / name).read_bytes() == files[name]
        assert (found.snapshot / name).is_symlink()
        assert not os.path.isabs(os.readlink(found.snapshot / name))
    assert found.received == sum(len(files[name]) for name in names)
    assert partials(cache) == []
    assert refs_main(cache) is None, "a pinned fetch says nothing about main"


def test_the_cache_is_what_the_hub_client_makes_and_reads(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    ours = fetch(hub, cache).snapshot
    theirs = Path(
        snapshot_download(
            REPO, revision=ONE, cache_dir=tmp_path / "other", endpoint=hub.url, ignore_patterns=["README.md"]
        )
    )

    def links(root: Path) -> dict[str, str]:
        return {p.relative_to(root).as_posix(): os.readlink(p) for p in root.rglob("*") if p.is_symlink()}

    assert links(ours) == links(theirs)
    before = len(hub.requests)
    assert snapshot_download(REPO, revision=ONE, cache_dir=cache, local_files_only=True) == str(ours)
    assert len(hub.requests) == before
    into = fetch(hub, tmp_path / "other")
    assert into.received == 0, "what their client fetched is not fetched again"


def test_weights_for_other_engines_are_left_out(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    files |= {"pytorch_model.bin": b"x" * 9000, "onnx/model.onnx": b"x" * 9000, "mask_embedding.pt": b"x" * 9000}
    snapshot = fetch(hub, cache).snapshot
    assert not (snapshot / "pytorch_model.bin").exists()
    assert not (snapshot / "onnx").exists()
    assert (snapshot / "mask_embedding.pt").exists(), "the engine reads it"


def test_a_cache_without_symlinks(
    hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    snapshot = fetch(hub, cache).snapshot
    assert (snapshot / SHARD).read_bytes() == files[SHARD]
    assert not (snapshot / SHARD).is_symlink()
    assert fetch(hub, cache).received == 0


def test_a_second_fetch_receives_nothing(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    fetch(hub, cache)
    sent = hub.sent()
    again = fetch(hub, cache)
    assert again.received == 0
    assert again.present == sum(len(data) for name, data in files.items() if name != "README.md")
    assert hub.sent() == sent


def test_pages_of_the_file_list_are_followed(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.page = 2
    assert (fetch(hub, cache).snapshot / SHARD).is_file()


@pytest.mark.parametrize(
    "faults",
    [
        [truncate(1000)],
        [truncate(100_000), truncate(50_000), truncate(1)],
        [status(500), status(502), status(503)],
        [status(429)],
        [truncate(1000), status(500), truncate(1000), status(500), truncate(1000), status(500)],
        [corrupt(200_000)],
        [truncate(1000), corrupt(500)],
        [truncate(1000), ignore_range],
    ],
    ids=["cut", "cut-thrice", "5xx", "429", "cut-and-5xx", "bit", "bit-before-cut", "range-ignored"],
)
def test_passing_faults_end_in_the_right_bytes(
    faults: list[Fault], hub: Hub, cache: Path, files: dict[str, bytes]
) -> None:
    hub.faults[SHARD] = list(faults)
    found = fetch(hub, cache)
    assert (found.snapshot / SHARD).read_bytes() == files[SHARD]
    assert not hub.faults[SHARD]


def test_a_cut_file_is_resumed_by_range(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults[SHARD] = [truncate(100_000)]
    fetch(hub, cache)
    assert [r.range for r in hub.gets(SHARD)] == [None, "bytes=100000-"]
    assert hub.sent(SHARD) == len(files[SHARD])


def test_a_stalled_file_is_resumed(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults[SHARD] = [stall(50_000, 3)]
    patience = Patience(attempts=4, first_wait=0.01, longest_wait=0.02, stall=0.4)
    started = time.monotonic()
    found = fetch(hub, cache, patience=patience)
    assert time.monotonic() - started < 2.5
    assert (found.snapshot / SHARD).read_bytes() == files[SHARD]
    assert hub.gets(SHARD)[1].range == "bytes=50000-"


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([status(500)] * 9, "answers 500"),
        ([corrupt(9)] * 9, "another hash"),
        ([too_long], "goes on after"),
        ([status(404)], "404"),
        ([truncate(0)] * 9, SHARD),
    ],
    ids=["5xx", "wrong-hash", "too-long", "404", "nothing"],
)
def test_lasting_faults_name_the_file_and_announce_nothing(
    faults: list[Fault], message: str, hub: Hub, cache: Path, files: dict[str, bytes]
) -> None:
    hub.faults[SHARD] = list(faults)
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch(hub, cache, revision=None)
    assert SHARD in str(caught.value)
    assert len(caught.value.lines()) <= 3
    assert not (snapshot_dir(REPO, ONE, cache) / SHARD).exists()
    assert refs_main(cache) is None
    hub.faults.clear()
    assert (fetch(hub, cache, revision=None).snapshot / SHARD).read_bytes() == files[SHARD]
    assert refs_main(cache) == ONE


def test_refs_main_stays_on_the_last_whole_revision(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    fetch(hub, cache, revision=None)
    assert refs_main(cache) == ONE
    hub.repos[REPO].revisions[TWO] = repo_files(tmp_path / "second", seed=2)
    hub.repos[REPO].main = TWO
    hub.faults[SHARD] = [status(500)] * 9
    with pytest.raises(CheckpointError):
        fetch(hub, cache, revision=None)
    assert refs_main(cache) == ONE
    assert fetch(hub, cache, revision=None, offline=True).revision == ONE
    hub.faults.clear()
    fetch(hub, cache, revision=None)
    assert refs_main(cache) == TWO


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from dflash_serve.checkpoint.fetch import FetchOptions, fetch_checkpoint
from dflash_serve.progress import SilentProgress
from dflash_serve.recipe.schema import Checkpoint
options = FetchOptions(cache=Path(sys.argv[1]), endpoint=sys.argv[2])
fetch_checkpoint("target", Checkpoint(repo="org/model"), None, options, SilentProgress())
"""


def test_a_killed_fetch_is_resumed_at_the_byte(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults[SHARD] = [slow(30, pieces=300)]
    environment = os.environ | {"NO_PROXY": "*"}
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(cache), hub.url, str(Path(__file__).parent)], env=environment
    )
    deadline = time.monotonic() + 30
    entry = next(file for file in pinned(hub).files if file.path == SHARD)
    partial = repo_folder(REPO, cache) / "blobs" / (entry.expected + PARTIAL)
    while not (partial.exists() and partial.stat().st_size > 20_000):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert refs_main(cache) is None
    have = partial.stat().st_size
    found = fetch(hub, cache)
    assert (found.snapshot / SHARD).read_bytes() == files[SHARD]
    resumed = hub.gets(SHARD)[-1].range
    assert resumed == f"bytes={have}-"
    assert found.received < sum(map(len, files.values()))


def test_a_partial_longer_than_its_file_is_thrown_away(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    manifest = pinned(hub)
    entry = next(file for file in manifest.files if file.path == SHARD)
    blobs = repo_folder(REPO, cache) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (entry.expected + PARTIAL)).write_bytes(b"x" * (entry.size + 5))
    assert (fetch(hub, cache).snapshot / SHARD).read_bytes() == files[SHARD]


def test_a_range_that_the_server_refuses(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    entry = next(file for file in pinned(hub).files if file.path == SHARD)
    blobs = repo_folder(REPO, cache) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (entry.expected + PARTIAL)).write_bytes(files[SHARD][:1000])
    hub.faults[SHARD] = [status(416)]
    assert (fetch(hub, cache).snapshot / SHARD).read_bytes() == files[SHARD]
    assert [r.range for r in hub.gets(SHARD)] == ["bytes=1000-", None]


def test_a_whole_partial_needs_no_more_bytes(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    entry = next(file for file in pinned(hub).files if file.path == SHARD)
    blobs = repo_folder(REPO, cache) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (entry.expected + PARTIAL)).write_bytes(files[SHARD])
    fetch(hub, cache)
    assert hub.sent(SHARD) == 0


def test_a_wrong_partial_is_found_by_its_hash(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    entry = next(file for file in pinned(hub).files if file.path == SHARD)
    blobs = repo_folder(REPO, cache) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (entry.expected + PARTIAL)).write_bytes(b"x" * 1000)
    assert (fetch(hub, cache).snapshot / SHARD).read_bytes() == files[SHARD]


def test_a_shortened_file_in_the_cache_is_fetched_again(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    os.truncate(os.path.realpath(found.snapshot / SHARD), 10)
    assert (fetch(hub, cache).snapshot / SHARD).read_bytes() == files[SHARD]


def test_disk_is_checked_on_the_bytes_still_missing(
    hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [fetch_module.HEADROOM + 10]
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free[0]}))
    with pytest.raises(PreflightRefused, match="GiB more") as caught:
        fetch(hub, cache)
    assert caught.value.exit_code == 4
    assert hub.sent(SHARD) == 0
    free[0] = fetch_module.HEADROOM + 10_000_000
    fetch(hub, cache)
    free[0] = 0
    assert fetch(hub, cache).received == 0, "nothing is missing, so a full disk is no matter"


def test_the_token_goes_to_the_hub_alone(
    hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO].gated = True
    with pytest.raises(CheckpointError, match="gated") as caught:
        fetch(hub, cache)
    assert "HF_TOKEN" in caught.value.fix
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(hub, cache)
    content = [r for r in hub.requests if "/cdn/" in r.path]
    assert content
    assert {r.host for r in content} == {"localhost"}
    assert not any(r.authorized for r in content), "the CDN must not see the token"


def test_the_token_file_of_the_hub_is_read(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO].gated = True
    (tmp_path / "token").write_text("hf_secret\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert fetch(hub, cache).received


def test_a_mirror_by_environment(
    hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    assert fetch(hub, cache, endpoint=None).received


def test_offline(hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = pinned(hub)
    with pytest.raises(CheckpointError, match="not in the cache"):
        fetch(hub, cache, offline=True)
    with pytest.raises(CheckpointError, match="not in the cache"):
        fetch(hub, cache, revision=None, offline=True)
    fetch(hub, cache)
    before = len(hub.requests)
    assert fetch(hub, cache, offline=True, manifest=manifest, verify=True).received == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = fetch(hub, cache)
    assert (found.received, found.manifest) == (0, None)
    assert len(hub.requests) == before
    (found.snapshot / SHARD).unlink()
    with pytest.raises(CheckpointError, match=SHARD):
        fetch(hub, cache)


def test_pins_that_differ_from_the_hub_stop_before_any_byte(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    manifest = pinned(hub)
    wrong = [f if f.path != SHARD else FileEntry(path=f.path, size=f.size, sha256="e" * 64) for f in manifest.files]
    with pytest.raises(CheckpointError, match="in the manifest"):
        fetch(hub, cache, manifest=Manifest(repo=REPO, revision=ONE, files=tuple(wrong)))
    assert hub.sent(SHARD) == 0


def test_a_pinned_file_that_is_gone_is_named(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    """A publisher removed a quantized file: repo, revision and file stand in the message."""
    manifest = pinned(hub)
    del files[SHARD]
    with pytest.raises(CheckpointError) as caught:
        fetch(hub, cache, manifest=manifest)
    text = str(caught.value)
    assert SHARD in text
    assert REPO in text
    assert ONE[:12] in text
    assert "404" in text


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (Checkpoint(repo="org/other"), "no repo org/other"),
        (Checkpoint(repo=REPO, revision="3" * 40), "no revision"),
    ],
)
def test_repos_and_revisions_that_do_not_exist(
    checkpoint: Checkpoint, message: str, hub: Hub, cache: Path, files: dict
) -> None:
    with pytest.raises(CheckpointError, match=message):
        fetch_checkpoint("target", checkpoint, None, options(hub, cache), SilentProgress())


def test_pins_of_another_repo_or_revision_are_refused(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    manifest = pinned(hub)
    with pytest.raises(CheckpointError, match="the pins are of"):
        fetch(hub, cache, manifest=manifest.model_copy(update={"repo": "org/else"}))
    with pytest.raises(CheckpointError, match="the pins are of revision"):
        fetch(hub, cache, revision=TWO, manifest=manifest)


def test_a_busy_api_is_asked_again(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.api_failures = 2
    assert fetch(hub, cache, revision=None).received


def test_no_server_at_all(hub: Hub, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot fetch"):
        fetch(hub, cache, endpoint="http://127.0.0.1:9")


def test_two_fetches_at_once_receive_each_byte_once(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults[SHARD] = [slow(0.5)]
    found: list[Fetched] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(hub, cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2
    assert hub.sent(SHARD) == len(files[SHARD])


def test_verify_hashes_what_was_there(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    path = Path(os.path.realpath(found.snapshot / SHARD))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert fetch(hub, cache).received == 0, "sizes agree, so only hashing shows it"


def spoil(path: Path) -> None:
    """One bit wrong, the size as it was."""
    real = Path(os.path.realpath(path))
    data = bytearray(real.read_bytes())
    data[-1] ^= 1
    real.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [SHARD, "chat_template.jinja"])
def test_verify_fetches_a_corrupt_file_again_and_no_other(
    name: str, hub: Hub, cache: Path, files: dict[str, bytes]
) -> None:
    found = fetch(hub, cache)
    spoil(found.snapshot / name)
    again = fetch(hub, cache, verify=True)
    assert again.received == len(files[name])
    assert (again.snapshot / name).read_bytes() == files[name]
    assert again.findings == ()
    assert fetch(hub, cache, verify=True).received == 0


def test_verify_repairs_a_blob_that_no_name_leads_to(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    spoil(found.snapshot / SHARD)
    (found.snapshot / SHARD).unlink()
    assert (fetch(hub, cache, verify=True).snapshot / SHARD).read_bytes() == files[SHARD]


def test_verify_repairs_a_cache_without_symlinks(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    found = fetch(hub, cache)
    real = Path(os.path.realpath(found.snapshot / SHARD))
    real.replace(found.snapshot / SHARD)
    spoil(found.snapshot / SHARD)
    assert (fetch(hub, cache, verify=True).snapshot / SHARD).read_bytes() == files[SHARD]


def test_a_file_of_the_users_own_behind_a_corrupt_name_is_kept(
    hub: Hub, cache: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    found = fetch(hub, cache)
    own = tmp_path / "own.safetensors"
    own.write_bytes(b"x" * len(files[SHARD]))
    (found.snapshot / SHARD).unlink()
    (found.snapshot / SHARD).symlink_to(own)
    assert (fetch(hub, cache, verify=True).snapshot / SHARD).read_bytes() == files[SHARD]
    assert own.read_bytes() == b"x" * len(files[SHARD])


def test_what_is_corrupt_stays_missing_while_the_hub_is_silent(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    manifest = pinned(hub)
    found = fetch(hub, cache, manifest=manifest)
    spoil(found.snapshot / SHARD)
    hub.faults[SHARD] = [status(500)] * 9
    with pytest.raises(CheckpointError, match="answers 500"):
        fetch(hub, cache, manifest=manifest, verify=True)
    assert not (found.snapshot / SHARD).exists(), "wrong weights must not be served meanwhile"
    hub.faults.clear()
    assert (fetch(hub, cache, manifest=manifest).snapshot / SHARD).read_bytes() == files[SHARD]


def test_offline_a_corrupt_file_is_told_and_kept(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    manifest = pinned(hub)
    found = fetch(hub, cache)
    spoil(found.snapshot / SHARD)
    with pytest.raises(CheckpointError, match="is not the file of") as caught:
        fetch(hub, cache, manifest=manifest, offline=True, verify=True)
    assert "dflash-serve fetch NAME --verify" in caught.value.fix
    assert (found.snapshot / SHARD).exists()


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot use the cache") as caught:
        fetch(hub, tmp_path / "file" / "cache")
    assert str(tmp_path / "file") in caught.value.where
    assert "move it away" in caught.value.fix


@pytest.mark.parametrize("place", ["name", "blob", "partial", "snapshot", "main", "refs", "lock"])
def test_something_in_the_way_of_a_name_is_told(place: str, hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    entry = next(file for file in pinned(hub).files if file.path == SHARD)
    root = repo_folder(REPO, cache)
    in_the_way = {
        "name": snapshot_dir(REPO, ONE, cache) / SHARD / "inside",
        "blob": root / "blobs" / entry.expected / "inside",
        "partial": root / "blobs" / (entry.expected + PARTIAL) / "inside",
        "main": root / "refs" / "main" / "inside",
        "lock": lock_path(REPO, entry.expected, cache) / "inside",
        # A file where a directory has to be.
        "snapshot": root / "snapshots",
        "refs": root / "refs",
    }[place]
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("mine")
    with pytest.raises(CheckpointError, match="cannot use the cache") as caught:
        fetch(hub, cache, revision=None)
    assert str(root.name) in caught.value.where
    assert "move it away" in caught.value.fix
    assert in_the_way.read_text() == "mine"
    assert not list(cache.rglob("*.tmp")), "no temporary name is left"
    shutil.rmtree(in_the_way.parent) if in_the_way.name == "inside" else in_the_way.unlink()
    assert (fetch(hub, cache, revision=None).snapshot / SHARD).read_bytes() == files[SHARD]
    assert refs_main(cache) == ONE


def test_a_full_disk_is_told(hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("dflash_serve.checkpoint.transfer.os.fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            fetch(hub, cache)
    assert caught.value.where == str(cache)
    assert "make room" in caught.value.fix
    assert (fetch(hub, cache).snapshot / SHARD).read_bytes() == files[SHARD]


def test_a_file_name_that_leaves_the_snapshot_is_refused(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    files["../../evil"] = b"x"
    with pytest.raises((CheckpointError, ValueError), match="no file name"):
        fetch(hub, cache)


def test_the_cache_is_found_as_the_client_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    for values in (
        {},
        {"HF_HUB_CACHE": "/a/b"},
        {"HF_HOME": "~/c"},
        {"XDG_CACHE_HOME": "/d"},
        {"HF_HOME": "/e", "XDG_CACHE_HOME": "/d"},
    ):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        assert str(hub_cache()) == theirs


class Lines:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, float | None]] = []

    def step(self, title: str):
        from contextlib import nullcontext

        return nullcontext(self)

    def update(self, text: str, fraction: float | None = None) -> None:
        self.texts.append((text, fraction))

    def line(self, text: str) -> None:
        self.texts.append((text, None))


def test_progress_has_rate_and_time_left(hub: Hub, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults[SHARD] = [slow(1.5)]
    lines = Lines()
    fetch_checkpoint("target", Checkpoint(repo=REPO, revision=ONE), None, options(hub, cache), lines)
    assert any("MiB/s" in text and "left" in text for text, _ in lines.texts)
    fractions = [fraction for _, fraction in lines.texts if fraction is not None]
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] <= fractions[-1] == 1.0


def test_interrupt_keeps_what_was_fetched(
    hub: Hub, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults[SHARD] = [slow(5, pieces=100)]
    original: Callable = fetch_module._Meter.show

    def show(self: object, step: object) -> None:
        if any(p.stat().st_size > 1000 for p in partials(cache)):
            raise KeyboardInterrupt
        original(self, step)

    started = time.monotonic()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch_module._Meter, "show", show)
        fetch(hub, cache)
    assert time.monotonic() - started < 4, "the running transfer ends between two chunks"
    assert partials(cache)
    assert (fetch(hub, cache).snapshot / SHARD).read_bytes() == files[SHARD]
