"""Servers that a process starts for itself end with it, even if it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ...processes import is_alive

PRIVATE = """
import sys
import redis
from penstock.ops.local.stack import private_redis

with private_redis(append_only=False) as url, redis.Redis.from_url(url) as client:
    print(client.info("server")["process_id"], flush=True)
    sys.stdin.read()
"""
ON_A_PORT = """
import sys
from pathlib import Path
from penstock.ops.lab.clusters.redis_processes import RedisProcesses, free_port

class OneServer(RedisProcesses):
    name = "one server"
    port = free_port()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def start(self):
        self._spawn(self.port, "--port", str(self.port), "--save", "")
        self._wait_until(lambda: self._is_ours(self.port), "it does not start", self.port)

with OneServer(Path(sys.argv[1])) as server:
    print(server._processes[server.port].pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "left"])
@pytest.mark.parametrize("code", [PRIVATE, ON_A_PORT], ids=["private", "on a port"])
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, code: str, is_killed: bool) -> None:
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        if is_killed:
            owner.kill()
        else:
            owner.stdin.close()
        owner.wait()
    give_up_at = time.monotonic() + 60.0
    while is_alive(pid):
        assert time.monotonic() < give_up_at, "the server is still there"
        time.sleep(0.02)
