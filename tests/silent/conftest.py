"""What the tests of silent failures share: the tiny recipe's plan, and real servers of it on the CPU."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from dflash_serve import environment, paths
from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.overlay.build import build
from dflash_serve.overlay.spec import OverlaySpec
from dflash_serve.plan import planner
from dflash_serve.plan.model import Plan
from dflash_serve.progress import SilentProgress
from dflash_serve.runtime import native
from dflash_serve.runtime.state import Run
from dflash_serve.verify import boot, drafting, load, reuse
from dflash_serve.verify.model import Check
from dflash_serve.verify.report import ask, subject_of

from . import needs_block

# A machine that does other things as well takes minutes.
START_SECONDS = 500


@pytest.fixture(scope="session")
def tiny_plan() -> Plan:
    """The tiny recipe's, as on a machine without a GPU."""
    inventory = Inventory(host=Host(cpu_cores=2, ram_total=24 * 2**30), nvml_error="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "read_inventory", lambda: inventory)
        return planner.make_plan(planner.Request("tiny"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers follow each other: who needs the wrong one comes after all who need the sound one."""
    items.sort(key=lambda item: "compared" in getattr(item, "fixturenames", ()))


@contextmanager
def started(plan: Plan, python: Path) -> Iterator[Run]:
    """A real server of a plan, as it is; what is wrong with the plan is the test's intention."""
    run = native.start(plan, python)
    began = time.monotonic()
    try:
        while True:
            assert time.monotonic() - began < START_SECONDS, run.log_file.read_text()[-3000:]
            assert run.process() is not None, run.log_file.read_text()[-3000:]
            try:
                if requests.get(f"{run.url}/health", timeout=2).status_code == 200:
                    break
            except requests.RequestException:
                pass
            time.sleep(0.25)
        yield run
    finally:
        native.stop(run, grace=2)


@pytest.fixture(scope="package")
def python() -> Path:
    """The CPU engine's interpreter; it is installed when it is missing."""
    return environment.ensure(environment.spec_for("cpu"), SilentProgress())


@pytest.fixture(scope="package")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """The tiny recipe on this machine's CPU, in a state directory of its own; its overlays are built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_SERVE_STATE", str(tmp_path_factory.mktemp("state")))
        host = planner.read_inventory().host
        patch.setattr(planner, "read_inventory", lambda: Inventory(host=host, nvml_error="none"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        assert paths.state_home().is_dir()
        plan = planner.make_plan(planner.Request("tiny", port=port))
        for decided in plan.overlays:
            if decided.needed and decided.spec:
                build(OverlaySpec.from_dict(decided.spec), Path(str(decided.path)).parent)
        yield plan


def drafting_with(plan: Plan, drafter: Path) -> Plan:
    """The plan with another drafter's directory."""
    assert plan.drafter is not None
    argv = list(plan.argv)
    at = argv.index("--speculative-config") + 1
    argv[at] = json.dumps({**json.loads(argv[at]), "model": str(drafter)})
    return plan.model_copy(
        update={"argv": tuple(argv), "drafter": plan.drafter.model_copy(update={"served_from": str(drafter)})}
    )


@pytest.fixture(scope="package")
def sound(cpu_plan: Plan, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Plan]]:
    """A server that is well. Its drafter needs its whole block, so that the wrong server's is worse for one reason."""
    assert cpu_plan.drafter is not None
    drafter = needs_block.make(
        Path(cpu_plan.drafter.served_from), tmp_path_factory.mktemp("right") / "drafter", is_causal=False
    )
    # A larger pool than the wrong server's; vLLM takes whole GiB only.
    roomy = {**cpu_plan.environment, "VLLM_CPU_KVCACHE_SPACE": "2"}
    plan = drafting_with(cpu_plan, drafter).model_copy(update={"environment": roomy})
    with started(plan, python) as run:
        yield run, plan


@dataclass(frozen=True)
class Compared:
    """What verify finds: `right`, the drafter's check on the sound server; `wrong`, all checks on the wrong one."""

    right: Check
    wrong: list[Check]


@pytest.fixture(scope="package")
def compared(
    sound: tuple[Run, Plan], cpu_plan: Plan, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Compared:
    """Ends the sound server, and starts one that is wrong in five ways and says nothing.

    Its drafter is causal, window and pool are smaller, it takes one sequence and has no prefix cache. Of these only the
    first can change what is accepted of a draft.
    """
    subject = subject_of(*sound)
    right = next(check for check in ask(drafting.drafter, subject) if check.id == "drafter")
    pool = boot._pool(subject)
    native.stop(sound[0], grace=2)
    assert cpu_plan.drafter is not None
    drafter = needs_block.make(
        Path(cpu_plan.drafter.served_from), tmp_path_factory.mktemp("causal") / "drafter", is_causal=True
    )
    meant = drafting_with(cpu_plan, drafter)
    argv = list(meant.argv)
    argv[argv.index("--max-model-len") + 1] = "2048"
    argv[argv.index("--max-num-seqs") + 1] = "1"
    argv[argv.index("--enable-prefix-caching")] = "--no-enable-prefix-caching"
    assert cpu_plan.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    planned = meant.expectations.model_copy(update={"kv_pool_tokens": pool})
    with started(meant.model_copy(update={"argv": tuple(argv)}), python) as run:
        subject = subject_of(run, meant.model_copy(update={"expectations": planned}))
        checks = (*boot.CHECKS, *drafting.CHECKS, *reuse.CHECKS, *load.CHECKS)
        wrong = [check for make in checks for check in ask(make, subject)]
    for check in (right, *wrong):
        print(check.lines())
    return Compared(right, wrong)
