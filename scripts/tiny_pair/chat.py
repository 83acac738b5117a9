"""Conversations cut from source files: a user asks about a function, the assistant answers with code or a docstring."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from tiny_pair.corpus import SourceFile

FENCE = "```"
LENGTH = range(120, 1600)


@dataclass(frozen=True)
class Turn:
    """One question and its answer, with the place in the corpus that both were cut from."""

    user: str
    assistant: str
    path: str
    line: int


def _parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None


def _dedent(lines: list[str], columns: int) -> list[str]:
    return [line[columns:] if not line[:columns].strip() else line for line in lines]


def _docstring_of(node: ast.AST) -> ast.Constant | None:
    first = node.body[0] if node.body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.value if is_text and isinstance(first.value.value, str) else None


def turns(file: SourceFile) -> Iterator[Turn]:
    """Every conversation this file gives; path and line decide each one's kind, so they are always the same."""
    tree = _parse(file.text)
    lines = file.text.splitlines()
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        source = _dedent(lines[node.lineno - 1 : node.end_lineno], node.col_offset)
        if not (len(source) >= 4 and len("\n".join(source)) in LENGTH):
            continue
        draw = random.Random(f"{file.path}:{node.lineno}")
        docstring = _docstring_of(node)
        kinds = ["continue"] + (["docstring", "write"] if docstring is not None else [])
        kind = draw.choice(kinds)
        if kind == "continue":
            cut = draw.randrange(1, max(2, len(source) // 2))
            user = f"Continue this code:\n{FENCE}\n" + "\n".join(source[:cut]) + f"\n{FENCE}"
            answer = "\n".join(source[cut:])
        elif kind == "docstring":
            first, last = docstring.lineno - node.lineno, docstring.end_lineno - node.lineno + 1
            bare = "\n".join(source[:first] + source[last:])
            user = f"Write a docstring for this code:\n{FENCE}\n{bare}\n{FENCE}"
            answer = "\n".join(source[first:last])
        else:
            summary = ast.get_docstring(node).strip().split("\n")[0]
            user = f"Write `{node.name}`: {summary}"
            answer = "\n".join(source)
        yield Turn(user, f"{FENCE}\n{answer}\n{FENCE}", file.path, node.lineno)


def render(turn: Turn) -> str:
    """The conversation as the chat template writes it, with the end of the answer."""
    return prompt(turn.user) + turn.assistant + "<|im_end|>\n"


def prompt(user: str) -> str:
    """What the chat template makes of one user message, up to where the assistant begins."""
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
