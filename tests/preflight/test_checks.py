"""Every check, seen refusing (or warning, or noting) and seen passing."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from machines import DOCKER, GIB, MIB, Series, context, findings, machine

from dflash_serve.findings import Severity
from dflash_serve.preflight.context import Context, Image, Weights
from dflash_serve.preflight.probes import BindResult, DockerState, SharedMemory
from dflash_serve.preflight.registry import all_checks

R, W, N = Severity.REFUSE, Severity.WARN, Severity.NOTE


@dataclass(frozen=True)
class Seen:
    """A start that a check must object to, and the nearest one that it must let pass."""

    id: str
    severity: Severity
    bad: Callable[[], Context]
    good: Callable[[], Context]
    says: str = ""


def down(problem: str | None, **more: Any) -> dict[str, Any]:
    return {"docker": lambda: DockerState("/usr/bin/docker", problem, "socket", **more)}  # type: ignore[arg-type]


def taken(number: int) -> dict[str, Any]:
    return {
        "bind": lambda host, port: BindResult(False, number, "reason"),
        "port_owner": lambda port: "pid 7 (nginx, www)",
    }


def shm(total: int, free: int) -> dict[str, Any]:
    return {"shared_memory": lambda: SharedMemory(total, free)}


def gated(directory: Path | None) -> tuple[Weights, ...]:
    return (Weights("target", directory, repo="org/model", gated=True, revision="a" * 40),)


def pinned(revision: str | None) -> tuple[Weights, ...]:
    return (Weights("drafter", repo="org/drafter", revision=revision),)


TABLE = [
    Seen(
        "docker-binary",
        R,
        lambda: context(runtime="docker", probes={"docker": lambda: DockerState(None, "unreachable")}),
        lambda: context(runtime="docker"),
    ),
    Seen(
        "docker-daemon",
        R,
        lambda: context(runtime="docker", probes=down("unreachable")),
        lambda: context(runtime="docker"),
    ),
    Seen(
        "docker-permission",
        R,
        lambda: context(runtime="docker", probes=down("permission")),
        lambda: context(probes=down("permission")),
        "may not talk",
    ),
    Seen(
        "compose-version",
        R,
        lambda: context(runtime="docker", compose_service={}, probes={"compose": lambda: "1.29.2"}),
        lambda: context(runtime="docker", compose_service={}, probes={"compose": lambda: "v2.39.1-desktop.1"}),
        "1.29.2",
    ),
    Seen(
        "container-toolkit",
        R,
        lambda: context(runtime="docker", probes=down(None, info={"Runtimes": {"runc": {}}})),
        lambda: context(runtime="docker"),
    ),
    Seen("driver-cuda", R, lambda: context("driver-too-old"), lambda: context("2x5090"), "570.133.20"),
    Seen(
        "no-gpu",
        R,
        lambda: context("driver-not-loaded"),
        lambda: context("driver-not-loaded", variant="cpu"),
        "no NVIDIA GPU is found",
    ),
    Seen("gpu-missing", R, lambda: context(gpus=(0, 5)), lambda: context(gpus=(0, 1)), "GPU 5"),
    Seen("gpu-dead", R, lambda: context("dead-gpu"), lambda: context("dead-gpu", gpus=(0,))),
    Seen("gpu-mig", R, lambda: context("h200-mig"), lambda: context("h200-mig", gpu_uuids=("MIG-0-1",))),
    Seen(
        "gpu-mig-index",
        R,
        lambda: context("h200-mig", gpu_uuids=("MIG-0-1",)),
        lambda: context("h200-mig", gpu_uuids=("MIG-0-1",), runtime="docker"),
        "GPU 1 of 1",
    ),
    Seen("gpu-count", R, lambda: context(gpus=(0,), tensor_parallel_size=2), lambda: context(tensor_parallel_size=2)),
    Seen(
        "gpu-capability",
        R,
        lambda: context("4x3090", requires_capability=">=8.9"),
        lambda: context("2x5090", requires_capability=">=8.9"),
        "needs compute capability >=8.9",
    ),
    Seen("gpu-architecture", R, lambda: context("4xv100"), lambda: context("4x3090"), "no code for"),
    Seen(
        "gpu-memory",
        R,
        lambda: context("1x3090-desktop", requires_memory_gib=40),
        lambda: context(requires_memory_gib=40),
    ),
    Seen(
        "gpu-mixed",
        R,
        lambda: context("4080s-3080"),
        lambda: context("4080s-3080", tensor_parallel_size=1),
        "8.6 and 8.9",
    ),
    Seen("gpu-busy", R, lambda: context("busy-vllm"), lambda: context("draining", utilization=None), "in use by pid"),
    Seen(
        "gpu-drained",
        N,
        lambda: Series("draining", [20000, 12000, 400, 0]).context(),
        lambda: context(machine("draining", memory_mib={"total": 24576, "reserved": 317, "used": 4})),
        "drained",
    ),
    Seen("gpu-display", N, lambda: context("1x3090-desktop"), lambda: context("2x5090")),
    Seen("utilization-unified", R, lambda: context("gb10", utilization=0.9), lambda: context("gb10", utilization=0.75)),
    Seen(
        "utilization-wsl",
        R,
        lambda: context("wsl2-3090", utilization=0.95),
        lambda: context("wsl2-3090", utilization=0.93),
    ),
    Seen("utilization-small", W, lambda: context(utilization=0.96), lambda: context("h200", utilization=0.96)),
    Seen("unified-page-cache", N, lambda: context("gb10", vllm_version="0.30.0"), lambda: context("gb10")),
    Seen("port-taken", R, lambda: context(probes=taken(errno.EADDRINUSE)), lambda: context(), "nginx"),
    Seen("port-privileged", R, lambda: context(port=80, probes=taken(errno.EACCES)), lambda: context(port=8000)),
    Seen("host-address", R, lambda: context(probes=taken(errno.EADDRNOTAVAIL)), lambda: context()),
    Seen(
        "disk-space",
        R,
        lambda: context(cache_directory=Path("/c"), fetch_bytes=50 * GIB, probes={"free_disk": lambda path: 50 * GIB}),
        lambda: context(cache_directory=Path("/c"), fetch_bytes=50 * GIB, probes={"free_disk": lambda path: 52 * GIB}),
    ),
    Seen(
        "host-memory",
        R,
        lambda: context(variant="cpu", load_bytes=100 * GIB),
        lambda: context(variant="cpu", load_bytes=GIB),
    ),
    Seen("cgroup-memory", R, lambda: limited(8 * GIB), lambda: limited(32 * GIB)),
    Seen("shared-memory", R, lambda: context(probes=shm(64 * MIB, 64 * MIB)), lambda: context(), "64"),
    Seen(
        "shared-memory-full",
        W,
        lambda: context(probes=shm(16 * GIB, MIB)),
        lambda: context(gpus=(0,), tensor_parallel_size=1, probes=shm(16 * GIB, MIB)),
    ),
    Seen("hub-token", R, lambda: context(weights=gated(None)), lambda: context(weights=gated(None), hub_token=True)),
    Seen("pins", W, lambda: context(weights=pinned(None)), lambda: context(weights=pinned("a" * 40))),
    Seen(
        "image-digest",
        W,
        lambda: context(runtime="docker", image=Image("vllm/vllm-openai:v0.33.0")),
        lambda: context(runtime="docker", image=Image("vllm/vllm-openai@sha256:" + "a" * 64)),
    ),
    Seen(
        "image-nightly",
        W,
        lambda: context(runtime="docker", image=Image("vllm/vllm-openai:nightly-0123abc")),
        lambda: context(runtime="docker", image=Image("vllm/vllm-openai:v0.33.0")),
    ),
    Seen(
        "wsl-pinned-memory",
        R,
        lambda: context("wsl2-3090"),
        lambda: context("wsl2-3090", engine_environment={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}),
    ),
    Seen(
        "env-model-runner",
        R,
        lambda: context(engine_environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        lambda: context(engine_environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    ),
    Seen(
        "env-plugins",
        R,
        lambda: context(engine_environment={"VLLM_PLUGINS": "other"}),
        lambda: context(engine_environment={"VLLM_PLUGINS": "other,dflash2_patches"}),
    ),
    Seen(
        "env-vllm",
        W,
        lambda: context(runtime="container", user_environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"}),
        lambda: context(runtime="container", user_environment={"VLLM_LOGGING_LEVEL": "DEBUG", "HOME": "/"}),
    ),
    Seen(
        "kv-connector",
        R,
        lambda: context(kv_connector="LMCacheConnectorV1"),
        lambda: context(kv_connector="OffloadingConnector"),
    ),
    Seen("p2p-hang", N, lambda: context(pcie()), lambda: context(pcie(), engine_environment={"NCCL_P2P_DISABLE": "1"})),
    Seen(
        "vgpu-shim",
        W,
        lambda: context(user_environment={"LD_PRELOAD": "/usr/local/vgpu/libvgpu.so"}),
        lambda: context(user_environment={"LD_PRELOAD": "/usr/lib/libjemalloc.so"}),
    ),
    Seen(
        "restart-policy",
        W,
        lambda: context(restart_policy="unless-stopped"),
        lambda: context(restart_policy="on-failure:3"),
    ),
    Seen(
        "mtp-path",
        R,
        lambda: context(method="mtp", model_paths=("/models/DFlash-lab/Qwen",)),
        lambda: context(method="dflash2", model_paths=("/models/DFlash-lab/Qwen",)),
    ),
    Seen("draft-tokens", R, lambda: context(num_speculative_tokens=15), lambda: context(num_speculative_tokens=5)),
    Seen(
        "cuda-toolkit",
        W,
        lambda: context(probes={"nvcc": lambda env: (13, 3)}),
        lambda: context(probes={"nvcc": lambda env: (13, 0)}),
    ),
]


def test_visible_devices_of_the_shell_are_not_followed_and_that_is_said() -> None:
    plan = {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    made = context(user_environment={"CUDA_VISIBLE_DEVICES": "1"}, engine_environment=plan)
    assert [(f.id, f.severity) for f in findings("engine_environment", made)] == [("env-visible-devices", W)]
    assert findings("engine_environment", context(user_environment=plan, engine_environment=plan)) == []


def test_a_gpu_that_is_slowed_down_is_a_warning() -> None:
    hot = context("ecc-errors")
    assert [(f.id, f.severity) for f in findings("gpu_health", hot)] == [("gpu-throttled", W)]
    capped = context(machine("ecc-errors", throttle=0x04))
    assert findings("gpu_health", capped) == []


def limited(limit: int) -> Context:
    """A process that a cgroup limits."""
    made = context(load_bytes=16 * GIB)
    host = made.inventory.host.model_copy(update={"memory_limit": limit})
    return context(load_bytes=16 * GIB, inventory=made.inventory.model_copy(update={"host": host}))


def pcie() -> dict[str, Any]:
    """Two RTX 5090 whose driver allows peer transfers over PCIe."""
    data = machine("2x5090")
    data["links"] = {"*.*": {"p2p": 0, "nvlink": 5, "topology": 30}}
    return data


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.id)
def test_a_check_objects_and_lets_pass(case: Seen) -> None:
    check = next(check for check in all_checks() if case.id in check.ids)
    said = [finding for finding in check.run(case.bad()) if finding.id == case.id]
    assert said
    assert said[0].severity is case.severity
    assert case.says in said[0].what
    assert len(said[0].lines()) <= 3
    assert said[0].fix or said[0].severity is not R
    assert case.id not in {finding.id for finding in check.run(case.good())}


def snapshot(folder: Path, **files: bytes | str) -> Path:
    """A whole little checkpoint, with files replaced or (empty string) left out."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    shard = len(header).to_bytes(8, "little") + header + bytes(8)
    names: dict[str, bytes | str] = {
        "config.json": '{"architectures": ["Qwen3ForCausalLM"]}',
        "tokenizer.json": "{}",
        "model.safetensors": shard,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in {**names, **{key.replace("__", "."): value for key, value in files.items()}}.items():
        if data != "":
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def files(directory: Path | None, **more: Any) -> Context:
    """A start from that directory."""
    return context(weights=(Weights("target", directory, repo="org/model", tokenizer=True, **more),))


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    place = snapshot(tmp_path / "m")
    size = (place / "model.safetensors").stat().st_size
    assert findings("model_files", files(place, sizes={"model.safetensors": size})) == []


@pytest.mark.parametrize(
    ("id", "change", "sizes"),
    [
        ("checkpoint-config", {"config__json": ""}, {}),
        ("checkpoint-tokenizer", {"tokenizer__json": ""}, {}),
        ("checkpoint-no-weights", {"model__safetensors": ""}, {}),
        ("checkpoint-header", {"model__safetensors": b"\x08"}, {}),
        ("checkpoint-size", {}, {"model.safetensors": 999}),
        ("checkpoint-listed", {}, {"model-00002-of-00002.safetensors": 5}),
        ("checkpoint-index", {"model__safetensors__index__json": "["}, {}),
        ("checkpoint-missing-shard", {"model__safetensors__index__json": '{"weight_map": {"w": "b.safetensors"}}'}, {}),
    ],
)
def test_a_broken_checkpoint_is_refused(tmp_path: Path, id: str, change: dict[str, Any], sizes: dict[str, int]) -> None:
    said = findings("model_files", files(snapshot(tmp_path / "m", **change), sizes=sizes))
    assert id in {finding.id for finding in said if finding.severity is R}


def test_a_link_that_leaves_the_mount_is_refused(tmp_path: Path) -> None:
    place = snapshot(tmp_path / "m", model__safetensors="")
    (tmp_path / "elsewhere").write_bytes(b"x")
    (place / "model.safetensors").symlink_to("../elsewhere")
    said = findings("model_files", files(place))
    assert [finding.id for finding in said] == ["checkpoint-broken"]
    assert "leaves the snapshot" in said[0].what


def test_absent_weights_are_refused_unless_the_start_fetches_them() -> None:
    weights = (Weights("drafter", repo="org/drafter", revision="a" * 40),)
    assert [f.id for f in findings("model_files", context(weights=weights))] == ["checkpoint-absent"]
    assert findings("model_files", context(weights=weights))[0].severity is R
    assert findings("model_files", context(weights=weights, will_fetch=True))[0].severity is N


def test_a_directory_that_is_gone_is_refused(tmp_path: Path) -> None:
    assert [f.id for f in findings("model_files", files(tmp_path / "gone"))] == ["checkpoint-broken"]


def test_the_containers_user_must_own_its_caches(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    uid = tmp_path.stat().st_uid
    for user, ids in ((uid + 1000, ["container-user"]), (uid, []), (0, []), (None, [])):
        made = context(runtime="docker", image=Image(uid=user), writable=(tmp_path, tmp_path / "new"))
        assert [finding.id for finding in findings("container_user", made)] == ids
    tmp_path.chmod(0o777)
    made = context(runtime="docker", image=Image(uid=uid + 1000), writable=(tmp_path,))
    assert findings("container_user", made) == []


def test_every_id_of_every_check_is_seen_here() -> None:
    source = Path(__file__).read_text()
    inherited = {
        "checkpoint-partial",
        "checkpoint-unlisted-shard",
        "checkpoint-duplicate-tensor",
        "checkpoint-missing-tensor",
    }
    missing = [id for check in all_checks() for id in check.ids if f'"{id}"' not in source and id not in inherited]
    assert missing == []


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.name)
def test_an_ordinary_start_passes(check: Any) -> None:
    assert [finding for finding in check.run(context()) if finding.severity is R] == []
    assert check.summary


def test_a_container_on_the_port_is_named() -> None:
    busy = {"bind": lambda host, port: BindResult(False, errno.EADDRINUSE, ""), "port_owner": lambda port: None}
    docker = {"docker": lambda: DockerState(DOCKER.binary, ports={8000: "old-server"})}
    said = findings("port", context(probes={**busy, **docker}))
    assert "container old-server" in said[0].what
    assert said[0].fix.startswith("docker stop old-server")
    said = findings("port", context(probes=busy))
    assert "another user" in said[0].what


def test_pins_are_demanded_with_require_pins() -> None:
    said = findings("pins", context(weights=pinned(None), require_pins=True))
    assert said[0].severity is R


def test_a_malformed_digest_is_refused() -> None:
    said = findings("image", context(runtime="docker", image=Image("vllm/vllm-openai@sha256:abc")))
    assert [(finding.id, finding.severity) for finding in said] == [("image-digest", R)]


def test_variables_of_the_shell_do_not_reach_a_native_engine() -> None:
    strays = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ATTENTION_BACKEND": "X"}
    said = findings("engine_environment", context(user_environment=strays))
    assert [(finding.id, finding.severity) for finding in said] == [("env-vllm", N)]
    assert "VLLM_ATTENTION_BACKEND, VLLM_USE_V2_MODEL_RUNNER" in said[0].what


def test_alike_capability_of_unlike_cards_is_a_warning() -> None:
    data = machine("2x5090", name="NVIDIA RTX PRO 6000", memory_mib={"total": 97887, "reserved": 638, "used": 4})
    assert [(f.id, f.severity) for f in findings("gpu_class", context(data))] == [("gpu-mixed", W)]


def test_an_unknown_connector_is_a_warning() -> None:
    for name in ("LMCacheMPConnector", "SomeConnector"):
        assert findings("kv_connector", context(kv_connector=name))[0].severity is W
    assert findings("kv_connector", context(kv_connector="LMCacheConnectorV1", hybrid=False)) == []


def test_a_busy_mig_slice_is_refused_and_its_neighbour_is_not() -> None:
    assert [f.id for f in findings("gpu_busy", context("h200-mig", gpu_uuids=("MIG-0-0",)))] == ["gpu-busy"]
    assert findings("gpu_busy", context("h200-mig", gpu_uuids=("MIG-0-1",))) == []


def test_weights_and_engine_on_one_file_system_need_room_for_both(tmp_path: Path) -> None:
    def said(free: int) -> list[str]:
        made = context(
            cache_directory=tmp_path / "weights",
            fetch_bytes=10 * GIB,
            build_directory=tmp_path / "engine",
            build_bytes=5 * GIB,
            probes={"free_disk": lambda path: free},
        )
        return [finding.what for finding in findings("disk", made)]

    assert said(16 * GIB) == []
    assert said(15 * GIB) == ["15.0 GiB are still to be written, 15.0 GiB are free"]
