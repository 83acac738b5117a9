"""Take out of a text what a public bug report must not hold, and keep what names the failure.

Replaced: credentials, prompts and generated text, user names and home directories, public addresses, host names, e-mail
addresses, GPU serial ids. Kept: private and loopback addresses, model names, hashes, versions, paths below a home.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

MIN_SECRET = 6
# Names that are in every log and nobody's secret.
_COMMON = {"root", "user", "users", "home", "host", "localhost", "vllm", "admin", "ubuntu", "nobody", "main", "engine"}
_PRIVATE = tuple(
    ipaddress.ip_network(net)
    for net in (
        "0.0.0.0/32", "10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
        "255.255.255.255/32", "::/128", "::1/128", "fe80::/10", "fc00::/7",
    )
)  # fmt: skip

# A name that announces a secret: api_key, HF_TOKEN, client-secret ... but not max_tokens or tokenizer.
_SENSITIVE = (
    r"[\w.-]*(?:api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|token|secret|passw(?:or)?d|passphrase|credentials?"
    r"|authorization)"
)
_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|(?!<)[^\s,;)\]}'\"]+)"
_TOKENS = (
    # Whole tokens that are known by their shape.
    (
        re.compile(
            r"\b(?:hf_|sk-|ghp_|gho_|ghs_|ghu_|github_pat_|glpat-|xox[a-z]-|nvapi-|AKIA|AIza|npm_|pypi-)[\w-]{14,}"
        ),
        "<token>",
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), "<token>"),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        "<key>",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE), r"\1 <token>"),
    # A name that says so, with its value: --api-key X, TOKEN=X, "token": "X", 'api_key': ['X', 'Y'].
    (re.compile(rf"(?i)(--{_SENSITIVE}[= ]+)(?!-){_VALUE}"), r"\1<secret>"),
    (re.compile(rf"(?i)\b({_SENSITIVE}[\"']?\s*[:=]\s*)\[[^\]\n]*\]?"), r"\1<secret>"),
    (re.compile(rf"(?i)\b({_SENSITIVE}[\"']?\s*[:=]\s*)(?!None\b|null\b){_VALUE}"), r"\1<secret>"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@"), r"\1<secret>@"),
    (re.compile(r"(?i)([?&][\w-]*(?:sig|signature|token|key|secret|password)=)[^&\s'\"]+"), r"\1<secret>"),
)
_CONTENT = (
    # What people wrote and what the model answered: everything to the end of the line goes.
    re.compile(
        r"(?i)(\b(?:prompts?|messages|content|input_text|inputs?|generated[_ ]text|outputs?(?:_text)?|completion|"
        r"reasoning(?:_content)?|delta|text|query|queries|documents?|instructions|arguments|suffix|stop|bad_words)"
        r"[\"']?\s*[:=]\s*)(?!None\b|null\b|<)\S.*$",
        re.MULTILINE,
    ),
    re.compile(r"(?i)((?:\w*token_ids)[\"']?\s*[:=]\s*)\[[^\]\n]*\]?"),
    re.compile(r"(?i)((?:rejected (?:draft )?tokens?|for tokens?) )(?:\[[^\]\n]*\]?|\d+)"),
    re.compile(r"(input_value=)(?!<).*?(?=, input_type=|\]$|$)", re.MULTILINE),
)
_USER_NAME = r"\b(?:user|username|login|logname|owner)"
_HOMES = (
    (re.compile(r"(/home/|/Users/|/var/home/|/export/home/)(?!<)[^/\s'\":,;)\]]+"), r"\1<user>"),
    (re.compile(r"([A-Za-z]:\\+Users\\+)(?!<)[^\\\s'\":,;)\]]+"), r"\1<user>"),
    (re.compile(rf"(?i)({_USER_NAME}[\"']?\s*[=:]\s*[\"']?)(?!<|None\b|null\b)[A-Za-z_][\w.-]*"), r"\1<user>"),
    (re.compile(r"\b([ug]id=\d+)\((?!<)[^)\s]*\)"), r"\1(<user>)"),
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IPV4 = re.compile(r"(?<![\w.])(?<!==)\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])")
_MAC = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])")
_GPU_ID = re.compile(r"\b((?:GPU|MIG)-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_RANDOM = re.compile(r"(?<![\w/+.-])(?!_Z)[A-Za-z0-9_-]{32,}(?![\w/.-])")
_HOST = re.compile(
    r"(?i)(\b(?:host|hostname|nodename|node|master_addr|mq_connect_ip)[\"']?\s*[=:]\s*[\"']?)(?!<)"
    r"(?=[\w.-]*[A-Za-z])[\w-]+(?:\.[\w-]+)+"
)


@dataclass(frozen=True)
class Redactor:
    """Takes private things out of texts.

    Attributes:
        secrets: exact values that must not stay: keys from files and the environment.
        names: exact words: user and host names.
        homes: directories that become `~`.
    """

    secrets: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    _names: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        words = sorted({n for n in self.names if len(n) >= 3 and n.lower() not in _COMMON}, key=len, reverse=True)
        pattern = (
            re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(map(re.escape, words))})(?![A-Za-z0-9_])") if words else None
        )
        object.__setattr__(self, "_names", pattern)

    def json(self, value: object, key: str = "") -> object:
        """A JSON value whose texts are redacted one by one, so that it stays JSON. A text is judged with its key."""
        if isinstance(value, dict):
            return {self(str(name)): self.json(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            # An argument is judged with the option before it.
            before = [key, *(f"{one} " if str(one).startswith("--") else key for one in value)]
            return [self.json(inner, name) for name, inner in zip(before, value, strict=False)]
        if not isinstance(value, str):
            return value
        named = key if key.endswith(" ") else f"{key}="
        judged = self(named + value)
        return judged.removeprefix(named) if key and judged.startswith(named) else self(value)

    def __call__(self, text: str) -> str:
        """The text without what is private; a second pass changes nothing more."""
        for secret in sorted((s for s in self.secrets if len(s) >= MIN_SECRET), key=len, reverse=True):
            text = text.replace(secret, "<secret>")
        for pattern, replacement in _TOKENS:
            text = pattern.sub(replacement, text)
        for pattern in _CONTENT:
            text = pattern.sub(r"\1<removed>", text)
        for home in sorted((h.rstrip("/") for h in self.homes if len(h.strip("/")) >= 2), key=len, reverse=True):
            text = re.sub(rf"(?<![\w.]){re.escape(home)}(?![\w.-])", "~", text)
        for pattern, replacement in _HOMES:
            text = pattern.sub(replacement, text)
        text = _EMAIL.sub("<email>", text)
        text = _MAC.sub("<mac>", text)
        text = _GPU_ID.sub(r"\1<id>", text)
        text = _IPV4.sub(_address, text)
        text = _IPV6.sub(_address, text)
        text = _HOST.sub(r"\1<host>", text)
        text = _RANDOM.sub(_random, text)
        return self._names.sub("<name>", text) if self._names else text


def for_this_machine(secrets: Iterable[str] = ()) -> Redactor:
    """A redactor that knows this machine's and this user's names, home and secrets in the environment."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME"):
        names.add(os.environ.get(name, ""))
    with contextlib.suppress(KeyError, OSError):  # a uid without an entry
        names.add(getpass.getuser())
    home = os.path.expanduser("~")
    named = re.compile(r"(?i)key|token|secret|passw|credential")
    values = [value for name, value in os.environ.items() if named.search(name)]
    return Redactor(secrets=(*secrets, *values), names=tuple(sorted(names)), homes=(home,))


def _address(match: re.Match[str]) -> str:
    """A public address becomes a word; what is no address (a time, a version) stays."""
    text = match[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    return text if any(address in net for net in _PRIVATE if net.version == address.version) else "<address>"


def _random(match: re.Match[str]) -> str:
    """A long word with digits and letters of both cases is a key; names, C++ symbols and hexadecimal hashes are not."""
    text = match[0]
    digits = sum(char.isdigit() for char in text)
    mixed = any(char.islower() for char in text) and any(char.isupper() for char in text)
    return "<token>" if mixed and digits >= 3 and not text.isdigit() else text
