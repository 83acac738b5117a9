"""The table of failures: complete, searchable, true to vLLM's own messages, and with fixes that exist."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.cli import cli
from dflash_serve.observe.doctor import Doctor
from dflash_serve.observe.fingerprints import Role, by_id, fingerprints, literal
from dflash_serve.shape.wishes import SETTABLE

HERE = Path(__file__).parent
MESSAGES: list[dict[str, Any]] = yaml.safe_load((HERE / "vllm_messages.yaml").read_text())
LINES = [
    line
    for name in ("labelled.yaml", "heldout.yaml")
    for entry in yaml.safe_load((HERE / name).read_text())
    for line in (entry["log"] + entry.get("kernel", "")).splitlines()
]


def rendered(message: dict[str, Any]) -> str:
    """The message as a log shows it: each {} of the template is one of the recorded values."""
    parts = message["template"].split("{}")
    values = [*message["values"], *["x"] * len(parts)]
    text = "".join(part + value for part, value in zip(parts[:-1], values, strict=False)) + parts[-1]
    return message.get("before", "") + text.partition("\n")[0]


def test_there_are_many_and_each_is_described_once() -> None:
    assert len(fingerprints()) >= 45
    assert len(by_id()) == len(fingerprints())
    patterns = [pattern for known in fingerprints() for pattern in known.patterns]
    assert len(patterns) == len(set(patterns))
    by_hand = {"restart-loop", "container-oom-kill"}
    assert all(known.patterns or known.exit_codes or known.id in by_hand for known in fingerprints())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: f"{message['id']}-{message['find'][:24]}")
def test_a_message_of_vllm_is_recognised(message: dict[str, Any]) -> None:
    """Words of the message were read in the wheels named there; the pattern finds them in the rendered line."""
    known = by_id()[message["id"]]
    level = {"error": "ERROR", "warning": "WARNING", "info": "INFO"}[known.level]
    doctor = Doctor()
    doctor.read(io.BytesIO(f"(EngineCore pid=7) {level} 11-30 03:36:24 [x.py:1] {rendered(message)}\n".encode()), "log")
    assert doctor.diagnosis().found[0].fingerprint == known
    assert message["find"] in message["template"]
    assert message["versions"]


def test_what_points_into_vllms_source_has_its_message_recorded() -> None:
    recorded = {message["id"] for message in MESSAGES}
    claimed = {known.id for known in fingerprints() if "/vllm/blob/v" in known.source}
    # vLLM has no message of its own there: an attribute of another model's configuration is missing.
    assert claimed - recorded <= {"method-by-path"}


def test_every_command_in_a_fix_exists() -> None:
    for known in fingerprints():
        for words in re.findall(r"dflash-serve ([a-z]+)(?: ([a-z]+))?", known.fix):
            context = click.Context(cli)
            command = cli.get_command(context, words[0])
            assert command is not None, f"{known.id}: {words[0]}"
            if isinstance(command, click.Group):
                assert command.get_command(click.Context(command), words[1]) is not None, f"{known.id}: {words}"


def test_every_fingerprint_has_been_seen() -> None:
    """Each has a line in the labelled excerpts or a recorded message of vLLM, or is told by an exit code."""
    lines = LINES + [rendered(message) for message in MESSAGES]
    unseen = {known.id for known in fingerprints() if not any(known.matches(line) for line in lines)}
    assert unseen <= {known.id for known in fingerprints() if known.exit_codes or known.id == "restart-loop"}


def test_a_literal_is_in_every_line_that_matches() -> None:
    for known in fingerprints():
        for needle, pattern in known.compiled:
            assert all(needle in line for line in LINES if pattern.search(line))


@given(st.from_regex(r"[a-z]{1,3}(\\\.|\+|\?|\*|\{2\}|\(b\||c\)|\[xy\]|\.\*|\\d\+| [A-Z]{4}){0,6}", fullmatch=True))
def test_the_literal_of_any_pattern_is_in_its_matches(pattern: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return
    needle = literal(pattern)
    for text in ("abc ABCD.", "aab..xyz 12 ABCD", "a b c", "aaabbb(c)"):
        for match in compiled.finditer(text):
            assert needle in match[0]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("Free memory on .* is less", "Free memory on "),
        (r"\[Errno 98\]", "[Errno 98]"),
        ("ab+cd", "ab"),
        ("colou?r of", "colo"),
        ("(?:one|two) three", " three"),
        ("one|two", ""),
        (r"xs{2,3}yz[abc]q", "yz"),
        (r"\bKeyError\b", "KeyError"),
    ],
)
def test_literals(pattern: str, expected: str) -> None:
    assert literal(pattern) == expected


def test_roles_say_what_the_report_shows() -> None:
    roles = {known.role for known in fingerprints()}
    assert roles == set(Role) - {Role.UNKNOWN}
    assert by_id()["engine-killed"].role is Role.CONSEQUENCE


def test_the_page_about_them_is_current() -> None:
    script = HERE.parents[1] / "scripts" / "make_fingerprints_doc.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_a_fix_sets_can_be_set() -> None:
    named = {key for known in fingerprints() for key in re.findall(r"--set (\w+)", known.fix)}
    assert named
    assert named <= set(SETTABLE)
