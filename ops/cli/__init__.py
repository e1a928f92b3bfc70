"""The program ``penstock``: send requests, inspect and change a deployment, manage the embedded Redis.

To add a subcommand, write a module that ends in a ``Command``, in the folder of its kind, and add it to ``COMMANDS``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import resolve_name

from ...shared.process import plain_structlog  # noqa: F401  # before structlog
from ...shared.process.command_line import Command, UsageError, run_program

LAB = "..lab"
# In the order in which --help lists them; each with its module and its name there.
COMMANDS = {
    "demo": ".trials.DEMO",
    "worker": ".engines.worker.WORKER",
    "status": ".status.COMMAND",
    "generate": ".work.generate.COMMAND",
    "chat": ".work.chat.CHAT",
    "run": ".work.chat.RUN",
    "example": ".work.example.COMMAND",
    "batch": ".work.batch.COMMAND",
    "jobs": ".servers.jobs.COMMAND",
    "webhook": ".access.webhook.COMMAND",
    "models": ".engines.models.COMMAND",
    "quality": ".engines.worker.QUALITY",
    "lora": ".engines.lora.COMMAND",
    "queue": ".queues.queue.COMMAND",
    "requests": ".queues.requests.COMMAND",
    "shard": ".queues.shard.COMMAND",
    "dead": ".queues.dead.COMMAND",
    "engine": ".engines.engine.COMMAND",
    "dashboard": ".servers.pages.DASHBOARD",
    "top": ".servers.pages.TOP",
    "audit": ".access.audit.COMMAND",
    "operator": ".access.keys.OPERATOR",
    "usage": ".access.usage.COMMAND",
    "budget": ".access.budget.COMMAND",
    "gateway": ".servers.gateway.COMMAND",
    "keys": ".access.keys.KEYS",
    "metrics": ".servers.metrics.COMMAND",
    "redis": ".servers.redis.REDIS",
    "bench": f"{LAB}.bench.command.COMMAND",
    "chaos": f"{LAB}.chaos.command.COMMAND",
    "sim": ".trials.SIM",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``penstock`` with ``argv`` (the process's arguments when None) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    # Only the requested command is imported, since importing all takes a third of a second.
    names = () if words[:1] == ["--version"] else tuple(COMMANDS)
    if words and words[0] in COMMANDS:
        names = words[:1]
    commands = [_command(name) for name in names]
    return run_program("penstock", "Durable, streaming LLM inference.", commands, argv)


def _command(name: str) -> Command:
    module, _, constant = COMMANDS[name].rpartition(".")
    try:
        return getattr(import_module(module, __name__), constant)
    except ModuleNotFoundError as error:
        # The wheel leaves the laboratory out.
        if not COMMANDS[name].startswith(LAB) or error.name != resolve_name(LAB, __name__):
            raise
    return Command(name, "Needs a clone of Penstock's repository.", _refuse_without_clone, forwards_arguments=True)


def _refuse_without_clone(_: argparse.Namespace) -> int:
    raise UsageError("this command is not part of the installed package; run it in a clone of Penstock's repository")
