"""The native runtime: the engine as a process of its own session, in a virtual environment, without Docker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dflash_serve.errors import StartFailed
from dflash_serve.plan.model import Plan
from dflash_serve.runtime import state
from dflash_serve.runtime.backend import Ending, Tail
from dflash_serve.runtime.log import LogTail, last_lines
from dflash_serve.runtime.state import Run, ensure_key

# The rest of the user's environment stays out, so that a stray VLLM_* or PYTHONPATH can't change the plan.
PASSED_THROUGH = (
    "HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "HF_HOME",
    "HF_HUB_CACHE", "HF_ENDPOINT", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CUDA_HOME",
)  # fmt: skip


def command(plan: Plan, python: Path) -> list[str]:
    """The exact command line. The API key is not in it: the engine reads it from its environment."""
    return [str(python), *plan.engine.entry, *plan.argv]


def environment(plan: Plan, key: str, temp_dir: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The server's whole environment: a few of the user's variables, then the plan's."""
    source = os.environ if base is None else base
    return {
        **{name: source[name] for name in PASSED_THROUGH if name in source},
        **plan.environment,
        "TMPDIR": str(temp_dir),
        "VLLM_API_KEY": key,
    }


def start(plan: Plan, python: Path, *, pass_fds: Sequence[int] = ()) -> Run:
    """Spawn the server and return at once; its output goes to the run's log.

    Args:
        pass_fds: locks that the server must hold for as long as it lives.

    Raises:
        StartFailed: the interpreter can't be executed, or the run's files can't be written.
    """
    directory = state.begin(plan)
    log = directory / "server.log"
    process, temp_dir = None, None
    try:
        # A short path: the engine puts Unix sockets there, whose names are limited to 107 bytes.
        temp_dir = Path(tempfile.mkdtemp(prefix="dflash-serve-"))
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as sink:
            process = subprocess.Popen(
                command(plan, python),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(plan, ensure_key(Path(plan.server.key_file)), temp_dir),
                cwd=directory,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        known = {"pid": process.pid, "process_started": _create_time(process.pid), "temp_dir": str(temp_dir)}
        return state.started(plan, "native", **known)
    except BaseException as exc:
        # A server that no state file knows would run on for ever.
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if temp_dir is not None:
            shutil.rmtree(temp_dir, ignore_errors=True)
        if isinstance(exc, OSError):
            raise StartFailed(
                f"cannot start the engine: {exc.strerror}",
                where=str(exc.filename or python),
                fix=f"rebuild its environment: dflash-serve environment install {plan.engine.variant}",
            ) from None
        raise


def alive(run: Run) -> bool:
    """Whether the process that was started still runs."""
    return run.process() is not None


def ending(run: Run) -> Ending:
    """` (signal 9)` or ` (exit 1)` when the process is our own child."""
    if run.pid is None:
        return Ending()
    try:
        pid, status = os.waitpid(run.pid, os.WNOHANG)
    except ChildProcessError:
        return Ending()
    if pid == 0:
        return Ending()
    code = os.waitstatus_to_exitcode(status)
    return Ending(f" (signal {-code})" if code < 0 else f" (exit {code})", code=code)


@contextmanager
def tail(run: Run, *, lines: int | None = None) -> Iterator[Tail]:
    """The log's file, as it grows."""
    yield LogTail(run.log_file, lines=lines)


def recent(run: Run, *, lines: int) -> str:
    """The last lines of the log."""
    return last_lines(run.log_file, lines)


def sync_log(run: Run) -> None:
    """Nothing to do: the server writes that file itself."""


def members(run: Run) -> list[psutil.Process]:
    """The server and everything in its session: engine core, workers, resource trackers."""
    if run.pid is None:
        return []
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == run.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    # A session id lives on as long as a member does; with a reused pid the leader would be a stranger.
    leader = next((p for p in found if p.pid == run.pid), None)
    if leader is not None and run.process() is None:
        return []
    return found


def engine_alive(run: Run) -> bool:
    """Whether the server still has its engine core; a killed one leaves an HTTP server that answers for a while."""
    process = run.process()
    if process is None:
        return False
    try:
        return any("EngineCore" in _title(child) for child in process.children(recursive=True))
    except psutil.Error:
        return False


def stop(run: Run, *, grace: float) -> list[int]:
    """Ask the server to drain and end, then end what is left of its session and remove its temporary files.

    Args:
        grace: seconds that requests in flight get.

    Returns:
        Pids that had to be killed.
    """
    process = run.process()
    alive = members(run)
    killed: list[int] = []
    if process is not None:
        _signal(process.pid, signal.SIGTERM)
        _wait([process], grace)
    # The engine's own children end with it; give them a moment before they are made to.
    _wait(members(run), 3.0)
    for survivor in members(run):
        killed.append(survivor.pid)
        _signal(survivor.pid, signal.SIGKILL)
    _wait(alive, 5.0)
    if process is not None:
        _reap(process.pid)
    clean_up(run)
    return killed


def clean_up(run: Run) -> None:
    """Remove the run's temporary directory and what a killed engine left in /dev/shm."""
    if run.temp_dir:
        shutil.rmtree(run.temp_dir, ignore_errors=True)


def _title(process: psutil.Process) -> str:
    """The process title; the engine sets it to VLLM::EngineCore."""
    try:
        return process.name() + " " + " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _create_time(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait(processes: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_running(process) for process in processes):
            return
        time.sleep(0.1)


def _running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _reap(pid: int) -> None:
    """Collect our own child, so that it does not stay as a zombie of a long-lived caller."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
