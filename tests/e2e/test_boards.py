"""Every query of our Grafana board and of vLLM's, and every alert, on a scrape of ours by a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams

from ..processes import DEADLINE_S
from ..warm_python import light_python

pytestmark = [pytest.mark.xdist_group("deployment"), pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "ops" / "deploy"
BOARD, RULES = DEPLOY / "grafana" / "penstock.json", DEPLOY / "prometheus" / "penstock.yml"
PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="needs prometheus (Debian: apt-get install prometheus)"
)

# The queries of vLLM's board, as of examples/observability/prometheus_grafana/grafana.json at 4b5c627.
_IN = '{model_name="$model_name"}'
_TIMES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
VLLMS = [
    *(
        f"histogram_quantile({share}, sum by(le) (rate(vllm:{name}_bucket{_IN}[$__rate_interval])))"
        for name in _TIMES
        for share in (0.99, 0.95, 0.9, 0.5)
    ),
    *(
        f"rate(vllm:{name}_sum{_IN}[$__rate_interval])\n/\nrate(vllm:{name}_count{_IN}[$__rate_interval])"
        for name in _TIMES
    ),
    f"rate(vllm:prompt_tokens_total{_IN}[$__rate_interval])",
    f"rate(vllm:generation_tokens_total{_IN}[$__rate_interval])",
    f"vllm:num_requests_running{_IN}",
    f"vllm:num_requests_waiting{_IN}",
    f"vllm:kv_cache_usage_perc{_IN}",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{_IN}[$__rate_interval]))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{_IN}[$__rate_interval]))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{_IN}[$__rate_interval]))",
    f"rate(vllm:request_queue_time_seconds_sum{_IN}[$__rate_interval])",
    f"rate(vllm:request_prefill_time_seconds_sum{_IN}[$__rate_interval])",
    f"rate(vllm:request_decode_time_seconds_sum{_IN}[$__rate_interval])",
    f"rate(vllm:request_max_num_generation_tokens_sum{_IN}[$__rate_interval])",
]
OURS = [target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel["targets"]]
# A Redis without a limit, and a machine without a GPU.
MAY_BE_EMPTY = {"penstock_redis_max_memory_bytes > 0", *(query for query in OURS if "engine_gpu" in query)}
VARIABLES = {"$model_name": "demo", "$model": "demo", "$__rate_interval": "1m"}


@pytest.fixture(scope="module")
def exporter_url(deployment: LocalStack) -> Iterator[str]:
    """`penstock metrics` of the shared deployment: where it listens."""
    command = [light_python(), "-m", "penstock.ops.cli", "metrics", "--redis-url", deployment.url, "--port", "0"]
    command += ["--metric-names", "vllm", "--refresh", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("ready: ").strip()
        process.terminate()


@pytest.fixture(scope="module")
def prometheus_url(exporter_url: str, gateway: LocalGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that scrapes the exporter and the gateway every second: where it listens."""
    assert PROMETHEUS is not None
    folder = tmp_path_factory.mktemp("prometheus")
    urls = [httpx.URL(exporter_url), httpx.URL(gateway.base_url)]
    targets = [{"targets": [f"{url.host}:{url.port}"]} for url in urls]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "penstock", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append("--web.listen-address=127.0.0.1:0")
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{_listening_port(process.pid)}"
        finally:
            process.kill()


def _listening_port(pid: int) -> int:
    """The port that a process has taken, once it has."""
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        for connection in psutil.Process(pid).net_connections("tcp4"):
            if connection.status == psutil.CONN_LISTEN:
                return connection.laddr.port
        assert time.monotonic() < give_up_at, "prometheus does not listen"
        time.sleep(0.05)


async def _values(http: httpx.AsyncClient, query: str) -> list[float]:
    """Return the current values of a board's expression.

    Raises: AssertionError: Prometheus cannot evaluate it.
    """
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    answer: dict[str, Any] = (await http.get("/api/v1/query", params={"query": query})).json()
    assert answer["status"] == "success", answer
    return [float(sample["value"][1]) for sample in answer["data"]["result"]]


@needs_prometheus
@pytest.mark.parametrize("queries", [VLLMS, OURS], ids=["vllms", "ours"])
async def test_every_query_of_a_board_has_values(
    queries: list[str], prometheus_url: str, client: Client, gateway: LocalGateway
) -> None:
    unanswered = {query for query in queries if query not in MAY_BE_EMPTY}
    async with httpx.AsyncClient(base_url=prometheus_url, timeout=DEADLINE_S) as http, asyncio.timeout(DEADLINE_S):
        while unanswered:
            await client.generate("four plus two is", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
            async with httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as user:
                await user.get("/v1/models")
            try:
                results = {query: await _values(http, query) for query in sorted(unanswered)}
            except httpx.TransportError:
                continue  # it is not there yet
            unanswered = {query for query, values in results.items() if not any(map(math.isfinite, values))}
        for query in queries:
            await _values(http, query)


@needs_prometheus
async def test_every_alert_can_be_evaluated_and_none_of_engines_fires(prometheus_url: str, client: Client) -> None:
    async with httpx.AsyncClient(base_url=prometheus_url, timeout=DEADLINE_S) as http, asyncio.timeout(DEADLINE_S):
        rules: list[dict[str, Any]] = []
        while not rules or any(rule["health"] == "unknown" for rule in rules):
            try:
                answer = (await http.get("/api/v1/rules")).json()
            except httpx.TransportError:
                continue
            rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    # The deployment's Redis is one for tests.
    assert firing <= {"PenstockRedisNotPersistent"}
