"""Silent failures on a real vLLM with the tiny pair: one sound server behind a faulty proxy, and one server that is
wrong in several ways at once. Each check is red with the fault and green without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.plan.model import Plan
from dflash_serve.progress import SilentProgress
from dflash_serve.runtime import native
from dflash_serve.runtime.state import Run
from dflash_serve.verify import boot, drafting, evaluate, generation, lossless
from dflash_serve.verify.client import Client
from dflash_serve.verify.commands import evaluation
from dflash_serve.verify.model import Subject
from dflash_serve.verify.report import ask
from dflash_serve.verify.soak import soak

from . import faulty_proxy as proxy
from .conftest import Compared

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


def behind(url: str, run: Run, plan: Plan, *, timeout: float = 60) -> Subject:
    client = Client(url, run.served_model_name, Path(run.key_file), timeout=timeout)
    return Subject(client=client, metrics_url=f"{url}/metrics", plan=plan, log=run.log_file.read_text())


def reds(subject: Subject, *checks: Callable[[Subject], list[Any]]) -> list[str]:
    return [c.id for check in checks for c in ask(check, subject) if not c.passed]


FAULTS = [
    ("window", proxy.lowered_window(2048), boot.window_served, "window-served"),
    ("renamed", proxy.renamed("vllm:kv_cache_usage_perc", "vllm:kv_usage"), boot.metric_names, "metric-names"),
    ("plugin", proxy.without("dflash:patch_info"), boot.patches, "patches-active"),
    ("empty", proxy.empty(), generation.generation, "generation"),
    ("repeating", proxy.repeating("!"), generation.generation, "generation"),
    ("unstopping", proxy.unstopping(), generation.stops, "stops"),
    ("grammar", proxy.rejecting_grammar(), generation.structured, "structured"),
]


def test_without_a_fault_all_are_green(sound: tuple[Run, Plan]) -> None:
    """The whole set is green on a sound server in tests/serve, which runs `verify` as a user does."""
    checks = dict.fromkeys(check for _, _, check, _ in FAULTS)
    assert reds(behind(sound[0].url, *sound), *checks) == []


@pytest.mark.parametrize(("fault", "check", "red"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_fault_on_the_way(
    sound: tuple[Run, Plan], fault: proxy.Fault, check: Callable[[Subject], list[Any]], red: str
) -> None:
    with proxy.faulty(sound[0].url, fault) as faulty:
        assert reds(behind(faulty.url, *sound), check) == [red]


def test_a_token_that_is_not_the_targets(sound: tuple[Run, Plan]) -> None:
    with proxy.faulty(sound[0].url, proxy.altered_token(at=2)) as faulty:
        subject = behind(faulty.url, *sound)
        subject.kept["generations"] = [
            subject.client.complete(
                generation.prompts()["acceptance"]["code"][0],
                max_tokens=16, temperature=0, ignore_eos=True, return_token_ids=True,
            )
        ]  # fmt: skip
        (check,) = ask(lossless.lossless, subject)
    print(check.lines())
    assert not check.passed
    assert check.figures["lossless_mismatches"] >= 1
    assert check.series["mismatch_positions"][0] >= 2


def test_an_engine_that_hangs_while_health_answers(sound: tuple[Run, Plan]) -> None:
    import requests

    with proxy.faulty(sound[0].url, proxy.wedged(20)) as faulty:
        assert requests.get(faulty.url + "/health", timeout=5).status_code == 200
        (check,) = ask(generation.generation, behind(faulty.url, *sound, timeout=2))
    assert not check.passed
    assert "the engine hangs" in check.detail


def test_a_drafter_that_nothing_is_accepted_of_is_red_whatever_its_speed(
    sound: tuple[Run, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = generation.prompts()["acceptance"] | {"max_tokens": 12}
    monkeypatch.setattr(drafting, "prompts", lambda: {"acceptance": fewer})
    zero = proxy.counters(r"vllm:spec_decode_num_accepted_tokens\w*_total", lambda value: 0.0)
    with proxy.faulty(sound[0].url, zero) as faulty:
        (check,) = ask(drafting.drafter, behind(faulty.url, *sound))
    assert not check.passed
    assert "inert" in check.detail
    assert check.figures["output_tok_s"] > 1


def test_a_soak_of_twenty_seconds(sound: tuple[Run, Plan]) -> None:
    subject = behind(sound[0].url, *sound)
    with SilentProgress().step("") as step:
        checks = soak(subject, 20.0, step, pids=lambda: [process.pid for process in native.members(sound[0])])
    for check in checks:
        print(check.lines())
    assert all(check.passed for check in checks)
    assert checks[0].figures["soak_requests"] >= 3
    assert next(check for check in checks if check.id == "soak-memory").figures["soak_memory_gib"] > 0.5


def test_the_evaluation_from_the_server_to_the_report(sound: tuple[Run, Plan]) -> None:
    """The harness in its own environment, four questions; the answers are kept for the comparison without a drafter."""
    subject = behind(sound[0].url, *sound)
    (check,) = evaluation(subject, "tiny", ("smoke",), 4, None)
    print(check.lines())
    assert check.passed
    assert "of 4 questions" in check.detail
    kept = evaluate.load(evaluate.kept("tiny", drafter=True))
    assert kept is not None
    assert kept.drafter
    assert set(kept.tasks[0].right) == {"0", "1", "2", "3"}


def test_a_server_that_is_wrong_in_five_ways(compared: Compared) -> None:
    """It starts, serves and says nothing; the causal block is told by its config and by what is accepted of it."""
    wrong = {check.id: check for check in compared.wrong if not check.passed}
    assert set(wrong) == {"drafter-served", "drafter", "window-served", "concurrency", "prefix-cache", "kv-pool"}
    assert "causal" in wrong["drafter-served"].detail
