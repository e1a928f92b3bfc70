"""Fixtures for every suite: a real Redis of our own, a namespace per test, blocking calls caught."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import redis
import structlog
from blockbuster import BlockBuster

from penstock.ops.lab.clusters.cluster_trio import ClusterTrio
from penstock.ops.local import server as local_server
from penstock.ops.local import worker as local_worker
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.redis_access.embedded import find_redis_server
from penstock.worker.supervisor.fork_server import FORK_SERVER_VARIABLE, running_fork_server

from . import captured_logs, forked_lanes
from .fast import NEED_TORCH, SLOW, be_quick, do_without_torch, is_among
from .gate import Gate
from .lanes import arrange
from .redis_server import RedisServer
from .warm_python import LIGHT_PYTHON_VARIABLE, WARM_PYTHON_VARIABLE, WarmProgram

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Before a test module imports it: structlog's own does not see the loggers of ``shared.log.get_logger``.
structlog.testing.capture_logs = captured_logs.capture_logs

HAS_GPU = os.path.exists("/dev/nvidia0")
if not HAS_GPU:
    # Read when Triton is first imported, its own library of functions included; on a CPU nothing of ours uses it else.
    os.environ["TRITON_INTERPRET"] = "1"

# Read when torch is first imported, here and in programs of the tests; engines set their own number. Threads of torch
# wait for each other by spinning, which on few cores with several test processes would take most of the suite's time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# numpy's would be there from its import on, and keep lanes from being forked.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Set where a folder is to stay clean, it would have every process that a test starts compile all our sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A slow machine is no failure. Drawn examples are those of the last run as long as a test stays the same: others are
# looked for in a search for errors, and not where a change is judged.
hypothesis.settings.register_profile(
    "penstock",
    deadline=None,
    derandomize="PENSTOCK_TEST_EXPLORE" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("penstock")

# Of a Redis for the tests to use: a test may run others as a user of less rights.
REDIS_URL_VARIABLE = "PENSTOCK_TEST_REDIS_URL"

DEMO_MODEL = Path(__file__).parent.parent / "ops" / "demo" / "model"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="what needs neither torch nor an engine")
    parser.addoption(
        "--broker-on",
        choices=("server", "cluster"),
        default="server",
        help="where the broker's tests run; on a server some of them run on a cluster as well",
    )
    parser.addoption("--fast", action="store_true", help="what of that is quick")


_FORK_SERVER = pytest.StashKey[ExitStack]()

_OBJECTS_PER_COLLECTION = 20_000


def pytest_configure(config: pytest.Config) -> None:
    # Until everything is imported and collected there is next to no garbage, and looking for it is a third of the time.
    gc.disable()
    # Garbage of tests and the programs forked for them; by default it is looked for every 700 objects.
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts programs in the background so, and every process that a test starts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _log_plainly()
    if config.getoption("--fast"):
        config.option.without_torch = True
        be_quick()
    if config.getoption("--without-torch"):
        do_without_torch()
    elif lane := getattr(config, "workerinput", None):
        os.environ[FORK_SERVER_VARIABLE] = lane[FORK_SERVER_VARIABLE]
    elif not config.getoption("tx", default=[]):
        _keep_fork_server(config)
    if config.getoption("tx", default=[]):
        config.pluginmanager.register(forked_lanes)


@pytest.hookimpl(trylast=True, optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """After lanes are forked: a thread watches the fork server."""
    if not config.getoption("--without-torch"):
        _keep_fork_server(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    if not node.config.getoption("--without-torch"):
        node.workerinput[FORK_SERVER_VARIABLE] = os.environ[FORK_SERVER_VARIABLE]


def pytest_collection_finish() -> None:
    """Collections of garbage during the tests pass over all that was imported and collected: millions of objects."""
    gc.freeze()
    gc.enable()
    # Else libraries that count their objects at the end find these and report them as leaked.
    atexit.register(gc.unfreeze)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FORK_SERVER in config.stash:
        config.stash[_FORK_SERVER].close()


def _keep_fork_server(config: pytest.Config) -> None:
    """Keep one fork server for all engines of the run, so torch is imported once."""
    config.stash[_FORK_SERVER] = stack = ExitStack()
    program = str(Path(__file__).parent / "fork_server.py")
    cores, workers = (
        (os.environ.get(variable, sys.executable), program, kind)
        for variable, kind in ((WARM_PYTHON_VARIABLE, "cores"), (LIGHT_PYTHON_VARIABLE, "workers"))
    )
    running = running_fork_server(("--model", str(DEMO_MODEL), "--log-level", "warning"), cores, workers)
    os.environ[FORK_SERVER_VARIABLE] = stack.enter_context(running)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--without-torch") and is_among(collection_path, NEED_TORCH):
        return True
    return True if config.getoption("--fast") and is_among(collection_path, SLOW) else None


_GUARD = BlockBuster(
    scanned_modules=[f"penstock.{part}" for part in ("producer", "shared", "worker", "ops")],
    # A forked lane runs below it: calls of its tests themselves are not calls of our code.
    excluded_modules=["penstock.worker.processes.forking"],
)


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    """A blocking call inside the event loop of our own code fails the test."""
    _GUARD.activate()
    yield
    _GUARD.deactivate()


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Programs that run inside this process configure its logs, with the streams of their test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    _log_plainly()


def _log_plainly() -> None:
    """Drawing a traceback with rich, which structlog does where rich is installed, takes up to half a second."""
    structlog.reset_defaults()
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.fixture
def log_records() -> Iterator[list[logging.LogRecord]]:
    """Log records of the test, from INFO on; pytest's own fixture costs each test two milliseconds."""
    handler, root = _Records(logging.INFO), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler.records
    root.setLevel(level)
    root.removeHandler(handler)


class _Records(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def namespace() -> str:
    """A namespace no other test uses, so that tests may share one Redis and run side by side."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a private redis-server on a unix socket, one per test process, or of an external server."""
    if address := os.environ.get(REDIS_URL_VARIABLE):
        yield address
        return
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    server = subprocess.Popen(
        [str(find_redis_server()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    url = f"unix://{socket}"
    deadline = time.monotonic() + 60
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert server.poll() is None, "redis-server died"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)
    yield url
    server.kill()
    server.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, which it may stop, kill and start again."""
    server = RedisServer(tmp_path)
    server.start()
    server.wait_until_ready()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterTrio]:
    """A Redis cluster of three nodes, one per test process. It stays as it is."""
    with ClusterTrio(tmp_path_factory.mktemp("cluster")) as trio:
        yield trio


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Holds the requests of engines that are started afterwards where the test wants them."""
    gate = Gate(tmp_path)
    with gate.for_engines():
        yield gate


@pytest.fixture
async def commands(redis_url: str) -> AsyncIterator[CommandConnection]:
    connection = CommandConnection(redis_url)
    yield connection
    await connection.close()


@pytest.fixture
async def subscriber(redis_url: str) -> AsyncIterator[Subscriber]:
    following = Subscriber(redis_url)
    await following.open()
    yield following
    await following.close()


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """Start ``sys.executable`` with torch and transformers already imported, in a run with lanes."""
    monkeypatch.setattr(sys, "executable", os.environ.get(WARM_PYTHON_VARIABLE, sys.executable))
    return sys.executable


@pytest.fixture(scope="session", autouse=True)
def _warm_supervisors() -> Iterator[None]:
    """In a run with lanes each `worker start` and gateway of a deployment is forked from who has its imports."""
    with pytest.MonkeyPatch.context() as patch:
        for starter in (local_worker, local_server) if LIGHT_PYTHON_VARIABLE in os.environ else ():
            patch.setattr(starter, "start_program", WarmProgram)
        yield


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked gpu, with a line in the report, without an NVIDIA device; mark the rest that is not slow as
    fast.
    """
    if config.getoption("--fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    if config.getoption("loadgroup", default=False):
        arrange(items)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
