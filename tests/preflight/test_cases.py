"""Problems that people reported, by the id of the report: the input that shows each, and the answer it must get.

Answers and links stand in tests/data/reports/preflight.yaml.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import GIB, Series, context, findings, machine

from dflash_serve.findings import Severity
from dflash_serve.hardware.host import is_wsl
from dflash_serve.hardware.model import GpuProcess
from dflash_serve.preflight.checks.container_toolkit import gives_gpus
from dflash_serve.preflight.checks.shared_memory import service_shared_memory
from dflash_serve.preflight.context import Context, Image, Weights
from dflash_serve.preflight.parsers import docker_ports, nvcc_release, required_cuda
from dflash_serve.preflight.probes import DockerState, SharedMemory, ports_of_ps, try_bind
from dflash_serve.preflight.runner import run

R, W, N = Severity.REFUSE, Severity.WARN, Severity.NOTE
MIB = 2**20


def said(made: Context, *ids: str) -> list[tuple[str, Severity]]:
    """Findings of the whole preflight with these ids."""
    return [(finding.id, finding.severity) for finding in run(made) if finding.id in ids]


def test_b29_above_095_on_a_small_card_warns() -> None:
    assert said(context("1x3090-desktop", utilization=0.96, gpus=()), "utilization-small") == []
    made = context(machine("4x3090", memory_mib={"total": 24576, "reserved": 317, "used": 0}), utilization=0.97)
    assert said(made, "utilization-small") == [("utilization-small", W)] * 4
    assert said(context("h200", utilization=0.97), "utilization-small") == []


def test_b30_waits_for_three_equal_samples() -> None:
    """Free 60000, 60000, 67000, 67000 MiB: the third equal sample ends the wait."""
    total = 81559 - 551
    series = Series("draining", [0])
    data = machine("8xh100")
    data["gpus"] = data["gpus"][:1]
    samples = iter([60000, 60000, 67000, 67000, 67000, 80000])
    taken: list[int] = []

    def read() -> Any:
        free = next(samples)
        taken.append(free)
        data["gpus"][0]["memory_mib"]["used"] = total - free
        return context(data).inventory

    made = context(data, inventory=read(), gpus=(0,), utilization=0.8)
    made = context(
        data,
        inventory=made.inventory,
        gpus=(0,),
        utilization=0.8,
        probes={"inventory": read, "clock": lambda: series.now, "sleep": series.sleep},
    )
    assert [f.id for f in findings("gpu_busy", made)] == ["gpu-drained"]
    assert taken == [60000, 60000, 67000, 67000, 67000]


def test_b31_memory_without_a_process_is_a_dying_one() -> None:
    """`0, 23800, 24576` and no compute app: busy, after the wait showed that it does not drain."""
    series = Series("draining", [23800])
    found = findings("gpu_busy", series.context())
    assert [(f.id, f.severity) for f in found] == [("gpu-busy", R)]
    assert "dying process" in found[0].where
    assert series.samples == 3


def test_b31_a_restart_waits_until_the_old_server_has_drained() -> None:
    series = Series("draining", [23800, 15000, 15000, 2000, 0])
    assert [(f.id, f.severity) for f in findings("gpu_busy", series.context())] == [("gpu-drained", N)]


def test_b31_the_wait_ends_even_when_the_figure_never_stands_still() -> None:
    series = Series("draining", [23000 + number % 2 for number in range(500)])
    assert [f.id for f in findings("gpu_busy", series.context())] == ["gpu-busy"]
    assert 30 <= series.now < 32


def test_b31_a_process_that_shows_up_during_the_wait_is_named() -> None:
    def appear(data: dict[str, Any]) -> None:
        data["gpus"][0]["compute"] = [["$PID", 9000]]

    series = Series("draining", [23800, 23000, 9000], then=appear)
    found = findings("gpu_busy", series.context())
    assert f"pid {os.getpid()}" in found[-1].what


def test_b31_a_killed_server_that_the_driver_still_lists_is_waited_for() -> None:
    """Seen on an H200: for a moment a killed process stays listed with all its memory."""
    listed = [[4000321, 23000]]
    data = machine("draining", compute=listed)
    samples = iter([23800] * 6 + [0] * 9)

    def read() -> Any:
        used = next(samples)
        data["gpus"][0] |= {"compute": listed if used else []}
        data["gpus"][0]["memory_mib"]["used"] = used
        return context(data).inventory

    series = Series("draining", [0])
    probes = {"inventory": read, "clock": lambda: series.now, "sleep": series.sleep, "exists": lambda pid: True}
    found = findings("gpu_busy", context(data, inventory=read(), probes=probes))
    assert [(finding.id, finding.severity) for finding in found] == [("gpu-drained", N)]


def test_b31_a_process_of_another_namespace_is_refused_after_the_wait() -> None:
    found = findings("gpu_busy", context("other-namespace", probes={"exists": lambda pid: False}))
    assert [(finding.id, finding.severity) for finding in found] == [("gpu-busy", R)]
    assert "not visible from here" in found[0].what


def test_b34_a_path_with_dflash_in_an_mtp_start() -> None:
    path = "/models/dflash-lab/Qwen3.8-27B"
    assert said(context(method="mtp", model_paths=(path,)), "mtp-path") == [("mtp-path", R)]
    assert said(context(method="mtp", model_paths=("/models/Qwen3.8-27B",)), "mtp-path") == []


def test_b38_a_desktop_reduces_the_pool_and_does_not_refuse() -> None:
    """1334 MiB used with a screen: a note, and the share that still fits is accepted."""
    found = run(context("1x3090-desktop", utilization=0.92))
    assert [finding.id for finding in found if finding.severity is R] == []
    note = next(finding for finding in found if finding.id == "gpu-display")
    assert "1.3 GiB" in note.what


def test_b38_a_share_that_the_desktop_leaves_no_room_for_names_the_one_that_fits() -> None:
    found = findings("gpu_busy", context("1x3090-desktop", utilization=0.95))
    assert found[0].severity is R
    assert "--set gpu_memory_utilization=0.94" in found[0].fix


def test_b39_wsl_needs_the_variable_in_the_engines_environment() -> None:
    assert is_wsl("6.6.87.2-microsoft-standard-WSL2")
    assert said(context("wsl2-3090"), "wsl-pinned-memory") == [("wsl-pinned-memory", R)]
    made = context("wsl2-3090", engine_environment={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"})
    assert said(made, "wsl-pinned-memory") == []
    assert said(context("2x5090"), "wsl-pinned-memory") == []


def test_b40_wsl_hides_memory() -> None:
    """Free 23296 of 24576 MiB under WSL: at most 0.93."""
    data = machine("wsl2-3090", memory_mib={"total": 24576, "reserved": 0, "used": 1280})
    assert said(context(data, utilization=0.94), "utilization-wsl") == [("utilization-wsl", R)]
    assert said(context(data, utilization=0.93), "utilization-wsl") == []


def test_b43_compiler_and_torch_of_different_cuda() -> None:
    assert nvcc_release("Cuda compilation tools, release 13.3, V13.3.33") == (13, 3)
    made = context(torch_cuda=(13, 0), probes={"nvcc": lambda environment: (13, 3)})
    assert said(made, "cuda-toolkit") == [("cuda-toolkit", W)]


def test_b44_tensor_parallelism_over_two_capabilities() -> None:
    assert said(context("4080s-3080"), "gpu-mixed") == [("gpu-mixed", R)]


def test_b45_lmcache_with_a_hybrid_target() -> None:
    assert said(context(kv_connector="LMCacheConnectorV1", hybrid=True), "kv-connector") == [("kv-connector", R)]
    assert said(context(kv_connector="LMCacheConnectorV1", hybrid=False), "kv-connector") == []
    assert said(context(kv_connector="OffloadingConnector", hybrid=True), "kv-connector") == []


@pytest.mark.parametrize(
    ("tokens", "block", "refused"),
    [(7, 8, False), (15, 8, True), (None, 8, True), (15, 16, False), (16, 16, True), (0, 8, True)],
)
def test_b50_draft_tokens_and_block(tokens: int | None, block: int, refused: bool) -> None:
    made = context(num_speculative_tokens=tokens, block_size=block)
    assert said(made, "draft-tokens") == ([("draft-tokens", R)] if refused else [])


def test_b59_a_spark_reports_no_memory() -> None:
    made = context("gb10")
    gpu = made.inventory.gpus[0]
    assert (gpu.unified, gpu.memory_total, gpu.compute_capability) == (True, None, "12.1")
    assert [finding.id for finding in run(made) if finding.severity is R] == []


def test_b60_available_memory_counts_and_not_free() -> None:
    """MemFree 20 GB, MemAvailable 100 GB: it passes, with a note for engines that read MemFree."""
    old = run(context("gb10", vllm_version="0.32.0"))
    assert [finding.id for finding in old if finding.severity is R] == []
    assert ("unified-page-cache", N) in [(finding.id, finding.severity) for finding in old]
    assert said(context("gb10", vllm_version="0.33.0"), "unified-page-cache") == []


def test_b61_a_spark_above_075_is_refused_unless_forced() -> None:
    assert said(context("gb10", utilization=0.9), "utilization-unified") == [("utilization-unified", R)]
    forced = context("gb10", utilization=0.9, forced=frozenset({"utilization-unified"}))
    assert said(forced, "utilization-unified") == [("utilization-unified", W)]
    assert said(context("gb10", utilization=0.75), "utilization-unified") == []


def test_b62_a_restart_policy_without_end() -> None:
    assert said(context(restart_policy="unless-stopped"), "restart-policy") == [("restart-policy", W)]
    assert said(context(restart_policy="no"), "restart-policy") == []


def test_b64_a_driver_too_old_for_the_image() -> None:
    line = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9, please update your driver"
    assert required_cuda(line) == (12, 9)
    assert said(context("driver-too-old", engine_cuda=(13, 0)), "driver-cuda") == [("driver-cuda", R)]
    assert said(context("driver-too-old", engine_cuda=(12, 9)), "driver-cuda") == []


def test_b67_docker_without_the_nvidia_runtime() -> None:
    assert not gives_gpus({"Runtimes": {"runc": {}}})
    assert gives_gpus({"Runtimes": {"nvidia": {}}})
    assert gives_gpus({"Runtimes": {}, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=0"}]})
    made = context(runtime="docker", probes={"docker": lambda: DockerState("docker", info={"Runtimes": {"runc": {}}})})
    assert said(made, "container-toolkit") == [("container-toolkit", R)]


def test_b68_a_nightly_tag() -> None:
    made = context(runtime="docker", image=Image("vllm/vllm-openai:nightly-0a1b2c3"))
    assert said(made, "image-nightly") == [("image-nightly", W)]


def test_b71_an_index_of_66_shards_and_65_files(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    names = [f"model-{number:05d}-of-00066.safetensors" for number in range(1, 67)]
    for number, name in enumerate(names[:-1]):
        unique = header.replace(b'"w"', f'"w{number}"'.encode())
        (tmp_path / name).write_bytes(len(unique).to_bytes(8, "little") + unique + bytes(4))
    (tmp_path / f"{names[-1]}.incomplete").write_bytes(b"")
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    made = context(weights=(Weights("target", tmp_path, tokenizer=True),))
    ids = said(made, "checkpoint-missing-shard", "checkpoint-partial")
    assert ("checkpoint-missing-shard", R) in ids
    assert ("checkpoint-partial", N) in ids


def test_b73_shared_memory_of_a_container() -> None:
    small = {"shared_memory": lambda: SharedMemory(64 * MIB, 64 * MIB)}
    assert said(context(probes=small), "shared-memory") == [("shared-memory", R)]
    assert said(context(gpus=(0,), tensor_parallel_size=1, probes=small), "shared-memory") == []
    for service, refused in (
        ({}, True),
        ({"shm_size": "64m"}, True),
        ({"shm_size": "8gb"}, False),
        ({"ipc": "host"}, False),
    ):
        made = context(runtime="docker", compose_service=service)
        assert bool(said(made, "shared-memory")) is refused, service
    assert service_shared_memory({"shm_size": 8 * GIB}) == 8 * GIB


def test_b76_a_port_that_is_taken_is_seen_before_the_start() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        made = context(port=port, probes={"bind": try_bind})
        found = findings("port", made)
        assert try_bind("0.0.0.0", port).number == errno.EADDRINUSE
    assert [(finding.id, finding.severity) for finding in found] == [("port-taken", R)]
    assert f"port {port}" in found[0].what


@pytest.mark.parametrize("column", ["127.0.0.1:8020->8000/tcp", "[::]:8020->8000/tcp", ":::8020->8000/tcp"])
def test_b77_published_ports_on_any_address(column: str) -> None:
    assert [entry.port for entry in docker_ports(column)] == [8020]
    assert ports_of_ps({"web": column}) == {8020: "web"}


def test_b81_a_cache_that_root_owns(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    uid = tmp_path.stat().st_uid
    made = context(runtime="docker", image=Image(uid=uid + 1000), writable=(tmp_path,))
    assert said(made, "container-user") == [("container-user", R)]


def test_b83_peer_transfers_over_pcie_on_blackwell() -> None:
    data = machine("2x5090")
    data["links"] = {"*.*": {"p2p": 0, "nvlink": 5, "topology": 30}}
    found = findings("p2p", context(data))
    assert [(finding.id, finding.severity) for finding in found] == [("p2p-hang", N)]
    assert "NCCL_P2P_DISABLE=1" in found[0].fix
    assert findings("p2p", context("8xh100")) == []
    assert findings("p2p", context("2x5090")) == []  # its driver refuses peer transfers anyway


def test_b84_a_vgpu_shim() -> None:
    made = context(user_environment={"LD_PRELOAD": "/usr/local/vgpu/libvgpu.so:/x.so"})
    assert said(made, "vgpu-shim") == [("vgpu-shim", W)]
    switched = context(
        user_environment={"LD_PRELOAD": "/usr/local/vgpu/libvgpu.so"},
        engine_environment={"CUDA_DISABLE_CONTROL": "true"},
    )
    assert said(switched, "vgpu-shim") == []


def test_b86_memory_decides_where_utilization_is_not_available() -> None:
    made = context("utilization-na")
    assert made.inventory.gpus[0].utilization_percent is None
    assert said(made, "gpu-busy") == [("gpu-busy", R)]


def test_a_process_is_described_with_all_that_is_known() -> None:
    process = GpuProcess(pid=7, name="python vllm serve", user="alice", memory=3 * GIB, container="web")
    assert process.describe() == "pid 7 (python vllm serve, alice, container web, 3.0 GiB)"
    assert GpuProcess(pid=7).describe() == "pid 7 (not visible from here)"


REPORTS = Path(__file__).resolve().parents[1] / "data" / "reports" / "preflight.yaml"


@pytest.mark.parametrize(("id", "case"), yaml.safe_load(REPORTS.read_text()).items())
def test_the_mapping_of_cases_names_tests_that_exist(id: str, case: dict[str, Any]) -> None:
    assert case["how"]
    assert case["answer"] in {"fixed", "refused", "warned", "detected"}
    for node in case["tests"]:
        file, _, name = node.partition("::")
        assert name.startswith(f"test_{id.lower()}_")
        assert f"def {name}(" in (REPORTS.parents[3] / file).read_text()
