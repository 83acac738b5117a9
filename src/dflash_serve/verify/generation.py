"""Generation canaries: text that makes sense, and the abilities that the recipe turns on."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from functools import cache
from importlib import resources
from typing import Any

import yaml

from dflash_serve.verify.client import Completion
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked

# The target's arg max, token by token. Penalties would come from generation_config.json, or from the recipe's sampling.
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# Parts of a name: `check_with_path`, `checkWithPath`.
_PART = re.compile(r"[A-Z]?[a-z]+")
LONGEST_PART = 16
CODE_SHARE = 0.7


@cache
def prompts() -> dict[str, Any]:
    """The fixed prompts of the canaries."""
    data: dict[str, Any] = yaml.safe_load(resources.files("dflash_serve.verify").joinpath("prompts.yaml").read_text())
    return data


def generation(subject: Subject) -> list[Check]:
    """A chat answer: not empty, not one piece over and over, made of words."""
    canary = prompts()["generation"]
    answer = subject.client.chat(canary["chat"], max_tokens=canary["max_tokens"], temperature=0)
    said = answer.reasoning + answer.text
    where = "POST /v1/chat/completions"
    if not said.strip():
        return [
            failed(
                "generation",
                f"the canary's answer is empty ({answer.tokens} tokens)",
                where=where,
                fix="NaN logits show like this: serve in bfloat16, and check the weights: dflash-serve fetch --verify",
            )
        ]
    if answer.tokens > 16 and repeats(said):
        return [
            failed(
                "generation",
                f"the canary's answer repeats itself: {said[:60]!r}",
                where=where,
                fix="a broken checkpoint, KV cache dtype or patch; try --set kv_cache_dtype=auto",
            )
        ]
    words = words_of(said)
    if answer.tokens > 16 and (len(words) < 3 or said.count("\ufffd") > 2):
        return [
            failed(
                "generation",
                f"the canary's answer is no text: {said[:60]!r}",
                where=where,
                fix="weights and tokenizer of different models, or broken weights: dflash-serve fetch --verify",
            )
        ]
    return [passed("generation", f"answered {answer.tokens} tokens, {len(words)} words")]


def stops(subject: Subject) -> list[Check]:
    """Generation ends: by itself where the model is an instructed one, else at a stop string."""
    canary = prompts()["stops"]
    if subject.abilities.reasoning:
        answer = _chat(subject, canary, thinking=True)
        what = f"did not end within {answer.tokens} tokens after being asked for one word"
    else:
        answer = subject.client.complete(canary["complete"], max_tokens=24, temperature=0, stop=["\n"])
        what = f"ran past its stop string ({answer.tokens} tokens)"
    if answer.finish_reason == "stop":
        return [passed("stops", f"ended after {answer.tokens} tokens")]
    return [
        failed(
            "stops",
            f"the answer {what}",
            where="POST /v1/chat/completions" if subject.abilities.reasoning else "POST /v1/completions",
            fix="check eos_token_id in generation_config.json, and the chat template",
        )
    ]


def structured(subject: Subject) -> list[Check]:
    """JSON after a grammar. With a drafter, blocks can desynchronise it (vllm#53777).

    An instructed model gets a JSON schema. A base model gets the same as a regular expression: a schema allows blanks
    between any two tokens, and such a model may never stop making them.
    """
    canary = prompts()["structured"]
    form: dict[str, Any] = {"structured_outputs": {"regex": canary["regex"]}}
    if subject.abilities.reasoning:
        schema = {"name": "pick", "schema": canary["schema"], "strict": True}
        form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer = _chat(subject, canary, **form)
    if _follows(answer.text, canary["schema"]):
        return [passed("structured-output", f"JSON after the grammar: {answer.text.strip()[:60]}")]
    return [
        failed(
            "structured-output",
            f"the answer does not follow its grammar ({answer.finish_reason}): {answer.text[:60]!r}",
            where="POST /v1/chat/completions",
            fix="grammar and drafts may be out of step: look for 'Failed to advance FSM' in the log; try --no-drafter",
        )
    ]


def _follows(text: str, schema: dict[str, Any]) -> bool:
    try:
        made = json.loads(text)
        colours, number = schema["properties"]["colour"]["enum"], made["number"]
        return set(made) == {"colour", "number"} and made["colour"] in colours and number in range(1, 10)
    except (ValueError, TypeError, KeyError):
        return False


def tool_call(subject: Subject) -> list[Check]:
    """One tool, one call with arguments that parse."""
    if not subject.abilities.tools:
        return [unchecked("tool-call", "no tool-call parser is set")]
    canary = prompts()["tool"]
    tools = [{"type": "function", "function": canary["function"]}]
    answer = _chat(subject, canary, tools=tools, tool_choice="auto")
    for name, arguments in answer.tool_calls:
        try:
            city = json.loads(arguments)["city"]
        except (ValueError, KeyError, TypeError):
            continue
        if name == canary["function"]["name"] and isinstance(city, str) and "paris" in city.lower():
            return [passed("tool-call", f"called {name}({arguments})")]
    made = ", ".join(f"{name}({arguments[:40]})" for name, arguments in answer.tool_calls) or repr(answer.text[:60])
    return [
        failed(
            "tool-call",
            f"asked for the weather in Paris with a tool at hand, it answered {made}",
            where="POST /v1/chat/completions, tools",
            fix="the tool-call parser must be the model's: recipe key serve.tool_call_parser",
        )
    ]


def thinking(subject: Subject) -> list[Check]:
    """Thinking is set apart when it is on, and absent when it is off."""
    if not subject.abilities.reasoning:
        return [unchecked("thinking", "no reasoning parser is set")]
    canary = prompts()["thinking"]
    parser, switch = _argument(subject, "--reasoning-parser"), _switch(subject)
    checks = []
    answer = _chat(subject, canary, thinking=True)
    if not switch and answer.text.strip() and not answer.reasoning.strip() and "think>" not in answer.text:
        return [unchecked("thinking", f"how {parser} turns thinking on and off is not known here")]
    if answer.reasoning.strip() and answer.text.strip() and "think>" not in answer.text:
        checks.append(passed("thinking-on", f"{len(answer.reasoning.split())} words of thinking, then the answer"))
    else:
        missing = "thinking" if not answer.reasoning.strip() else "answer"
        checks.append(
            failed(
                "thinking-on",
                f"thinking is on and there is no {missing} set apart: {(answer.text or answer.reasoning)[-60:]!r}",
                where="POST /v1/chat/completions",
                fix=f"the reasoning parser must be the model's (it is {parser}): recipe key serve.reasoning_parser",
            )
        )
    if not switch:
        return [*checks, unchecked("thinking-off", f"how {parser} turns thinking off is not known here")]
    answer = _chat(subject, canary)
    if answer.text.strip() and not answer.reasoning.strip():
        return [*checks, passed("thinking-off", f"answered {answer.text.strip()[:20]!r} at once")]
    return [
        *checks,
        failed(
            "thinking-off",
            "thinking is off and there is thinking still" if answer.reasoning.strip() else "there is no answer",
            where=f"POST /v1/chat/completions, {switch}: false",
            fix="the chat template does not take the switch: is it the model's own?",
        ),
    ]


def image(subject: Subject) -> list[Check]:
    """A picture of one colour, named."""
    if not subject.abilities.images:
        why = "whether the model sees is not known" if subject.abilities.images is None else "text only, as planned"
        return [unchecked("image", why)]
    canary = prompts()["image"]
    url = "data:image/png;base64," + base64.b64encode(png(224, 224, (220, 20, 20))).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": canary["chat"]}]
    answer = _chat(subject, {**canary, "chat": content})
    if "red" in answer.text.lower():
        return [passed("image", f"a red picture is {answer.text.strip()[:30]!r}")]
    return [
        failed(
            "image",
            f"a red picture is called {answer.text.strip()[:60]!r}",
            where="POST /v1/chat/completions, image_url",
            fix="the vision tower's weights: dflash-serve fetch --verify; or serve text only",
        )
    ]


def words_of(text: str) -> list[str]:
    """Its words: pieces between blanks that have a letter, or what a text of code joins without blanks.

    A name such as `check_with_path` has three. Its parts count only where words are most of an ASCII text, since random
    characters and pieces of a foreign vocabulary have a few by chance.
    """
    apart = [word for word in text.split() if any(c.isalpha() for c in word)]
    parts = (part for part in _PART.findall(text) if 3 <= len(part) <= LONGEST_PART)
    joined = [part for part in parts if set(part.lower()) & set("aeiouy")]
    letters = sum(not char.isspace() and char not in "_`" for char in text)
    mostly = sum(map(len, joined)) >= CODE_SHARE * max(1, letters)
    if len(apart) >= 3 or not text.isascii() or not mostly or len({part.lower() for part in joined}) < 3:
        return apart
    return joined


def repeats(text: str) -> bool:
    """Whether one short piece fills the text."""
    compact = "".join(text.split())
    return any(
        len(compact) >= 12 * n and compact[:n] * (len(compact) // n) == compact[: len(compact) // n * n]
        for n in range(1, 9)
    )


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """A picture of one colour: PNG signature, IHDR (8 bit RGB), IDAT, IEND."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _switch(subject: Subject) -> str | None:
    """The chat template's argument that turns thinking on and off, where the reasoning parser's is known."""
    found: str | None = prompts()["thinking"]["switch"].get(_argument(subject, "--reasoning-parser"))
    return found


def _chat(subject: Subject, canary: dict[str, Any], *, thinking: bool = False, **extra: Any) -> Completion:
    """One answer, greedy and without thinking where that can be had.

    A model that thinks is asked with its own sampling, since greedy thinking may go in circles; where its trace did not
    end, it is asked once more.
    """
    thinks = bool(subject.abilities.reasoning)
    if switch := _switch(subject):
        extra["chat_template_kwargs"] = {switch: thinking}
        thinks = thinking
    sampling = {} if thinks else {"temperature": 0}
    answer = subject.client.chat(canary["chat"], max_tokens=_room(subject, canary), **sampling, **extra)
    if thinks and answer.finish_reason == "length" and not answer.text.strip():
        answer = subject.client.chat(canary["chat"], max_tokens=_room(subject, canary), **sampling, **extra)
    return answer


def _room(subject: Subject, canary: dict[str, Any]) -> int:
    """Tokens for an answer: the canary's, less where the window is small."""
    return int(min(canary["max_tokens"], max(64, subject.window // 2)))


def _argument(subject: Subject, name: str) -> str:
    argv = subject.plan.argv if subject.plan else ()
    return argv[argv.index(name) + 1] if name in argv else ""


CHECKS = (generation, stops, structured, tool_call, thinking, image)
