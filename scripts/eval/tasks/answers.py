"""Prompts and scoring of the tasks beside this file, for lm-evaluation-harness.

A thinking model writes a trace first, then an answer in a form of its own. So no stop string cuts it, the trace has a
budget, the last stated answer counts, and an answer that can't be found is counted apart (`invalid`): a budget that is
too small looks like a poor model otherwise.
"""

from __future__ import annotations

import re
from typing import Any

BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LETTER = re.compile(r"answer\s*(?:is|:)\s*\**\s*\(?([A-J])\b", re.IGNORECASE)
STATED = re.compile(r"answer\s*(?:is|:)\s*\**\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)


def after_thinking(text: str | None) -> str:
    """What follows the trace; the server's reasoning parser has cut it off already where there is one."""
    return (text or "").rsplit("</think>", 1)[-1]


def number(text: str) -> str | None:
    """The last boxed number, else the last stated one, else the last one; without separators and trailing zeros."""
    boxed = [found for content in BOXED.findall(text) for found in NUMBER.findall(content)[-1:]]
    found = boxed or STATED.findall(text) or NUMBER.findall(text)
    return plain(found[-1]) if found else None


def plain(text: str) -> str:
    """1,200.0 is 1200 and 007 is 7."""
    digits = text.replace(",", "")
    negative, digits = digits.startswith("-"), digits.lstrip("-")
    whole, _, fraction = digits.partition(".")
    fraction = fraction.rstrip("0")
    value = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return f"-{value}" if negative and value != "0" else value


def letter(text: str) -> str | None:
    """The last boxed letter, else the last stated one."""
    boxed = [content.strip(" ().").upper() for content in BOXED.findall(text)]
    found = [one for one in boxed if re.fullmatch(r"[A-J]", one)] or LETTER.findall(text)
    return found[-1].upper() if found else None


def scored(given: str | None, wanted: str) -> dict[str, float]:
    return {"exact_match": float(given == wanted), "invalid": float(given is None)}


def gsm8k(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return scored(number(after_thinking(results[0])), plain(doc["answer"].rsplit("####", 1)[-1].strip()))


def aime(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    wanted = next(value for key, value in doc.items() if key.lower() == "answer")
    return scored(number(after_thinking(results[0])), plain(str(wanted).strip()))


def mmlu_pro(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return scored(letter(after_thinking(results[0])), doc["answer"])


def mmlu_pro_prompt(doc: dict[str, Any]) -> str:
    options = "\n".join(f"({chr(65 + i)}) {option}" for i, option in enumerate(doc["options"]))
    return (
        f"The following question is about {doc['category']}. Think it through, then end with a line of the form "
        f'"The answer is (X)", X being the letter of one option.\n\n{doc["question"]}\n\n{options}'
    )


def every(step: int, dataset: Any) -> Any:
    return dataset.select(range(0, len(dataset), step))


def every_fifth(dataset: Any) -> Any:
    return every(5, dataset)


def every_sixtieth(dataset: Any) -> Any:
    return every(60, dataset)
