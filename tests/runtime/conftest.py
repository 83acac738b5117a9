"""A plan whose engine is the stub, and a state directory of the test's own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_serve import paths
from dflash_serve.plan.model import EngineChoice, Expectations, Hardware, ModelRef, Plan, Server

STUB = Path(__file__).with_name("stub_engine.py")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def stub_plan(home: Path) -> Callable[..., Plan]:
    def make(*extra: str, name: str = "stub") -> Plan:
        port = free_port()
        return Plan(
            tool_version="0",
            recipe=name,
            recipe_title="A stub engine",
            engine=EngineChoice(
                variant="cpu",
                runtime="native",
                vllm_version="0.0.0",
                distribution="stub",
                entry=(str(STUB),),
                environment="0" * 12,
                reason="test",
            ),
            hardware=Hardware(cpu_cores=1, ram_bytes=1),
            target=ModelRef(served_from="/nowhere"),
            drafter=None,
            shape={},
            memory=None,
            overlays=(),
            patches=(),
            server=Server(
                host="127.0.0.1", port=port, served_model_name=name, key_file=str(paths.run_dir(name) / "api.key")
            ),
            environment={"PYTHONUNBUFFERED": "1"},
            argv=("--port", str(port), *extra),
            expectations=Expectations(),
        )

    return make
