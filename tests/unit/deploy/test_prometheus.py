"""The board asks for metrics that are there; promtool reads the configuration where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ...yaml_files import load_yaml
from .manifests import DEPLOY, kustomized, tool, unknown_metrics


def test_the_board_queries_existing_metrics() -> None:
    board = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert unknown_metrics(target["expr"]) == set(), panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_a_missing_metric_is_detected() -> None:
    assert unknown_metrics("rate(penstock_engine_steps[1m]) + penstock_engine_up") == {"penstock_engine_steps"}


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    promtool = tool("promtool")
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    (tmp_path / "rules").mkdir()
    shutil.copy(DEPLOY / "prometheus" / "penstock.yml", tmp_path / "rules")
    command = [promtool, "check", "config", "prometheus.yml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def keeps_engines(relabelings: list[dict[str, Any]], sources: str) -> bool:
    """Whether series with the label ``engine`` come through; knows the one rule that is used."""
    return {sources: ["engine"], "regex": ".+", "action": "drop"} not in relabelings


def test_compose_reads_engines_from_workers_alone() -> None:
    """`penstock metrics` reports engines, too, and boards add up all series."""
    scraped = load_yaml((DEPLOY / "compose" / "prometheus.yml").read_text())
    metrics = {
        job["static_configs"][0]["targets"][0]
        for job in scraped["scrape_configs"]
        if keeps_engines(job.get("metric_relabel_configs", []), "source_labels")
    }
    # A gateway tells of engines only if asked to (`--metrics deployment`), which the compose file does not.
    assert metrics == {"worker:9465", "gateway:8000"}


def test_a_cluster_reads_engines_from_workers_alone() -> None:
    monitors = {manifest["kind"]: manifest["spec"] for manifest in kustomized("monitoring")}
    (services,), (pods,) = monitors["ServiceMonitor"]["endpoints"], monitors["PodMonitor"]["podMetricsEndpoints"]
    assert not keeps_engines(services["metricRelabelings"], "sourceLabels")
    assert keeps_engines(pods.get("metricRelabelings", []), "sourceLabels")


def test_compose_scrapes_and_provisions_its_services() -> None:
    compose = load_yaml((DEPLOY / "compose" / "compose.yaml").read_text())
    scraped = load_yaml((DEPLOY / "compose" / "prometheus.yml").read_text())
    for job in scraped["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            name, _, port = target.partition(":")
            assert port in compose["services"][name]["command"]
    source = load_yaml((DEPLOY / "compose" / "grafana" / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
