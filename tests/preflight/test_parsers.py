"""Parsers of other programs' output: the forms seen in the field, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.preflight import parsers
from dflash_serve.preflight.parsers import PublishedPort


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.95.05", (580, 95, 5)),
        ("v2.39.1-desktop.1", (2, 39, 1)),
        ("Docker Compose version v2.24.6", (2, 24, 6)),
        ("2", (2,)),
        ("", None),
        (None, None),
        ("none", None),
    ],
)
def test_version(text: str | None, version: tuple[int, ...] | None) -> None:
    assert parsers.version(text) == version


def test_docker_ports_in_all_forms() -> None:
    column = (
        "127.0.0.1:8020->8000/tcp, [::]:8021->8001/tcp, :::8022->8002/tcp, "
        "0.0.0.0:9000-9001->9000-9001/tcp, 443/tcp, 0.0.0.0:53->53/udp"
    )
    assert parsers.docker_ports(column) == [
        PublishedPort("127.0.0.1", 8020, 8000, "tcp"),
        PublishedPort("::", 8021, 8001, "tcp"),
        PublishedPort("::", 8022, 8002, "tcp"),
        PublishedPort("0.0.0.0", 9000, 9000, "tcp"),
        PublishedPort("0.0.0.0", 9001, 9001, "tcp"),
        PublishedPort("0.0.0.0", 53, 53, "udp"),
    ]
    assert parsers.docker_ports("0.0.0.0:0->1/tcp, 0.0.0.0:99999->1/tcp, 1.1.1.1:9-5->9-5/tcp") == []


def test_lines_of_cuda() -> None:
    assert parsers.required_cuda("unsatisfied condition: cuda>=12.9\n") == (12, 9)
    assert parsers.required_cuda("unsatisfied condition: brand=tesla") is None
    assert parsers.nvcc_release("Cuda compilation tools, release 12.8, V12.8.61") == (12, 8)
    assert parsers.locked_cuda("a==1\ncuda-toolkit==13.0.3.0 ; sys_platform == 'linux' \\\n") == (13, 0)
    assert parsers.locked_cuda("cuda-toolkit[cublas]==12.9.1") == (12, 9)
    assert parsers.locked_cuda("nothing") is None
    assert parsers.dotted((13, 0)) == "13.0"
    assert parsers.dotted(None) == "unknown"


def test_connector_of_the_transfer_config() -> None:
    assert (
        parsers.connector_name('{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}') == "OffloadingConnector"
    )
    assert parsers.connector_name("{}") is None


@given(st.text(max_size=300))
def test_any_text(text: str) -> None:
    found = parsers.version(text)
    assert found is None or all(part >= 0 for part in found)
    for entry in parsers.docker_ports(text):
        assert 0 < entry.port <= 65535
    parsers.required_cuda(text)
    parsers.nvcc_release(text)
    parsers.locked_cuda(text)
    parsers.connector_name(text)


@given(
    st.sampled_from(["127.0.0.1", "0.0.0.0", "[::]", "::", "[fe80::1]", "10.0.0.7"]),
    st.integers(1, 65535),
    st.integers(1, 65535),
    st.sampled_from(["tcp", "udp"]),
)
def test_a_published_port_is_read_back(address: str, port: int, inner: int, protocol: str) -> None:
    found = parsers.docker_ports(f"443/tcp, {address}:{port}->{inner}/{protocol}")
    assert found == [PublishedPort(address.strip("[]"), port, inner, protocol)]


@given(st.text(alphabet="0123456789.:->/tcpud[], ", max_size=80))
def test_text_that_looks_like_ports(text: str) -> None:
    for entry in parsers.docker_ports(text):
        assert 0 < entry.container_port <= 65535
