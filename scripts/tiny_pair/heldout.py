"""Prompts from held-out files, for measuring: beginnings of code to complete and conversations.

Every entry has a ``prompt`` that can be completed as it stands; a conversation's is rendered by the chat template, and
``user`` holds its message for the chat endpoint.
"""

from __future__ import annotations

import ast
import random
import warnings

from tiny_pair import chat, corpus
from tiny_pair.corpus import SourceFile

COMPLETIONS, CONVERSATIONS = 20, 12
PROMPT_LINES = range(4, 13)
CHARACTERS = range(80, 500)


def _beginnings(file: SourceFile, draw: random.Random) -> list[dict]:
    """Openings of top-level functions and classes with a few lines of their body."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.text)
        except SyntaxError:
            return []
    lines = file.text.splitlines(keepends=True)
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno - node.lineno >= PROMPT_LINES.stop:
            text = "".join(lines[node.lineno - 1 : node.lineno - 1 + draw.choice(PROMPT_LINES)])
            if len(text) in CHARACTERS:
                found.append({"kind": "completion", "file": file.path, "line": node.lineno, "prompt": text})
    return found


def prompts(files: list[SourceFile], seed: int = 7) -> dict:
    """The prompt set: one or two of each held-out file, shuffled by ``seed``, cut to the numbers above."""
    draw = random.Random(seed)
    completions, conversations = [], []
    for file in files:
        if not file.heldout:
            continue
        beginnings = _beginnings(file, draw)
        completions += draw.sample(beginnings, min(1, len(beginnings)))
        talks = [t for t in chat.turns(file) if len(t.user) < CHARACTERS.stop]
        conversations += [
            {"kind": "chat", "file": t.path, "line": t.line, "user": t.user, "prompt": chat.prompt(t.user)}
            for t in draw.sample(talks, min(1, len(talks)))
        ]
    draw.shuffle(completions)
    draw.shuffle(conversations)
    chosen = completions[:COMPLETIONS] + conversations[:CONVERSATIONS]
    return {
        "source": corpus.describe(files)["source"],
        "licence": corpus.LICENCE,
        "manifest_sha256": corpus.describe(files)["manifest_sha256"],
        "made_by": "scripts/train_tiny_pair.py prompts",
        "max_tokens": 128,
        "prompts": [{"id": f"{p['kind']}-{i:02d}", **p} for i, p in enumerate(chosen)],
    }
