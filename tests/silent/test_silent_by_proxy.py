"""Every fault that can be put between a server and its client: the check is red with it and green without it.

The toy server lets a fault be made at an exact point in milliseconds; test_silent_live.py makes the same on a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from dflash_serve.plan.model import Plan
from dflash_serve.verify import boot, drafting, generation, load, lossless, needle, reuse
from dflash_serve.verify.client import Client
from dflash_serve.verify.model import Abilities, Check, Subject
from dflash_serve.verify.report import ask
from tests.verify.fake_engine import FakeEngine, serving

from . import faulty_proxy as proxy

Made = Callable[[Subject], list[Check]]


@dataclass(frozen=True)
class Silent:
    """One silent failure.

    Attributes:
        red: ids of the checks that must fail, and no others.
        fault: on the way; None when the server itself is wrong.
        server: what is wrong with the server.
        says: a part of the red check's message.
    """

    name: str
    check: Made
    red: str
    says: str
    fault: proxy.Fault | None = None
    server: dict[str, Any] = field(default_factory=dict)


ZERO = proxy.counters(r"vllm:spec_decode_num_accepted_tokens\w*_total", lambda value: 0.0)
LATER_MORE = proxy.counters(
    r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*position="1"\}', lambda value: 3 * value
)
FAILURES = (
    Silent("window-lowered", boot.window_served, "window-served", "2048", proxy.lowered_window(2048)),
    Silent("version-bumped", boot.engine_version, "engine-version", "vLLM 0.31.0 serves", server={"version": "0.31.0"}),
    Silent("nan-logits", generation.generation, "generation", "empty", proxy.empty()),
    Silent("nan-logits-as-text", generation.generation, "generation", "repeats itself", proxy.repeating("!")),
    Silent("never-stops", generation.stops, "stops", "ran past its stop string", proxy.unstopping()),
    Silent("grammar-rejected", generation.structured, "structured", "Failed to advance FSM", proxy.rejecting_grammar()),
    Silent("causal-drafter", drafting.drafter, "drafter", "below the recipe's band", server={"accept": (1, 0, 0)}),
    Silent("inert-drafter", drafting.drafter, "drafter", "is inert", ZERO),
    Silent("fp16-nan-drafter", drafting.drafter, "drafter", "is inert", server={"accept": (0,), "nan_drafts": 1}),
    Silent("sometimes-nan", drafting.drafter, "nan-drafts", "are NaN", server={"nan_drafts": 1}),
    Silent("inert-on-chat", drafting.drafter, "drafter-chat", "on chat", server={"accept_chat": (0,)}),
    Silent("no-drafter", drafting.drafter, "drafter", "whatever its speed", server={"accept": None}),
    Silent("positions-swapped", drafting.drafter, "positions", "more often than an earlier one", LATER_MORE),
    Silent("metrics-renamed", boot.metric_names, "metric-names", "vllm:kv_cache_usage_perc",
           proxy.renamed("vllm:kv_cache_usage_perc", "vllm:kv_usage")),
    Silent("metrics-without-drafts", boot.metric_names, "metric-names", "spec_decode",
           proxy.without("vllm:spec_decode")),
    Silent("plugin-swallowed", boot.patches, "patches-active", "not loaded", proxy.without("dflash:patch_info")),
    Silent("token-altered", lossless.lossless, "lossless", "are not the target's", proxy.altered_token(at=3)),
    Silent("prefix-cache-dead", reuse.prefix_cache, "prefix-cache", "no cache hit", server={"prefix": False}),
    Silent("cached-context-lost", reuse.prefix_cache, "cached-drafts", "falls from",
           server={"accept_cached": (0, 0, 1)}),
    Silent("acceptance-falls", needle.needle, "context-acceptance", "tokens", server={"accept_long": (0, 0, 1)}),
    Silent("concurrency-lowered", load.concurrency, "concurrency", "ran together",
           server={"slots": 1, "step": 0.02}),
    Silent("one-at-a-time", load.concurrency, "concurrency", "ran together", proxy.one_at_a_time(), {"step": 0.02}),
    Silent("stream-stalls", load.concurrency, "concurrency", "stood still", proxy.stalling(2, 0.8)),
)  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_red_then_green(failure: Silent, tiny_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "STALL_SECONDS", 0.5)
    patches = tuple(p.id for p in tiny_plan.patches if p.outcome == "applied")

    def found(server: dict[str, Any], fault: proxy.Fault | None) -> list[Check]:
        with ExitStack() as stack:
            engine = stack.enter_context(serving(FakeEngine(patches=patches, **server)))
            url = engine.url if fault is None else stack.enter_context(proxy.faulty(engine.url, fault)).url
            client = Client(url, engine.model, timeout=10)
            subject = Subject(
                client, f"{url}/metrics", plan=tiny_plan, log="", abilities=Abilities(False, False, False)
            )
            return ask(failure.check, subject)

    red = [check for check in found(failure.server, failure.fault) if not check.passed]
    assert [check.id for check in red] == [failure.red]
    assert failure.says in red[0].detail
    assert red[0].fix
    assert len(red[0].lines()) <= 3
    sound = {key: value for key, value in failure.server.items() if key == "step"}
    assert [check.lines() for check in found(sound, None) if not check.passed] == []


def test_an_engine_that_hangs_while_health_answers() -> None:
    with serving(FakeEngine()) as engine:
        with proxy.faulty(engine.url, proxy.wedged(10)) as faulty:
            assert requests.get(faulty.url + "/health", timeout=5).status_code == 200
            client = Client(faulty.url, engine.model, timeout=1)
            (check,) = ask(generation.generation, Subject(client, f"{faulty.url}/metrics"))
        assert not check.passed
        assert "the engine hangs" in check.detail
        (check,) = ask(generation.generation, Subject(Client(engine.url, engine.model), f"{engine.url}/metrics"))
        assert check.passed


def test_a_stream_that_stops_for_good_is_no_endless_wait() -> None:
    with serving(FakeEngine()) as engine, proxy.faulty(engine.url, proxy.stalling(2, 20)) as faulty:
        client = Client(faulty.url, engine.model, timeout=1)
        (check,) = ask(generation.generation, Subject(client, f"{faulty.url}/metrics"))
    assert not check.passed
    assert check.detail == "no token for 1 s: the engine hangs"


def test_speed_does_not_hide_an_inert_drafter(tiny_plan: Plan) -> None:
    """The inert one is as quick as the sound one, to the user's eye; the counters tell them apart."""
    figures = []
    for accept in ((0,), (3, 2, 4, 3)):
        step = 0.002 if accept == (0,) else 0.008
        with serving(FakeEngine(accept=accept, step=step)) as engine:
            subject = Subject(Client(engine.url, engine.model), f"{engine.url}/metrics", plan=tiny_plan)
            check = ask(drafting.drafter, subject)[0]
            figures.append((check.passed, check.figures["output_tok_s"]))
    (inert_passed, inert_speed), (sound_passed, sound_speed) = figures
    assert (inert_passed, sound_passed) == (False, True)
    assert inert_speed > 0.5 * sound_speed
