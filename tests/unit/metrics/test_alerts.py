"""The shipped alerts: each fires where it is to and keeps quiet where not, judged by promtool; each has its runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.producer.gateway.metrics import Metrics
from penstock.shared.metrics import ALL, MetricKind

from ...processes import DEADLINE_S
from ...yaml_files import load_yaml

ROOT = Path(__file__).parents[3]
RULES = ROOT / "ops" / "deploy" / "prometheus" / "penstock.yml"
RUNBOOK = ROOT / "ops" / "guide" / "operating" / "alerts.md"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)")

(GROUP,) = load_yaml(RULES.read_text())["groups"]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in GROUP["rules"]}

# Of the gateway's processes, reported by the gateway that has several.
ELSEWHERE = {"penstock_gateway_process_restarts_total"}

M = 'model_name="m"'
WAITING, PAUSED = f"penstock_num_requests_waiting{{{M}}}", f"penstock_queue_paused{{{M}}}"
UP = f'penstock_engine_up{{{M},engine="h-0"}}'
TOKENS = f'penstock_generation_tokens_total{{{M},engine="h-0"}}'
ENDED = f'penstock_request_success_total{{{M},engine="h-0",finished_reason="%s"}}'
STATE = f'penstock_engine_state{{{M},engine="h-0",state="%s"}}'
FIRST_TOKEN = f'penstock_time_to_first_token_seconds_bucket{{{M},engine="h-0",le="%s"}}'
OK_5XX = 'penstock_http_requests_total{instance="g",route="/v1/models",method="GET",status="%s"}'
USED, MOST = 'penstock_redis_used_memory_bytes{server="home"}', 'penstock_redis_max_memory_bytes{server="home"}'

# Of each alert, series that fire it and series that do not. A value is one of every half minute of an hour.
CASES: dict[str, tuple[dict[str, str], list[dict[str, str]]]] = {
    "PenstockNoEngine": (
        {WAITING: "3x120", UP: "0x120"},
        [{WAITING: "3x120", UP: "1x120"}, {WAITING: "0x120", UP: "0x120"}],
    ),
    "PenstockQueueStandsStill": (
        {WAITING: "3x120", UP: "1x120", PAUSED: "0x120", TOKENS: "500x120"},
        [
            {WAITING: "3x120", UP: "1x120", PAUSED: "0x120", TOKENS: "500+90x120"},
            {WAITING: "3x120", UP: "1x120", PAUSED: "1x120", TOKENS: "500x120"},
            {WAITING: "0x120", UP: "1x120", PAUSED: "0x120", TOKENS: "500x120"},
        ],
    ),
    "PenstockOldestWaitsLong": (
        {f"penstock_queue_oldest_age_seconds{{{M}}}": "400x120", PAUSED: "0x120"},
        [
            {f"penstock_queue_oldest_age_seconds{{{M}}}": "400x120", PAUSED: "1x120"},
            {f"penstock_queue_oldest_age_seconds{{{M}}}": "20x120", PAUSED: "0x120"},
        ],
    ),
    "PenstockPausedForLong": (
        {PAUSED: "1x120", WAITING: "1x120"},
        [{PAUSED: "1x120", WAITING: "0x120"}, {PAUSED: "0x100 1x20", WAITING: "1x120"}],
    ),
    "PenstockEngineDead": (
        {STATE % "dead": "1x120", STATE % "busy": "0x120"},
        [{STATE % "dead": "0x120", STATE % "busy": "1x120"}, {STATE % "sleeping": "1x120"}],
    ),
    "PenstockEngineRestarts": (
        {f'penstock_engine_restarts_total{{{M},engine="h-0"}}': "0+1x120"},
        [{f'penstock_engine_restarts_total{{{M},engine="h-0"}}': "0x110 1x10"}],
    ),
    "PenstockRequestsFail": (
        {ENDED % "stop": "0+9x120", ENDED % "error": "0+1x120"},
        [{ENDED % "stop": "0+99x120", ENDED % "error": "0+1x120", ENDED % "cancelled": "0+50x120"}],
    ),
    "PenstockFirstTokenSlow": (
        {FIRST_TOKEN % "10.0": "0+1x120", FIRST_TOKEN % "20.0": "0+9x120", FIRST_TOKEN % "+Inf": "0+9x120"},
        [{FIRST_TOKEN % "10.0": "0+99x120", FIRST_TOKEN % "20.0": "0+100x120", FIRST_TOKEN % "+Inf": "0+100x120"}],
    ),
    "PenstockPreemptions": (
        {f'penstock_num_preemptions_total{{{M},engine="h-0"}}': "0+30x120"},
        [{f'penstock_num_preemptions_total{{{M},engine="h-0"}}': "0+1x120"}],
    ),
    "PenstockDeadLetterGrows": (
        {f"penstock_dead_letter_requests{{{M}}}": "0x110 2x10"},
        [{f"penstock_dead_letter_requests{{{M}}}": "7x120"}, {f"penstock_dead_letter_requests{{{M}}}": "7x110 1x10"}],
    ),
    "PenstockWebhooksGivenUp": (
        {'penstock_webhook_deliveries{state="dead"}': "0x110 2x10"},
        [
            {
                'penstock_webhook_deliveries{state="dead"}': "7x120",
                'penstock_webhook_deliveries{state="pending"}': "0+9x120",
            }
        ],
    ),
    "PenstockRedisAway": (
        {'penstock_redis_up{server="home"}': "0x120"},
        [{'penstock_redis_up{server="home"}': "1x120"}],
    ),
    "PenstockRedisNearlyFull": (
        {USED: "90x120", MOST: "100x120"},
        [{USED: "90x120", MOST: "200x120"}, {USED: "90x120", MOST: "0x120"}],
    ),
    "PenstockRedisNotPersistent": (
        {'penstock_redis_append_only{server="home"}': "0x120"},
        [{'penstock_redis_append_only{server="home"}': "1x120"}],
    ),
    "PenstockFiguresMissing": ({"penstock_snapshot_ok": "0x120"}, [{"penstock_snapshot_ok": "1x120"}]),
    "PenstockGatewayErrors": (
        {OK_5XX % 200: "0+9x120", OK_5XX % 503: "0+1x120"},
        [{OK_5XX % 200: "0+99x120", OK_5XX % 503: "0+1x120", OK_5XX % 404: "0+50x120"}],
    ),
    "PenstockGatewayProcessesDie": (
        {'penstock_gateway_process_restarts_total{instance="g"}': "0+1x120"},
        [{'penstock_gateway_process_restarts_total{instance="g"}': "0x110 1x10"}],
    ),
}


def test_every_alert_has_cases_and_a_paragraph() -> None:
    assert set(ALERTS) == set(CASES)
    assert sorted(re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE)) == sorted(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook"] == f"ops/guide/operating/alerts.md#{name.lower()}"


def test_every_metric_that_a_rule_names_is_exported() -> None:
    exported = set(ELSEWHERE)
    for spec in ALL.values():
        name = f"penstock_{spec.name}"
        parts = {MetricKind.COUNTER: ["_total"], MetricKind.HISTOGRAM: ["_bucket", "_sum", "_count"]}
        exported |= {name + part for part in parts.get(spec.kind, [""])}
    exported |= {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    exported |= {f"{family.name}_total" for family in Metrics().registry.collect() if family.type == "counter"}
    for name, rule in ALERTS.items():
        assert set(re.findall(r"penstock_\w+", rule["expr"])) <= exported, name


@needs_promtool
def test_the_rules_are_sound() -> None:
    result = promtool("check", "rules", str(RULES))
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.slow
def test_alerts_fire_where_they_are_to_and_only_there(tmp_path: Path) -> None:
    tests = []
    for alert, (firing, quiet) in CASES.items():
        tests.append(_case(alert, firing, fires=True))
        tests += [_case(alert, series, fires=False) for series in quiet]
    result = judge(tmp_path, tests)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_a_case_can_fail(tmp_path: Path) -> None:
    """So that a mistake in the form of the cases is not taken for quiet."""
    firing, (quiet, *_) = CASES["PenstockNoEngine"]
    assert judge(tmp_path, [_case("PenstockNoEngine", firing, fires=False)]).returncode != 0
    assert judge(tmp_path, [_case("PenstockNoEngine", quiet, fires=True)]).returncode != 0


@needs_promtool
def test_a_missing_exporter_raises_an_alert(tmp_path: Path) -> None:
    result = judge(tmp_path, [_case("PenstockFiguresMissing", {"up": "1x120"}, fires=True)])
    assert result.returncode == 0, result.stdout + result.stderr


def _case(alert: str, series: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """At the end of an hour: whether the alert is firing, whatever its labels."""
    alerts = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else []
    expression = f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
    return {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "60m", "exp_samples": alerts}],
    }


def judge(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    file = folder / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}))
    return promtool("test", "rules", str(file))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
