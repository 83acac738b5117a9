"""Files are whole or absent, also when the writer is killed; locks have one holder and die with it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.fsio import atomic_write, atomic_write_json, locked


@settings(max_examples=60)
@given(old=st.binary(max_size=2000), new=st.binary(max_size=2000))
def test_a_failed_write_leaves_the_old_content(
    tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes
) -> None:
    path = tmp_path_factory.mktemp("w") / "f"
    atomic_write(path, old)

    class Broken(bytes):
        pass

    with pytest.raises(OSError, match="no space"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space")))
        atomic_write(path, new)
    assert path.read_bytes() == old
    assert [p.name for p in path.parent.iterdir()] == ["f"]


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "key"
    atomic_write(path, "secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_killed_writer_leaves_old_or_new(tmp_path: Path) -> None:
    """kill -9 at ten random points of a loop of writes: the file always parses and belongs to one generation."""
    path = tmp_path / "state.json"
    atomic_write_json(path, {"n": -1, "fill": "x" * 50_000, "end": -1})
    script = (
        "import sys, pathlib\n"
        "from dflash_serve.fsio import atomic_write_json\n"
        "n = 0\n"
        "while True:\n"
        "    atomic_write_json(pathlib.Path(sys.argv[1]), {'n': n, 'fill': 'x' * 50_000, 'end': n})\n"
        "    n += 1\n"
        "    print(n, flush=True)\n"
    )
    rng = random.Random(7)
    for _ in range(10):
        writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        value = json.loads(path.read_text())
        assert value["n"] == value["end"] >= 0
    atomic_write_json(path, {})
    assert json.loads(path.read_text()) == {}


def test_a_lock_has_one_holder_and_dies_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "l"
    script = (
        "import sys, pathlib, time\nfrom dflash_serve.fsio import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(TimeoutError), locked(lock, timeout=0.05):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with locked(lock, timeout=2):
        pass
