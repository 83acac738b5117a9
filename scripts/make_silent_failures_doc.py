"""Write docs/silent-failures.md from src/dflash_serve/verify/silent.yaml; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_serve.verify.silent import document

TARGET = Path(__file__).resolve().parents[1] / "docs" / "silent-failures.md"


def main() -> int:
    text = document()
    if "--check" in sys.argv[1:]:
        if TARGET.is_file() and TARGET.read_text("utf-8") == text:
            return 0
        print(f"{TARGET} is not current: python scripts/make_silent_failures_doc.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
