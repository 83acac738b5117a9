#!/usr/bin/env python3
"""Makes the tiny pairs: tokenizer, a small target and its DFlash2 drafter, trained from nothing.

    train_tiny_pair.py prepare --library Python-3.12.1/Lib --data DIR        tokenizer and token streams
    train_tiny_pair.py train dense --data DIR --out recipes --minutes 5      one pair; also `hybrid`
    train_tiny_pair.py sensitive --data DIR --device cpu --minutes 13        tests/data/needs_block.safetensors
    train_tiny_pair.py prompts --library Python-3.12.1/Lib                   tests/data/heldout_prompts.json
    train_tiny_pair.py lock --library Python-3.12.1/Lib                      record another corpus

Needs torch, safetensors and tokenizers. On a CPU add `--device cpu`; it works the same and learns less a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

from tiny_pair import chat, checkpoint, corpus, data, heldout, rollouts, train_drafter, train_target
from tiny_pair.reference import Drafter
from tiny_pair.spec import PAIRS, PairSpec
from tiny_pair.target import Target

REPOSITORY = Path(__file__).parent.parent
PROMPTS = REPOSITORY / "tests" / "data" / "heldout_prompts.json"
NEEDS_BLOCK = REPOSITORY / "tests" / "data" / "needs_block.safetensors"


@dataclass(frozen=True)
class Size:
    """How much one step takes, by device."""

    target_tokens: int
    window: int
    rollout_batch: int
    drafter_sequences: int
    anchors: int


SIZES = {
    "cuda": Size(
        target_tokens=65536, window=1024, rollout_batch=8192, drafter_sequences=256, anchors=24, sensitive_sequences=160
    ),
    "cpu": Size(
        target_tokens=2048, window=256, rollout_batch=16, drafter_sequences=8, anchors=16, sensitive_sequences=6
    ),
}
DRAFTER_SHARE_AT_LEAST = 0.4
SENSITIVE_SEQUENCES = {"cuda": 160, "cpu": 6}
SENSITIVE = ("layers.0.self_attn.", "layers.1.self_attn.")


def train_pair(spec: PairSpec, args: argparse.Namespace) -> None:
    """Target, rollouts, drafter; checkpoints are written as soon as each is done."""
    torch.manual_seed(args.seed)
    cuda = args.device.startswith("cuda")
    if cuda:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length, which decoding changes each step
    size, seconds = SIZES["cuda" if cuda else "cpu"], args.minutes * 60
    tokenizer, streams = data.load(args.data, args.device)
    out, started = args.out / spec.directory, time.monotonic()
    if not args.keep_target:
        target = Target(spec.target).to(args.device)
        print(f"[target] {sum(p.numel() for p in target.parameters()):,} parameters", flush=True)
        budget = train_target.TargetBudget(size.target_tokens, size.window, args.target_share * seconds, args.target_lr)
        train_target.train(target, streams, budget, args.seed, autocast=cuda, compiled=args.compile)
        checkpoint.save(target, tokenizer, out / "target")
    # From here on the target is what was written: rounded to bfloat16, and run in it where that is fast.
    dtype = torch.bfloat16 if cuda else torch.float32
    target = checkpoint.load_target(out / "target", args.device, dtype)
    train_target.report(target, streams, size.window)

    prompts = {split: rollouts.Prompts.of(streams[split], tokenizer) for split in ("rollout", "heldout")}
    aux, batch = spec.drafter.aux_layers, size.rollout_batch
    short = rollouts.gather(target, prompts["rollout"], rollouts.SHORT, aux, batch, args.seed)
    long = rollouts.gather(target, prompts["rollout"], rollouts.LONG, aux, max(4, batch // 4), args.seed)
    unseen = rollouts.gather(target, prompts["heldout"], rollouts.UNSEEN, aux, min(64, batch), args.seed)

    drafter = Drafter(spec.drafter).to(args.device)
    print(f"[drafter] {sum(p.numel() for p in drafter.parameters()):,} parameters", flush=True)
    left = max(DRAFTER_SHARE_AT_LEAST * seconds, seconds - (time.monotonic() - started))
    budget = train_drafter.DrafterBudget(size.drafter_sequences, size.anchors, left, args.drafter_lr)
    train_drafter.train(
        drafter, target, [(short, 0.85), (long, 0.15)], budget, args.seed, autocast=cuda, compiled=args.compile
    )
    checkpoint.save(drafter, tokenizer, out / "drafter")
    drafter = checkpoint.load_drafter(out / "drafter", args.device, dtype)
    for name, pool in (("heldout", unseen), ("rollout", short.every(max(1, len(short.ids) // 192)))):
        length, reached = train_drafter.acceptance_length(drafter, target, pool)
        print(
            f"[drafter] {name}: acceptance length {length:.3f}, by position {[round(r, 3) for r in reached]}",
            flush=True,
        )
    show(target, tokenizer, args.device)


def train_sensitive(args: argparse.Namespace) -> None:
    """Weights that make the dense pair's drafter need its whole block; the rest of it stays as it is.

    By itself a drafter this small hardly looks at later mask tokens, so running it causally costs next to nothing, and
    no test could see it. Only the attention of the first layers is trained, and only it is written: a file for tests,
    not a better drafter.
    """
    spec, cuda = PAIRS["dense"], args.device.startswith("cuda")
    kind = "cuda" if cuda else "cpu"
    torch.manual_seed(args.seed)
    tokenizer, streams = data.load(args.data, args.device)
    dtype = torch.bfloat16 if cuda else torch.float32
    target = checkpoint.load_target(args.out / spec.directory / "target", args.device, dtype)
    drafter = checkpoint.load_drafter(args.out / spec.directory / "drafter", args.device)
    prompts = {split: rollouts.Prompts.of(streams[split], tokenizer) for split in ("rollout", "train", "heldout")}
    aux = spec.drafter.aux_layers
    pool = rollouts.Rollouts.join(
        [
            rollouts.gather(target, prompts[split], rollouts.SHORT, aux, args.rollouts, args.seed + i)
            for i, split in enumerate(("rollout", "train"))
        ]
    )
    unseen = rollouts.gather(target, prompts["heldout"], rollouts.UNSEEN, aux, min(64, args.rollouts), args.seed)
    trained = {name: p for name, p in drafter.named_parameters() if name.startswith(SENSITIVE)}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    budget = train_drafter.DrafterBudget(
        SENSITIVE_SEQUENCES[kind], SIZES[kind].anchors, args.minutes * 60, lr=1.5e-3, causal_weight=0.5
    )
    train_drafter.train(drafter, target, [(pool, 1.0)], budget, args.seed, autocast=cuda, compiled=False)
    weights = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in trained.items()}
    save_file(weights, NEEDS_BLOCK, metadata={"format": "pt"})
    NEEDS_BLOCK.chmod(0o644)
    for causal in (False, True):
        length, _ = train_drafter.acceptance_length(drafter, target, unseen, causal=causal)
        print(f"[drafter] heldout, {'causal' if causal else 'right'}: acceptance length {length:.3f}", flush=True)


def show(target: Target, tokenizer: Tokenizer, device: str) -> None:
    """Print a few greedy continuations, to look at."""
    samples = [
        "def read_config(path):\n    ",
        "class Stack:\n    def __init__(self):\n",
        "import os\nimport sys\n",
        chat.prompt("Write `is_even`: Return True if the number is even."),
    ]
    for text in samples:
        ids = torch.tensor([tokenizer.encode(text).ids], device=device)
        ids = target.continue_greedily(ids, ids.shape[1] + 80)
        print("-----\n" + tokenizer.decode(ids[0].tolist(), skip_special_tokens=False), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("lock", "prepare", "prompts"):
        command = commands.add_parser(name)
        command.add_argument(
            "--library", dest="source", type=Path, required=True, help="the Lib directory of the pinned CPython"
        )
        if name == "prepare":
            command.add_argument("--data", type=Path, required=True)
    command = commands.add_parser("train")
    command.add_argument("pair", choices=sorted(PAIRS))
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("--out", type=Path, default=REPOSITORY / "recipes")
    command.add_argument("--device", default="cuda")
    command.add_argument("--minutes", type=float, default=5.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--target-lr", type=float, default=4e-3)
    command.add_argument("--drafter-lr", type=float, default=3e-3)
    command.add_argument(
        "--target-share", type=float, default=0.2, help="of the time; rollouts and drafter get the rest"
    )
    command.add_argument("--compile", action="store_true", help="compile layers (faster steps, some seconds to start)")
    command.add_argument(
        "--keep-target", action="store_true", help="use the target that is there, train the drafter only"
    )
    command = commands.add_parser("sensitive")
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("--out", type=Path, default=REPOSITORY / "recipes", help="where the pair is")
    command.add_argument("--device", default="cuda")
    command.add_argument("--minutes", type=float, default=13.0)
    command.add_argument("--rollouts", type=int, default=40, help="sequences of each prompt length and split")
    command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "sensitive":
        train_sensitive(args)
    elif args.command == "train":
        train_pair(PAIRS[args.pair], args)
    elif args.command == "lock":
        corpus.write_lock(corpus.read_files(args.source))
    elif args.command == "prepare":
        data.prepare(corpus.load(args.source), args.data)
    else:
        PROMPTS.parent.mkdir(parents=True, exist_ok=True)
        PROMPTS.write_text(json.dumps(heldout.prompts(corpus.load(args.source)), indent=1) + "\n")


if __name__ == "__main__":
    main()
