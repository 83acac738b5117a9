"""Token streams: made once from the corpus, stored in one file, read by every training stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tiny_pair import chat
from tiny_pair import tokenizer as tok
from tiny_pair.corpus import SPLITS, SourceFile


@dataclass(frozen=True)
class Text:
    """Two one-dimensional token streams [n] of one split; documents end with <|endoftext|>."""

    code: Tensor
    chat: Tensor


Streams = dict[str, Text]


def _stream(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    ids: list[int] = []
    for start in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch(documents[start : start + 512]):
            ids += [*encoding.ids, tok.END_OF_TEXT_ID]
    return torch.tensor(ids, dtype=torch.int16)


def prepare(files: list[SourceFile], directory: Path) -> None:
    """Train the tokenizer on all files but the held-out ones and write tokenizer and streams to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tok.train(f.text for f in files if not f.heldout)
    tok.save(tokenizer, directory, max_length=4096)
    streams = {}
    for split in SPLITS:
        chosen = [f for f in files if f.split == split]
        streams[f"{split}.code"] = _stream(tokenizer, [f.text for f in chosen])
        streams[f"{split}.chat"] = _stream(tokenizer, [chat.render(t) for f in chosen for t in chat.turns(f)])
    save_file(streams, directory / "streams.safetensors")
    print({name: len(ids) for name, ids in streams.items()}, flush=True)


def load(directory: Path, device: str) -> tuple[Tokenizer, Streams]:
    """Tokenizer and streams as ``prepare`` left them, the streams as int64 on a device."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    stored = {name: ids.to(device).long() for name, ids in load_file(directory / "streams.safetensors").items()}
    return tokenizer, {split: Text(stored[f"{split}.code"], stored[f"{split}.chat"]) for split in SPLITS}


def windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows of a stream: [count, length]."""
    starts = torch.randint(0, len(stream) - length, (count,), generator=generator)
    return stream[starts.to(stream.device)[:, None] + torch.arange(length, device=stream.device)]


def windows_from(stream: Tensor, starts: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows [count, length] that begin at positions drawn from ``starts`` [m]."""
    starts = starts[(starts >= 0) & (starts <= len(stream) - length)]
    chosen = starts[torch.randint(0, len(starts), (count,), generator=generator).to(starts.device)]
    return stream[chosen[:, None] + torch.arange(length, device=stream.device)]


def line_starts(stream: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Positions [m] whose token before ends a line."""
    ends = [tokenizer.decode([token]).endswith("\n") for token in range(tokenizer.get_vocab_size())]
    table = torch.tensor(ends, device=stream.device)
    return table[stream[:-1]].nonzero()[:, 0] + 1


def answer_starts(stream: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Positions [m] in a chat stream where an assistant's answer begins."""
    head = torch.tensor(tokenizer.encode("<|im_start|>assistant\n").ids, device=stream.device)
    match = torch.ones(len(stream) - len(head), dtype=torch.bool, device=stream.device)
    for offset, token in enumerate(head):
        match &= stream[offset : offset + len(match)] == token
    return match.nonzero()[:, 0] + len(head)
