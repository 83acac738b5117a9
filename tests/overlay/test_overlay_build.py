"""Trees are whole or absent, stand on symlinks alone, and work under another prefix."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from snapshot_maker import bf16_target, config, write_drafter, write_header, write_target

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.errors import BuildFailed, CheckpointError
from dflash_serve.overlay import build as build_module
from dflash_serve.overlay.build import RECORD, build, damage_of
from dflash_serve.overlay.inventory import collect_garbage, overlay, overlays
from dflash_serve.overlay.layout import plan_mounts
from dflash_serve.overlay.spec import OverlaySpec, SnapshotSource, overlay_path

REVISION = "a" * 40
CHANGES = {"max_position_embeddings": 524288}


def hub_snapshot(cache: Path, write: Callable[[Path], object], repo: str = "z-lab/Drafter") -> SnapshotSource:
    """A snapshot as the hub cache lays it out: names are relative links to blobs."""
    root = cache / f"models--{repo.replace('/', '--')}"
    plain = cache / "plain"
    write(plain)
    snapshot = root / "snapshots" / REVISION
    (root / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in sorted(plain.iterdir()):
        blob = hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(root / "blobs" / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    plain.rmdir()
    return SnapshotSource(snapshot, repo, REVISION)


def drafter(cache: Path, shards: int = 1) -> SnapshotSource:
    return hub_snapshot(cache, lambda place: write_drafter(place, config("drafter-dflash2"), shards))


def temporaries(home: Path) -> list[Path]:
    return list(home.glob(".tmp-*"))


def test_a_drafter_overlay(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES, ("why",))
    home = tmp_path / "overlays"
    promised = overlay_path(spec, home)
    assert not home.exists(), "the path is known before anything is built"
    built = build(spec, home)
    assert built.path == promised
    assert not built.reused
    assert damage_of(built.path) is None
    assert sorted(p.name for p in built.path.iterdir()) == [
        RECORD,
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    for path in built.path.iterdir():
        if path.name not in (RECORD, "config.json"):
            assert path.is_symlink()
            assert not os.path.isabs(os.readlink(path))
            assert path.stat().st_size == (spec.source.directory / path.name).stat().st_size
    before, after = config("drafter-dflash2"), json.loads((built.path / "config.json").read_text())
    assert after == before | CHANGES
    assert list(after) == list(before), "the order of keys stays"
    record = json.loads((built.path / RECORD).read_text())
    assert record["changes"] == {"max_position_embeddings": {"from": 262144, "to": 524288}}
    assert record["revision"] == REVISION
    assert read_drafter(built.path).max_position_embeddings == 524288
    assert temporaries(home) == []


def test_building_again_reuses_and_writes_nothing(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES)
    first = build(spec, tmp_path / "o")
    inode = first.path.stat().st_ino
    again = build(spec, tmp_path / "o")
    assert again.reused
    assert again.bytes_written == 0
    assert again.links == first.links
    assert again.path.stat().st_ino == inode


def test_no_weight_byte_is_copied(tmp_path: Path) -> None:
    source = hub_snapshot(tmp_path / "hub", lambda place: write_target(place, bf16_target(), shards=15), "Qwen/Target")
    built = build(OverlaySpec("target", source, {"text_config.max_position_embeddings": 524288}), tmp_path / "o")
    own = sum(p.stat().st_size for p in built.path.iterdir() if not p.is_symlink())
    assert own == built.bytes_written < 30_000
    assert sum(p.stat().st_size for p in built.path.iterdir()) > 55e9


def test_the_name_follows_from_every_input(tmp_path: Path) -> None:
    source, home = drafter(tmp_path / "hub"), tmp_path / "o"
    spec = OverlaySpec("drafter", source, CHANGES)
    name = spec.name(home)
    assert name.startswith("drafter-Drafter-")
    assert OverlaySpec("drafter", source, dict(CHANGES), ("another reason",)).name(home) == name
    assert OverlaySpec.from_dict(json.loads(json.dumps(spec.as_dict()))).name(home) == name
    others = [
        OverlaySpec("drafter", source, {"max_position_embeddings": 524289}),
        OverlaySpec("target", source, CHANGES),
        OverlaySpec("drafter", SnapshotSource(source.directory, source.repo, "b" * 40), CHANGES),
        OverlaySpec("drafter", SnapshotSource(source.directory), CHANGES),
    ]
    assert len({name, *(other.name(home) for other in others)}) == 5


def test_builder_version_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES)
    before = spec.name(tmp_path / "o")
    monkeypatch.setattr("dflash_serve.overlay.spec.BUILDER_VERSION", 2)
    assert spec.name(tmp_path / "o") != before


def test_a_plain_directory_is_told_apart_by_its_config(tmp_path: Path) -> None:
    place = write_drafter(tmp_path / "plain", config("drafter-dflash2"))
    (place / "assets").mkdir()
    (place / "assets" / "logo.png").write_bytes(b"png")
    spec = OverlaySpec("drafter", SnapshotSource(place), CHANGES)
    built = build(spec, tmp_path / "o")
    assert (built.path / "assets" / "logo.png").read_bytes() == b"png"
    assert (built.path / "assets" / "logo.png").is_symlink()
    (place / "config.json").write_text(json.dumps(config("drafter-dflash2") | {"rms_norm_eps": 1e-5}))
    assert overlay_path(spec, tmp_path / "o") != built.path


def test_links_resolve_under_another_prefix(tmp_path: Path) -> None:
    """What a container sees: overlays home and the repo's folder, each at its mount, nothing else."""
    host = tmp_path / "host" / "root"
    source, home = drafter(host / ".cache/huggingface/hub"), host / ".cache/dflash-serve/overlays"
    built = build(OverlaySpec("drafter", source, CHANGES), home)
    other = OverlaySpec("drafter", source, CHANGES | {"rms_norm_eps": 1e-5})
    layout = plan_mounts(home, [source], prefix=str(tmp_path / "container"))
    inside = Path(layout.inside(built.path))
    names = [other.name(home)]
    assert {mount.host for mount in layout.mounts} == {home, source.root}
    for mount in layout.mounts:
        Path(mount.container).parent.mkdir(parents=True, exist_ok=True)
        mount.host.rename(Path(mount.container))
    shutil.rmtree(tmp_path / "host")
    assert damage_of(inside) is None
    assert (inside / "model.safetensors").stat().st_size > 3.8e9
    moved = SnapshotSource(Path(layout.inside(source.directory)), source.repo, source.revision)
    again = build(OverlaySpec("drafter", moved, CHANGES), inside.parent)
    assert again.reused, "the name is the same on both sides"
    assert again.path == inside
    names.append(OverlaySpec("drafter", moved, other.changes).name(inside.parent))
    assert names[0] == names[1]


def test_a_cache_reached_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "disk" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "cache").symlink_to("disk/deep/er")
    source = drafter(tmp_path / "cache" / "hub")
    built = build(OverlaySpec("drafter", source, CHANGES), tmp_path / "cache" / "overlays")
    assert (built.path / "model.safetensors").stat().st_size > 3.8e9
    aside = build(OverlaySpec("drafter", source, CHANGES), tmp_path / "elsewhere")
    assert (aside.path / "model.safetensors").stat().st_size > 3.8e9


def test_mounts_inside_one_another_are_one(tmp_path: Path) -> None:
    place = tmp_path / "o" / "snap"
    layout = plan_mounts(tmp_path / "o", [SnapshotSource(place)])
    assert len(layout.mounts) == 1
    assert str(layout.inside(tmp_path / "o" / "x")).startswith("/srv/models/")
    with pytest.raises(ValueError, match="not mounted"):
        layout.inside(tmp_path / "other" / "x")


# Snapshots that must be refused. Each edits a directory that is good before.


def _lose_shard(place: Path) -> None:
    (place / "model-00002-of-00003.safetensors").unlink()


def _shorten(place: Path) -> None:
    path = place / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def _empty(place: Path) -> None:
    os.truncate(place / "model-00001-of-00003.safetensors", 0)


def _unlisted(place: Path) -> None:
    write_header(place / "model-00004-of-00004.safetensors", [])


def _cut_config(place: Path) -> None:
    (place / "config.json").write_text('{"architectures": ["DFl')


def _list_config(place: Path) -> None:
    (place / "config.json").write_text("[]")


def _negative(place: Path) -> None:
    (place / "config.json").write_text(json.dumps(config("drafter-dflash2") | {"hidden_size": -1}))


def _no_config(place: Path) -> None:
    (place / "config.json").unlink()


def _cyclic(place: Path) -> None:
    (place / "tokenizer.json").symlink_to("vocab.json")
    (place / "vocab.json").symlink_to("tokenizer.json")


def _escaping(place: Path) -> None:
    (place / "tokenizer.json").symlink_to("../../../../../../etc/hostname")


def _absolute(place: Path) -> None:
    (place / "tokenizer.json").symlink_to("/etc/hostname")


def _broken(place: Path) -> None:
    (place / "tokenizer.json").symlink_to("nowhere")


def _fifo(place: Path) -> None:
    os.mkfifo(place / "pipe")


def _index_leads_out(place: Path) -> None:
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/hostname"}}))


def _index_lies(place: Path) -> None:
    path = place / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["no.such.tensor"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))


def _unknown_architecture(place: Path) -> None:
    found = config("drafter-dflash2") | {"architectures": ["NobodyKnowsMe"]}
    del found["dflash_config"]
    (place / "config.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_lose_shard, "model-00002-of-00003.safetensors"),
        (_shorten, "model-00002-of-00003.safetensors"),
        (_empty, "model-00001-of-00003.safetensors"),
        (_unlisted, "model-00004-of-00004.safetensors"),
        (_cut_config, "config.json ends too early"),
        (_list_config, "config.json holds a list"),
        (_negative, "hidden_size"),
        (_no_config, "config.json is missing"),
        (_cyclic, "cyclic"),
        (_escaping, "leaves the snapshot"),
        (_absolute, "absolute link"),
        (_broken, "leads to no file"),
        (_fifo, "no regular file"),
        (_index_leads_out, "no plain file name"),
        (_index_lies, "no.such.tensor"),
        (_unknown_architecture, "NobodyKnowsMe"),
    ],
)
def test_bad_snapshots_are_refused_by_name_and_leave_nothing(
    edit: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    place = write_drafter(tmp_path / "plain", config("drafter-dflash2"), shards=3)
    edit(place)
    home = tmp_path / "o"
    with pytest.raises(CheckpointError) as caught:
        build(OverlaySpec("drafter", SnapshotSource(place), CHANGES), home)
    assert named in str(caught.value)
    assert len(caught.value.lines()) <= 3
    assert [p for p in home.iterdir() if p.name != ".locks"] == []


def test_a_snapshot_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such snapshot"):
        build(OverlaySpec("drafter", SnapshotSource(tmp_path / "x"), CHANGES), tmp_path / "o")


@pytest.mark.parametrize("edit", [{"vocab_size": 1000}, {"hidden_size": 2560, "target_hidden_size": 2560}])
def test_a_drafter_of_another_target_is_refused(edit: dict, tmp_path: Path) -> None:
    found = config("drafter-dflash2") | edit
    found["dflash_config"]["mask_token_id"] = 7
    place = write_drafter(tmp_path / "plain", found)
    spec = OverlaySpec("drafter", SnapshotSource(place), CHANGES)
    with pytest.raises(CheckpointError, match="its target"):
        build(spec, tmp_path / "o", target=read_target(bf16_target()))
    assert not (tmp_path / "o").exists()


def test_a_change_through_something_that_is_no_object(tmp_path: Path) -> None:
    place = write_drafter(tmp_path / "plain", config("drafter-dflash2"))
    with pytest.raises(CheckpointError, match="no object"):
        build(OverlaySpec("drafter", SnapshotSource(place), {"architectures.x": 1}), tmp_path / "o")


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
        (lambda path: (path / "config.json").write_text("{}"), "edited"),
        (lambda path: (path / RECORD).write_text("{"), "record"),
        (lambda path: (path / RECORD).write_text("[]"), "record"),
        (lambda path: (path / RECORD).unlink(), "missing"),
        (lambda path: os.truncate(os.path.realpath(path / "tokenizer_config.json"), 1), "another size"),
    ],
)
def test_a_damaged_tree_is_noticed_and_made_anew(harm: Callable[[Path], object], word: str, tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES)
    built = build(spec, tmp_path / "o")
    harm(built.path)
    assert word in (damage_of(built.path) or "")
    assert overlay(tmp_path / "o", built.path.name).damage
    again = build(spec, tmp_path / "o")
    assert not again.reused
    assert damage_of(again.path) is None
    assert temporaries(tmp_path / "o") == []


def _build_in_child(spec: OverlaySpec, home: Path, out: multiprocessing.Queue) -> None:
    out.put(build(spec, home).reused)


def test_two_builders_at_once(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub", shards=5), CHANGES)
    context = multiprocessing.get_context("fork")
    out: multiprocessing.Queue = context.Queue()
    children = [context.Process(target=_build_in_child, args=(spec, tmp_path / "o", out)) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 6
    assert sorted(out.get(timeout=5) for _ in children) == [False, True, True, True, True, True]
    assert len(overlays(tmp_path / "o")) == 1


def test_a_held_lock_is_named(tmp_path: Path) -> None:
    from dflash_serve.fsio import locked

    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES)
    home = tmp_path / "o"
    with locked(home / ".locks" / f"{spec.name(home)}.lock"):
        code = (
            "import sys, pathlib, json\n"
            "from dflash_serve.overlay.build import build\n"
            "from dflash_serve.overlay.spec import OverlaySpec\n"
            "try:\n"
            "    build(OverlaySpec.from_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]), lock_timeout=0.2)\n"
            "except Exception as exc:\n"
            "    print(type(exc).__name__, exc)\n"
        )
        found = subprocess.run(
            [sys.executable, "-c", code, json.dumps(spec.as_dict()), str(home)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert "BuildFailed another process has been building" in found.stdout


def _killed_child(spec: OverlaySpec, home: Path, delay: float) -> bool:
    """Fork a builder, SIGKILL it after `delay` seconds; whether it was still alive."""
    child = os.fork()
    if child == 0:
        try:
            build(spec, home)
        finally:
            os._exit(0)
    time.sleep(delay)
    done, _ = os.waitpid(child, os.WNOHANG)
    if done == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return done == 0


def test_kill_at_200_random_points_leaves_nothing_or_a_whole_tree(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub", shards=8), CHANGES)
    dice, home, longest = random.Random(20260830), tmp_path / "o", 0.05
    path, seen = overlay_path(spec, home), {"killed": 0, "absent": 0, "whole": 0}
    for _ in range(200):
        shutil.rmtree(path, ignore_errors=True)
        killed = _killed_child(spec, home, dice.uniform(0, longest))
        # Half of the builders get done on any machine, so the kills spread over the whole of a build.
        longest *= 1.05 if killed else 0.95
        seen["killed"] += killed
        if path.exists():
            assert damage_of(path) is None
            seen["whole"] += 1
        else:
            seen["absent"] += 1
        assert len(overlays(home)) == int(path.exists()), "nothing else looks like an overlay"
    assert seen["killed"] > 50, seen
    assert seen["absent"] > 20, seen
    assert seen["whole"] > 20, seen
    shutil.rmtree(path, ignore_errors=True)
    assert damage_of(build(spec, home).path) is None
    assert temporaries(home) == [], "the next builder sweeps what the killed ones left"


SYSCALLS = ("symlink", "rename", "fsync", "mkdir", "open", "readlink")


def _crash_after(count: int, spec: OverlaySpec, home: Path, failure: Callable[[], None]) -> int:
    """Run a builder whose `count`-th file-system call fails; its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [count]

    def wrap(original: Callable) -> Callable:
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                failure()
            return original(*args, **kwargs)

        return call

    for name in SYSCALLS:
        setattr(os, name, wrap(getattr(os, name)))
    try:
        build(spec, home)
    except BuildFailed:
        os._exit(5)
    except BaseException:
        os._exit(70)
    os._exit(0 if left[0] > 0 else 1)


def test_a_crash_at_every_single_step(tmp_path: Path) -> None:
    """Random kills may miss a point: here the process dies before each file-system call in turn."""
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub", shards=3), CHANGES)
    home = tmp_path / "o"
    path = overlay_path(spec, home)
    for count in range(1, 500):
        shutil.rmtree(path, ignore_errors=True)
        status = _crash_after(count, spec, home, lambda: os._exit(9))
        assert path.exists() is False or damage_of(path) is None
        if status == 0:
            break
        assert status == 9
    assert count > 15
    assert damage_of(path) is None


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_every_single_step(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub", shards=3), CHANGES)
    home = tmp_path / "o"
    path, failures = overlay_path(spec, home), 0
    for count in range(1, 500):
        shutil.rmtree(path, ignore_errors=True)
        status = _crash_after(count, spec, home, _no_space)
        assert path.exists() is False or damage_of(path) is None
        assert status != 70, f"call {count} ended in something else than BuildFailed"
        if status == 0:
            break
        failures += status == 5
        if not path.exists():
            assert temporaries(home) == []
    assert failures > 10


TMPFS_SCRIPT = """
import json, pathlib, sys
from dflash_serve.overlay.build import build
from dflash_serve.overlay.spec import OverlaySpec
from dflash_serve.errors import DFlashError
home = pathlib.Path(sys.argv[2])
try:
    built = build(OverlaySpec.from_dict(json.loads(sys.argv[1])), home)
    print("built", built.reused)
except DFlashError as exc:
    print(type(exc).__name__, int(exc.exit_code), exc)
print(sorted(p.name for p in home.iterdir() if p.name != ".locks"))
"""


def _in_mount_namespace(setup: str, spec: OverlaySpec, home: Path) -> str:
    command = f'{setup} && exec "$0" -c "$1" "$2" "$3"'
    return subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-ec",
            command,
            sys.executable,
            TMPFS_SCRIPT,
            json.dumps(spec.as_dict()),
            home,
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_small_full_tmpfs(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES)
    home = tmp_path / "o"
    home.mkdir()
    fill = f"mount -t tmpfs -o size=64k none {home} && (dd if=/dev/zero of={home}/.fill bs=4k 2>/dev/null || true)"
    out = _in_mount_namespace(fill, spec, home)
    assert "BuildFailed 5 cannot write the overlay" in out
    assert "No space left" in out
    assert "['.fill']" in out


def test_a_read_only_cache(tmp_path: Path) -> None:
    spec = OverlaySpec("drafter", drafter(tmp_path / "hub"), CHANGES)
    home = tmp_path / "o"
    home.mkdir()
    frozen = f"mount --bind {home} {home} && mount -o remount,ro,bind {home}"
    out = _in_mount_namespace(frozen, spec, home)
    assert "BuildFailed 5 cannot write the overlay" in out
    assert "Read-only file system" in out
    build(spec, home)
    assert "built True" in _in_mount_namespace(frozen, spec, home), "a finished overlay needs no writable cache"


def test_list_show_and_gc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    source, home = drafter(tmp_path / "hub"), tmp_path / "o"
    built = [
        build(OverlaySpec("drafter", source, {"max_position_embeddings": n}), home).path
        for n in (300000, 400000, 500000)
    ]
    run = tmp_path / "state" / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(json.dumps({"overlays": [{"path": str(built[0])}]}))
    found = overlays(home)
    assert {entry.path for entry in found} == set(built)
    assert overlay(home, built[0].name).used_by == ("mine",)
    assert overlay(home, built[1].name[:-2]).changes == {"max_position_embeddings": {"from": 262144, "to": 400000}}
    old = home / ".tmp-drafter-x-y"
    old.mkdir()
    os.utime(old, (0, 0))
    fresh = home / ".tmp-drafter-x-z"
    fresh.mkdir()
    would = collect_garbage(home, keep=[built[1].name], dry_run=True)
    assert would == [built[2].name, old.name]
    assert built[2].exists()
    assert collect_garbage(home, keep=[built[1].name]) == would
    assert not built[2].exists()
    assert not old.exists()
    assert fresh.exists()
    assert {entry.path for entry in overlays(home)} == set(built[:2])
    assert (source.directory / "model.safetensors").stat().st_size > 3.8e9, "the snapshot is untouched"


def test_build_module_has_no_copy_of_weights() -> None:
    """The only files it opens for writing are config and record."""
    text = Path(build_module.__file__).read_text()
    assert "copy" not in text.replace("copied", "")
    assert text.count('open("wb")') == 1
