"""What the tests of silent failures share: the tiny recipe's plan, and real servers of it on the CPU."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

# A machine that does other things as well takes minutes.
START_SECONDS = 500


@pytest.fixture(scope="session")
def tiny_plan() -> Plan:
    """The tiny recipe's, as on a machine without a GPU."""
    inventory = Inventory(host=Host(cpu_cores=2, ram_total=24 * 2**30), nvml_error="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "read_inventory", lambda: inventory)
        return planner.make_plan(planner.Request("tiny"))


@contextmanager
def started(plan: Plan, python: Path) -> Iterator[Run]:
    """A real server of a plan, as it is; what is wrong with the plan is the test's intention."""
    for decided in plan.overlays:
        if decided.needed and decided.spec:
            build(OverlaySpec.from_dict(decided.spec), Path(str(decided.path)).parent)
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


@pytest.fixture(scope="module")
def python() -> Path:
    """The CPU engine's interpreter; it is installed when it is missing."""
    return environment.ensure(environment.spec_for("cpu"), SilentProgress())


@pytest.fixture(scope="module")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """The tiny recipe on this machine's CPU, in a state directory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_SERVE_STATE", str(tmp_path_factory.mktemp("state")))
        host = planner.read_inventory().host
        patch.setattr(planner, "read_inventory", lambda: Inventory(host=host, nvml_error="none"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        assert paths.state_home().is_dir()
        yield planner.make_plan(planner.Request("tiny", port=port))
