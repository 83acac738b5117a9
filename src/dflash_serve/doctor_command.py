"""`dflash-serve doctor`: why a server failed, from its log, exit code, restarts and the kernel's log."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dflash_serve import paths
from dflash_serve.errors import StartFailed, UsageError
from dflash_serve.hardware import kernel_log
from dflash_serve.observe import bundle, redact
from dflash_serve.observe.doctor import Diagnosis, Doctor, Found, Verdict
from dflash_serve.observe.fingerprints import Role
from dflash_serve.runtime import state
from dflash_serve.runtime.backend import log_of
from dflash_serve.runtime.state import Run, RunState

BUNDLES_KEPT = 10
_LOG_PID = re.compile(rb"^\([\w-]+ pid=(\d+)\)")
# `Killed process 12 (python)`, `oom-kill:...,pid=12,uid=0`, `traps: python[12] trap`, `python[12]: segfault`
_KERNEL_PID = re.compile(rb"Killed process (\d+)|\bpid=(\d+)|(?:traps: )?\S+\[(\d+)\](?::| trap)")


@dataclass(frozen=True)
class Subject:
    """What is diagnosed: a log file, of a run of ours or of any vLLM."""

    log: Path
    run: Run | None = None

    @property
    def died(self) -> bool:
        """Whether it is known to have failed by itself; one that did not pass verification was stopped by us."""
        return self.run is not None and self.run.state is RunState.FAILED and not self.unverified

    @property
    def unverified(self) -> str:
        """What verification found, of a run that it ended."""
        run = self.run
        refused = run is not None and run.state is RunState.FAILED and run.summary.get("passed") is False
        return (run.cause or "") if run is not None and refused else ""


@click.command()
@click.argument("subject", required=False, metavar="[LOGFILE|NAME|-]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option(
    "--exit-code", type=click.IntRange(-64, 255), metavar="N", help="Of the server or its container; 137, -9."
)
@click.option("--restart-count", type=click.IntRange(0), default=0, metavar="N", help="docker inspect: RestartCount.")
@click.option("--kernel-log", type=click.Path(exists=True, path_type=Path), metavar="FILE", help="dmesg -T's output.")
@click.option("--bundle", "target", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write a redacted tar.gz for a bug report there, whatever is found.")  # fmt: skip
def doctor(
    subject: str | None,
    as_json: bool,
    exit_code: int | None,
    restart_count: int,
    kernel_log: Path | None,
    target: Path | None,
) -> None:
    """Say why a server failed: the most likely cause first, with its evidence and what to do.

    \b
    Examples:
      dflash-serve doctor                        the server started last
      dflash-serve doctor server.log --exit-code 137
      docker logs NAME 2>&1 | dflash-serve doctor -
      sudo dmesg -T > kernel.txt; dflash-serve doctor server.log --kernel-log kernel.txt
    """
    with _subject(subject) as seen:
        examiner = Doctor(died=seen.died)
        try:
            _examine(examiner, seen, exit_code, restart_count, kernel_log)
        except OSError as exc:
            raise UsageError(f"a log cannot be read: {exc.strerror}", where=str(exc.filename)) from None
        found = examiner.diagnosis()
        if target is None and found.verdict is Verdict.UNKNOWN:
            target = _bundle_path(seen)
        if target is not None:
            try:
                _write_bundle(target, found, seen, kernel_log)
            except OSError as exc:
                raise UsageError(f"the bundle cannot be written: {exc.strerror}", where=str(target)) from None
    if as_json:
        click.echo(json.dumps({**as_dict(found, target), "verification": seen.unverified or None}, indent=2))
        return
    if seen.unverified:
        click.echo(f"it started, and verification ended it: {seen.unverified}")
    click.echo("\n".join(text(found, target)))


def _examine(
    examiner: Doctor, seen: Subject, exit_code: int | None, restart_count: int, kernel_log: Path | None
) -> None:
    grown = time.time() - seen.log.stat().st_mtime
    with seen.log.open("rb") as handle:
        examiner.read(handle, seen.log.name, idle=grown)
    if kernel_log is not None:
        with kernel_log.open("rb") as handle:
            examiner.read(handle, kernel_log.name, kernel=True)
    elif seen.run is not None and seen.died:
        # Other processes die as well: the kernel's word counts for a run that failed, and for its own processes.
        records = _kernel_since(Path("/"), seen.run.started_at)
        if seen.run.container is None:
            records = _about(records, _pids(seen.log))
        examiner.read(io.BytesIO(records), "kernel log", kernel=True)
    if seen.run is not None and seen.run.container and exit_code is None:
        attributes = _inspect(seen.run.container)
        ended = attributes.get("State", {})
        if ended.get("Status") == "exited":
            examiner.exited(int(ended.get("ExitCode", 0)), oom_killed=bool(ended.get("OOMKilled")))
        restart_count = restart_count or int(attributes.get("RestartCount", 0))
    elif exit_code is not None:
        examiner.exited(exit_code)
    examiner.restarted(restart_count)


def text(found: Diagnosis, bundled: Path | None) -> Iterator[str]:
    """The report for a person, by lines."""
    first = found.first
    if found.verdict is Verdict.KNOWN and first is not None and first.fingerprint is not None:
        yield f"cause: {first.fingerprint.cause}"
        yield f"where: {_place(first)}"
        yield f"fix:   {first.fingerprint.fix}"
        yield f"see:   {first.fingerprint.source}"
    elif found.verdict is Verdict.UNKNOWN:
        yield "cause: not known to us" + ("; its first error is" if first else ", and its log names no error")
        if first is not None:
            yield f"where: {_place(first)}"
    elif found.verdict is Verdict.STOPPED:
        yield f"the server was asked to stop; no sign of a failure in {found.lines:,} lines"
    else:
        yield f"no sign of a failure in {found.lines:,} lines"
    rest = [one for one in found.found if one is not first]
    if rest:
        yield ""
        yield "also found:"
    for one in rest:
        yield f"  {one.fingerprint.cause if one.fingerprint else 'an error that is not known to us'}"
        yield f"    {_place(one)}"
        if one.fingerprint and one.role in {Role.REQUEST, Role.NOTICE, Role.CAUSE}:
            yield f"    fix: {one.fingerprint.fix}"
    if bundled is not None:
        yield ""
        yield f"bundle for a bug report: {bundled}"
        yield "  without tokens, prompts, user and host names, home paths and public addresses; look through it first"


def as_dict(found: Diagnosis, bundled: Path | None) -> dict[str, Any]:
    """The report for a machine; `cause` is null unless a fingerprint names one."""
    known = found.verdict is Verdict.KNOWN
    return {
        "verdict": found.verdict.value,
        "cause": _entry(found.first) if known and found.first else None,
        "found": [_entry(one) for one in found.found],
        "lines": found.lines,
        "starts": found.starts,
        "ready": found.ready,
        "bundle": None if bundled is None else str(bundled),
    }


def _entry(one: Found) -> dict[str, Any]:
    known = one.fingerprint
    return {
        "id": known.id if known else None,
        "role": one.role.value,
        "layer": known.layer if known else None,
        "cause": known.cause if known else None,
        "fix": known.fix if known else None,
        "see": known.source if known else None,
        "source": one.evidence.source,
        "line": one.evidence.line,
        "evidence": one.evidence.text,
    }


def _place(one: Found) -> str:
    return f"{one.evidence.where}: {one.evidence.text[:160]}"


@contextlib.contextmanager
def _subject(name: str | None) -> Iterator[Subject]:
    """The log to read: a file, standard input (kept while we look), or that of a run."""
    if name == "-":
        with tempfile.NamedTemporaryFile(prefix="dflash-serve-doctor-", suffix=".log") as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.flush()
            yield Subject(Path(kept.name))
        return
    if name is not None and Path(name).is_file():
        yield Subject(Path(name))
        return
    run = state.load(name) if name and "/" not in name else None
    if name is None:
        run = next(iter(state.load_all()), None)
        if run is None:
            raise UsageError("nothing was started here", fix="dflash-serve doctor LOGFILE")
    if run is None:
        raise UsageError(f"there is no log file and no server called {name}", fix="dflash-serve status")
    if not log_of(run).is_file():
        raise UsageError(f"{run.recipe} has no log", where=str(run.log_file))
    yield Subject(run.log_file, run)


def _inspect(container: str) -> dict[str, Any]:
    """What Docker says of a container; empty when it is gone or Docker doesn't answer."""
    from dflash_serve.runtime import docker

    with contextlib.suppress(StartFailed):
        return docker.inspect(container) or {}
    return {}


def _kernel_since(root: Path, started: float) -> bytes:
    """Lines of the kernel's log since then (seconds since the epoch); empty when this user may not read it."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    kept: list[bytes] = []
    for record in kernel_log.records(root) or ():
        head, _, message = record.partition(b";")
        fields = head.split(b",")
        if len(fields) > 2 and fields[2].isdigit() and booted + int(fields[2]) / 1e6 >= started:
            kept.append(message.partition(b"\n")[0])
    return b"\n".join(kept)


def _pids(log: Path) -> set[bytes]:
    """Processes that a log names: `(EngineCore pid=123)`."""
    with log.open("rb") as handle:
        return {pid for line in handle for pid in _LOG_PID.findall(line[:200])}


def _about(records: bytes, pids: set[bytes]) -> bytes:
    """Lines of the kernel's log that name no process, or one of these."""
    kept = []
    for line in records.splitlines():
        named = {pid for groups in _KERNEL_PID.findall(line) for pid in groups if pid}
        if not named or named & pids:
            kept.append(line)
    return b"\n".join(kept)


def _bundle_path(seen: Subject) -> Path:
    """A new file below the state directory; the oldest go."""
    home = paths.state_home() / "bundles"
    for old in sorted(home.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)[: -(BUNDLES_KEPT - 1)]:
        old.unlink(missing_ok=True)
    name = seen.run.recipe if seen.run else "log"
    return home / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.tar.gz"


def _write_bundle(target: Path, found: Diagnosis, seen: Subject, kernel_log: Path | None) -> None:
    secrets = []
    if seen.run is not None:
        with contextlib.suppress(OSError):
            secrets.append(Path(seen.run.key_file).read_text().strip())
    logs = [seen.log] + ([kernel_log] if kernel_log and kernel_log.is_file() else [])
    plan = seen.run.plan_file if seen.run else None
    bundle.write(target, found, logs, redact.for_this_machine(secrets), plan=plan)
