"""Dashboards: provisioned as files, each panel with a query on what is recorded or exported, no two in one place."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml

from dflash_serve.observe.names import table

from .conftest import ROOT, rules
from .prom import metric_names, panels

GRAFANA = ROOT / "docker/grafana"
BOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


def test_they_are_provisioned_from_the_datasource_that_compose_has() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert (source["uid"], source["url"]) == ("prometheus", "http://prometheus:9090")
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/dflash.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    assert [board.stem for board in BOARDS] == ["operator", "tuning"]


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_panels_are_whole_and_do_not_overlap(file: Path) -> None:
    board = json.loads(file.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "prometheus"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    for one, other in itertools.combinations([panel["gridPos"] for panel in board["panels"]], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_queries_name_only_what_is_exported_or_recorded() -> None:
    known = {rule["record"] for rule in rules("recording")} | {"dflash:patch_info"}
    for name in [*table().metrics.values(), *table().process.values()]:
        known |= {stem + part for stem in name.names for part in ("", "_bucket", "_sum", "_count")}
    for title, expression in panels():
        assert metric_names(expression) <= known, title


def test_the_operators_page_fits_one_screen() -> None:
    """What is read in ten seconds needs no scrolling: 28 grid rows are a screen of 1080 lines."""
    board = json.loads((GRAFANA / "dashboards/operator.json").read_text())
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) <= 28
