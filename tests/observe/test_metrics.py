"""Numbers from a metrics text: right, unknown, or a clear refusal; never a wrong mean."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from dflash_serve.observe.check import require_whole
from dflash_serve.observe.exposition import read
from dflash_serve.observe.metrics import Engine, MetricsError, Snapshot, parse
from dflash_serve.observe.names import table

DATA = Path(__file__).resolve().parents[1] / "data/metrics"
REAL = (DATA / "vllm-0.32.0-tiny-busy.txt").read_text()
EARLIER = (DATA / "vllm-0.32.0-tiny-idle.txt").read_text()
VERIFIED = (DATA / "vllm-0.32.0-tiny-verified.txt").read_text()
OTHER = (DATA / "vllm-0.33.0-dflash2.txt").read_text()
FIGURES = ("drafts", "draft_tokens", "accepted_tokens", "generation_tokens", "prompt_tokens", "running", "waiting",
           "prefix_cache_queries", "prefix_cache_hits", "preemptions", "requests_finished")  # fmt: skip


def two_engines(text: str, second: str) -> str:
    """One text of two engines: the same families, the second text's samples as engine 1."""
    other = [line.replace('engine="0"', 'engine="1"') for line in second.splitlines() if 'engine="0"' in line]
    return text + "\n".join(other) + "\n"


def started(text: str, at: float | None) -> str:
    """The text of a process that was started then; None: that does not tell."""
    rows = [row for row in text.splitlines() if not row.startswith("process_start_time_seconds ")]
    return "\n".join([*rows, *([] if at is None else [f"process_start_time_seconds {at}"]), ""])


def figures(snapshot: Snapshot) -> dict[str, float | None]:
    out = {key: snapshot.total(key) for key in FIGURES}
    out["acceptance_length"] = snapshot.acceptance_length
    out["kv_cache_usage"] = snapshot.kv_cache_usage
    for key in ("ttft", "tpot", "e2e"):
        histogram = snapshot.histogram(key)
        out[key] = histogram.mean if histogram else None
    return out


def test_a_real_text_of_our_engine() -> None:
    seen = parse(REAL)
    assert [engine.identity for engine in seen.engines] == [("", "tiny", "0")]
    assert (seen.drafts, seen.draft_tokens, seen.accepted_tokens) == (367, 2569, 487)
    assert seen.acceptance_length == pytest.approx(1 + 487 / 367)
    assert seen.accepted_per_position == (193, 107, 64, 41, 34, 26, 22)
    assert seen.engines[0].positions == seen.accepted_per_position
    assert seen.engines[0].split["drafted_per_position"] == dict.fromkeys(range(7), 367)
    assert sum(seen.engines[0].split["verifications"].values()) == 367
    assert (seen.running, seen.waiting, seen.generation_tokens) == (4, 2, 828)
    assert seen.kv_cache_usage == pytest.approx(0.00293, abs=1e-5)
    assert seen.server.patches["draft-watch"] == "applied"
    assert seen.server.values["topk_fallback"] == 0
    assert seen.speculative
    assert seen.engines[0].unusable == ()


def test_a_real_text_of_another_release_without_our_plugin() -> None:
    seen = parse(OTHER)
    require_whole(seen)
    assert seen.acceptance_length == pytest.approx(1 + 35691 / 18248)
    assert seen.server.patches == {}


def test_counters_add_and_fractions_do_not() -> None:
    """Two engines at 40 % are 40 % full, not 80 %."""
    usage = re.compile(r"(vllm:kv_cache_usage_perc\{.*\}) .*")
    text = usage.sub(r"\1 0.4", two_engines(REAL, EARLIER))
    seen = parse(text)
    assert len(seen.engines) == 2
    assert seen.drafts == 367 + 350
    assert seen.total("generation_tokens") == 828 + 783
    assert seen.kv_cache_usage == pytest.approx(0.4)
    ttft = seen.histogram("ttft")
    assert ttft is not None
    assert ttft.count == sum(parse(t).histogram("ttft").count for t in (REAL, EARLIER))  # type: ignore[union-attr]


def test_an_old_name_gives_the_same_value_as_the_new_one() -> None:
    old = REAL
    for name in table().metrics.values():
        if len(name.names) > 1:
            stem, former = (n.removesuffix("_total") for n in name.names[:2])
            old = old.replace(stem, former)
    assert "vllm:gpu_cache_usage_perc" in old
    assert "vllm:kv_cache_usage_perc" not in old
    assert figures(parse(old)) == figures(parse(REAL))
    require_whole(parse(old))


def test_old_and_new_name_together_count_once() -> None:
    """Releases 0.9 to 0.12 exported both for a while."""
    both = REAL + "".join(
        line.replace("vllm:prefix_cache", "vllm:gpu_prefix_cache").replace("vllm:kv_cache", "vllm:gpu_cache") + "\n"
        for line in REAL.splitlines()
        if line.startswith(("vllm:prefix_cache", "vllm:kv_cache"))
    )
    assert figures(parse(both)) == figures(parse(REAL))


@pytest.mark.parametrize("release", ["0.20.0", "0.24.0", "0.28.0", "0.31.0", "0.32.0", "0.33.0"])
def test_every_release_exports_what_the_table_says_that_every_one_does(release: str) -> None:
    exported = set(yaml.safe_load((DATA / "names.yaml").read_text())["releases"][release])
    for key, name in table().metrics.items():
        ours = name.names[0].startswith("dflash:")
        known = {stem.removesuffix("_total") for stem in name.names} | set(name.names)
        assert ours or known & exported, f"{release} has no name for {key}"
    assert not exported & set(table().removed)


def test_no_drafts_is_no_acceptance_length() -> None:
    seen = parse("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5\n")
    assert seen.acceptance_length is None
    assert seen.total("drafts") is None
    assert not seen.speculative


def test_the_time_between_two_readings() -> None:
    seen = parse(REAL).since(parse(EARLIER))
    assert (seen.drafts, seen.accepted_tokens, seen.generation_tokens) == (17, 487 - 463, 45)
    assert seen.running == 4
    assert sum(seen.accepted_per_position) == seen.accepted_tokens
    assert seen.restarted == ()


def test_a_restarted_engine_counts_from_zero_and_the_other_does_not() -> None:
    """Engine 1 restarted; its tokens had grown beyond the old value already, its drafts had not."""
    earlier = parse(two_engines(EARLIER, EARLIER))
    fresh = VERIFIED.replace(
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 240.0',
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 9000.0',
    )
    assert fresh != VERIFIED
    seen = parse(two_engines(REAL, fresh)).since(earlier)
    assert seen.restarted == (("", "tiny", "1"),)
    assert [engine.values["generation_tokens"] for engine in seen.engines] == [45, 9000]
    assert [engine.values["drafts"] for engine in seen.engines] == [17, 66]


def test_a_restart_is_seen_though_every_counter_has_passed_its_old_value() -> None:
    later = parse(started(REAL, 900))
    seen = later.since(parse(started(EARLIER, 100)))
    assert seen.restarted == (("", "tiny", "0"),)
    assert figures(seen) == figures(parse(REAL))
    assert seen.server == later.server
    for at in (900, None):
        same = later.since(parse(started(EARLIER, at)))
        assert (same.restarted, same.drafts) == ((), 17)


def test_only_the_engines_of_the_server_that_restarted_count_anew() -> None:
    def page(text: str, instance: str, started: int) -> str:
        mine = [row for row in text.splitlines() if 'engine="0"' in row]
        rows = [row.replace('engine="0"', f'engine="0",instance="{instance}"') for row in mine]
        return "\n".join([*rows, f'process_start_time_seconds{{instance="{instance}"}} {started}', ""])

    earlier = parse(page(EARLIER, "a", 1) + page(EARLIER, "b", 1))
    seen = parse(page(REAL, "a", 1) + page(REAL, "b", 2)).since(earlier)
    assert seen.restarted == (("b", "tiny", "0"),)
    assert [engine.values["drafts"] for engine in seen.engines] == [17, 367]


def test_sums_of_the_process_that_went_back_are_another_life() -> None:
    line = "dflash:watched_drafts_total 2.0"
    assert line in EARLIER
    assert line in REAL
    earlier = started(EARLIER, None).replace(line, "dflash:watched_drafts_total 50.0")
    assert parse(started(REAL, None)).since(parse(earlier)).server.values["watched_drafts"] == 2


def test_several_series_of_one_engine_are_one_figure() -> None:
    """Such as two api servers' pages joined: fractions don't add up, positions do."""
    usage = 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'
    accepted = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"}'
    assert usage in REAL
    assert accepted in REAL
    seen = parse(REAL + usage.replace("}", ',pid="2"} 0.6\n') + accepted.replace("}", ',pid="2"} 3\n'))
    assert seen.kv_cache_usage == 0.6
    assert seen.accepted_per_position[:3] == (193, 107 + 3, 64)


@pytest.mark.parametrize(
    "text",
    [
        REAL[:-20],
        REAL.replace(" 367.0", " abc"),
        "{{{{\n",
        "vllm:x one\n",
        "<html><body>502 Bad Gateway</body></html>\n",
        '{"error": "not found"}\n',
        REAL + REAL,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="x"} 1.0\n',
    ],
)
def test_what_is_no_whole_metrics_text_is_refused(text: str) -> None:
    with pytest.raises(MetricsError):
        parse(text)


def test_an_engine_with_nan_takes_no_part_in_a_ratio() -> None:
    """Its accepted tokens over the other engine's drafts would be a wrong mean."""
    text = two_engines(REAL, EARLIER).replace(
        'num_drafts_total{engine="0",model_name="tiny"} 367.0', 'num_drafts_total{engine="0",model_name="tiny"} NaN'
    )
    seen = parse(text)
    assert seen.engines[0].unusable == ("vllm:spec_decode_num_drafts_total",)
    assert seen.acceptance_length == pytest.approx(1 + 463 / 350)
    assert seen.total("drafts") is None


@pytest.mark.parametrize("value", ["-1.0", "+Inf", "-Inf", "NaN"])
def test_no_count_is_negative_or_infinite(value: str) -> None:
    seen = parse(REAL.replace(" 367.0", f" {value}"))
    assert "vllm:spec_decode_num_drafts_total" in seen.engines[0].unusable
    assert seen.acceptance_length is None


def test_a_histogram_whose_buckets_do_not_add_up_is_no_number() -> None:
    line = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"}'
    assert line in REAL
    seen = parse("".join(row + "\n" for row in REAL.splitlines() if not row.startswith(line)))
    assert seen.histogram("ttft") is None
    assert seen.engines[0].unusable == ("vllm:time_to_first_token_seconds",)


def test_quantiles_are_prometheus_quantiles() -> None:
    text = "".join(
        f'vllm:time_to_first_token_seconds_bucket{{le="{end}"}} {count}\n'
        for end, count in (("0.1", 0), ("0.5", 50), ("1.0", 90), ("+Inf", 100))
    )
    text += "vllm:time_to_first_token_seconds_sum 60\nvllm:time_to_first_token_seconds_count 100\n"
    ttft = parse(text).histogram("ttft")
    assert ttft is not None
    assert ttft.quantile(0.5) == pytest.approx(0.5)
    assert ttft.quantile(0.25) == pytest.approx(0.3)
    assert ttft.quantile(0.7) == pytest.approx(0.75)
    assert ttft.quantile(0.99) == 1.0  # beyond the last finite bucket Prometheus says its bound
    assert ttft.mean == pytest.approx(0.6)


@settings(max_examples=60)
@given(st.integers(min_value=0, max_value=len(REAL) - 1))
def test_a_cut_text_gives_right_numbers_unknown_ones_or_a_refusal(cut: int) -> None:
    whole = figures(parse(REAL))
    try:
        seen = parse(REAL[:cut])
        require_whole(seen)
    except MetricsError as exc:
        assert 1 <= len(exc.lines()) <= 3
        return
    for key, value in figures(seen).items():
        assert value in (None, whole[key]), key


def test_every_cut_at_the_end_of_a_line_of_two_engines() -> None:
    """The engine that comes last in a family is the one that a cut takes away."""
    lines = sorted(two_engines(REAL, EARLIER).splitlines(keepends=True), key=lambda line: line.split("{")[0])
    whole = figures(parse("".join(lines)))
    judged = 0
    for end in range(0, len(lines), 7):
        try:
            seen = parse("".join(lines[:end]))
            require_whole(seen)
        except MetricsError:
            continue
        judged += 1
        for key, value in figures(seen).items():
            assert value in (None, whole[key]), (key, end)
    assert judged


def test_positions_that_do_not_add_up_are_unknown() -> None:
    text = "".join(row + "\n" for row in REAL.splitlines() if 'position="6"' not in row)
    assert parse(text).engines[0].positions == ()


@given(st.text(max_size=500))
def test_any_text_is_numbers_or_a_clear_refusal(text: str) -> None:
    try:
        parse(text + "\n")
    except MetricsError as exc:
        assert len(exc.lines()) <= 3


@settings(max_examples=60)
@given(st.integers(min_value=0, max_value=len(REAL) - 2), st.text(alphabet='{}",= \\0aN#\n', min_size=1, max_size=3))
def test_a_text_with_one_place_overwritten_never_breaks_the_reader(at: int, junk: str) -> None:
    try:
        seen = parse(REAL[:at] + junk + REAL[at + len(junk) :])
    except MetricsError:
        return
    for value in figures(seen).values():
        assert value is None or math.isfinite(value)


counters = st.fixed_dictionaries({"drafts": st.integers(0, 10**9), "accepted": st.integers(0, 10**9)})


@given(st.lists(st.tuples(counters, counters), min_size=1, max_size=4))
def test_a_difference_is_never_negative_and_adds_up_over_engines(pairs: list[tuple[dict, dict]]) -> None:
    def text(at: int) -> str:
        return "".join(
            f'vllm:spec_decode_num_drafts_total{{engine="{i}"}} {pair[at]["drafts"]}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="{i}"}} {pair[at]["accepted"]}\n'
            for i, pair in enumerate(pairs)
        )

    seen = parse(text(1)).since(parse(text(0)))
    for engine, (then, now) in zip(seen.engines, pairs, strict=True):
        restarted = now["drafts"] < then["drafts"] or now["accepted"] < then["accepted"]
        base = {"drafts": 0, "accepted": 0} if restarted else then
        assert engine.values["drafts"] == now["drafts"] - base["drafts"]
        assert engine.values["accepted_tokens"] == now["accepted"] - base["accepted"]
        assert (engine.identity in seen.restarted) == restarted
    assert seen.drafts == sum(engine.values["drafts"] for engine in seen.engines)


def test_a_page_of_ten_megabytes_is_read_in_seconds() -> None:
    """A gateway that joins two hundred servers' pages."""
    pages, size, i = [], 0, 0
    while size < 10 * 2**20:
        page = REAL.replace('engine="0"', f'engine="0",instance="host{i}:8000"')
        page = "".join(line + "\n" for line in page.splitlines() if "instance=" in line)
        pages.append(page)
        size, i = size + len(page), i + 1
    started = time.process_time()
    seen = parse("".join(pages))
    seconds = time.process_time() - started
    print(f"{size / 2**20:.1f} MB of {i} servers in {seconds:.1f} s")
    assert len(seen.engines) == i
    assert seen.drafts == 367 * i
    assert seen.kv_cache_usage == parse(REAL).kv_cache_usage
    assert seconds < 20


@given(st.dictionaries(st.sampled_from(["engine", "model_name", "le"]), st.text(max_size=12)), st.floats(width=32))
def test_labels_and_values_are_read_as_prometheus_own_library_writes_them(labels: dict, value: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("x", "help", sorted(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(value)
    found = read(generate_latest(registry).decode(), frozenset({"x"})).samples
    assert len(found) == 1
    assert found[0].labels == labels
    assert found[0].value == value or math.isnan(value)


@pytest.mark.parametrize(
    "line",
    [
        "x{" + 'a="1" ' * 30 + "} 1 ?",
        "x{" + 'a="1" ' * 30 + "} 1",
        "x{" + 'a="1"' * 30 + "} 1",
        "x{" + 'a="1",' * 20000 + "? 1",
        "x{" + " " * 50000 + "? 1",
        'x{a="1"' + " " * 50000 + "? 1",
        'x{a="' + '\\"' * 50000,
        "x" + "\t" * 50000 + "1" + " " * 50000 + "?",
        "x{,} 1",
    ],
    ids=range(9),
)
def test_a_line_that_is_no_sample_is_refused_at_once(line: str) -> None:
    started = time.process_time()
    with pytest.raises(MetricsError, match="line 1"):
        read(line + "\n", frozenset())
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("labels", ['a="1",b="2"', ' a = "1" , b = "2" , ', 'a="1",b="2",'])
def test_labels_are_separated_by_commas(labels: str) -> None:
    assert read(f"x{{{labels}}} 1 1700000000\n", frozenset({"x"})).samples[0].labels == {"a": "1", "b": "2"}


def test_a_page_above_the_limit_is_refused() -> None:
    with pytest.raises(MetricsError, match="more than"):
        parse("# x\n" * (9 * 2**20))


def test_engines_are_told_apart_in_words() -> None:
    assert Engine("host:8000", "tiny", "1", {}, {}, {}).label == "host:8000 tiny engine 1"
    assert Engine("", "", "", {}, {}, {}).label == "engine 0"
