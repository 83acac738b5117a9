"""`dflash-serve metrics check`: what is wrong, in words, and an exit code for cron."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash_serve.errors import UsageError
from dflash_serve.observe.check import Expected, Reading, check, regression
from dflash_serve.observe.context import by_context, read_rows
from dflash_serve.observe.metrics import MetricsError, parse
from dflash_serve.observe_commands import metrics

DATA = Path(__file__).resolve().parents[1] / "data/metrics"
BUSY = (DATA / "vllm-0.32.0-tiny-busy.txt").read_text()
IDLE = (DATA / "vllm-0.32.0-tiny-idle.txt").read_text()
OTHER = (DATA / "vllm-0.33.0-dflash2.txt").read_text()


def having(text: str, **values: float | str) -> str:
    """The text with other values; a key is a sample name's end, such as `num_drafts_total`."""
    for name, value in values.items():
        text, count = re.subn(rf"^(\w+:{name}(?:\{{.*\}})?) .*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count, name
    return text


def without(text: str, part: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if part not in line)


def plus(text: str, **values: float) -> str:
    """The text with gauges of our stat logger added."""
    return text + "".join(f"dflash:{name} {value}\n" for name, value in values.items())


def ids(text: str, earlier: str | None = None, seconds: float | None = None, **expected: float) -> list[str]:
    now = parse(text)
    recent = now.since(parse(earlier)) if earlier else None
    return [f.id for f in check(Reading(now, recent, seconds, Expected(**expected)))]  # type: ignore[arg-type]


def run(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(metrics, list(args), input=stdin)


def test_a_good_server_has_no_finding() -> None:
    assert ids(BUSY) == []
    assert ids(OTHER) == []
    assert ids(BUSY, IDLE, 3.0) == ["few-drafts"]


def test_b16_drafts_without_an_accepted_token_are_an_inert_drafter(tmp_path: Path) -> None:
    text = having(
        BUSY,
        spec_decode_num_drafts_total=100,
        spec_decode_num_draft_tokens_total=700,
        spec_decode_num_accepted_tokens_total=0.0,
        spec_decode_num_accepted_tokens_per_pos_total=0.0,
    )
    file = tmp_path / "metrics.txt"
    file.write_text(text)
    done = run("check", str(file))
    assert done.exit_code == 7
    assert "the drafter is inert: 100 drafts of 700 tokens, none accepted [drafter-inert]" in done.output


def test_b15_nan_scores_are_named_as_the_cause() -> None:
    text = having(
        BUSY,
        spec_decode_num_drafts_total=1100,
        spec_decode_num_accepted_tokens_total=0.0,
        watched_drafts_total=17,
        watched_nan_drafts_total=17,
    )
    found = {f.id: f for f in check(Reading(parse(text)))}
    assert "bfloat16" in found["drafter-inert"].fix
    assert "float16 target" in found["drafter-inert"].fix
    assert "17 of 17 watched drafts have NaN scores" in found["nan-drafts"].what


def test_one_inert_engine_of_two_is_found_though_the_mean_is_fine() -> None:
    dead = having(BUSY, spec_decode_num_accepted_tokens_total=0.0, spec_decode_num_accepted_tokens_per_pos_total=0.0)
    text = BUSY + "".join(
        line.replace('engine="0"', 'engine="1"') + "\n" for line in dead.splitlines() if 'engine="0"' in line
    )
    found = check(Reading(parse(text), expected=Expected(acceptance_min=1.5)))
    assert [(f.id, f.where) for f in found] == [("drafter-inert", "tiny engine 1")]


def test_b90_a_text_without_speculative_counters_is_a_drafter_that_is_not_active() -> None:
    text = without(without(BUSY, "vllm:spec_decode"), "dflash:")
    assert ids(text) == ["drafter-not-active"]
    assert ids(text, drafter=False) == []
    assert ids(plus(text, expected_drafter_active=0)) == []


def test_b90_tokens_without_drafts_are_a_drafter_that_was_ignored() -> None:
    text = having(BUSY, spec_decode_num_drafts_total=0.0, spec_decode_num_accepted_tokens_total=0.0)
    assert ids(text) == ["drafter-idle"]


def test_b87_old_names_are_judged_like_new_ones() -> None:
    old = BUSY.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    old = old.replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
    assert ids(having(old, gpu_prefix_cache_queries_total=12552)) == ["prefix-cache-dead"]
    assert ids(old + "vllm:num_requests_swapped 0.0\n") == ["metrics-of-old"]


def test_b89_a_usage_that_somebody_summed_is_named() -> None:
    assert ids(having(BUSY, kv_cache_usage_perc=0.4)) == []
    assert ids(having(BUSY, kv_cache_usage_perc=1.6)) == ["usage-above-one"]


def test_b06_prefix_queries_without_a_hit_are_a_dead_cache() -> None:
    assert ids(having(BUSY, prefix_cache_queries_total=12552, prefix_cache_hits_total=0)) == ["prefix-cache-dead"]
    assert ids(having(BUSY, prefix_cache_queries_total=12552, prefix_cache_hits_total=5)) == []


def test_b07_no_reuse_in_the_interval_is_not_hidden_by_hits_before_it() -> None:
    earlier = having(BUSY, prefix_cache_queries_total=2_000_000, prefix_cache_hits_total=1_039_000)
    now = having(BUSY, prefix_cache_queries_total=3_040_000, prefix_cache_hits_total=1_039_000)
    assert ids(now) == []
    found = [f for f in check(Reading(parse(now), parse(now).since(parse(earlier)))) if f.id == "prefix-cache-dead"]
    assert "0 reuse: 1,040,000 prompt tokens" in found[0].what


def test_b09_acceptance_by_context_shows_what_the_mean_hides() -> None:
    rows = [f'{{"prompt_len": {n}, "accepted": {1.98 * d}, "drafts": {d}}}\n' for n, d in ((8000, 900), (12000, 700))]
    rows += [
        f'{{"prompt_len": {n}, "accepted": {0.25 * d}, "drafts": {d}}}\n' for n, d in ((270000, 100), (300000, 60))
    ]
    buckets = by_context(read_rows(rows, "rows"))
    assert [(b.end, b.requests) for b in buckets] == [(16384, 2), (float("inf"), 2)]
    assert [b.acceptance_length for b in buckets] == pytest.approx([2.98, 1.25])
    done = run("lengths", "-", stdin="".join(rows))
    assert done.exit_code == 0
    assert "2.98 over 1,600 drafts of 2 requests" in done.output
    assert "1.25 over 160 drafts of 2 requests" in done.output


def test_b09_a_running_server_tells_acceptance_by_context() -> None:
    def contexts(*rows: tuple[int, int, int]) -> str:
        return BUSY + "".join(
            f'dflash:watched_context_drafts_total{{context="{end}"}} {drafts}\n'
            f'dflash:watched_context_accepted_tokens_total{{context="{end}"}} {accepted}\n'
            for end, drafts, accepted in rows
        )

    fallen = check(Reading(parse(contexts((4096, 100, 198), (262144, 100, 25)))))
    assert [f.id for f in fallen] == ["acceptance-falls-with-context"]
    assert "2.98 up to 4,096, 1.25 up to 262,144" in fallen[0].what
    assert ids(contexts((4096, 100, 198), (262144, 100, 180))) == []
    assert ids(contexts((4096, 100, 198), (262144, 20, 5))) == []  # too few to tell


def answer(prompt: int, accepted: int, steps: int) -> str:
    """As vLLM 0.33 answers with --per-request-spec-decode-metrics summary."""
    told = {"mean_acceptance_length": 1 + accepted / steps, "num_spec_steps": steps, "num_spec_tokens": 7,
            "num_accepted_draft_tokens": accepted, "num_draft_tokens": 7 * steps}  # fmt: skip
    usage = {"prompt_tokens": prompt, "completion_tokens": accepted + steps, "total_tokens": prompt + accepted + steps}
    return json.dumps({"id": "cmpl-1", "choices": [], "usage": usage, "metrics": {"speculative_decoding": told}}) + "\n"


def test_lengths_reads_answers_as_vllm_gives_them() -> None:
    done = run("lengths", "-", "--json", stdin=answer(100, 198, 100) + answer(5000, 25, 100))
    rows = json.loads(done.output)
    assert [(row["up_to"], row["drafts"], row["acceptance_length"]) for row in rows] == [
        (4096, 100, 2.98), (16384, 100, 1.25)
    ]  # fmt: skip


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b'{"prompt_len": 1, "accepted": 1, "drafts": 1}\n\xff\n'])
def test_lengths_of_a_file_that_is_no_text(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    done = run("lengths", str(file))
    assert isinstance(done.exception, UsageError)
    assert "is no UTF-8 text" in str(done.exception)


@pytest.mark.parametrize("line", ["{", "[1]", "7", "[" * 100000, '{"prompt_len": 1}', answer(1, 1, 1)[:40],
                                  answer(1, 1, 1).replace("speculative_decoding", "x"),
                                  '{"usage": {"prompt_tokens": 1}, "metrics": null}',
                                  '{"prompt_len": 1' + "0" * 400 + ', "accepted": 1, "drafts": 1}',
                                  '{"prompt_len": "x", "accepted": 1, "drafts": 1}',
                                  '{"prompt_len": 1, "accepted": -1, "drafts": 1}'])  # fmt: skip
def test_a_broken_row_is_named_with_its_line(line: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_rows(["\n", line], "rows.jsonl")
    assert raised.value.where == "rows.jsonl:2"


def test_b48_a_drop_of_more_than_five_percent_against_a_baseline_fails(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(having(BUSY, spec_decode_num_drafts_total=1000, spec_decode_num_accepted_tokens_total=2190))
    new.write_text(having(BUSY, spec_decode_num_drafts_total=1000, spec_decode_num_accepted_tokens_total=1660))
    done = run("check", str(new), "--baseline", str(old))
    assert done.exit_code == 7
    assert "acceptance length 2.66 against 3.19 of the baseline: 16.6 % lower" in done.output
    assert run("check", str(old), "--baseline", str(old)).exit_code == 0
    near = parse(having(BUSY, spec_decode_num_drafts_total=1000, spec_decode_num_accepted_tokens_total=2031))
    assert regression(near, parse(old.read_text())) == []
    with pytest.raises(MetricsError, match="66 drafts"):
        regression(parse((DATA / "vllm-0.32.0-tiny-verified.txt").read_text()), near)


def test_acceptance_is_held_against_the_band() -> None:
    assert ids(BUSY, acceptance_min=2.4) == ["acceptance-below-band"]
    assert ids(BUSY, acceptance_min=2.2, acceptance_max=8.0) == []
    assert ids(BUSY, acceptance_max=2.0) == ["acceptance-above-band"]
    assert ids(plus(BUSY, expected_acceptance_length_min=2.4)) == ["acceptance-below-band"]
    # What the caller asks for goes before what the server exports.
    assert ids(plus(BUSY, expected_acceptance_length_min=2.4), acceptance_min=2.0) == []


def test_the_plan_the_server_was_started_from_is_held_against_what_it_serves() -> None:
    served = plus(BUSY, kv_pool_tokens=217167, max_model_len=4096)
    assert ids(plus(served, expected_kv_pool_tokens=217167, expected_max_model_len=4096)) == []
    assert ids(plus(served, expected_kv_pool_tokens=300000, expected_max_model_len=8192)) == [
        "window-lowered",
        "kv-pool-small",
    ]


def test_fallback_refused_patches_and_preemptions() -> None:
    assert ids(having(BUSY, topk_fallback=1.0)) == ["topk-fallback"]
    assert ids(BUSY.replace('outcome="skipped",patch="kv-grouping"', 'outcome="refused",patch="kv-grouping"')) == [
        "patch-refused"
    ]
    assert ids(having(BUSY, num_preemptions_total=11)) == ["preemption-storm"]


def test_a_wedged_engine_and_a_slow_one() -> None:
    assert ids(BUSY, BUSY, 30.0) == ["engine-wedged"]
    assert ids(IDLE, IDLE, 30.0) == []
    # A prefill alone: no step is counted before its first token, and its chunks fill the cache.
    assert ids(having(BUSY, kv_cache_usage_perc=0.004), BUSY, 30.0) == []
    later = having(BUSY, generation_tokens_total=9828, request_decode_time_seconds_sum=500)
    assert "output-below-band" in ids(later, BUSY, 100.0, tok_s_min=100.0)
    assert "output-below-band" not in ids(later, BUSY, 100.0, tok_s_min=50.0)
    prefilled = having(later, request_prefill_time_seconds_sum=900)
    assert "output-below-band" not in ids(prefilled, BUSY, 100.0, tok_s_min=100.0)


def test_answers_so_slow_that_none_ends_are_judged() -> None:
    later = having(BUSY, generation_tokens_total=1028, kv_cache_usage_perc=0.004)
    assert "output-below-band" in ids(later, BUSY, 100.0, tok_s_min=50.0)


def test_impossible_positions_and_nan() -> None:
    text = BUSY.replace('position="0"} 193.0', 'position="0"} 107.0').replace(
        'position="1"} 107.0', 'position="1"} 193.0'
    )
    assert ids(text) == ["positions"]
    assert ids(having(BUSY, generation_tokens_total="NaN")) == ["metrics-unusable"]


def test_a_text_that_lacks_what_every_vllm_exports_is_refused() -> None:
    with pytest.raises(MetricsError, match="generation_tokens"):
        ids(without(BUSY, "vllm:generation_tokens"))
    with pytest.raises(MetricsError, match="no figure of vLLM"):
        ids("python_info 1.0\n")
    with pytest.raises(MetricsError, match="no accepted tokens"):
        ids(without(BUSY, "num_accepted_tokens"))


def test_a_restart_between_two_readings_is_told() -> None:
    # The server of before had counted less than the one of now, which has served for a while.
    line = "process_start_time_seconds 1.79602001219e+09"
    assert line in BUSY
    assert ids(BUSY, BUSY.replace(line, "process_start_time_seconds 1.7e+09"), 30.0) == ["restarted"]
    assert ids(IDLE, having(IDLE, generation_tokens_total=9000)) == ["restarted"]


def test_json_carries_findings_and_figures() -> None:
    done = run("check", "-", "--json", "--recipe", "tiny", stdin=BUSY)
    report = json.loads(done.output)
    assert (done.exit_code, report["ok"], report["exit_code"]) == (0, True, 0)
    assert report["figures"]["acceptance_length"] == pytest.approx(1 + 487 / 367)
    assert report["figures"]["accepted_per_position"][0] == 193


@pytest.mark.parametrize(
    ("args", "text", "code"),
    [
        (["metrics", "check", "-"], BUSY, 0),
        (["metrics", "check", "-", "--recipe", "qwen3.8-27b-fp8"], BUSY, 7),
        (["metrics", "check", "-"], BUSY[:9000], 2),
        (["metrics", "check", "/no/such/file"], "", 2),
        (["metrics", "check", "http://127.0.0.1:9/metrics"], "", 2),
        (["metrics", "check", "-", "--recipe", "nosuch"], BUSY, 3),
    ],
)
def test_exit_codes_are_fit_for_cron(args: list[str], text: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from dflash_serve.cli import main; main()", *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code in (2, 3):
        assert 1 <= len(done.stderr.splitlines()) <= 3


def test_a_password_in_an_address_is_not_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_serve import observe_commands

    monkeypatch.setattr(observe_commands, "fetch", lambda url, key: BUSY)
    done = run("check", "http://me:secret@host/metrics", "--json")
    assert json.loads(done.output)["source"] == "http://host/metrics"


def test_a_key_of_other_letters_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"\xe9\xff")
    done = run("check", "http://127.0.0.1:9/metrics", "--key-file", str(file))
    assert isinstance(done.exception, UsageError)
    assert "no API key is in this file" in str(done.exception)
