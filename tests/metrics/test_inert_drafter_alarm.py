"""A corrupted drafter, served for real: the server answers rightly, and the alarm goes off."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from tests.serve.conftest import ROOT, Shell, free_port
from tests.serve.conftest import shell as shell  # noqa: PLC0414  (a fixture)

from .prom import Prometheus
from .serve_cases import load

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]
PROMPTS = [entry["prompt"] for entry in json.loads((ROOT / "tests/data/heldout_prompts.json").read_text())["prompts"]]


def corrupt(weights: Path) -> None:
    """Negate the drafter's last norm: it ranks its candidates the wrong way round. Bfloat16 keeps the sign on top."""
    data = bytearray(weights.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start, end = json.loads(data[8 : 8 + length])["norm.weight"]["data_offsets"]
    for at in range(8 + length + start + 1, 8 + length + end, 2):
        data[at] ^= 0x80
    weights.write_bytes(data)


def test_a_corrupted_drafter_is_refused_by_verify_and_sets_off_the_alarm(shell: Shell, tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        shutil.copytree(ROOT / "recipes/tiny" / name, tmp_path / "tiny" / name)
    corrupt(tmp_path / "tiny/drafter/model.safetensors")
    recipe = tmp_path / "tiny.yaml"
    # Relative paths of a recipe are relative to recipes/.
    text = (ROOT / "recipes/tiny.yaml").read_text()
    recipe.write_text(text.replace("path: tiny/", f"path: {tmp_path}/tiny/"))
    done = shell.run("up", str(recipe), "--keep-unverified", "--port", str(free_port()), check=False, timeout=540)
    assert done.returncode == 7, done.stdout + done.stderr
    status = shell.status()
    api = shell.api()
    prometheus = Prometheus(tmp_path / "prometheus", api.url.removeprefix("http://"), free_port(), key=api.key)
    try:
        prometheus.until("up{job='dflash-serve'} == 1", 20)
        with load(api, PROMPTS):
            firing = prometheus.until("ALERTS{alertname='DrafterInert',alertstate='firing'}", 200)
        assert firing[0]["metric"]["severity"] == "critical"
        assert prometheus.value("instance:acceptance_length:rate5m") < 1.02
        checked = shell.run("metrics", "check", status["metrics_url"], check=False)
        assert checked.returncode == 7
        assert "the drafter is inert" in checked.stdout
    finally:
        prometheus.close()
