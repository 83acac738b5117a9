"""Readers of what other programs print: ports, versions, requirements. Any text is taken; unknown is None or empty."""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, ...]


def version(text: str | None) -> Version | None:
    """The first dotted number in a text: `v2.39.1-desktop.1` as (2, 39, 1)."""
    match = re.search(r"\d{1,6}(?:\.\d{1,6}){0,3}", text or "", re.ASCII)
    return tuple(int(part) for part in match[0].split(".")) if match else None


@dataclass(frozen=True)
class PublishedPort:
    """One port of a container on the host."""

    address: str
    port: int
    container_port: int
    protocol: str


def docker_ports(text: str) -> list[PublishedPort]:
    """The ports column of `docker ps`: any address, IPv6 in brackets or bare, ranges.

    `127.0.0.1:8020->8000/tcp, [::]:8020->8000/tcp, 0.0.0.0:9000-9001->9000-9001/tcp, 443/tcp`.
    """
    out: list[PublishedPort] = []
    pattern = re.compile(
        r"^(?P<address>\[[^\]]*\]|[^\s]*):(?P<low>\d{1,5})(?:-(?P<high>\d{1,5}))?"
        r"->(?P<inner>\d{1,5})(?:-\d{1,5})?/(?P<protocol>tcp|udp|sctp)$",
        re.ASCII,
    )
    for part in text.split(","):
        match = pattern.match(part.strip())
        if match is None:
            continue
        low, inner = int(match["low"]), int(match["inner"])
        high = int(match["high"] or low)
        if not (0 < low <= high <= 65535 and 0 < inner <= 65535):
            continue
        for offset in range(high - low + 1):
            address = match["address"].strip("[]")
            out.append(PublishedPort(address, low + offset, inner + offset, match["protocol"]))
    return out


def required_cuda(text: str) -> Version | None:
    """The CUDA that an image asks of the driver, from the container CLI's refusal.

    `nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9`.
    """
    match = re.search(r"unsatisfied condition:\s*cuda\s*>=\s*(\d{1,3}(?:\.\d{1,3})?)", text, re.ASCII)
    return version(match[1]) if match else None


def nvcc_release(text: str) -> Version | None:
    """`Cuda compilation tools, release 13.3, V13.3.33` as (13, 3)."""
    match = re.search(r"release\s+(\d{1,3})\.(\d{1,3})", text, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def locked_cuda(text: str) -> Version | None:
    """The CUDA toolkit of a requirement file: `cuda-toolkit==13.0.3.0` as (13, 0)."""
    match = re.search(r"^cuda-toolkit(?:\[[^\]]*\])?==(\d{1,3})\.(\d{1,3})", text, re.MULTILINE | re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def connector_name(kv_transfer_config: str) -> str | None:
    """`kv_connector` in the JSON of `--kv-transfer-config`; None when it isn't there."""
    match = re.search(r'"kv_connector"\s*:\s*"([\w.]{1,100})"', kv_transfer_config, re.ASCII)
    return match[1] if match else None


def dotted(value: Version | None) -> str:
    """(13, 0) as `13.0`."""
    return ".".join(str(part) for part in value) if value else "unknown"
