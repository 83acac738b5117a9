"""The trained tiny pair: headers against config, its overlays, and a config that lost its causality."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.snapshot import check_snapshot
from dflash_serve.checkpoint.tensor_bytes import drafter_from_config, from_headers, target_from_config
from dflash_serve.overlay.build import build
from dflash_serve.overlay.decide import decide
from dflash_serve.overlay.spec import SnapshotSource
from dflash_serve.overlay.validate import validate_pair

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny"
TARGET, DRAFTER = SnapshotSource(TINY / "target"), SnapshotSource(TINY / "drafter")


def test_real_headers_and_config_agree_for_every_group() -> None:
    assert check_snapshot(TARGET.directory) == []
    assert check_snapshot(DRAFTER.directory) == []
    assert from_headers(TARGET.directory).groups == target_from_config(read_target(TARGET.directory)).groups
    assert from_headers(DRAFTER.directory).groups == drafter_from_config(read_drafter(DRAFTER.directory)).groups


def test_the_pair_fits_and_needs_its_overlay_for_4096_tokens(tmp_path: Path) -> None:
    target, drafter = read_target(TARGET.directory), read_drafter(DRAFTER.directory)
    assert validate_pair(target, drafter) == []
    old = decide(target, drafter, 4096, "0.32.0+cpu", target_source=TARGET, drafter_source=DRAFTER)
    assert [(d.kind, d.needed) for d in old] == [("target", False), ("drafter", True)]
    new = decide(target, drafter, 4096, "0.33.0", target_source=TARGET, drafter_source=DRAFTER)
    assert [d.needed for d in new] == [False, False]
    assert old[1].spec is not None
    built = build(old[1].spec, tmp_path, target=target)
    served = read_drafter(built.path)
    assert served.max_position_embeddings == 4096
    assert validate_pair(target, served, window=4096, vllm_version="0.32.0") == []


def test_a_drafter_that_lost_its_causality_is_repaired(tmp_path: Path) -> None:
    place = shutil.copytree(DRAFTER.directory, tmp_path / "lost")
    found = json.loads((place / "config.json").read_text())
    del found["is_causal"]
    (place / "config.json").write_text(json.dumps(found))
    lost, target = read_drafter(place), read_target(TARGET.directory)
    assert [f.id for f in validate_pair(target, lost) if f.severity.value == "refuse"] == ["drafter-causality"]
    decisions = decide(target, lost, 1024, "0.32.0", target_source=TARGET, drafter_source=SnapshotSource(place))
    (spec,) = [d.spec for d in decisions if d.spec is not None]
    assert spec.changes == {"is_causal": False}
    assert validate_pair(target, read_drafter(build(spec, tmp_path / "o").path)) == []
