"""An engine over two hosts, each in a network of its own: generations go on when a rank, a host or the link is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.producer import Client
from penstock.worker.config.ranks import KEY_VARIABLE

from ..gate import Gate
from ..processes import is_gone
from .conftest import OPTIONS, Start
from .watching import finish, start_streams, undisturbed, until, until_logged

RANKS = ("--tensor-parallel-size", "2", "--deterministic")


def may_make_namespaces() -> bool:
    """Return whether this machine lets the tests make hosts; a container may refuse it even to root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    host = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--uts"]
    probe = [*host, "ip", "link", "add", "pa", "type", "veth", "peer", "name", "pb"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="namespaces need root, its rights, and iproute2")


class OtherHost:
    """A network namespace that is linked to this one, in which `worker start` runs ranks with process ids of its own.

    Attributes:
        address: of this side of the link.
        their_address: of the other side.
    """

    def __init__(self) -> None:
        # Link-local addresses by process id, so that tests beside this one have others.
        number = os.getpid() % 16_000 * 4
        self._name = f"penstock{os.getpid()}"
        self._theirs, ours = f"pb{os.getpid()}", f"pa{os.getpid()}"
        prefix = f"169.254.{number // 256}"
        self.address, self.their_address = f"{prefix}.{number % 256 + 1}", f"{prefix}.{number % 256 + 2}"
        self._worker: subprocess.Popen[bytes] | None = None
        _ip("netns", "add", self._name)
        _ip("link", "add", ours, "type", "veth", "peer", "name", self._theirs, "netns", self._name)
        _ip("address", "add", f"{self.address}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", self._name, "address", "add", f"{self.their_address}/30", "dev", self._theirs)
        _ip("-n", self._name, "link", "set", "lo", "up")
        self.link("up")

    def link(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down")."""
        _ip("-n", self._name, "link", "set", self._theirs, state)

    def start(self, model: Path, *options: str, log: Path) -> None:
        """Run its `worker start`, as of another host: it sees none of this host's processes."""
        python = [sys.executable, "-m", "penstock.worker.cli", "start", "--model", str(model), *OPTIONS, *options]
        host = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        named = ["sh", "-c", 'hostname b && exec "$@"', "sh", *python]
        with log.open("wb") as file:
            self._worker = subprocess.Popen(
                ["ip", "netns", "exec", self._name, *host, *named], stdout=file, stderr=subprocess.STDOUT
            )

    def rank(self) -> psutil.Process | None:
        """Its rank, as this host sees it; None while it runs none."""
        assert self._worker is not None
        family = psutil.Process(self._worker.pid).children(recursive=True)
        return next((process for process in family if process.name().startswith("rank ")), None)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
        _ip("netns", "del", self._name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def opened_host() -> Iterator[OtherHost]:
    host = OtherHost()
    try:
        yield host
    finally:
        host.close()


async def test_generations_resume_when_another_host_loses_its_rank_or_its_link(
    start: Start, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of one rank."""
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    alone = await start(1, "--deterministic")
    async with Client.connect(alone.url) as client:
        expected = await undisturbed(client)
    await asyncio.to_thread(alone.stop)
    with opened_host() as host:
        options = (*RANKS, "--nnodes", "2", "--master-addr", host.address, "--master-port", str(free_port()))
        host.start(MODEL, *options, "--node-rank", "1", log=tmp_path / "other.log")
        stack = await start(1, *options)
        async with Client.connect(stack.url) as client:
            whole, watched = await start_streams(client, gate)
            assert [output.token_ids for output in whole] == [output.token_ids for output in expected]
            rank = host.rank()
            assert rank is not None
            rank.kill()
            await finish(watched, whole, gate)
            log = await until_logged(stack, '"is_external": true')
            assert f"of host b at {host.their_address}) was killed by SIGKILL" in log

            whole, watched = await start_streams(client, gate)
            rank = host.rank()
            assert rank is not None
            host.link("down")
            cut_off = rank
            await until(lambda: is_gone(cut_off), what="a rank that is cut off computes on")
            await until_logged(stack, "is lost: its host is unreachable")
            host.link("up")
            await finish(watched, whole, gate)
