"""The program ``penstock``: ask models, look at a deployment, care for the embedded Redis.

To add a subcommand, write a module that ends in a ``Command``, in the folder of its kind, and enter it in ``COMMANDS``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from ...shared import plain_structlog  # noqa: F401  # before structlog
from ...shared.command_line import Command, run_program

# In the order in which --help lists them; each with its module.
COMMANDS = {
    "demo": "trials.demo",
    "worker": "engines.worker",
    "status": "status",
    "generate": "work.generate",
    "batch": "work.batch",
    "jobs": "servers.jobs",
    "webhook": "access.webhook",
    "models": "engines.models",
    "lora": "engines.lora",
    "queue": "queues.queue",
    "requests": "queues.requests",
    "shard": "queues.shard",
    "dead": "queues.dead",
    "engine": "engines.engine",
    "dashboard": "servers.dashboard",
    "top": "servers.top",
    "audit": "access.audit",
    "operator": "access.operator",
    "gateway": "servers.gateway",
    "keys": "access.keys",
    "metrics": "servers.metrics",
    "redis": "servers.embedded_redis",
    "bench": "trials.bench",
    "chaos": "trials.chaos",
    "sim": "trials.sim",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``penstock`` with ``argv`` (the process's arguments when None) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    # The one that is asked for is imported alone, since all of them take a third of a second.
    names = () if words[:1] == ["--version"] else tuple(COMMANDS)
    if words and words[0] in COMMANDS:
        names = words[:1]
    commands = [_command(name) for name in names]
    return run_program("penstock", "Durable, streaming LLM inference.", metadata.version("penstock"), commands, argv)


def _command(name: str) -> Command:
    return import_module(f"{__name__}.{COMMANDS[name]}").COMMAND
