"""Rules and alerts: valid, each shown firing and not firing, each in the runbook, without a band of their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.observe.names import table
from dflash_serve.plan.model import Expectations
from dflash_serve.plan.prospects import exported

from .conftest import PROMETHEUS, ROOT, program, rules

ALERTS = {rule["alert"]: rule for rule in rules("alerts")}
# What a server exports: vLLM's names that every release has, and our stat logger's.
PLUGIN = (ROOT / "docker/patches/dflash2_patches/metrics.py").read_text()


@pytest.mark.parametrize("name", ["alerts", "recording"])
def test_promtool_tests_pass(name: str) -> None:
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(PROMETHEUS / "tests" / f"{name}.yml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_configuration_and_rules(tmp_path: Path) -> None:
    config = (PROMETHEUS / "prometheus.yml").read_text().replace("/etc/prometheus/rules", str(PROMETHEUS / "rules"))
    key = tmp_path / "key"
    key.write_text("secret")
    config = config.replace("/run/secrets/api_key", str(key))
    (tmp_path / "prometheus.yml").write_text(config)
    done = subprocess.run(
        [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 rules found" in done.stdout
    assert "16 rules found" in done.stdout


def expectations() -> dict[str, list[tuple[str, list[Any], list[str]]]]:
    """For each alert its promtool expectations: test, alerts expected, servers (instances) in it."""
    out: dict[str, list[tuple[str, list[Any], list[str]]]] = {}
    for test in yaml.safe_load((PROMETHEUS / "tests/alerts.yml").read_text())["tests"]:
        text = " ".join(entry["series"] for entry in test["input_series"])
        instances = sorted(set(re.findall(r'instance="([^"]+)"', text)))
        for expected in test["alert_rule_test"]:
            out.setdefault(expected["alertname"], []).append((test["name"], expected["exp_alerts"], instances))
    return out


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_shown_firing_and_not_firing(alert: str) -> None:
    found = expectations()[alert]
    assert any(fired for _, fired, _ in found)
    spared = [
        instance
        for _, fired, instances in found
        for instance in instances
        if instance not in {one["exp_labels"].get("instance") for one in fired}
    ]
    assert spared or any(not fired for _, fired, _ in found)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_its_section_in_the_runbook(alert: str) -> None:
    anchor = ALERTS[alert]["annotations"]["runbook"].removeprefix("docs/runbook.md#")
    heads = re.findall(r"^## (.+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert anchor in [head.lower().replace(" ", "-") for head in heads]
    assert ALERTS[alert]["labels"]["severity"] in {"critical", "warning"}


def test_bands_come_from_the_plan() -> None:
    """Whatever the rules expect of a server is exported by a plan, and no band is a number in the file."""
    wanted = set(re.findall(r"dflash:expected_(\w+)", (PROMETHEUS / "rules/alerts.yml").read_text()))
    plan = Expectations(
        max_model_len=1, max_num_seqs=1, kv_pool_tokens=1156401, acceptance_length_min=2.5, acceptance_length_max=5.46,
        output_tok_s_min=50, output_tok_s_max=90, drafter_active=True,
    )  # fmt: skip
    text = exported(plan)["DFLASH2_EXPECTED"]
    assert wanted <= {item.partition("=")[0] for item in text.split(",")}
    assert "kv_pool_tokens=1156401.0" in text
    assert not re.search(r"[\s\"'$]", text)  # it survives .env files and shells
    for alert in ("AcceptanceBelowBand", "OutputBelowBand", "PoolSmallerThanPlanned", "WindowLowered"):
        assert "dflash:expected_" in ALERTS[alert]["expr"]


def test_scrape_gap_counts_on_the_interval_of_the_configuration() -> None:
    interval = int(yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"].rstrip("s"))
    assert f"* {600 // interval})" in ALERTS["ScrapeGap"]["expr"]


def test_rules_name_only_what_is_exported_or_recorded() -> None:
    known = {rule["record"] for rule in rules("recording")} | {"up", "process_start_time_seconds"}
    for name in [*table().metrics.values(), *table().process.values()]:
        known |= {stem + part for stem in name.names for part in ("", "_bucket", "_sum", "_count")}
    for rule in rules("recording") + rules("alerts"):
        used = set(re.findall(r"(?:vllm|dflash|instance|engine):[\w:]+|process_start_time_seconds", rule["expr"]))
        assert used <= known, used - known


def test_the_plugin_exports_every_name_of_ours_in_the_table() -> None:
    for name in [*table().metrics.values(), *table().process.values()]:
        stem = name.names[0]
        if stem.startswith("dflash:expected_"):
            assert 'f"dflash:expected_{name}"' in PLUGIN
        elif stem.startswith("dflash:"):
            assert f'"{stem.removesuffix("_total")}"' in PLUGIN, stem
