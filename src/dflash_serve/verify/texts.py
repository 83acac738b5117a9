"""Long texts of a given length in tokens, made here, so that nobody's text is shipped and no cache knows them."""

from __future__ import annotations

import random
from collections.abc import Callable

_VERBS = ("read", "write", "count", "merge", "split", "check", "sort", "copy", "move", "close", "open", "join")
_NOUNS = ("line", "block", "table", "frame", "index", "queue", "page", "field", "record", "stream", "token", "node")


def functions(seed: int, count: int) -> list[str]:
    """`count` small Python functions, different for every seed."""
    rng = random.Random(seed)
    out = []
    for number in range(count):
        verb, noun, other = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_NOUNS)
        out.append(
            f"def {verb}_{noun}_{number}(self, {other}):\n"
            f'    """{verb.capitalize()} one {noun} of the {other}."""\n'
            f"    if {other} is None:\n        raise ValueError({noun!r})\n"
            f"    return self.{noun}[{rng.randrange(100)}]\n\n"
        )
    return out


def of_length(count: Callable[[str], int], tokens: int, seed: int) -> str:
    """Text of about `tokens` tokens (never more); it starts with the seed, so that two seeds share no prefix.

    Args:
        count: tokens of a text, by the server's tokenizer.
    """
    sample = functions(seed, 16)
    each = max(1.0, count("".join(sample)) / len(sample))
    parts = functions(seed, int(tokens / each) + 8)
    head = f"# {seed}\n"
    number = min(len(parts), int(tokens / each))
    while number > 1 and count(head + "".join(parts[:number])) > tokens:
        number -= max(1, number // 50)
    return head + "".join(parts[:number])
