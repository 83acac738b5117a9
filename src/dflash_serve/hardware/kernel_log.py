"""Xid reports of the NVIDIA driver in the kernel's log, where this user may read it."""

from __future__ import annotations

import os
import re
from pathlib import Path

KMSG = "dev/kmsg"
MAX_RECORDS = 50_000
RECORD_BYTES = 8192
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d{1,5})\b", re.ASCII)


def parse_xids(text: str) -> dict[str, tuple[int, ...]]:
    """Xid numbers by PCI address (`0000:01:00`), in order: `NVRM: Xid (PCI:0000:01:00): 31, pid=...`."""
    out: dict[str, list[int]] = {}
    for match in _XID.finditer(text):
        out.setdefault(match[1].lower(), []).append(int(match[2]))
    return {bus: tuple(codes) for bus, codes in out.items()}


def records(root: Path) -> list[bytes] | None:
    """Records of the kernel's log (`priority,sequence,microseconds since boot,...;message`), oldest first, as far as it
    goes back; None when this user may not read it.
    """
    try:
        fd = os.open(root / KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found: list[bytes] = []
    try:
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(fd, RECORD_BYTES)
            except BrokenPipeError:  # the record was overwritten meanwhile; the next read goes on
                continue
            except OSError:
                break  # BlockingIOError: the end of the log
            if not record:
                break
            found.append(record)
    finally:
        os.close(fd)
    return found


def read_xids(root: Path) -> dict[str, tuple[int, ...]] | None:
    """Xids since boot, as far as the log goes back; None when this user may not read it."""
    if (found := records(root)) is None:
        return None
    return parse_xids("\n".join(r.decode("utf-8", "replace") for r in found if b"NVRM: Xid" in r))


def same_device(pci_bus_id: str | None, bus: str) -> bool:
    """Whether NVML's `00000000:01:00.0` and the log's `0000:01:00` are the same device."""
    return pci_bus_id is not None and pci_bus_id.rpartition(".")[0][-len(bus) :].lower() == bus
