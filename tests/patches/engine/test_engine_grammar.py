"""Drafts against a grammar: vLLM's structured-output manager never rejects what its own masks allowed.

Reported: a draft block that crosses the end of the reasoning, or the start of a tool call, desynchronises the
grammar, and the request is ended with "grammar rejected tokens". This drives the real manager as the scheduler
does, with drafts that cross those places in every way, and a sampler that obeys the masks.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

K = 7
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CORPUS = [
    "I should call the function with a name.\n",
    '{"name": "abc", "n": 12}',
    '{"name":"x","n":-7}',
    "the answer is 42 ",
]
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<think>", "</think>"]
GRAMMARS = {
    "json": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": r"[a-c]{2,6}-[0-9]+"},
    "choice": {"regex": "yes|yesterday|no"},
}


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer with merges, so that tokens span several grammar steps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(params=["xgrammar", "guidance"])
def manager(request, tokenizer):
    from vllm.reasoning import ReasoningParserManager
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        model_config=SimpleNamespace(
            skip_tokenizer_init=True,
            is_diffusion=False,
            hf_config=SimpleNamespace(model_type="qwen3"),
            get_vocab_size=lambda: len(tokenizer),
        ),
        structured_outputs_config=SimpleNamespace(
            enable_in_reasoning=False,
            disable_any_whitespace=False,
            disable_additional_properties=False,
            backend=request.param,
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        num_speculative_tokens=K,
    )
    made = StructuredOutputManager(config)
    made.tokenizer = tokenizer
    backend = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}[request.param]
    made.backend = backend(config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    made.reasoner_cls = ReasoningParserManager.get_reasoning_parser("qwen3")
    return made


def start(manager, tokenizer, grammar, prompt):
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(**grammar))
    request = Request(
        request_id="r", prompt_token_ids=tokenizer.encode(prompt), sampling_params=params, pooling_params=None
    )
    request.structured_output_request.grammar = manager._create_grammar(request)
    return request


def allowed(row, size):
    bits = row.view("uint32")
    return [i for i in range(size) if bits[i >> 5] >> (i & 31) & 1]


def generate(manager, tokenizer, request, rng, *, padded, reasoning_tokens):
    """One request to its end. Returns (steps, blocks that crossed the end of the reasoning)."""
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("</think>")
    thought = tokenizer.encode(CORPUS[0] * 3)[:reasoning_tokens]
    wish = [*thought, end, *tokenizer.encode(rng.choice(['{"name": "abc", "n": 12}', "ab-12", "yesterday", "no"])), eos]
    steps = crossings = 0
    while request.num_output_tokens < 120:
        done = request.num_output_tokens
        drafts = (wish[done:] + [rng.randrange(len(tokenizer)) for _ in range(K)])[:K]
        drafts = [rng.randrange(len(tokenizer)) if rng.random() < 0.1 else token for token in drafts]
        if rng.random() < 0.1:
            drafts.insert(rng.randrange(K), end)
            drafts = drafts[:K]
        drafts = manager.validate_tokens(request, drafts)
        scheduled = drafts + [-1] * (K - len(drafts)) if padded else drafts
        mask = manager.grammar_bitmask({"r": request}, ["r"], {"r": scheduled})
        new = []
        for position in range(len(scheduled) + 1):
            may = allowed(mask[position], len(tokenizer))
            assert may, "a mask that allows nothing"
            want = scheduled[position] if position < len(scheduled) else -1
            index = request.num_output_tokens + len(new)
            liked = [t for t in (want, wish[index] if index < len(wish) else eos) if t in set(may)]
            token = liked[0] if liked and rng.random() < 0.9 else rng.choice(may)
            new.append(token)
            if token != want or token == eos:
                break
        crossings += end in new[:-1]
        request.append_output_token_ids(new)
        assert manager.accept_tokens(request, new), f"grammar rejected {new} ({tokenizer.decode(new)!r})"
        steps += 1
        if eos in new:
            break
    return steps, crossings


@pytest.mark.parametrize("padded", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_drafts_across_the_end_of_the_reasoning(manager, tokenizer, grammar, padded):
    crossings = 0
    for seed in range(40):
        rng = random.Random(seed)
        request = start(manager, tokenizer, GRAMMARS[grammar], "<think>\n")
        steps, crossed = generate(manager, tokenizer, request, rng, padded=padded, reasoning_tokens=rng.randrange(12))
        assert steps
        crossings += crossed
    assert crossings > 12  # blocks in which the grammar starts in the middle


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_drafts_when_the_prompt_ended_the_reasoning(manager, tokenizer, grammar):
    for seed in range(30):
        request = start(manager, tokenizer, GRAMMARS[grammar], "<think>\n\n</think>\n\n")
        steps, _ = generate(manager, tokenizer, request, random.Random(seed), padded=True, reasoning_tokens=0)
        assert steps
        text = tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
        if request.output_token_ids[-1] == tokenizer.eos_token_id and grammar == "json":
            assert set(json.loads(text, strict=False)) == {"name", "n"}
