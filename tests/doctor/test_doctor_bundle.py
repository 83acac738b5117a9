"""A bundle holds what a report needs and nothing private, from logs of any size."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.observe.bundle import AROUND_LINES, HEAD_LINES, TAIL_LINES, excerpt, write
from dflash_serve.observe.doctor import diagnose
from dflash_serve.observe.redact import Redactor

REDACT = Redactor(secrets=("k3y-of-the-server",), names=("quentin",), homes=("/home/quentin",))
LOG = """\
(APIServer pid=7) INFO 11-30 03:46:27 [api_utils.py:286] non-default args: {'api_key': ['k3y-of-the-server'], 'port': 1}
Please summarise the letter to my lawyer
(EngineCore pid=8) ERROR 11-30 03:46:28 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-30 03:46:28 [core.py:1510]   File "/home/quentin/venv/vllm/core.py", line 3, in run
(EngineCore pid=8) ERROR 11-30 03:46:28 [core.py:1510] FrobnicationError: the frob of 203.0.113.9 is missing
INFO:     203.0.113.9:51 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error
Traceback (most recent call last):
  File "/home/quentin/x.py", line 1, in <module>
    frobnicate(now)
FrobnicationError: again
"""


def unpacked(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        out = {}
        for member in archive.getmembers():
            assert (member.uname, member.uid, member.mtime, member.mode) == ("", 0, 0, 0o600)
            handle = archive.extractfile(member)
            assert handle is not None
            out[member.name.removeprefix("dflash-serve-bundle/")] = handle.read().decode()
        return out


def test_a_bundle_of_an_unknown_failure(tmp_path: Path) -> None:
    log, plan = tmp_path / "server.log", tmp_path / "plan.json"
    log.write_text(LOG)
    plan.write_text('{"served_from": "/home/quentin/models/target"}')
    target = write(tmp_path / "out" / "b.tar.gz", diagnose([log]), [log], REDACT, plan=plan)
    assert target.stat().st_mode & 0o777 == 0o600
    files = unpacked(target)
    assert sorted(files) == ["README.txt", "diagnosis.json", "logs/0-server.log", "plan.json"]
    whole = "\n".join(files.values())
    for private in ("k3y-of", "quentin", "203.0.113.9", "lawyer"):
        assert private not in whole
    kept = files["logs/0-server.log"].splitlines()
    assert kept[1] == "<40 characters removed>"
    assert "    frobnicate(now)" in kept
    assert "FrobnicationError" in files["diagnosis.json"]
    assert json.loads(files["plan.json"]) == {"served_from": "~/models/target"}
    assert json.loads(files["diagnosis.json"])["found"]


def test_json_stays_json(tmp_path: Path) -> None:
    log, plan = tmp_path / "server.log", tmp_path / "plan.json"
    log.write_text("ERROR 11-30 03:46:28 [x.py:1] ValueError: frob: prompt: 'my secret letter', n=1\n")
    argv = ["--port", "1", "--api-key", "abcdefghijkl", "x"]
    plan.write_text(json.dumps({"api_key": "k3y-of-the-server", "argv": argv, "n": [1, None]}))
    files = unpacked(write(tmp_path / "b.tar.gz", diagnose([log]), [log], REDACT, plan=plan))
    assert "letter" not in "".join(files.values())
    assert json.loads(files["diagnosis.json"])["lines"] == 1
    assert json.loads(files["plan.json"])["n"] == [1, None]
    assert "k3y" not in files["plan.json"]
    assert json.loads(files["plan.json"])["argv"] == ["--port", "1", "--api-key", "<secret>", "x"]


def test_two_bundles_of_one_failure_are_equal(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    first, second = (write(tmp_path / name, diagnose([log]), [log], REDACT) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_a_long_log_keeps_its_ends_and_what_was_found(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    line = "(EngineCore pid=8) INFO 11-30 03:46:28 [core.py:1] step {}\n"
    log.write_text("".join(line.format(n) for n in range(1, 20_001)))
    text = excerpt(log, [9_000], REDACT).text
    assert text.count("step") == HEAD_LINES + 2 * AROUND_LINES + 1 + TAIL_LINES
    assert "step 9000\n" in text
    assert "step 20000\n" in text
    assert f"... {9_000 - AROUND_LINES - HEAD_LINES - 1} lines ..." in text


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), max_size=40))
def test_a_line_without_a_level_stays_only_when_it_is_an_error(lines: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "x.log"
        path.write_text("\n".join(f"zqprivate {line}" for line in lines))
        assert "zqprivate" not in excerpt(path, [1], REDACT).text
