"""The command line's half of this room."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from dflash_serve.errors import ExitCode, UsageError
from dflash_serve.fsio import atomic_write
from dflash_serve.plan.model import Plan
from dflash_serve.progress import for_terminal
from dflash_serve.runtime import native, state
from dflash_serve.verify import evaluate, telemetry
from dflash_serve.verify.checks import Made
from dflash_serve.verify.client import Client
from dflash_serve.verify.model import Abilities, Check, Level, Subject
from dflash_serve.verify.report import Report, examine, has_vision, keep, last_start, subject_of
from dflash_serve.verify.soak import seconds_of
from dflash_serve.verify.soak import soak as run_soak


@click.command()
@click.argument("server", metavar="[NAME|URL]", required=False)
@click.option("--quick", "level", flag_value="quick", default="quick", help="What ends every `up` (the default).")
@click.option("--full", "level", flag_value="full", help="More: every depth of the window, perplexity, all streams.")
@click.option("--soak", metavar="1h", help="Then mixed load for that long, with a verdict.")
@click.option("--eval", "tasks", metavar="TASK,TASK", help="Then accuracy on these tasks; `none` for none.")
@click.option("--eval-limit", type=click.IntRange(1), metavar="N", help="The first N questions of each task.")
@click.option("--beside", metavar="URL", help="Ask this server the same: the target without its drafter.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a one-page report.")
@click.option("--key-file", type=click.Path(path_type=Path), help="The server's API key; else VLLM_API_KEY.")
@click.option("--model", help="The served model's name; else the first that the server names.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="What a URL is held against.")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="The log of the server behind a URL.")
@click.option("--metrics-url", metavar="URL", help="Where a URL's metrics are; else URL/metrics.")
def verify(
    server: str | None,
    level: str,
    soak: str | None,
    tasks: str | None,
    eval_limit: int | None,
    beside: str | None,
    as_json: bool,
    page: Path | None,
    key_file: Path | None,
    model: str | None,
    plan_file: Path | None,
    log_file: Path | None,
    metrics_url: str | None,
) -> None:
    """Prove that a server serves what was planned; exit 7 when something doesn't hold.

    \b
    Examples:
      dflash-serve verify                       the server that runs here
      dflash-serve verify tiny --full --html report.html
      dflash-serve verify tiny --soak 20m
      dflash-serve verify NAME --eval gsm8k_cot_lite --eval-limit 50
      dflash-serve verify http://10.0.0.5:8000 --key-file key --plan plan.json
    """
    run: state.Run | None = None
    if server is not None and server.startswith(("http://", "https://")):
        subject = remote(server, Level(level), key_file, model, plan_file, log_file, metrics_url)
    else:
        if plan_file or log_file or metrics_url or model or key_file:
            raise UsageError("--plan, --log, --metrics-url, --model and --key-file go with a URL")
        run = known(server)
        subject = subject_of(run, Plan.load(run.plan_file), level=Level(level))
    seconds = seconds_of(soak) if soak else None
    asked = wanted_tasks(tasks, subject)
    recipe = subject.plan.recipe if subject.plan else subject.client.model
    more: list[Made] = []
    with for_terminal().step(f"verifying {subject.client.url} ({level})") as step:
        if asked:
            more.append(lambda subject: evaluation(subject, recipe, asked, eval_limit, beside))
        if seconds:
            pids = None if run is None else (lambda: [process.pid for process in native.members(run)])
            more.append(lambda subject: run_soak(subject, seconds, step, pids=pids))
        report = examine(subject, step, recipe=recipe, more=more)
    if report.passed and subject.plan is not None:
        keep(recipe, report)
    if page is not None:
        write_page(report, page)
    show(report, as_json=as_json)
    sys.exit(ExitCode.DONE if report.passed else ExitCode.VERIFY_FAILED)


def wanted_tasks(text: str | None, subject: Subject) -> tuple[str, ...]:
    """Tasks to evaluate: the ones that are named; without a word the usual ones, for `--full` of an instructed model.

    Raises:
        UsageError: there is no such task.
    """
    if text is None:
        return evaluate.DEFAULT_TASKS if subject.full and subject.abilities.reasoning else ()
    names = tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
    if unknown := sorted(set(names) - set(evaluate.known_tasks())):
        raise UsageError(f"no task named {unknown[0]}", fix=f"there are {', '.join(evaluate.known_tasks())}")
    return names


def evaluation(
    subject: Subject, recipe: str, tasks: tuple[str, ...], limit: int | None, beside: str | None
) -> list[Check]:
    """Accuracy here, beside the other server's: one that is named, else what was kept of this recipe."""
    streams = subject.expectations.max_num_seqs or 4
    drafter = telemetry.scrape(subject).speculative
    client = subject.client

    def asked(url: str, *, drafter: bool) -> evaluate.Evaluation:
        return evaluate.evaluate(
            url, client.model, client.key, tasks, drafter=drafter, limit=limit, streams=min(64, streams)
        )

    mine = asked(client.url, drafter=drafter)
    if subject.plan is not None:
        atomic_write(evaluate.kept(recipe, drafter=drafter), mine.model_dump_json() + "\n")
    if beside:
        other: evaluate.Evaluation | None = asked(beside.rstrip("/").removesuffix("/v1"), drafter=not drafter)
    else:
        other = evaluate.load(evaluate.kept(recipe, drafter=not drafter)) if subject.plan else None
    return evaluate.compare(mine, other)


def write_page(report: Report, target: Path) -> None:
    """Write the report's page.

    Raises:
        UsageError: it can't be written.
    """
    from dflash_serve.verify.page import page

    try:
        atomic_write(target, page(report))
    except OSError as exc:
        raise UsageError(f"cannot write the report: {exc.strerror}", where=str(target)) from None


def show(report: Report, *, as_json: bool) -> None:
    """Print a report: a line a check, three for a failed one, and a verdict."""
    if as_json:
        click.echo(report.model_dump_json(indent=2))
        return
    for check in report.checks:
        for line in check.lines():
            click.echo(line)
    verdict = "verified" if report.passed else f"{len(report.failures)} of {len(report.asked)} checks failed"
    click.echo(f"\n{report.recipe}: {verdict} ({len(report.asked)} checks, {report.seconds:.0f} s)")


def known(name: str | None) -> state.Run:
    """The run of that name; the latest without one.

    Raises:
        UsageError: there is none.
    """
    runs = state.load_all() if name is None else [run for run in [state.load(name)] if run is not None]
    if not runs:
        what = "nothing was started here" if name is None else f"{name} was never started here"
        raise UsageError(what, fix=f"./start.sh {name or 'tiny'}, or give the URL of a server")
    return runs[0]


def remote(
    url: str,
    level: Level,
    key_file: Path | None,
    model: str | None,
    plan_file: Path | None,
    log_file: Path | None,
    metrics_url: str | None,
) -> Subject:
    """A server by its URL; one that was started here is recognised and gets its plan, log and key.

    Raises:
        UsageError: the URL or a file is no good.
        VerifyFailed: it doesn't answer.
    """
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname)
    except ValueError:
        named = False
    if not named:
        raise UsageError(f"not a URL of a server: {url!r}", fix="for example http://127.0.0.1:8000")
    base = f"{parts.scheme}://{parts.netloc}" + parts.path.rstrip("/").removesuffix("/v1")
    run = next((run for run in state.load_all() if run.url == base), None)
    if run is not None and plan_file is None:
        return subject_of(run, Plan.load(run.plan_file), level=level)
    plan = Plan.load(plan_file) if plan_file else None
    try:
        log = last_start(log_file.read_text(errors="replace")) if log_file else None
        key = key_file.read_text().strip() if key_file else os.environ.get("VLLM_API_KEY")
    except OSError as exc:
        fix = "check its path and rights"
        raise UsageError(f"cannot read the file: {exc.strerror}", where=str(exc.filename), fix=fix) from None
    except UnicodeDecodeError:
        raise UsageError("the key file is no text", where=str(key_file), fix="give the file with the API key") from None
    name = model or (plan.server.served_model_name if plan else None)
    if name is None:
        entries = Client(base, "", key=key).models()
        if not entries:
            raise UsageError("the server names no model", where=f"{base}/v1/models", fix="give --model NAME")
        name = str(entries[0]["id"])
    return Subject(
        client=Client(base, name, key=key),
        metrics_url=metrics_url or f"{base}/metrics",
        plan=plan,
        log=log,
        abilities=Abilities.of(plan, has_vision=has_vision(plan) if plan else None),
        level=level,
    )
