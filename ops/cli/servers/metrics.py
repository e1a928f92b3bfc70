"""``penstock metrics``: metrics of a deployment for Prometheus and autoscalers."""

from __future__ import annotations

import argparse

from ....shared.process.command_line import Command, UsageError, add_redis_arguments
from ....shared.process.log import add_log_arguments, configure_logging
from ....shared.redis_access.embedded import resolve_redis_url
from ..command_parts import need_libraries

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9464
_NEEDED = ("starlette", "uvicorn", "prometheus_client")


def _add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help="0.0.0.0 for all of IPv4, :: for all of IPv6 and IPv4 (127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (9464)")
    parser.add_argument(
        "--metric-names",
        choices=("penstock", "vllm"),
        default="penstock",
        help="vllm adds vLLM's names, for boards and rules that were written for it (penstock)",
    )
    parser.add_argument("--refresh", type=float, default=2.0, metavar="S", help="how often Redis is read (2)")
    parser.add_argument(
        "--wanted-wait",
        type=float,
        default=10.0,
        metavar="S",
        help="time within which engines should serve waiting requests (10)",
    )
    parser.add_argument(
        "--wanted-kv-usage", type=float, default=0.8, metavar="SHARE", help="target usage of KV caches (0.8)"
    )
    add_log_arguments(parser)
    add_redis_arguments(parser)


def _run_metrics(arguments: argparse.Namespace) -> int:
    need_libraries("penstock metrics", *_NEEDED, extra="gateway")
    for name in ("refresh", "wanted_wait"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be a positive number of seconds")
    if not 0 < arguments.wanted_kv_usage <= 1:
        raise UsageError(f"--wanted-kv-usage must be above 0 and at most 1, got {arguments.wanted_kv_usage:g}")
    from ....shared.metrics.exposition import MetricNames
    from ...metrics.app import serve
    from ...metrics.wanted import WantedOptions

    configure_logging(arguments.log_level, arguments.log_format)
    with resolve_redis_url(arguments.redis_url) as url:
        return serve(
            url,
            host=arguments.host,
            port=arguments.port,
            namespace=arguments.namespace,
            shards=arguments.shards,
            names=MetricNames(arguments.metric_names),
            options=WantedOptions(arguments.wanted_wait, arguments.wanted_kv_usage),
            refresh_s=arguments.refresh,
        )


COMMAND = Command(
    "metrics", "Export metrics for Prometheus and autoscalers.", run=_run_metrics, add_arguments=_add_metrics_arguments
)
