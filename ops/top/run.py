"""The process of ``penstock top``: connections for the application, and its log in a file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ...shared.deployment.audit import acting_as, process_actor
from ...shared.errors import ConfigurationError
from ...shared.keys import Keys
from ...shared.process.log import configure_logging
from ...shared.shards import ShardsArgument, check_servers, make_commands
from ..views.access import Access
from ..views.source import RETRY_FOR_S, Source
from .app import Top

NO_LOG = Path("/dev/null")


def run_top(
    url: str,
    *,
    namespace: str,
    shards: ShardsArgument,
    access: Access,
    model: str = "",
    log_path: Path = NO_LOG,
) -> int:
    """Show a deployment in this terminal until the user quits, and return the exit status.

    Args:
        model: model whose tenants and requests are shown first; empty for the first model.
        log_path: file for warnings, since the terminal is in use.

    Raises:
        ConfigurationError: the log cannot be written.
        RedisUnavailableError, RedisUnsupportedError: Redis is unreachable, or lacks a required feature.
    """
    try:
        log = log_path.open("a")
    except OSError as error:
        raise ConfigurationError(f"--log-file {log_path} cannot be written: {error.strerror}") from error
    with log:
        configure_logging("warning", "json", log)
        try:
            return asyncio.run(_run_application(url, namespace, shards, access, model))
        finally:
            configure_logging("warning")


async def _run_application(url: str, namespace: str, shards: ShardsArgument, access: Access, model: str) -> int:
    await check_servers(url, shards, namespace=namespace)
    keys = Keys(namespace)
    connection = make_commands(url, shards, keys, retry_for_s=RETRY_FOR_S)
    source = Source(url, connection, keys, shards)
    try:
        await source.open()
        with acting_as(process_actor("top")):
            app = Top(source, access, model=model, redis_url=connection.shown_url)
            # Mouse support would keep the terminal from selecting text.
            await app.run_async(mouse=False)
            return app.return_code or 0
    finally:
        await source.close()
