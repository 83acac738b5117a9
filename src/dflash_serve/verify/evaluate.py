"""Accuracy through lm-evaluation-harness, with and without the drafter side by side.

The harness lives in an environment of its own, made from a hash-locked list on first use; the tasks are in
scripts/eval/tasks. What one run answered, question by question, is kept beside the run, so that the same recipe served
with and without its drafter (one after the other, on one GPU) is compared in pairs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_serve import paths
from dflash_serve.errors import UsageError, VerifyFailed
from dflash_serve.fsio import locked
from dflash_serve.verify.model import Check, failed, passed

DEFAULT_TASKS = ("gsm8k_cot_lite", "mmlu_pro_lite", "aime25_thinking")
# A trace of 65,536 tokens at 20 tok/s takes this long.
REQUEST_SECONDS = 7200
MOST_INVALID = 0.2
NORMAL_95 = 1.96


class Task(BaseModel):
    """One task's answers.

    Attributes:
        right: 1 or 0 by question id; invalid: ids whose answer was not found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    right: dict[str, float]
    invalid: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """Share of right answers."""
        return sum(self.right.values()) / len(self.right)

    @property
    def noise(self) -> float:
        """Half the 95 % interval of the score, as a binomial share."""
        return NORMAL_95 * math.sqrt(self.score * (1 - self.score) / len(self.right))


class Evaluation(BaseModel):
    """What one server answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    drafter: bool
    tasks: Annotated[tuple[Task, ...], Field(min_length=1)]

    def task(self, name: str) -> Task | None:
        """The task of that name."""
        return next((task for task in self.tasks if task.name == name), None)


def home() -> Path:
    """Where tasks, data and the lock are.

    Raises:
        UsageError: this installation has no checkout.
    """
    found = paths.project_root() / "scripts" / "eval"
    if not (found / "requirements.txt").is_file():
        raise UsageError("the evaluation's tasks are not here", where=str(found), fix="run it from a checkout")
    return found


def known_tasks() -> tuple[str, ...]:
    """Names of the tasks."""
    return tuple(sorted(path.stem for path in (home() / "tasks").glob("*.yaml")))


def harness() -> Path:
    """The harness's interpreter; its environment is made on first use.

    Raises:
        VerifyFailed: it can't be installed.
    """
    lock = home() / "requirements.txt"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    digest = hashlib.sha256(version.encode() + lock.read_bytes()).hexdigest()[:12]
    place = paths.cache_home() / f"evaluation-{digest}"
    python, marker = place / "bin" / "python", place / "complete"
    with locked(paths.cache_home() / f"evaluation-{digest}.lock", timeout=1800):
        if marker.is_file() and os.access(python, os.X_OK):
            return python
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        # The lock is complete; pip would ask for hashes of extras that it resolves anew.
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--require-hashes"]
        _run([*install, "-r", str(lock)])
        marker.write_text(version)
    return python


def evaluate(
    url: str, model: str, key: str | None, tasks: Sequence[str], *, drafter: bool, limit: int | None, streams: int
) -> Evaluation:
    """Ask a server all questions of the tasks.

    Args:
        limit: questions of each task; None for all.
        streams: requests at once.

    Raises:
        UsageError: no such task. VerifyFailed: the harness failed.
    """
    unknown = sorted(set(tasks) - set(known_tasks()))
    if unknown:
        raise UsageError(f"no task named {unknown[0]}", fix=f"there are {', '.join(known_tasks())}")
    python = harness()
    with tempfile.TemporaryDirectory(prefix="dflash-eval-") as out:
        arguments = {
            "model": model,
            "base_url": f"{url}/v1/chat/completions",
            "num_concurrent": streams,
            "max_retries": 2,
            "timeout": REQUEST_SECONDS,
            "tokenizer_backend": "None",
            "tokenized_requests": "False",
        }
        command = [str(python), "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args"]
        command += [",".join(f"{name}={value}" for name, value in arguments.items())]
        command += ["--tasks", ",".join(tasks), "--include_path", "tasks", "--apply_chat_template"]
        command += ["--log_samples", "--output_path", out, *([] if limit is None else ["--limit", str(limit)])]
        # The harness reads the key here; on the command line everybody could read it.
        environment = {**os.environ, "OPENAI_API_KEY": key or "none", "HF_DATASETS_TRUST_REMOTE_CODE": "0"}
        _run(command, cwd=home(), environment=environment)
        return Evaluation(url=url, drafter=drafter, tasks=tuple(read_samples(Path(out), name) for name in tasks))


def read_samples(out: Path, name: str) -> Task:
    """One task's answers from the harness's sample file.

    Raises:
        VerifyFailed: there is none, or it holds no answer.
    """
    files = sorted(out.rglob(f"samples_{name}_*.jsonl"))
    right: dict[str, float] = {}
    invalid = []
    for line in files[-1].read_text("utf-8").splitlines() if files else []:
        sample = json.loads(line)
        question = str(sample["doc_id"])
        right[question] = float(sample["exact_match"])
        if sample["invalid"]:
            invalid.append(question)
    if not right:
        raise VerifyFailed(f"the harness left no answers of {name}", where=str(out), fix="run it again; report it")
    return Task(name=name, right=right, invalid=tuple(invalid))


def compare(mine: Evaluation, other: Evaluation | None) -> list[Check]:
    """One check a task: its score with noise, and the paired difference to the other server's answers."""
    return [_task(mine, task, other.task(task.name) if other else None) for task in mine.tasks]


def _task(mine: Evaluation, task: Task, other: Task | None) -> Check:
    what = "with the drafter" if mine.drafter else "without a drafter"
    share = len(task.invalid) / len(task.right)
    detail = f"{what} {task.score:.1%} ± {task.noise:.1%} of {len(task.right)} questions, {share:.0%} [invalid]"
    figures = {f"{task.name}_score": round(task.score, 4), f"{task.name}_invalid": round(share, 4)}
    name = f"eval-{task.name}"
    if other is not None and (both := sorted(set(task.right) & set(other.right))):
        differences = [task.right[question] - other.right[question] for question in both]
        mean = sum(differences) / len(both)
        spread = NORMAL_95 * math.sqrt(sum((d - mean) ** 2 for d in differences) / max(1, len(both) - 1) / len(both))
        changed = sum(1 for d in differences if d)
        figures |= {f"{task.name}_difference": round(mean, 4), f"{task.name}_difference_noise": round(spread, 4)}
        beside = "without" if mine.drafter else "with"
        alike = sum(other.right[question] for question in both) / len(both)
        detail += f"; {beside} {alike:.1%} of the same {len(both)}"
        detail += f", paired difference {mean:+.1%} ± {spread:.1%} ({changed} changed)"
        worse = mean if mine.drafter else -mean
        if worse + spread < 0:
            return failed(
                name,
                detail,
                where=f"{len(both)} questions answered by both",
                fix="drafts must not change answers: look at the lossless check, and serve with --no-drafter",
                figures=figures,
            )
    if share > MOST_INVALID and task.name != "smoke":
        return failed(
            name,
            detail,
            where="answers in which no answer was found",
            fix="raise the window or the task's max_gen_toks: the trace ends before the answer",
            figures=figures,
        )
    return passed(name, detail, figures=figures)


def load(path: Path) -> Evaluation | None:
    """An evaluation that was kept; None when there is none of this version."""
    try:
        return Evaluation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def kept(recipe: str, *, drafter: bool) -> Path:
    """Where a recipe's evaluation is kept."""
    return paths.run_dir(recipe) / f"evaluation-{'drafter' if drafter else 'plain'}.json"


def _run(command: list[str], *, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise VerifyFailed(f"cannot run {command[0]}: {exc.strerror}", fix="install Python with venv") from None
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise VerifyFailed(
            f"the evaluation harness failed: {lines[-1][:200] if lines else 'it said nothing'}",
            where=" ".join(Path(command[0]).parts[-3:]),
            fix="its data sets come from the Hugging Face hub: is it reachable? HF_ENDPOINT, HF_TOKEN",
        )
