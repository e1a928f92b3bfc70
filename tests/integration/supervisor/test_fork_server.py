"""Engine cores that are forked: by whom, what becomes of them when others die, and when nobody can fork."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock.ops.demo.run import MODEL
from penstock.producer import Client, SamplingParams
from penstock.worker.cli import host_services
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.processes.forking import (
    FORK_VERSION,
    NUM_DESCRIPTORS,
    ChildExited,
    ForkAnswer,
    ForkCore,
    Forked,
    ForkWorker,
    NotForked,
    fork_process,
    workers_address,
)
from penstock.worker.processes.ipc import FrameSplitter, frame, socket_pair
from penstock.worker.processes.process_tree import Lifeline
from penstock.worker.processes.progress import ProgressReader
from penstock.worker.programs import HostOptions
from penstock.worker.supervisor import fork_server
from penstock.worker.supervisor.fork_server import FORK_SERVER_VARIABLE, running_fork_server

from ...processes import DEADLINE_S, is_gone
from .conftest import StartedWorker, StartWorker, wait_until

PARAMS = SamplingParams(max_tokens=8, temperature=0.0)
CORES, WORKERS = "penstock.worker.engine.fork_server", "penstock.worker.serving.fork_server"


@pytest.fixture
def own_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `worker start` of this test keeps a fork server of its own, as it does for a user."""
    monkeypatch.delenv(FORK_SERVER_VARIABLE)


def num_events(worker: StartedWorker, event: str) -> int:
    return sum(told["event"] == event for told in worker.events)


def fork_servers_of(worker: StartedWorker, module: str = CORES) -> list[psutil.Process]:
    """Return the fork server, or none between two."""
    found: list[psutil.Process] = []
    for process in psutil.Process(worker.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if module in process.cmdline():
                found.append(process)
    return found


def started(worker: StartedWorker) -> list[bool]:
    """Return for each core so far whether it was forked."""
    return [bool(event["is_forked"]) for event in worker.events if event["event"] == "core_started"]


async def answer(redis_url: str, namespace: str) -> str:
    async with Client.connect(redis_url, namespace=namespace) as client, asyncio.timeout(DEADLINE_S):
        return (await client.generate("four plus two is", PARAMS)).text


@pytest.mark.usefixtures("own_fork_server")
async def test_a_fork_server_that_dies_takes_no_engine_along_and_a_supervisor_all(
    start_worker: StartWorker, redis_url: str, namespace: str
) -> None:
    worker = start_worker("--device", "cpu", "--engines", "2")
    await asyncio.to_thread(worker.await_ready)
    (server,), core = fork_servers_of(worker), worker.newest_core()
    (workers_server,), served = fork_servers_of(worker, WORKERS), worker.worker_processes()
    assert core.ppid() == server.pid
    assert [process.ppid() for process in served] == [workers_server.pid] * 2
    expected = await answer(redis_url, namespace)
    server.kill()
    workers_server.kill()
    await asyncio.to_thread(wait_until, lambda: num_events(worker, "fork_server_ended") == 2, "their ends are not told")
    assert await answer(redis_url, namespace) == expected
    assert not any(map(is_gone, [core, *served]))
    # An orphan's end is seen as well, and the engine comes back, however its core is started then.
    core.kill()
    await asyncio.to_thread(worker.await_event, "engine_restarted")
    assert await answer(redis_url, namespace) == expected
    # A supervisor that is killed takes them all along.
    for kind in (CORES, WORKERS):
        await asyncio.to_thread(wait_until, lambda kind=kind: fork_servers_of(worker, kind), "no other fork server")
    cores = [event["core_pid"] for event in worker.events if event["event"] == "core_started"]
    alive = [psutil.Process(int(str(pid))) for pid in cores if pid != core.pid]
    family = [*fork_servers_of(worker), *fork_servers_of(worker, WORKERS), *alive, *worker.worker_processes()]
    assert len(family) == 6
    worker.process.kill()
    await asyncio.to_thread(wait_until, lambda: all(map(is_gone, family)), f"left behind: {family}")


@pytest.mark.usefixtures("own_fork_server")
def test_a_core_that_hangs_does_not_outlive_its_worker_process(start_worker: StartWorker) -> None:
    worker = start_worker("--device", "cpu")
    worker.await_ready()
    core = worker.newest_core()
    core.suspend()
    # Nobody who knows the core is left then.
    fork_servers_of(worker)[0].kill()
    wait_until(lambda: num_events(worker, "fork_server_ended") == 1, "its end is not reported")
    worker.worker_processes()[0].kill()
    wait_until(lambda: is_gone(core), "the core outlived its worker process")
    worker.await_event("engine_restarted")
    worker.process.terminate()
    assert worker.await_end() == 0


def test_a_worker_process_stopped_before_it_handles_signals_ends() -> None:
    """The fork server ignores signals to its group; an early drain must not be lost thereby."""
    listener = (sys.executable, "-c", STOPS_ITSELF)
    with running_fork_server((), listener, listener) as address:

        async def fork() -> int:
            request = ForkWorker(
                version=FORK_VERSION,
                engine_id="e",
                environment=dict(os.environb),
                folder=os.getcwdb(),
                module_paths=sys.path,
            )
            return await (await fork_process(workers_address(address), request, [0, 1, 2], 30.0)).wait()

        assert asyncio.run(fork()) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_how_a_forked_core_ended_is_known(start_worker: StartWorker, number: signal.Signals) -> None:
    worker = start_worker("--device", "cpu")
    worker.await_ready()
    worker.newest_core().send_signal(number)
    lost = worker.await_event("engine_lost")
    assert lost["cause"] == f"the engine core was killed by {number.name}"
    worker.process.terminate()
    worker.await_end()
    assert started(worker)[0] is True


async def test_without_one_cores_are_started_by_themselves(
    start_worker: StartWorker, redis_url: str, namespace: str
) -> None:
    worker = start_worker("--device", "cpu", "--no-fork-server")
    await asyncio.to_thread(worker.await_ready)
    assert started(worker) == [False]
    (process,) = worker.worker_processes()
    assert worker.newest_core().ppid() == process.pid
    assert process.ppid() == worker.process.pid
    assert await answer(redis_url, namespace)
    worker.process.terminate()
    assert await asyncio.to_thread(worker.await_end) == 0


def test_one_that_is_away_costs_no_start(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORK_SERVER_VARIABLE, "/nowhere/socket")
    worker = start_worker("--device", "cpu")
    assert "No such file" in str(worker.await_event("worker_not_forked")["reason"])
    assert worker.await_event("worker_started")["is_forked"] is False
    assert "No such file" in str(worker.await_event("core_not_forked")["reason"])
    # From here on all is as without one: that such a core becomes ready is for the test above.
    worker.await_event("core_started")
    assert started(worker) == [False]


def test_a_temporary_folder_too_long_for_a_socket_disables_the_fork_server(tmp_path: Path, monkeypatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(fork_server.tempfile, "tempdir", str(long))
    with running_fork_server() as address:
        assert address == ""


# A child of it is told to stop as soon as it is there: the first thing that it does is to change its group.
STOPS_ITSELF = """
import os, signal, socket, sys
from penstock.worker.processes.fork_server import be_fork_server, ignore_stops
from penstock.worker.serving.fork_server import WORKERS
ignore_stops()
set_group = os.setsid
os.setsid = lambda: (set_group(), os.kill(os.getpid(), signal.SIGTERM))
be_fork_server(int(sys.argv[sys.argv.index("--listen-fd") + 1]), WORKERS)
"""
REFUSES = """
import os, socket, sys
from penstock.worker.engine.fork_server import CORES
from penstock.worker.processes.fork_server import ForkServer
ForkServer(socket.socket(fileno=int(sys.argv[sys.argv.index("--listen-fd") + 1])), 0, CORES, sys.argv[1]).run()
"""
# The driver of a GPU: its status says that this process has not initialized CUDA, and from the second fork on that it
# has.
DRIVER = """
import ctypes, types
statuses = iter([3, 0])
load = ctypes.CDLL
driver = types.SimpleNamespace(cuCtxGetCurrent=lambda _: next(statuses))
ctypes.CDLL = lambda name, *rest, **options: driver if name == "libcuda.so.1" else load(name, *rest, **options)
"""


class Asker:
    """A worker process's end of one connection."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(address)
        self._splitter = FrameSplitter()
        # Its core says hello there and waits for a configuration that never comes.
        self.ours, self.theirs = socket_pair()
        self.progress = ProgressReader()
        self.lifeline = Lifeline()

    def close(self) -> None:
        for end in (self.socket, self.ours, self.theirs):
            end.close()
        self.progress.close()
        self.lifeline.close()

    def ask(self, *, version: int = FORK_VERSION, num_descriptors: int = NUM_DESCRIPTORS, engine_id: str = "e") -> None:
        request = ForkCore(
            version=version,
            engine_id=engine_id,
            environment=dict(os.environb),
            folder=os.getcwdb(),
            module_paths=sys.path,
            log_options=["--log-level", "critical"],
        )
        nothing = os.open(os.devnull, os.O_RDWR)
        descriptors = [self.theirs.fileno(), self.progress.fd, nothing, self.lifeline.reader, nothing, nothing]
        try:
            socket.send_fds(self.socket, [frame(msgspec.msgpack.encode(request))], descriptors[:num_descriptors])
        finally:
            os.close(nothing)

    def answer(self) -> Forked | NotForked | ChildExited:
        payloads: list[bytes] = []
        while not payloads:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
            assert data, "the fork server hung up"
            for descriptor in descriptors:
                os.close(descriptor)
            payloads = self._splitter.feed(data)
        return msgspec.msgpack.decode(payloads[0], type=ForkAnswer)


def test_refused_forks_return_the_reason() -> None:
    command = (sys.executable, "-c", REFUSES)
    with running_fork_server((), (*command, "torch is broken")) as address:
        asker = Asker(address)
        asker.ask()
        assert asker.answer() == NotForked("torch is broken")
        asker.close()
    with running_fork_server((), (*command, "")) as address:
        for version, num_descriptors, words in ((99, 6, "speaks version"), (FORK_VERSION, 2, "2 descriptors of 6")):
            asker = Asker(address)
            asker.ask(version=version, num_descriptors=num_descriptors)
            refused = asker.answer()
            assert isinstance(refused, NotForked)
            assert words in refused.reason
            asker.close()
        garbled = Asker(address)
        garbled.socket.sendall(frame(b"\xc1"))
        refused = garbled.answer()
        assert isinstance(refused, NotForked)
        assert "cannot decode" in refused.reason
        garbled.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cores_of_any_device_are_forked(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(fork_server, "running_fork_server", lambda _: contextlib.nullcontext("/its/socket"))
    engine, process = EngineConfig(model=str(MODEL), device=device), {"log_level": "info", "log_format": "json"}
    with host_services.fork_server(HostOptions(), engine, {**process, "standby": False}) as address:
        assert address == "/its/socket"
    with host_services.fork_server(HostOptions(fork_server=False), engine, {**process, "standby": False}) as address:
        assert address == ""


def test_no_core_is_forked_once_cuda_is_initialized() -> None:
    with running_fork_server((), (sys.executable, "-c", DRIVER + REFUSES, "")) as address:
        first, second = Asker(address), Asker(address)
        first.ask(engine_id="first")
        assert isinstance(first.answer(), Forked)
        second.ask(engine_id="second")
        refused = second.answer()
        assert isinstance(refused, NotForked)
        assert "has initialized CUDA" in refused.reason
        first.close()
        second.close()


def test_the_next_core_of_an_engine_begins_when_its_last_has_ended() -> None:
    """A suspended core does not end on its own when it is no longer needed."""
    with running_fork_server((), (sys.executable, "-c", REFUSES, "")) as address:
        first, second = Asker(address), Asker(address)
        first.ask()
        forked = first.answer()
        assert isinstance(forked, Forked)
        core = psutil.Process(forked.pid)
        core.suspend()
        second.ask()
        assert isinstance(second.answer(), Forked)
        assert is_gone(core)
        assert first.answer() == ChildExited(-signal.SIGKILL)
        first.close()
        second.close()
