"""The inventory against a compiled stand-in for NVML: each described machine says what must be seen of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_machine import SOURCE, describe, host_of, inventory_of, library, names, playing
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.hardware import inventory as module
from dflash_serve.hardware.inventory import read
from dflash_serve.hardware.model import Inventory
from dflash_serve.hardware.utilization import utilization_limit


def look(inventory: Inventory, path: str) -> Any:
    """The value at `gpus.0.name`, `len(links)`, `usable(0)` or `free(0)`."""
    if match := re.fullmatch(r"len\((.+)\)", path):
        return len(look(inventory, match[1]))
    if match := re.fullmatch(r"(usable|free)\((\d+)\)", path):
        gpu = inventory.gpus[int(match[2])]
        return inventory.usable_bytes(gpu) if match[1] == "usable" else inventory.free_bytes(gpu)
    value: Any = inventory
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def test_there_are_enough_machines() -> None:
    assert len(names()) >= 20


@pytest.mark.parametrize("name", names())
def test_a_machine_is_read_as_described(name: str) -> None:
    machine = describe(name)
    inventory = inventory_of(machine)
    assert machine["expect"]
    for path, wanted in machine["expect"].items():
        if path.endswith("?"):
            assert wanted.lower() in str(look(inventory, path[:-1])).lower(), path
        else:
            assert look(inventory, path) == wanted, path
    for finding in inventory.findings:
        assert finding.severity.value in {"note", "warn"}
        assert all(line.isprintable() for line in finding.lines())
    assert Inventory.model_validate_json(inventory.model_dump_json()) == inventory


@pytest.mark.parametrize(
    ("name", "held_mib"),
    [
        ("2x5090", 0),
        ("draining", 0),
        ("busy-vllm", 0),
        ("other-namespace", 0),
        ("1x3090-desktop", 1334),
        ("wsl2-3090", 963),
    ],
)
def test_a_plan_counts_on_what_a_server_will_leave_and_not_on_what_a_desktop_keeps(name: str, held_mib: int) -> None:
    inventory = inventory_of(name)
    gpu = inventory.gpus[0]
    assert inventory.plannable_bytes(gpu) == (gpu.memory_usable or 0) - held_mib * 2**20


def test_a_plan_for_unified_memory_counts_on_what_is_available() -> None:
    inventory = inventory_of("gb10")
    assert inventory.plannable_bytes(inventory.gpus[0]) == 100 * 2**30


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [("gb10", "unified", 0.75), ("wsl2-3090", "wsl", 0.93), ("2x5090", "small", 0.95), ("h200", None, None)],
)
def test_the_share_that_this_kind_of_machine_can_stand(name: str, kind: str | None, limit: float | None) -> None:
    inventory = inventory_of(name)
    found = utilization_limit(inventory, inventory.gpus[0])
    assert (found and found[0]) == kind
    assert (found and found[1].limit) == limit


def test_a_process_is_named_with_its_user() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "vllm", "serve"])
    try:
        process = inventory_of("busy-vllm", pid=child.pid).gpus[0].processes[0]
    finally:
        child.kill()
        child.wait()
    assert process.pid == child.pid
    assert process.name is not None
    assert process.name.startswith("python")
    assert process.user
    assert "21.0 GiB" in process.describe()


def test_the_container_of_a_process_is_named(tmp_path: Path) -> None:
    full = "a" * 64
    cgroup = tmp_path / "proc" / str(os.getpid()) / "cgroup"
    cgroup.parent.mkdir(parents=True)
    cgroup.write_text(f"0::/system.slice/docker-{full}.scope\n")
    machine = describe("busy-vllm")
    with playing(machine):
        named = read(root=tmp_path, host=host_of(machine), names=lambda ids: {full: "web"})
        unnamed = read(root=tmp_path, host=host_of(machine), names=lambda ids: {})
    assert named.gpus[0].processes[0].container == "web"
    assert unnamed.gpus[0].processes[0].container == "a" * 12


def test_a_gpu_that_misbehaved_is_noted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text("6,1,2,-;NVRM: Xid (PCI:0000:02:00): 31, pid=812, name=python3")
    machine = describe("2x5090")
    with playing(machine):
        inventory = read(root=tmp_path, host=host_of(machine))
    assert [gpu.xids for gpu in inventory.gpus] == [(), (31,)]
    assert [(finding.id, finding.where) for finding in inventory.findings] == [("gpu-xid", inventory.gpus[1].label)]


def test_a_driver_that_hangs_is_reported_and_does_not_hang_us() -> None:
    machine = describe("2x5090") | {"hang_seconds": 1.5}
    with playing(machine):
        start = time.monotonic()
        inventory = read(host=host_of(machine), timeout=0.2)
        assert time.monotonic() - start < 1.4
        time.sleep(1.6)  # the library is one a process: let the hung call end before the next test
    assert inventory.gpus == ()
    assert inventory.nvml_error is not None
    assert "did not answer" in inventory.nvml_error
    assert inventory.nvml_fix


def test_the_bindings_find_the_library_by_its_name(tmp_path: Path) -> None:
    """In a process of its own, through the dynamic loader's search path, as with a real driver."""
    machine = describe("h200")
    code = "from dflash_serve.hardware.inventory import read; print(read().gpus[0].name)"
    with playing(machine) as path:
        env = {**os.environ, "LD_LIBRARY_PATH": str(library().parent), "FAKE_NVML_FILE": str(path)}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "NVIDIA H200"


def test_without_the_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    inventory = read(host=host_of(describe("2x5090")))
    assert inventory.gpus == ()
    assert inventory.nvml_error is not None
    assert "Not Found" in inventory.nvml_error
    assert inventory.nvml_fix is not None
    assert "driver" in inventory.nvml_fix


def test_without_the_bindings_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    inventory = read(host=host_of(describe("2x5090")))
    assert inventory.nvml_error is not None
    assert "nvidia-ml-py" in inventory.nvml_error


def test_pynvml_is_imported_late() -> None:
    code = f"import sys; import {module.__name__}; sys.exit('pynvml' in sys.modules or 'docker' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FUNCTIONS = re.findall(r"^int (nvml\w+)\(", SOURCE.read_text(), re.MULTILINE)
CODES = [*range(1, 31), 999, 12345, 2**31 - 1]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["2x5090", "h200-mig", "8xh100", "gb10"]),
    st.dictionaries(st.sampled_from(FUNCTIONS), st.sampled_from(CODES), max_size=8),
    st.dictionaries(st.sampled_from(FUNCTIONS), st.sampled_from(CODES), max_size=8),
)
def test_any_call_may_fail_with_any_error(name: str, all_gpus: dict[str, int], first: dict[str, int]) -> None:
    machine = describe(name)
    machine["errors"] = all_gpus
    machine["gpus"][0]["errors"] = first
    inventory = inventory_of(machine)
    assert inventory.nvml_error or len(inventory.gpus) <= len(machine["gpus"])


TEXT = st.text(st.characters(blacklist_characters="\n\t\r\0", codec="utf-8"), max_size=120)
ESCAPES = st.lists(st.integers(1, 255), max_size=60).map(lambda codes: "".join(f"\\x{c:02x}" for c in codes))


@settings(max_examples=60, deadline=None)
@given(st.one_of(TEXT, ESCAPES), st.one_of(TEXT, ESCAPES), st.integers(-5, 2**31 - 1))
def test_any_string_and_number_from_the_driver(driver: str, name: str, cuda: int) -> None:
    machine = describe("2x5090")
    machine["driver"], machine["cuda"] = driver, cuda
    machine["gpus"][0]["name"] = name
    inventory = inventory_of(machine)
    assert inventory.gpus[0].name.isprintable()
    assert inventory.driver_version is None or inventory.driver_version.isprintable()
