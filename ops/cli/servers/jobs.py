"""``penstock jobs``: a process that runs webhooks, batches and generations as arq jobs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from ....shared.errors import ConfigurationError
from ....shared.process.command_line import EXIT_FAILED, Command, add_redis_arguments, add_tracing_argument
from ....shared.process.log import add_log_arguments, configure_logging
from ....shared.redis_access.embedded import resolve_redis_url


def _add_jobs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="what generate asks where a job names none; may be left out if one is known")
    parser.add_argument("--max-jobs", type=int, default=100, metavar="N", help="how many run at a time (100)")
    parser.add_argument(
        "--poll-delay", type=float, default=0.2, metavar="S", help="how often the queue is looked at (0.2)"
    )
    parser.add_argument(
        "--sweep-every", type=int, default=1, metavar="S", help="how often what is due is looked for; divides 60 (1)"
    )
    parser.add_argument(
        "--lease-ttl", type=float, default=10.0, metavar="S", help="when the jobs of a dead process are taken up (10)"
    )
    parser.add_argument(
        "--drain-timeout", type=int, default=10, metavar="S", help="time for running jobs at shutdown (10)"
    )
    parser.add_argument("--queue-name", default="", metavar="NAME", help="arq's queue (NAMESPACE:jobs)")
    parser.add_argument(
        "--allow-private-webhooks",
        action="append",
        default=[],
        metavar="CIDR",
        help="network that webhooks may call though it is private or loopback; may be repeated; 'all' for any",
    )
    parser.add_argument(
        "--webhook-timeout", type=float, default=15.0, metavar="S", help="how long an attempt may take (15)"
    )
    parser.add_argument(
        "--webhook-first-delay",
        type=float,
        default=5.0,
        metavar="S",
        help="before an event is tried again; each further delay is four times the one before, up to 6 h (5)",
    )
    parser.add_argument(
        "--webhook-attempts", type=int, default=11, metavar="N", help="after which an event is given up (11: 26 h)"
    )
    parser.add_argument("--files-dir", metavar="DIR", help="of batches, shared by all hosts (in the data folder)")
    parser.add_argument("--burst", action="store_true", help="end when nothing is due")
    parser.add_argument("--check", action="store_true", help="run nothing; exit status 0 if a process runs these jobs")
    add_tracing_argument(parser)
    add_log_arguments(parser)
    add_redis_arguments(parser)


def _run_jobs(arguments: argparse.Namespace) -> int:
    try:
        # Imported here, since the other commands do not need arq.
        from ....producer.jobs import JobSettings, WebhookSettings
        from ....producer.jobs.run import is_healthy, run_jobs
    except ImportError as error:
        raise ConfigurationError(str(error)) from error
    configure_logging(arguments.log_level, arguments.log_format)
    if arguments.log_level != "debug":
        # arq logs every job, every attempt, and a sweep every second.
        for name in ("arq", "httpx"):
            logging.getLogger(name).setLevel(logging.WARNING)
    with resolve_redis_url(arguments.redis_url) as url:
        settings = JobSettings(
            redis_url=url,
            namespace=arguments.namespace,
            shards=arguments.shards,
            model=arguments.model,
            queue_name=arguments.queue_name,
            max_jobs=arguments.max_jobs,
            poll_delay_s=arguments.poll_delay,
            sweep_every_s=arguments.sweep_every,
            lease_ttl_s=arguments.lease_ttl,
            drain_timeout_s=arguments.drain_timeout,
            files_dir=arguments.files_dir,
            otlp_traces_endpoint=arguments.otlp_traces_endpoint,
            webhooks=WebhookSettings(
                allowed_networks=tuple(arguments.allow_private_webhooks),
                timeout_s=arguments.webhook_timeout,
                first_delay_s=arguments.webhook_first_delay,
                max_attempts=arguments.webhook_attempts,
            ),
        )
        if not arguments.check:
            asyncio.run(run_jobs(settings, burst=arguments.burst))
            return 0
        if asyncio.run(is_healthy(settings)):
            print("jobs are run")
            return 0
        print("error: no process runs these jobs; start one with 'penstock jobs'", file=sys.stderr)
        return EXIT_FAILED


COMMAND = Command(
    "jobs", "Run webhooks, batches and generations as arq jobs.", run=_run_jobs, add_arguments=_add_jobs_arguments
)
