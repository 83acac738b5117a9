"""Exactly one start gets a GPU, and the kernel takes the lock back from the dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.errors import ExitCode, PreflightRefused
from dflash_serve.hardware.lock import Holder, acquire, holder_of, lock_path

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
FORK = multiprocessing.get_context("fork")


def contend(directory: Path, uuids: list[str], start: float, out: int, hold: int) -> None:
    """A start in a process of its own: waits for the common moment, tries, reports, holds until told."""
    while time.monotonic() < start:
        pass
    try:
        locks = acquire(uuids, f"start {os.getpid()}", directory=directory)
    except PreflightRefused as exc:
        os.write(out, f"lost {os.getpid()} {exc.what}\n".encode())
        os._exit(int(exc.exit_code))
    os.write(out, f"won {os.getpid()}\n".encode())
    os.read(hold, 1)
    locks.release()
    os._exit(0)


def test_of_two_starts_exactly_one_wins_a_hundred_times(tmp_path: Path) -> None:
    for race in range(100):
        out_read, out = os.pipe()
        hold, hold_write = os.pipe()
        start = time.monotonic() + 0.01
        orders = ([A, B], [B, A]) if race % 2 else ([A, B], [B, C])
        pair = [FORK.Process(target=contend, args=(tmp_path, uuids, start, out, hold)) for uuids in orders]
        for process in pair:
            process.start()
        os.close(out)
        lines: list[str] = []
        with os.fdopen(out_read) as reader:
            lines += [reader.readline(), reader.readline()]
            os.write(hold_write, b"..")
            for process in pair:
                process.join(10)
        os.close(hold)
        os.close(hold_write)
        won = [line.split() for line in lines if line.startswith("won")]
        lost = [line for line in lines if line.startswith("lost")]
        assert len(won) == 1, lines
        assert len(lost) == 1, lines
        assert f"start {won[0][1]} (pid {won[0][1]}) since 2" in lost[0]
        assert sorted(process.exitcode or 0 for process in pair) == [0, ExitCode.REFUSED]
    assert holder_of(A, directory=tmp_path) is None


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that inherited the lock from a command that is gone."""
    locks = acquire([A], "tiny", directory=tmp_path)
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=locks.fds)
    locks.hand_over(server.pid)
    locks.close()
    yield server
    server.kill()
    server.wait()


def test_a_server_keeps_the_gpu_after_its_starter_and_loses_it_when_killed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(PreflightRefused, match=rf"held by tiny \(pid {sleeper.pid}\)"):
        acquire([A], "second", directory=tmp_path)
    holder = holder_of(A, directory=tmp_path)
    assert holder is not None
    assert holder.pid == sleeper.pid
    sleeper.send_signal(signal.SIGKILL)
    sleeper.wait()
    acquire([A], "second", directory=tmp_path).release()


def test_a_start_that_fails_on_one_gpu_holds_none(tmp_path: Path) -> None:
    with acquire([B], "first", directory=tmp_path):
        with pytest.raises(PreflightRefused):
            acquire([A, B, C], "second", directory=tmp_path)
        acquire([A, C], "third", directory=tmp_path).release()


def test_other_gpus_are_free(tmp_path: Path) -> None:
    with acquire([A], "first", directory=tmp_path), acquire([B], "second", directory=tmp_path) as second:
        assert second.uuids == (B,)
        assert holder_of(C, directory=tmp_path) is None


def test_the_cpu_needs_no_lock(tmp_path: Path) -> None:
    with acquire([], "tiny", directory=tmp_path) as locks:
        assert locks.fds == ()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_holders_record_is_not_taken_for_a_live_one(tmp_path: Path) -> None:
    lock_path(A, tmp_path).write_text(Holder(pid=2**22 - 1, name="old", since="2020").model_dump_json())
    assert holder_of(A, directory=tmp_path) is None
    with acquire([A], "new", directory=tmp_path):
        holder = holder_of(A, directory=tmp_path)
    assert holder is not None
    assert holder.name == "new"


@pytest.mark.parametrize("record", [b"", b"\xff\xfe", b"{}", b'{"pid": "x"}', b"[]"])
def test_a_broken_record_still_refuses(tmp_path: Path, record: bytes) -> None:
    with acquire([A], "first", directory=tmp_path) as locks:
        os.ftruncate(locks.fds[0], 0)
        os.pwrite(locks.fds[0], record, 0)
        with pytest.raises(PreflightRefused, match="another start"):
            acquire([A], "second", directory=tmp_path)


def test_a_directory_that_cannot_be_made_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightRefused, match="cannot write the lock"):
        acquire([A], "x", directory=tmp_path / "file" / "locks")


@given(st.text(max_size=300))
def test_any_uuid_is_a_file_in_the_directory(uuid: str) -> None:
    path = lock_path(uuid, Path("/x"))
    assert path.parent == Path("/x")
    assert len(path.name) < 140
