"""A real Prometheus with this project's configuration, rules and alerts, scraping one server."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import requests
import yaml

from .conftest import PROMETHEUS, ROOT, program, rules

# Figures that have no data on a server that is well, or on one without a GPU, and why.
EMPTY = {
    "dflash:expected_output_tok_s_min": "the tiny recipe has no band of speeds: it runs on anything",
    "dflash:expected_kv_pool_tokens": "a plan for the CPU knows no pool",
    "instance:context_accepted_per_draft:increase1h": "a bucket needs 30 sampled drafts of an hour",
}


class Prometheus:
    """Started from docker/prometheus, with another target and a shorter interval; nothing else differs."""

    def __init__(self, home: Path, target: str, port: int, *, key: str = "secret", interval: str = "1s") -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "api_key").write_text(key)
        text = (PROMETHEUS / "prometheus.yml").read_text()
        config = yaml.safe_load(text)
        config["global"].update(scrape_interval=interval, scrape_timeout=interval, evaluation_interval=interval)
        config["rule_files"] = [str(PROMETHEUS / "rules/*.yml")]
        server, itself = config["scrape_configs"]
        server["authorization"]["credentials_file"] = str(home / "api_key")
        server["static_configs"] = [{"targets": [target]}]
        itself["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url, self.data = f"http://127.0.0.1:{port}", home / "data"
        self._log = (home / "log").open("w")
        self._process = subprocess.Popen(
            [program("prometheus"), f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={self.data}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.until("up", 30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's result; empty while Prometheus starts."""
        try:
            got = requests.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10)
        except requests.ConnectionError:
            return []
        if got.status_code == 503:
            return []
        answer = got.json()
        assert answer["status"] == "success", (expression, answer)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expression: str) -> float:
        """The one value of an expression."""
        result = self.query(expression)
        assert len(result) == 1, (expression, result)
        return float(result[0]["value"][1])

    def until(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Wait until an expression has a result."""
        end = time.monotonic() + seconds
        while not (found := self.query(expression)):
            assert time.monotonic() < end, f"{expression} has no result after {seconds} s; {self.firing()}"
            time.sleep(0.5)
        return found

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {row["metric"]["alertname"] for row in self.query('ALERTS{alertstate="firing"}')}

    def rule_problems(self) -> list[str]:
        """Rules that failed when they were evaluated."""
        groups = requests.get(f"{self.url}/api/v1/rules", timeout=10).json()["data"]["groups"]
        return [f"{r['name']}: {r['lastError']}" for group in groups for r in group["rules"] if r["health"] == "err"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


def panels() -> list[tuple[str, str]]:
    """Title and query of every panel of the Grafana dashboards, its variable filled in as Grafana does for all."""
    out = []
    for file in sorted((ROOT / "docker/grafana/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            out += [
                (f"{file.stem}: {panel['title']}", target["expr"].replace("$instance", ".+"))
                for target in panel["targets"]
            ]
    return out


def check_everything_has_data(prometheus: Prometheus, seconds: float = 60) -> None:
    """Every recording rule and every panel's query returns data, or is empty for a reason that is written down."""
    asked = [(rule["record"], rule["record"]) for rule in rules("recording")] + panels()
    assert not [name for name in EMPTY if not any(name in expression for _, expression in asked)]
    due = [(title, query) for title, query in asked if not any(name in query for name in EMPTY)]
    end = time.monotonic() + seconds
    while due := [(title, query) for title, query in due if not prometheus.query(query)]:
        assert time.monotonic() < end, f"no data after {seconds} s: {due}"
        time.sleep(0.5)
    for _, query in asked:
        prometheus.query(query)  # also the excused ones are valid
    assert prometheus.rule_problems() == []


def metric_names(expression: str) -> set[str]:
    """Metrics that an expression reads."""
    return set(re.findall(r"(?:vllm|dflash|instance|engine):[\w:]+", expression))
