"""Host facts from files: parsers take anything, and the forms seen in the field give the right values."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.hardware.host import (
    container_id,
    is_wsl,
    memory_limit,
    parse_cpuinfo,
    parse_meminfo,
    read_host,
)
from dflash_serve.hardware.kernel_log import parse_xids, read_xids, same_device
from dflash_serve.hardware.processes import program_of, short_command

FULL = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("kernel", "wsl"),
    [
        ("6.6.87.2-microsoft-standard-WSL2", True),
        ("5.15.167.4-Microsoft", True),
        ("6.17.0-1031-nvidia", False),
        ("6.8.0-60-generic", False),
    ],
)
def test_wsl_by_the_kernel_release(kernel: str, wsl: bool) -> None:
    assert is_wsl(kernel) is wsl


def test_meminfo_of_a_spark_whose_page_cache_is_full() -> None:
    memory = parse_meminfo("MemTotal: 127600000 kB\nMemFree:  20000000 kB\nMemAvailable: 100000000 kB\nJunk\n")
    assert memory == {
        "MemTotal": 127600000 * 1024,
        "MemFree": 20000000 * 1024,
        "MemAvailable": 100000000 * 1024,
    }


def test_cpuinfo_of_both_architectures() -> None:
    x86 = "processor\t: 0\nmodel name\t: AMD  EPYC 9654\nflags\t\t: fpu avx2 avx512f\nprocessor\t: 1\nflags : none\n"
    assert parse_cpuinfo(x86) == ("AMD EPYC 9654", ("avx2", "avx512f", "fpu"))
    assert parse_cpuinfo("processor : 0\nFeatures\t: fp asimd sve\n") == (None, ("asimd", "fp", "sve"))


@pytest.mark.parametrize(
    "line",
    [
        f"0::/system.slice/docker-{FULL}.scope",
        f"12:memory:/docker/{FULL}",
        f"0::/kubepods.slice/kubepods-besteffort.slice/cri-containerd-{FULL}.scope",
        f"0::/kubepods/besteffort/pod1/{FULL}",
        f"0::/machine.slice/libpod-{FULL}.scope/container",
        f"0::/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{FULL}",
        f"0::/../docker-{FULL}.scope",
    ],
)
def test_container_ids_in_the_forms_of_all_engines(line: str) -> None:
    assert container_id(f"1:name=systemd:/\n{line}\n") == FULL


def test_a_session_is_no_container() -> None:
    assert container_id("0::/user.slice/user-1000.slice/session-2.scope\n") is None


def test_the_tightest_memory_limit_of_the_ancestors_holds(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    for path, value in (("a", "8589934592"), ("a/b", "max")):
        (tmp_path / "sys/fs/cgroup" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / path / "memory.max").write_text(value + "\n")
    assert memory_limit(tmp_path) == 8589934592


def test_the_limit_of_version_one_and_of_a_private_namespace(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,memory:/docker/x\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    limit = tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    limit.write_text("4294967296")
    assert memory_limit(tmp_path) == 4294967296
    limit.write_text("9223372036854771712")
    assert memory_limit(tmp_path) is None


def test_an_empty_root_gives_unknowns(tmp_path: Path) -> None:
    host = read_host(tmp_path, kernel="x")
    assert (host.ram_total, host.memory_limit, host.iommu, host.in_container) == (None, None, None, False)


def test_a_docker_container_and_a_pod_are_seen(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    assert read_host(tmp_path).in_container
    pod = tmp_path / "pod"
    (pod / "var/run/secrets/kubernetes.io").mkdir(parents=True)
    assert read_host(pod).in_container


@pytest.mark.parametrize(
    ("argv", "short"),
    [
        (["/usr/bin/python3", "/opt/venv/bin/vllm", "serve", "/models/x"], "python3 vllm serve"),
        (
            ["python", "-u", "-m", "vllm.entrypoints.cli.main", "--api-key", "secret"],
            "python -m vllm.entrypoints.cli.main",
        ),
        (["VLLM::EngineCore"], "VLLM::EngineCore"),
        (["python3", "-c", "token = 'secret'", "serve"], "python3 -c"),
        (["/usr/lib/xorg/Xorg", "-core", ":0"], "Xorg"),
        (["python", "a.py", "--token", "secret"], "python a.py"),
        (["nginx: worker process"], "nginx:"),
        ([], None),
        ([" "], None),
    ],
)
def test_a_command_is_shown_without_its_arguments(argv: list[str], short: str | None) -> None:
    assert short_command(argv) == short


@given(st.lists(st.text(max_size=40), max_size=6))
def test_short_command_is_printable_and_short(argv: list[str]) -> None:
    text = short_command(argv)
    assert text is None or (text.isprintable() and len(text) <= 80)


@given(st.integers(-(2**40), 2**70))
def test_any_pid_is_a_program_or_unknown(pid: int) -> None:
    name, _ = program_of(pid)
    assert name is None or isinstance(name, str)


def test_xids_by_device(tmp_path: Path) -> None:
    lines = (
        "6,1,2,-;NVRM: Xid (PCI:0000:01:00): 31, pid=812, name=python3, Ch 00000008, MMU Fault FAULT_PDE",
        "6,2,3,-;NVRM: Xid (PCI:0000:C1:00): 79, GPU has fallen off the bus.",
        "6,3,4,-;NVRM: Xid (PCI:0000:01:00.0): 13, Graphics SM Warp Exception",
        "6,4,5,-;usb 1-1: new device",
    )
    assert parse_xids("\n".join(lines)) == {"0000:01:00": (31, 13), "0000:c1:00": (79,)}
    assert same_device("00000000:01:00.0", "0000:01:00")
    assert same_device("00000000:C1:00.0", "0000:c1:00")
    assert not same_device("00000000:02:00.0", "0000:01:00")
    assert not same_device(None, "0000:01:00")
    (tmp_path / "dev").mkdir()
    assert read_xids(tmp_path) is None
    (tmp_path / "dev" / "kmsg").write_text("\n".join(lines))
    assert read_xids(tmp_path) == parse_xids("\n".join(lines))


@given(st.text())
def test_parsers_take_any_text(text: str) -> None:
    parse_meminfo(text)
    parse_cpuinfo(text)
    parse_xids(text)
    found = container_id(text)
    assert found is None or len(found) == 64
