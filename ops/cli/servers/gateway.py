"""``penstock gateway``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import sys

from redis.exceptions import RedisError

from ....shared.errors import PenstockError
from ....shared.params.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from ....shared.process.command_line import EXIT_FAILED, Command, add_redis_arguments, add_tracing_argument
from ....shared.process.log import add_log_arguments, configure_logging, get_logger
from ....shared.redis_access.embedded import resolve_redis_url
from ....shared.values.shown import shown
from ..command_parts import add_prices_argument, chosen_prices, need_libraries

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
MAX_WORKERS = 256
_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client")

log = get_logger(__name__)


def _add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help="0.0.0.0 for all of IPv4, :: for all of IPv6 and IPv4 (127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: 8000)")
    parser.add_argument(
        "--workers", type=_number_of_workers, default=1, metavar="N", help="processes that serve on the port (1)"
    )
    parser.add_argument("--model", help="of requests that name none; may be left out if only one is known, or served")
    parser.add_argument(
        "--api-keys", choices=("on", "off"), default="off", help="require an API key of `penstock keys`"
    )
    parser.add_argument("--tenant", default="default", help="of all requests without API keys (default: default)")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="whose pages may call from a browser: https://app.example.org, https://*.example.org, '*' for all",
    )
    parser.add_argument("--max-body-bytes", type=int, default=4 * 1024 * 1024, metavar="N", help="4 MiB by default")
    parser.add_argument(
        "--max-running-requests",
        type=int,
        default=10_000,
        metavar="N",
        help="more at a time get 429, of each process (default: 10000)",
    )
    _add_times(parser)
    _add_formats(parser)
    parser.add_argument(
        "--lora-updating", action="store_true", help="answer /v1/load_lora_adapter and /v1/unload_lora_adapter"
    )
    parser.add_argument(
        "--io-processor",
        action="append",
        default=[],
        metavar="NAME|MODULE:CLASS",
        help="turns `data` of /pooling into prompts, and results into answers; may be given several times (none)",
    )
    parser.add_argument("--fail-fast", action="store_true", help="503 while no engine serves the model, without a wait")
    parser.add_argument(
        "--metrics",
        choices=("own", "deployment"),
        default="own",
        help="what /metrics tells: of this process, or of queues and engines, too, as `penstock metrics` does (own)",
    )
    parser.add_argument("--files-dir", metavar="DIR", help="of /v1/files, shared by all hosts (in the data folder)")
    parser.add_argument(
        "--strict-fields", action="store_true", help="refuse unknown fields of bodies, instead of ignoring them"
    )
    add_prices_argument(parser, "for the costs of /v1/usage; read at the start")
    _add_images(parser)
    add_tracing_argument(parser)
    add_log_arguments(parser)
    add_redis_arguments(parser)


def _add_times(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--result-ttl", type=float, default=3600.0, metavar="S", help="answers and responses can be read so long (3600)"
    )
    parser.add_argument(
        "--reconnect-grace", type=float, default=5.0, metavar="S", help="a cut stream's request goes on so long (5)"
    )
    parser.add_argument("--lease-ttl", type=float, default=10.0, metavar="S", help="the same if this process dies (10)")
    parser.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="S", help="for running answers after SIGTERM (30)"
    )
    parser.add_argument(
        "--keep-alive-timeout",
        type=float,
        default=130.0,
        metavar="S",
        help="an idle connection is kept so long; longer than the proxy in front keeps it (130)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="for a request's head, then for its body, which gets 1 s more for each 8 KiB (30)",
    )
    parser.add_argument(
        "--status-wait", type=float, default=2.0, metavar="S", help="of a stream's status for a first event (2)"
    )
    parser.add_argument("--keep-alive", type=float, default=15.0, metavar="S", help="between comments of a stream (15)")


def _add_formats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help=f"{', '.join(sorted(TOOL_CALL_FORMATS))} (by the tokenizer)",
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help=f"{', '.join(sorted(REASONING_FORMATS))}; none leaves it in the answer (by the tokenizer)",
    )


def _add_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fetch-images",
        choices=("off", "on"),
        default="off",
        help="whether images that a body names by https are fetched, from public addresses; data URLs always are (off)",
    )
    parser.add_argument(
        "--image-network",
        action="append",
        default=[],
        metavar="CIDR",
        help="private network that may be asked for images, too, or 'all'; may be given several times (none)",
    )


def _number_of_workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {MAX_WORKERS}, got {shown(text)}")
    return int(text)


def _run_gateway(arguments: argparse.Namespace) -> int:
    need_libraries("the gateway", *_NEEDED, extra="gateway")
    configure_logging(arguments.log_level, arguments.log_format)
    try:
        return _serve_gateway(arguments)
    except (PenstockError, RedisError) as error:
        if arguments.log_format == "pretty" or (arguments.log_format == "auto" and sys.stderr.isatty()):
            raise
        # As a JSON line, because log collectors read JSON lines from standard error.
        log.critical("gateway_not_started", error=str(error), code=getattr(error, "code", "redis_error"))
        return EXIT_FAILED


def _serve_gateway(arguments: argparse.Namespace) -> int:
    from ....producer.gateway.processes import serve_by_processes
    from ....producer.gateway.serve import serve
    from ....producer.gateway.settings import GatewaySettings
    from ....producer.openai.parsers import ParserChoice

    with resolve_redis_url(arguments.redis_url) as url:
        settings = GatewaySettings(
            redis_url=url,
            namespace=arguments.namespace,
            shards=arguments.shards,
            model=arguments.model,
            tenant=arguments.tenant,
            api_keys=arguments.api_keys == "on",
            max_body_bytes=arguments.max_body_bytes,
            max_running_requests=arguments.max_running_requests,
            result_ttl_s=arguments.result_ttl,
            reconnect_grace_s=arguments.reconnect_grace,
            lease_ttl_s=arguments.lease_ttl,
            shutdown_timeout_s=arguments.shutdown_timeout,
            keep_alive_timeout_s=arguments.keep_alive_timeout,
            request_timeout_s=arguments.request_timeout,
            keep_alive_s=arguments.keep_alive,
            status_wait_s=arguments.status_wait,
            cors_origins=tuple(arguments.cors_origin),
            parsers=ParserChoice(tool_call=arguments.tool_call_parser, reasoning=arguments.reasoning_parser),
            lora_updating=arguments.lora_updating,
            fail_fast=arguments.fail_fast,
            files_dir=arguments.files_dir,
            deployment_metrics=arguments.metrics == "deployment",
            otlp_traces_endpoint=arguments.otlp_traces_endpoint,
            fetch_images=arguments.fetch_images == "on",
            image_networks=tuple(arguments.image_network),
            io_processors=tuple(arguments.io_processor),
            strict_fields=arguments.strict_fields,
            prices=chosen_prices(arguments),
        )
        if arguments.workers == 1:
            return serve(settings, host=arguments.host, port=arguments.port)
        return serve_by_processes(
            settings,
            host=arguments.host,
            port=arguments.port,
            num_processes=arguments.workers,
            log_level=arguments.log_level,
            log_format=arguments.log_format,
        )


COMMAND = Command("gateway", "Serve OpenAI's HTTP API.", run=_run_gateway, add_arguments=_add_gateway_arguments)
