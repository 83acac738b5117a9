"""The trainer's models in plain PyTorch against other people's implementations, with the shipped weights."""

from __future__ import annotations

import json
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import checkpoint, delta_rule
from tiny_pair.reference import Drafter
from tiny_pair.target import Target
from torch import Tensor, nn

pytestmark = pytest.mark.engine

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PAIRS = ("tiny", "tiny-hybrid")
AUTHORS = "dflash==0.1.0"
AUTHORS_SHA256 = "b3fe38d9413efc30a952c8b38b34f1dcc696ba6d7b865acbf540a34cc53afaa2"


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[Path, Target, Drafter]:
    directory = RECIPES / request.param
    return directory, checkpoint.load_target(directory / "target"), checkpoint.load_drafter(directory / "drafter")


@pytest.fixture(scope="session")
def authors(tmp_path_factory: pytest.TempPathFactory) -> types.ModuleType:
    """The model file of the authors' package, fetched by hash.

    Only the file is loaded: the package pins other versions of torch and transformers than the engine's, and its other
    modules need packages that the engine has not.
    """
    room = tmp_path_factory.mktemp("authors")
    wanted = room / "requirements.txt"
    wanted.write_text(f"{AUTHORS} --hash=sha256:{AUTHORS_SHA256}\n")
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", wanted, "-d", room]
    subprocess.run(fetch, check=True, timeout=300)
    with zipfile.ZipFile(next(room.glob("dflash-*.whl"))) as wheel:
        source = wheel.read("dflash/model.py").decode()
    module = types.ModuleType("dflash_model_of_the_authors")
    sys.modules[module.__name__] = module  # transformers looks classes' modules up by name
    exec(compile(source, "dflash/model.py", "exec"), module.__dict__)
    return module


def head_of(target: Target) -> nn.Linear:
    """The target's output head as a module."""
    head = nn.Linear(target.spec.hidden, target.spec.vocabulary, bias=False)
    head.weight.data = target.model.embed_tokens.weight.data
    return head


def sequence(length: int) -> Tensor:
    return torch.randint(4, 4096, (1, length))


def test_chunks_equal_steps() -> None:
    """The delta rule in chunks of 64 against one step at a time, over a length that is no multiple."""
    q, k, v = torch.randn(3, 2, 3, 150, 32)
    q, k = delta_rule.unit(q), delta_rule.unit(k)
    g, beta = -0.3 * torch.rand(2, 3, 150), torch.rand(2, 3, 150)
    state, outputs = torch.zeros(2, 3, 32, 32), []
    for t in range(150):
        out, state = delta_rule.step(state, q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t])
        outputs.append(out)
    chunked, last = delta_rule.chunked(q, k, v, g, beta)
    torch.testing.assert_close(chunked, torch.stack(outputs, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, state, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_targets_equal_transformers(pair: tuple[Path, Target, Drafter]) -> None:
    """Logits and the hidden states that a drafter reads, against transformers' Qwen3 and Qwen3.5."""
    directory, target, drafter = pair
    held: dict[str, Any] = json.loads((directory / "target" / "config.json").read_text())
    if held["model_type"] == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        theirs = Qwen3ForCausalLM(Qwen3Config(**held))
    else:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**held))
    theirs = theirs.float().eval()
    missing = theirs.load_state_dict(target.state_dict(), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    theirs.tie_weights()
    ids = sequence(130)
    wanted = theirs(ids, output_hidden_states=True)
    hidden, aux = target(ids, drafter.spec.aux_layers)
    torch.testing.assert_close(target.logits(hidden), wanted.logits, atol=2e-3, rtol=1e-3)
    for layer, states in zip(drafter.spec.aux_layers, aux, strict=True):
        torch.testing.assert_close(states, wanted.hidden_states[layer + 1], atol=2e-3, rtol=1e-3)


@torch.no_grad()
def test_decoding_with_a_cache_equals_decoding_without(pair: tuple[Path, Target, Drafter]) -> None:
    _, target, _ = pair
    ids = sequence(20)
    cached = target.continue_greedily(ids, 40)
    for _ in range(20):
        hidden, _ = target(ids)
        ids = torch.cat([ids, target.logits(hidden[:, -1:]).argmax(-1)], 1)
    assert torch.equal(cached, ids)


@torch.no_grad()
@pytest.mark.parametrize("anchor", [1, 40, 590])
def test_the_authors_package_drafts_the_same_tokens(
    pair: tuple[Path, Target, Drafter], authors: types.ModuleType, anchor: int
) -> None:
    """`dflash` 0.1.0 loads our drafter and proposes what we propose; at 590 the window of 512 cuts the context."""
    directory, target, drafter = pair
    theirs = authors.DFlash2DraftModel.from_pretrained(directory / "drafter", dtype=torch.float32).eval()
    ids = sequence(600)
    aux = torch.cat(target(ids, drafter.spec.aux_layers)[1], -1)
    bonus = ids[:, anchor : anchor + 1]
    embedded = target.embed(drafter.block_ids(bonus))
    ours = drafter(embedded, aux, torch.tensor([[anchor]]))[:, 0]
    positions = torch.arange(anchor + drafter.spec.block)[None]
    hidden = theirs(target_hidden=aux[:, :anchor], noise_embedding=embedded, position_ids=positions)[:, 1:]
    torch.testing.assert_close(ours, hidden, atol=2e-4, rtol=1e-4)
    walked = drafter.candidate_selector.walk(ours, target.logits(ours), bonus[:, 0])
    proposed = theirs.propose(hidden, bonus[:, 0], head_of(target), 0.0)[0]
    assert torch.equal(walked, proposed)


@torch.no_grad()
def test_blocks_do_not_see_one_another(pair: tuple[Path, Target, Drafter]) -> None:
    """Many blocks of one sequence at once give what each gives alone: the trainer's masks are right."""
    _, target, drafter = pair
    ids = sequence(64)
    aux = torch.cat(target(ids, drafter.spec.aux_layers)[1], -1)
    anchors = torch.tensor([[3, 17, 40]])
    together = drafter(target.embed(drafter.block_ids(ids.gather(1, anchors))), aux, anchors)
    for place, anchor in enumerate(anchors[0].tolist()):
        one = torch.tensor([[anchor]])
        alone = drafter(target.embed(drafter.block_ids(ids.gather(1, one))), aux[:, : anchor + 1], one)
        torch.testing.assert_close(together[:, place], alone[:, 0], atol=1e-4, rtol=1e-4)
