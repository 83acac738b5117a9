"""The evaluation: answers are found as a thinking model gives them, noise is stated, pairs are compared."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.errors import UsageError, VerifyFailed
from dflash_serve.verify import evaluate
from dflash_serve.verify.evaluate import Evaluation, Task, compare

HOME = Path(__file__).resolve().parents[2] / "scripts" / "eval"


def answers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("eval_answers", HOME / "tasks" / "answers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ANSWERS = answers()


class Loader(yaml.SafeLoader):
    """Reads the harness's `!function` as text."""


Loader.add_constructor("!function", lambda loader, node: f"function {node.value}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so 3 + 4 = 7. The answer is 7.", "7"),
        ("The answer is $1,200.00 in all.", "1200"),
        ("first 12, then \\boxed{042}", "42"),
        ("\\boxed{\\text{about } 5} and \\boxed{6}", "6"),
        ("**Answer: 18**", "18"),
        ("maybe 3? The answer is 4. I also saw 9 birds.", "4"),
        ("-0.50", "-0.5"),
        ("-0", "0"),
        ("I can't say", None),
        ("", None),
    ],
)
def test_numbers(text: str, found: str | None) -> None:
    assert ANSWERS.number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is (C).", "C"),
        ("answer: b", "B"),
        ("A is wrong, the answer is **(J)**", "J"),
        ("\\boxed{(D)}", "D"),
        ("The answer is (Z)", None),
        ("A", None),
    ],
)
def test_letters(text: str, found: str | None) -> None:
    assert ANSWERS.letter(text) == found


def test_the_trace_does_not_count_and_a_missing_answer_is_counted_apart() -> None:
    doc = {"answer": "work #### 1,008"}
    assert ANSWERS.gsm8k(doc, ["<think>the answer is 3</think>The answer is 1008"])["exact_match"] == 1
    assert ANSWERS.gsm8k(doc, [None]) == {"exact_match": 0.0, "invalid": 1.0}
    assert ANSWERS.aime({"Answer": 25}, ["\\boxed{025}"]) == {"exact_match": 1.0, "invalid": 0.0}
    assert ANSWERS.mmlu_pro({"answer": "C"}, ["The answer is (B)"]) == {"exact_match": 0.0, "invalid": 0.0}


@given(st.text(max_size=200))
def test_any_text_is_scored(text: str) -> None:
    for score in (ANSWERS.gsm8k({"answer": "#### 1"}, [text]), ANSWERS.mmlu_pro({"answer": "A"}, [text])):
        assert set(score) == {"exact_match", "invalid"}
        assert not (score["exact_match"] and score["invalid"])


@pytest.mark.parametrize("path", sorted((HOME / "tasks").glob("*.yaml")), ids=lambda path: path.stem)
def test_tasks_suit_a_thinking_model(path: Path) -> None:
    task: dict[str, Any] = yaml.load(path.read_text(), Loader)
    assert task["task"] == path.stem
    assert task["generation_kwargs"]["until"] == []
    assert task["generation_kwargs"]["max_gen_toks"] >= (24 if path.stem == "smoke" else 8192)
    assert {metric["metric"] for metric in task["metric_list"]} == {"exact_match", "invalid"}
    for name in re.findall(r"answers\.(\w+)", path.read_text()):
        assert callable(getattr(ANSWERS, name))


def test_the_usual_tasks_are_there() -> None:
    assert set(evaluate.DEFAULT_TASKS) <= set(evaluate.known_tasks())
    assert "smoke" in evaluate.known_tasks()


def test_the_lock_has_a_hash_for_every_package_and_no_torch() -> None:
    text = (HOME / "requirements.txt").read_text()
    names = re.findall(r"(?m)^([a-z0-9][\w.-]*)==", text)
    assert len(names) > 40
    assert "torch" not in names
    assert text.count("--hash=sha256:") >= len(names)
    assert "file:" not in text


def asked(right: list[int], *, drafter: bool = True, invalid: tuple[str, ...] = (), name: str = "t") -> Evaluation:
    task = Task(name=name, right={str(i): float(v) for i, v in enumerate(right)}, invalid=invalid)
    return Evaluation(url="http://h:1", drafter=drafter, tasks=(task,))


def test_noise_is_that_of_a_share() -> None:
    (check,) = compare(asked([1] * 50 + [0] * 50), None)
    assert "50.0% ± 9.8% of 100 questions" in check.detail
    assert check.passed


@pytest.mark.parametrize(
    ("mine", "other", "good"),
    [
        ([1] * 80 + [0] * 20, [1] * 80 + [0] * 20, True),  # the same answers
        ([1] * 78 + [0] * 22, [1] * 80 + [0] * 20, True),  # two changed: noise
        ([1] * 40 + [0] * 60, [1] * 80 + [0] * 20, False),  # forty lost
        ([1] * 80 + [0] * 20, [1] * 40 + [0] * 60, True),  # better is no failure
    ],
)
def test_pairs(mine: list[int], other: list[int], good: bool) -> None:
    (check,) = compare(asked(mine), asked(other, drafter=False))
    assert check.passed is good
    assert "paired difference" in check.detail
    # Seen from the other side it is the same verdict.
    (mirrored,) = compare(asked(other, drafter=False), asked(mine))
    assert mirrored.passed is good


def test_many_answers_that_are_not_found_fail() -> None:
    missing = tuple(str(i) for i in range(30))
    (check,) = compare(asked([1] * 70 + [0] * 30, invalid=missing), None)
    assert not check.passed
    assert "30% [invalid]" in check.detail
    (check,) = compare(asked([1] * 70 + [0] * 30, invalid=missing, name="smoke"), None)
    assert check.passed


def test_samples_of_the_harness(tmp_path: Path) -> None:
    rows = [{"doc_id": i, "exact_match": float(i % 2), "invalid": float(i == 4)} for i in range(6)]
    (tmp_path / "m").mkdir()
    (tmp_path / "m/samples_smoke_2026.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = evaluate.read_samples(tmp_path, "smoke")
    assert task.score == 0.5
    assert task.invalid == ("4",)
    with pytest.raises(VerifyFailed):
        evaluate.read_samples(tmp_path, "other")


def test_an_unknown_task_is_named_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "harness", lambda: pytest.fail("installed"))
    with pytest.raises(UsageError, match="no task named nope"):
        evaluate.evaluate("http://h:1", "m", None, ("nope",), drafter=True, limit=1, streams=1)


def test_what_was_kept_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(asked([1, 0]).model_dump_json())
    assert evaluate.load(tmp_path / "e.json") == asked([1, 0])
    (tmp_path / "e.json").write_text("{}")
    assert evaluate.load(tmp_path / "e.json") is None
