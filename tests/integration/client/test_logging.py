"""The client in an app: it writes to the app's log, and to nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys

from ...processes import DEADLINE_S
from ...redis_server import RedisServer

# The server ends while the client is connected, which logs a warning. Then it is there again, which logs a line, too.
APP = """
import asyncio, sys
{set_up}
from penstock.producer import Client

async def main():
    async with Client.connect(sys.argv[1], model="m") as client:
        print("connected", file=sys.stderr, flush=True)
        sys.stdin.readline()
        asking = asyncio.create_task(client.queue_stats())
        while not client._commands._outage.is_on:
            await asyncio.sleep(0.01)
        print("away", file=sys.stderr, flush=True)
        await asking

asyncio.run(main())
"""
NONE = ""
BASIC = "import logging; logging.basicConfig(level='INFO', format='%(levelname)s %(name)s %(message)s')"
QUIET = f"{BASIC}; logging.getLogger('penstock').setLevel('CRITICAL')"
STRUCTLOG_ON_STDOUT = "import structlog; structlog.configure()"
ATTRIBUTES = """
import json, logging
class Attributes(logging.Handler):
    def emit(self, record):
        line = {name: getattr(record, name, None) for name in ("levelname", "funcName", "used_for", "url")}
        print(json.dumps(line), file=sys.stderr)
logging.getLogger("penstock").addHandler(Attributes())
"""


def lines_of_app(server: RedisServer, set_up: str) -> list[str]:
    """Return what an app writes while its Redis goes away and comes back."""
    card = ModelCard(model="m", max_model_len=1000, vocab_size=50)
    server.execute("HSET", Keys().models(), "m", msgspec.json.encode(card).decode())
    app = subprocess.Popen(
        [sys.executable, "-c", APP.format(set_up=set_up), server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert app.stderr is not None
    assert app.stderr.readline() == "connected\n"
    assert app.stdin is not None
    server.kill()
    app.stdin.write("\n")
    app.stdin.flush()
    lines = []
    while (line := app.stderr.readline()) != "away\n":
        assert line, lines
        lines.append(line)
    assert app.poll() is None
    server.start()
    server.wait_until_ready()
    stdout, stderr = app.communicate(timeout=DEADLINE_S)
    assert app.returncode == 0, stderr
    assert stdout == ""
    return [*map(str.strip, lines), *stderr.splitlines()]


@pytest.mark.parametrize("set_up", [NONE, QUIET, STRUCTLOG_ON_STDOUT], ids=["none", "quiet", "structlog"])
def test_client_writes_no_logs_unless_the_app_configures_logging(server: RedisServer, set_up: str) -> None:
    assert lines_of_app(server, set_up) == []


def test_lines_have_event_and_fields_in_their_message(server: RedisServer) -> None:
    away = next(line for line in lines_of_app(server, BASIC) if "redis_away" in line)
    assert away.startswith("WARNING penstock.shared.redis_access.link redis_away ")
    assert f"url='{server.url}'" in away
    assert "used_for=" in away


def test_fields_are_attributes_of_records(server: RedisServer) -> None:
    records = [json.loads(line) for line in lines_of_app(server, ATTRIBUTES)]
    assert {record["used_for"] for record in records} <= {"commands", "subscriptions"}
    assert records[0] == {
        "levelname": "WARNING",
        "funcName": "_tell_of_it",
        "used_for": records[0]["used_for"],
        "url": server.url,
    }
