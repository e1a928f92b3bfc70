"""The compose file as processes: its own commands, on ports and folders of a test's own.

Nothing is done that Docker would not do: a service's command is run with its environment, its secrets are files,
its name is an address. Only values that cannot be shared on one machine replace the file's (``_own``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import redis

from penstock.ops.demo.run import MODEL
from penstock.ops.lab.clusters.redis_processes import free_ports
from penstock.shared.redis_access.embedded import find_redis_server
from penstock.shared.redis_access.rights import Role

from ...processes import DEADLINE_S
from ...redis_server import acl_version
from ...warm_python import light_python
from ...yaml_files import load_yaml

COMPOSE = Path(__file__).parents[3] / "ops" / "deploy" / "compose" / "compose.yaml"
# Of other projects; their programs are not installed.
FOREIGN = {"prometheus", "grafana"}
PROGRAMS = {"penstock": "penstock.ops.cli", "worker": "penstock.worker.cli"}


def services() -> dict[str, dict[str, Any]]:
    return load_yaml(COMPOSE.read_text())["services"]


class ComposeStack:
    """All services that run all the time, in the order in which they depend on each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets = folder / "secrets"
        names = ("redis", "worker", "gateway", "dashboard", "metrics")
        self.ports: dict[str, int] = dict(zip(names, free_ports(len(names)), strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._managers: dict[str, socket.socket] = {}
        result = subprocess.run(
            [
                *_program("penstock"),
                "redis",
                "users",
                str(self.secrets),
                "--address",
                f"localhost:{self.ports['redis']}",
                "--redis-version",
                acl_version(),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        acl = self.secrets / "users.acl"
        # A user that may read the commands denied to the others.
        acl.write_text(f"{acl.read_text()}user judge on nopass ~* &* +@all\n")
        self.judge = redis.Redis(port=self.ports["redis"], username="judge", password="any")

    def start(self) -> None:
        """Start all services and wait until each is healthy."""
        own_services = {name: service for name, service in services().items() if name not in FOREIGN}
        self._start("redis", own_services.pop("redis"))
        self._wait("redis", self.judge.ping)
        for name, service in own_services.items():
            if "profiles" not in service:
                self._start(name, service)
        ready = {"worker": "/readyz", "gateway": "/ready", "dashboard": "/login", "metrics": "/readyz"}
        for name, path in ready.items():
            self._wait(name, lambda name=name, path=path: httpx.get(self.url(name) + path).raise_for_status())

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def redis_url(self, role: Role) -> str:
        return (self.secrets / f"{role}.url").read_text().strip()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def run(self, *command: str) -> str:
        """Run a single command as the service and return its output."""
        service = services()["operator"]
        result = subprocess.run(
            self._command([*command], python=light_python()),
            env=self._environment(service),
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def told(self, name: str) -> list[str]:
        """Return the process's messages to its service manager since the last call."""
        messages = []
        with suppress(BlockingIOError):
            while True:
                messages.append(self._managers[name].recv(4096).decode())
        return messages

    def denied(self) -> list[dict[str, Any]]:
        """Return the commands that Redis denied to users since the last call."""
        entries: Any = self.judge.acl_log(count=1000)
        self.judge.acl_log_reset()
        # redis-py names its connections, which an older Redis denies to users with few rights; it continues without.
        # So does the dashboard without the slow log, which it may not read.
        return [
            {name: entry[name] for name in ("username", "reason", "context", "object")}
            for entry in entries
            if not entry["object"].startswith(("client", "slowlog"))
        ]

    def stop(self) -> dict[str, int]:
        """End all with SIGTERM, Redis last, and return their exit statuses."""
        self.judge.close()
        statuses = {}
        for name in sorted(self._processes, key=lambda name: name == "redis"):
            process = self._processes[name]
            process.send_signal(signal.SIGTERM)
            try:
                statuses[name] = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait()
        return statuses

    def close(self) -> None:
        """Release the remaining resources when all processes have ended."""
        for manager in self._managers.values():
            manager.close()

    def _start(self, name: str, service: dict[str, Any]) -> None:
        (self.folder / name).mkdir()
        manager = self._managers[name] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.setblocking(False)
        manager.bind(str(self.folder / name / "notify"))
        with (self.folder / f"{name}.log").open("w") as log:
            self._processes[name] = subprocess.Popen(
                self._command(service["command"]),
                env=self._environment(service) | {"NOTIFY_SOCKET": str(self.folder / name / "notify")},
                cwd=self.folder / name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self, service: dict[str, Any]) -> dict[str, str]:
        """Return the variables that programs need of this process's, and those of the file."""
        inherited = {name: os.environ[name] for name in os.environ if not name.startswith("PENSTOCK_REDIS")}
        settings = self._own([f"{name}={value}" for name, value in service.get("environment", {}).items()])
        # /var/lib/penstock, which gateway and jobs share.
        inherited["PENSTOCK_DATA_DIR"] = str(self.folder / "data")
        return inherited | dict(word.split("=", 1) for word in settings)

    def _own(self, words: list[str]) -> list[str]:
        """Return the words of a command with the test's own paths and ports in place of the container's."""
        instead = {"/run/secrets": str(self.secrets), "/models/demo": str(MODEL), "0.0.0.0": "127.0.0.1"}
        instead |= {"8000": str(self.ports["gateway"]), "8090": str(self.ports["dashboard"])}
        instead |= {"9464": str(self.ports["metrics"]), "9465": str(self.ports["worker"])}
        replaced = []
        for word in words:
            for there, here in instead.items():
                word = word.replace(there, here) if "/" in there else (here if word == there else word)
            replaced.append(word)
        return replaced

    def _command(self, words: list[str], *, python: str = sys.executable) -> list[str]:
        program, *options = self._own(words)
        if program == "redis-server":
            return [str(find_redis_server()), *options, "--port", str(self.ports["redis"]), "--save", ""]
        return [*_program(program, python), *options]

    def _wait(self, name: str, ask: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                ask()
                return
            except (httpx.HTTPError, redis.RedisError):
                time.sleep(0.05)
            ended = [each for each, process in self._processes.items() if process.poll() is not None]
            assert not ended, f"{ended[0]} ended:\n{self.log(ended[0])[-3000:]}"
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.log(name)[-3000:]}"


def _program(name: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", PROGRAMS[name]]


def running(folder: Path) -> Iterator[ComposeStack]:
    """A stack for as long as a fixture lasts."""
    stack = ComposeStack(folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        stack.close()
