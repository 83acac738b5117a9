"""The command line: parse, call, print. Rooms are imported inside commands, so that `--help` and errors are quick."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dflash_serve import noplugins, paths
from dflash_serve.errors import DFlashError, ExitCode, PreflightRefused, UsageError
from dflash_serve.version import __version__

if TYPE_CHECKING:
    from dflash_serve.lifecycle import Served
    from dflash_serve.plan.model import Plan
    from dflash_serve.runtime.state import Run

noplugins.install()
# A command makes many objects and hardly any garbage: looking for it less often saves a tenth of a plan's time.
gc.set_threshold(50_000, 20, 20)

DEFAULT_PORT = 8000

# Commands of the rooms: name -> (module, attribute). Imported when called.
LAZY = {
    "recipes": ("dflash_serve.recipe.commands", "recipes"),
    "pins": ("dflash_serve.checkpoint.commands", "pins"),
    "fetch": ("dflash_serve.checkpoint.commands", "fetch"),
    "manifest": ("dflash_serve.checkpoint.commands", "manifest"),
    "overlay": ("dflash_serve.overlay.commands", "overlay"),
    "fit": ("dflash_serve.shape.commands", "fit"),
    "patches": ("dflash_serve.image.patch_commands", "patches"),
    "environment": ("dflash_serve.environment.commands", "environment"),
    "build": ("dflash_serve.image.commands", "build"),
    "render": ("dflash_serve.image.commands", "render"),
    "image": ("dflash_serve.image.commands", "image"),
    "serve": ("dflash_serve.serve_command", "serve"),
    "doctor": ("dflash_serve.doctor_command", "doctor"),
    "verify": ("dflash_serve.verify.commands", "verify"),
    "metrics": ("dflash_serve.observe_commands", "metrics"),
    "top": ("dflash_serve.live_commands", "top"),
    "dashboard": ("dflash_serve.live_commands", "dashboard"),
}


class LazyGroup(click.Group):
    """A group whose members are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *LAZY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in LAZY:
            from importlib import import_module

            module, attribute = LAZY[cmd_name]
            command: click.Command = getattr(import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and self.get_command(ctx, name) is None:
            import difflib

            near = difflib.get_close_matches(name, self.list_commands(ctx), n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else "see dflash-serve --help"
            raise UsageError(f"no command named {name!r}", fix=hint)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dflash-serve")
def cli() -> None:
    """Serve a target with its DFlash2 drafter on vLLM, and prove that it works.

    \b
    Start here:
      dflash-serve recipes list          what can be served
      dflash-serve plan NAME             every decision with its reason, nothing started
      dflash-serve up NAME               plan, check, build, start, verify; leaves it running
      dflash-serve status                what runs, and its acceptance length
      dflash-serve down                  stop it

    Exit codes: 0 done, 2 usage, 3 bad recipe or checkpoint, 4 preflight refused, 5 build failed,
    6 server failed to start, 7 verification failed, 70 a bug.
    """


def _plan_options(command: Any) -> Any:
    options = [
        click.argument("name"),
        click.option("--gpu", metavar="NxNAME", help="Plan for these GPUs instead of this machine's, e.g. 2x5090."),
        click.option(
            "--gpus", "devices", metavar="0,1", help="Serve on these GPUs, or on this MIG slice: index or UUID."
        ),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override one value of the shape."),
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True),
        click.option("--no-drafter", is_flag=True, help="Serve the target alone."),
        click.option(
            "--runtime", type=click.Choice(["native", "docker"]), help="Instead of what this machine suggests."
        ),
        click.option(
            "--restarts",
            type=click.IntRange(0, 9),
            default=0,
            show_default=True,
            metavar="N",
            help="Start a container that failed again, N times at most.",
        ),
        click.option("--force", "forced", multiple=True, metavar="CHECK", help="Overrule one named preflight check."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _pins_option(command: Any) -> Any:
    return click.option("--require-pins", is_flag=True, help="Refuse a checkpoint that no commit is pinned for.")(
        command
    )


def _json_option(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


def _make_plan(
    name: str,
    gpu: str | None,
    devices: str | None,
    settings: tuple[str, ...],
    host: str,
    port: int,
    no_drafter: bool,
    forced: tuple[str, ...],
    runtime: Any,
    restarts: int,
) -> Plan:
    from dflash_serve.plan.planner import Request, make_plan

    overrides: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UsageError(f"--set takes KEY=VALUE, not {setting!r}", fix="for example --set max_num_seqs=4")
        overrides[key.strip()] = value.strip()
    return make_plan(
        Request(
            name=name,
            gpu=gpu,
            gpus=_devices(devices),
            overrides=overrides,
            host=host,
            port=port,
            no_drafter=no_drafter,
            forced=forced,
            runtime=runtime,
            restarts=restarts,
        )
    )


def _plan_to_start(options: dict[str, Any], *, require_pins: bool = False) -> Plan:
    """A plan for a start on this machine.

    Raises:
        PreflightRefused: none can be made; its findings hold whatever else stands in the way.
    """
    try:
        return _make_plan(**options)
    except PreflightRefused as exc:
        if options["gpu"] is not None:
            raise
        from dflash_serve.preflight.from_recipe import findings_without_plan

        where = {key: options[key] for key in ("host", "port", "forced")}
        found = findings_without_plan(options["name"], exc.findings, require_pins=require_pins, **where)
        raise PreflightRefused(found) from None


def _devices(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,2})?|(GPU|MIG)-[0-9A-Za-z/-]{1,80}", part) for part in parts):
        raise UsageError(f"--gpus takes indices or UUIDs such as 0,1, not {text[:80]!r}")
    return tuple(dict.fromkeys(parts))


@cli.command()
@_plan_options
@click.option("--diff", "other", metavar="NAME", help="Show what differs from another recipe's plan.")
@click.option("--write", is_flag=True, help="Write what docker compose reads: .env, build/plan.json and more.")
@_json_option
def plan(other: str | None, write: bool, as_json: bool, **options: Any) -> None:
    """Print every decision of a start, with its reason. Nothing is started."""
    from dflash_serve.plan import text
    from dflash_serve.plan.model import differences

    if write:
        if other is not None:
            raise UsageError("--write writes one plan, --diff compares two", fix="use one of them")
        if as_json or options["runtime"] == "native":
            what = "--json prints a plan and --write writes it" if as_json else "compose runs containers"
            raise UsageError(f"{what}: --write takes neither --json nor --runtime native", fix="leave it out")
        from dflash_serve import stack

        stack.write_and_tell(_make_plan(**{**options, "runtime": "docker"}))
        return
    made = _make_plan(**options)
    if other is not None:
        rows = differences(made, _make_plan(**{**options, "name": other}))
        if as_json:
            click.echo(json.dumps([{"key": key, made.recipe: a, other: b} for key, a, b in rows], indent=2))
        else:
            text.print_differences(made.recipe, other, rows)
    elif as_json:
        click.echo(made.to_json(), nl=False)
    else:
        text.print_plan(made)


@cli.command()
@_plan_options
@click.option("--foreground", is_flag=True, help="Stay attached; Ctrl-C stops the server.")
@click.option("--start-timeout", type=click.IntRange(5), default=3600, show_default=True, metavar="SECONDS")
@click.option("--keep-unverified", is_flag=True, help="Leave the server running when verification fails (exit 7).")
@_pins_option
@_json_option
def up(
    foreground: bool, start_timeout: int, keep_unverified: bool, require_pins: bool, as_json: bool, **options: Any
) -> None:
    """Plan, check, build, start and verify a recipe; leaves it running.

    \b
    Examples:
      dflash-serve up tiny
      dflash-serve up qwen3.8-27b-nvfp4 --port 8001
      dflash-serve up tiny --foreground
    """
    from dflash_serve import lifecycle, progress, runs
    from dflash_serve.shape.known import ConfigUnknown

    shown = progress.for_terminal()
    made: Plan | None = None
    with shown.step(f"planning {options['name']}") as step:
        try:
            made = _plan_to_start(options, require_pins=require_pins)
        except PreflightRefused as exc:
            lifecycle.show(exc.findings[1:], step)  # the first one is what the error says
            raise
        except ConfigUnknown as exc:
            if options["gpu"] is not None:
                raise
            step.line(f"{exc.what}: it is fetched first")
    if made is None:
        where = {key: options[key] for key in ("host", "port", "forced")}
        lifecycle.provide_unplanned(options["name"], shown, require_pins=require_pins, **where)
        made = _make_plan(**options)
    elif not lifecycle.weights_present(made):
        lifecycle.provide_weights(made, shown, require_pins=require_pins)
        made = _make_plan(**options)
    served = lifecycle.up(
        made, shown, start_timeout=start_timeout, keep_unverified=keep_unverified, require_pins=require_pins
    )
    if as_json:
        click.echo(json.dumps({**runs.observe(served.run), "report": served.report.model_dump()}, indent=2))
    else:
        _print_served(served)
    if foreground:
        runs.stay(served.run, say=partial(click.echo, err=True))


def _print_served(served: Served) -> None:
    run, figures = served.run, served.report.figures
    name, key = run.served_model_name, run.key_file
    click.echo(
        f"\n{run.recipe} is serving: {len(served.report.asked)} checks passed, ready in {served.ready_seconds:.0f} s"
    )
    click.echo(f"  url          {run.url}/v1")
    click.echo(f"  metrics      {run.metrics_url}")
    click.echo(f"  key          {key}")
    if "acceptance_length" in figures:
        click.echo(f"  acceptance   {figures['acceptance_length']:.2f} tokens a verification")
    if "output_tok_s" in figures:
        click.echo(f"  speed        {figures['output_tok_s']:.1f} tok/s, one stream")
    click.echo("\nTry it:")
    click.echo(f'  curl {run.url}/v1/chat/completions -H "Authorization: Bearer $(cat {key})" \\')
    click.echo('    -H "Content-Type: application/json" \\')
    click.echo(
        f"""    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 64}}'"""
    )
    click.echo("\nStop it: ./start.sh down")


@cli.command()
@_plan_options
@_pins_option
@_json_option
def preflight(require_pins: bool, as_json: bool, **options: Any) -> None:
    """Check this machine for a recipe; exit 0 when it could start, 4 when it could not."""
    from dflash_serve.findings import Severity
    from dflash_serve.lifecycle import still_to_build
    from dflash_serve.preflight.runner import preflight as run_preflight
    from dflash_serve.shape.known import ConfigUnknown

    try:
        made = _plan_to_start(options, require_pins=require_pins)
        findings, locks = run_preflight(made, require_pins=require_pins, **still_to_build(made))
        locks.close()
    except PreflightRefused as exc:
        findings = list(exc.findings)
    except ConfigUnknown as exc:
        from dflash_serve.preflight.from_recipe import findings_before_fetch

        asked = {key: options[key] for key in ("gpu", "host", "port", "forced")}
        findings = findings_before_fetch(options["name"], exc, require_pins=require_pins, **asked)
    refused = any(finding.severity is Severity.REFUSE for finding in findings)
    if as_json:
        click.echo(
            json.dumps({"findings": [f.model_dump(mode="json") for f in findings], "refused": refused}, indent=2)
        )
    else:
        for finding in findings:
            click.echo("\n".join(finding.lines()))
        click.echo("refused" if refused else "nothing stands in the way")
    sys.exit(ExitCode.REFUSED if refused else ExitCode.DONE)


@cli.command()
@click.argument("name", required=False)
@_json_option
def status(name: str | None, as_json: bool) -> None:
    """Show what is served, its health and its acceptance length."""
    from dflash_serve import runs
    from dflash_serve.runtime import state

    seen = [runs.observe(run) for run in ([_run(name)] if name else state.load_all())]
    if as_json:
        first = seen[0] if seen else {"state": "none", "url": None, "metrics_url": None, "key_file": None,
                                      "recipe": None, "acceptance_length": None}  # fmt: skip
        click.echo(json.dumps({**first, "runs": seen}, indent=2))
        return
    if not seen:
        click.echo("nothing is served here; start with: ./start.sh tiny")
    for one in seen:
        length = one["acceptance_length"]
        extra = f"  acceptance {length:.2f}" if length is not None else ""
        cause = f"  ({one['cause']})" if one["cause"] and one["state"] in {"failed", "unknown"} else ""
        phase = f"  {one['phase']}" if "phase" in one else ""
        silent = "  does not answer" if one["state"] in {"serving", "unverified"} and not one["healthy"] else ""
        click.echo(f"{one['recipe']:<32} {one['state']:<11} {one['url']}{phase}{silent}{extra}{cause}")


@cli.command()
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing as the log grows.")
@click.option("-n", "--lines", type=click.IntRange(1), default=100, show_default=True)
@click.option("--previous", is_flag=True, help="The log of the start before.")
def logs(name: str | None, follow: bool, lines: int, previous: bool) -> None:
    """Print the server's log."""
    import time

    from dflash_serve.errors import StartFailed
    from dflash_serve.runtime.backend import of
    from dflash_serve.runtime.log import LogTail

    run = _run(name)
    path = run.log_file if not previous else run.directory / "server.previous.log"
    backend = of(run)
    trouble: StartFailed | None = None
    if not previous:
        try:
            lives = follow and backend.alive(run)
            if not lives:
                backend.sync_log(run)
        except StartFailed as exc:
            # What was kept of it can be read without the back end.
            lives, trouble = False, exc
        if lives:
            with backend.tail(run, lines=lines) as tail:
                while backend.alive(run):
                    click.echo(tail.read(), nl=False)
                    time.sleep(0.5)
                click.echo(tail.rest(), nl=False)
            return
    if not path.is_file():
        if trouble is not None:
            raise trouble
        raise UsageError(f"there is no such log of {run.recipe}", where=str(path))
    if trouble is not None:
        click.echo(f"{trouble.what}: this is what was kept of the log", err=True)
    click.echo(LogTail(path, lines=lines).read().rstrip("\n"))


@cli.command()
@click.argument("name", required=False)
@click.option("--grace", type=click.FloatRange(0, 3600), metavar="SECONDS",
              help="Time that running requests get; what the plan says without it.")  # fmt: skip
@click.option("--forget", is_flag=True, help="Take it for stopped when the Docker that ran it does not answer.")
@_json_option
def down(name: str | None, grace: float | None, forget: bool, as_json: bool) -> None:
    """Stop what is served (all of it without a name): running requests finish first."""
    from dflash_serve import runs
    from dflash_serve.errors import StartFailed
    from dflash_serve.runtime import state

    stopped: list[dict[str, Any]] = []
    failed: list[StartFailed] = []
    for run in [_run(name)] if name else state.load_all():
        live = run.state in runs.LIVE
        try:
            killed = runs.down(run, grace=grace, forget=forget)
        except StartFailed as exc:
            # One that can't be stopped doesn't keep the others running.
            failed.append(exc)
            continue
        if live or name:
            stopped.append({"recipe": run.recipe, "killed": killed})
    if as_json and not failed:
        click.echo(json.dumps({"stopped": stopped}, indent=2))
        return
    for one in stopped:
        forced = f" ({len(one['killed'])} processes had to be killed)" if one["killed"] else ""
        click.echo(f"{one['recipe']} is stopped{forced}", err=as_json)
    for other in failed[1:]:
        click.echo("\n".join(other.lines()), err=True)
    if failed:
        raise failed[0]
    if not stopped:
        click.echo("nothing is served here")


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell: eval "$(dflash-serve completion bash)"."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"no completion for {shell}")
    click.echo(found(cli, {}, "dflash-serve", "_DFLASH_SERVE_COMPLETE").source())


def _run(name: str | None) -> Run:
    from dflash_serve.runtime import state

    if name is None:
        runs = state.load_all()
        if not runs:
            raise UsageError("nothing was started here", fix="./start.sh tiny")
        return runs[0]
    run = state.load(name)
    if run is None:
        raise UsageError(f"{name} was never started here", fix=f"./start.sh {name}")
    return run


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; ends the process with an exit code of `ExitCode`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(_invoke(arguments))


def _invoke(arguments: list[str]) -> int:
    try:
        cli.main(arguments, prog_name="dflash-serve", standalone_mode=False)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.Abort:
        return _interrupted(arguments)
    except click.ClickException as exc:
        exc.show()
        return ExitCode.USAGE
    except DFlashError as exc:
        return _report(exc, "--json" in arguments)
    except KeyboardInterrupt:
        return _interrupted(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception:
        return _bug(arguments)
    return ExitCode.DONE


def _report(exc: DFlashError, as_json: bool) -> int:
    if as_json:
        findings = [f.model_dump(mode="json") for f in exc.findings] if isinstance(exc, PreflightRefused) else []
        error = {"what": exc.what, "where": exc.where, "fix": exc.fix}
        click.echo(json.dumps({"error": error, "findings": findings, "exit_code": int(exc.exit_code)}, indent=2))
    for line in exc.lines():
        click.echo(line, err=True)
    return exc.exit_code


def _interrupted(arguments: list[str]) -> int:
    # What `up` started it has stopped; a server that is only looked at, or is being stopped, runs on.
    click.echo("interrupted" + ("; nothing was left running" if arguments[:1] == ["up"] else ""), err=True)
    return ExitCode.INTERRUPTED


def _bug(arguments: list[str]) -> int:
    """Keep the traceback in a file: it's for us, not for the user."""
    import traceback

    from dflash_serve.fsio import atomic_write

    text = f"dflash-serve {__version__} {' '.join(arguments)}\n{traceback.format_exc()}"
    target: Path | None = paths.state_home() / "bugs" / f"{os.getpid()}.txt"
    try:
        assert target is not None
        atomic_write(target, text)
    except OSError:
        target = None
        click.echo(text, err=True)
    click.echo("this is a bug in dflash-serve, not in what you did", err=True)
    if target:
        click.echo(f"where: {target}\nfix: please report it with that file", err=True)
    return ExitCode.BUG
