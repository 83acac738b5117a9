"""The probes on this machine: sockets are bound, processes found, programs run."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_serve.preflight import probes
from dflash_serve.preflight.probes import docker_state, free_disk, nvcc, port_owner, shared_memory, try_bind


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_free_port_can_be_bound_twice() -> None:
    port = free_port()
    for host in ("127.0.0.1", "localhost", "0.0.0.0", ""):
        assert try_bind(host, port).ok, host


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_on_the_address_and_on_all(listens: str) -> None:
    with socket.socket() as server:
        server.bind((listens, 0))
        server.listen(1)
        port = server.getsockname()[1]
        assert try_bind("127.0.0.1", port).number == errno.EADDRINUSE
        assert try_bind("0.0.0.0", port).number == errno.EADDRINUSE


def test_another_loopback_address_is_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        assert try_bind("127.0.0.2", server.getsockname()[1]).ok


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "bad host", "\0", "a" * 300])
def test_an_address_that_is_not_ours(host: str) -> None:
    result = try_bind(host, free_port())
    assert not result.ok
    assert result.number != errno.EADDRINUSE


def test_a_name_with_an_address_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    stream = (socket.SOCK_STREAM, 6, "")
    known = [(socket.AF_INET6, *stream, ("2001:db8::1", port, 0, 0)), (socket.AF_INET, *stream, ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    assert try_bind("localhost", port).ok
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known[:1])
    assert not try_bind("localhost", port).ok


def test_the_owner_of_a_port_is_named() -> None:
    serve = "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    code = f"import socket, sys; {serve}; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        owner = port_owner(int(child.stdout.readline()))
    finally:
        child.communicate("")
    assert owner is not None
    assert owner.startswith(f"pid {child.pid} (python")
    assert port_owner(free_port()) is None


def test_disk_and_shared_memory_are_measured(tmp_path: Path) -> None:
    free = free_disk(tmp_path / "not" / "yet" / "there")
    assert free is not None
    assert free > 0
    shm = shared_memory()
    assert shm is None or 0 <= shm.free <= shm.total


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_nvcc_of_cuda_home_goes_before_the_path(tmp_path: Path) -> None:
    script(tmp_path / "home/bin/nvcc", "echo 'Cuda compilation tools, release 13.3, V13.3.33'")
    script(tmp_path / "path/nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.1'")
    path = str(tmp_path / "path")
    assert nvcc({"CUDA_HOME": str(tmp_path / "home"), "PATH": path}) == (13, 3)
    assert nvcc({"PATH": path}) == (12, 8)
    assert nvcc({"PATH": str(tmp_path)}) is None
    script(tmp_path / "path/nvcc", "exit 1")
    assert nvcc({"PATH": path}) is None


def test_docker_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    docker_state.cache_clear()
    state = docker_state()
    docker_state.cache_clear()
    assert (state.binary, state.problem) == (None, "unreachable")
    assert state.detail
    assert probes.compose_version() is None


def test_docker_that_may_not_be_used(tmp_path: Path) -> None:
    """A socket without rights for this user: told apart from an engine that is down."""
    tmp_path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "docker.sock"))
        server.listen(1)
        (tmp_path / "docker.sock").chmod(0o000)
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.environ["DOCKER_HOST"] = f"unix://{tmp_path}/docker.sock"
            if os.geteuid() == 0:  # whom no mode bits stop
                os.setuid(65534)
            docker_state.cache_clear()
            os.write(write, str(docker_state().problem).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            assert answer.read() == "permission"
        os.waitpid(pid, 0)


def test_compose_prints_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "docker", 'test "$1 $2 $3" = "compose version --short" && echo 2.39.1')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probes.compose_version() == "2.39.1"


class Answering:
    """A Docker client whose engine answers."""

    def __init__(self, **_: object) -> None:
        self.api = self

    def info(self) -> dict[str, object]:
        return {"Runtimes": {"nvidia": {}}}

    def containers(self) -> list[dict[str, object]]:
        ports = [{"PublicPort": 8020, "PrivatePort": 8000}, {"PrivatePort": 443}]
        return [{"Names": ["/web"], "Ports": ports}, {"Names": None, "Ports": None}]

    def close(self) -> None:
        pass


def test_docker_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import docker

    monkeypatch.setattr(docker, "from_env", Answering)
    docker_state.cache_clear()
    state = docker_state()
    docker_state.cache_clear()
    assert state.problem is None
    assert state.ports == {8020: "web"}
    assert "nvidia" in state.info["Runtimes"]
