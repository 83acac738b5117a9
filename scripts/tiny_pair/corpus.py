"""The training text: the library source of one CPython version, named file by file through one digest.

The lock file (``corpus.lock.json``) states the version, the licence, the rules that choose files, their number and a
SHA-256 over ``path  sha256`` lines. Loading refuses a tree that does not give the same digest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

LOCK = Path(__file__).with_name("corpus.lock.json")
PYTHON_VERSION = "3.12.1"
LICENCE = "PSF-2.0"
EXCLUDED_PARTS = frozenset({"site-packages", "__pycache__", "encodings", "encoded_modules", "lib-dynload"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "lib2to3/tests/data")
MAX_NON_ASCII = 0.01
SPLITS = ("heldout", "rollout", "train")
HELDOUT_ONE_IN, ROLLOUT_OF_IT = 20, 3


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; ``path`` is relative to the library directory and uses forward slashes."""

    path: str
    sha256: str
    text: str
    split: str

    @property
    def heldout(self) -> bool:
        return self.split == "heldout"


class CorpusMismatch(RuntimeError):
    """The tree at hand is not the corpus that the lock names."""


def split_of(path: str) -> str:
    """By the hash of its path, one file in twenty is held out of everything and three start rollouts only.

    A target must not have learned the text whose continuations its drafter learns from: it would recite.
    """
    draw = hashlib.sha256(path.encode()).digest()[0] % HELDOUT_ONE_IN
    return "heldout" if draw == 0 else "rollout" if draw <= ROLLOUT_OF_IT else "train"


def _wanted(path: str) -> bool:
    return not EXCLUDED_PARTS.intersection(path.split("/")) and not path.startswith(EXCLUDED_PREFIXES)


def read_files(library: Path) -> list[SourceFile]:
    """All chosen files below ``library``, sorted by path. Files with much non-ASCII text (tables) are left out."""
    files = []
    for location in sorted(library.rglob("*.py"), key=lambda p: p.relative_to(library).as_posix()):
        path = location.relative_to(library).as_posix()
        if not _wanted(path):
            continue
        data = location.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or sum(ord(c) > 127 for c in text) > MAX_NON_ASCII * len(text):
            continue
        files.append(SourceFile(path, hashlib.sha256(data).hexdigest(), text, split_of(path)))
    return files


def describe(files: list[SourceFile]) -> dict:
    """What the lock file holds for these files."""
    manifest = "".join(f"{f.path}  {f.sha256}\n" for f in files)
    return {
        "source": f"CPython {PYTHON_VERSION}, directory Lib (https://www.python.org/ftp/python/{PYTHON_VERSION}/)",
        "licence": LICENCE,
        "files": len(files),
        "characters": sum(len(f.text) for f in files),
        "manifest_sha256": hashlib.sha256(manifest.encode()).hexdigest(),
        "split_rule": f"sha256(path)[0] % {HELDOUT_ONE_IN}: 0 heldout, 1 to {ROLLOUT_OF_IT} rollout, else train",
        "files_by_split": {split: sum(f.split == split for f in files) for split in SPLITS},
        "heldout": [f.path for f in files if f.heldout],
    }


def write_lock(files: list[SourceFile]) -> None:
    """Record the corpus at hand as the corpus."""
    LOCK.write_text(json.dumps(describe(files), indent=1) + "\n")


def load(library: Path) -> list[SourceFile]:
    """The corpus at ``library``; raises CorpusMismatch when it differs from the lock."""
    files = read_files(library)
    found, wanted = describe(files), json.loads(LOCK.read_text())
    if found != wanted:
        raise CorpusMismatch(
            f"{library} holds {found['files']} files, digest {found['manifest_sha256'][:12]}; the lock names "
            f"{wanted['files']} files, digest {wanted['manifest_sha256'][:12]}. Use the Lib directory of an unpacked "
            f"Python-{PYTHON_VERSION} source archive, or record a new corpus with the `lock` command."
        )
    return files
