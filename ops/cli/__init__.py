"""The program ``penstock``: ask models, look at a deployment, care for the embedded Redis.

To add a subcommand, write a module that ends in a ``Command`` and enter it in ``COMMANDS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from ...shared.command_line import Command, run_program
from . import (
    audit,
    batch,
    bench,
    chaos,
    dashboard,
    dead,
    demo,
    embedded_redis,
    engine,
    gateway,
    generate,
    jobs,
    keys,
    metrics,
    models,
    operator,
    queue,
    requests,
    shard,
    sim,
    status,
    top,
    webhook,
    worker,
)

COMMANDS: tuple[Command, ...] = (
    demo.COMMAND,
    worker.COMMAND,
    status.COMMAND,
    generate.COMMAND,
    batch.COMMAND,
    jobs.COMMAND,
    webhook.COMMAND,
    models.COMMAND,
    queue.COMMAND,
    requests.COMMAND,
    shard.COMMAND,
    dead.COMMAND,
    engine.COMMAND,
    dashboard.COMMAND,
    top.COMMAND,
    audit.COMMAND,
    operator.COMMAND,
    gateway.COMMAND,
    keys.COMMAND,
    metrics.COMMAND,
    embedded_redis.COMMAND,
    bench.COMMAND,
    chaos.COMMAND,
    sim.COMMAND,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``penstock`` with ``argv`` (the process's arguments when None) and return its exit status."""
    return run_program("penstock", "Durable, streaming LLM inference.", metadata.version("penstock"), COMMANDS, argv)
