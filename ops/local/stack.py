"""A temporary deployment for the time of a ``with`` block: a private Redis and ``worker start``, or the Redis alone."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import redis

from ...shared.redis_access.embedded import EmbeddedRedis
from ...shared.shards import HOME, shards_text
from .life_line import LifeLine, unwind_on_sigterm
from .worker import LocalWorker, failure

POLL_S = 0.1


class LocalStack:
    """A private Redis and `worker start` in their own processes. Entering waits until the model is served.

    Args:
        model: folder or hub name.
        worker_options: further options of `worker start`.
        num_workers: how many times `worker start` is run.
        redis_url: a running Redis to use instead of a private one; its owner stops it.
        shards: names of further private servers, which hold the models. They are passed to the workers.
        of_each: further options, by worker.
        log_path: file of the workers' logs, shown if the start fails; None for a temporary file.
        while_loading: is called with the workers' logs so far, a few times a second, while the stack is entered.

    Raises:
        ConfigurationError: a worker did not start; the message contains its log.
    """

    def __init__(
        self,
        model: str | Path,
        worker_options: Sequence[str] = (),
        log_path: Path | None = None,
        *,
        num_workers: int = 1,
        redis_url: str = "",
        shards: Sequence[str] = (),
        of_each: Sequence[Sequence[str]] = (),
        while_loading: Callable[[str], None] | None = None,
    ) -> None:
        self._model = str(model)
        self._worker_options = list(worker_options)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._shard_names = shards
        self._while_loading = while_loading
        self._of_each = of_each or [()] * num_workers
        self.log_path = log_path or Path(self._folder.name) / "worker.log"
        self._redis_url = redis_url
        self._servers: dict[str, EmbeddedRedis] = {}
        self._life_lines: list[LifeLine] = []
        self.workers: list[LocalWorker] = []

    @property
    def url(self) -> str:
        """URL of Redis."""
        return self._redis_url or self._servers[HOME].url

    @property
    def shards(self) -> dict[str, str]:
        """URLs of the servers that hold the models, by name; empty if the private Redis holds them."""
        return {name: self._servers[name].url for name in self._shard_names}

    @property
    def server_urls(self) -> dict[str, str]:
        """URLs of all servers, by name."""
        return {HOME: self.url, **self.shards}

    @property
    def ready_time_s(self) -> float:
        """Time from the last start of the first worker until it served."""
        return self.workers[0].ready_time_s

    def __enter__(self) -> LocalStack:
        unwind_on_sigterm()
        try:
            if not self._redis_url:
                for name in (HOME, *self._shard_names):
                    self._servers[name] = EmbeddedRedis.start(self._data_folder(name))
            shards = ["--shards", shards_text(self.shards)] if self._shard_names else []
            self.workers = [
                LocalWorker(self._model, self.url, [*self._worker_options, *shards, *own], self.log_path)
                for own in self._of_each
            ]
            for worker in self.workers:
                worker.spawn()
            # Redis ends last, because workers return their requests to it.
            supervisors = [worker.pid for worker in self.workers]
            self._life_lines = [LifeLine(self.redis_pid(name), supervisors) for name in self._servers]
            for worker in self.workers:
                worker.await_ready(self._while_loading)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def redis_pid(self, name: str = HOME) -> int:
        """Process id of the private Redis, or of a shard."""
        return _redis_pid(self._data_folder(name))

    def kill_redis(self, name: str = HOME) -> None:
        """Kill the server with SIGKILL; ``restart_redis`` starts it again with its data."""
        os.kill(self.redis_pid(name), signal.SIGKILL)

    def delete_data(self) -> None:
        """Delete the data of a killed server, so that the next one starts empty."""
        folder = self._data_folder(HOME) / "redis"
        # Redis 7 and later use a folder.
        shutil.rmtree(folder / "appendonlydir", ignore_errors=True)
        (folder / "appendonly.aof").unlink(missing_ok=True)

    def restart_redis(self, name: str = HOME) -> None:
        """Start a killed server again, on the same socket and append-only file."""
        before, self._servers[name] = self._servers[name], EmbeddedRedis.start(self._data_folder(name))
        before.close()

    def stop(self) -> None:
        """Stop everything that this stack started. A second call does nothing."""
        for worker in self.workers:
            worker.stop()
        for line in self._life_lines:
            line.release()
        self._life_lines = []
        while self._servers:
            # A worker that was killed may have left processes that are still connected.
            self._servers.popitem()[1].close(force=True)
        self._folder.cleanup()

    def await_failure(self) -> str:
        """Wait until the first worker or the private Redis ends by itself. Return the reason, with the worker's log."""
        worker = self.workers[0]
        while worker.is_running and self._servers[HOME].is_server_running:
            time.sleep(POLL_S)
        return failure("the private Redis ended" if worker.is_running else "the worker ended", worker.log)

    def stop_worker(self) -> None:
        """Stop the first worker with SIGTERM and wait for its end. Requests stay in Redis."""
        self.workers[0].stop()

    def start_worker(self) -> None:
        """Start the first worker again and wait until it serves.

        Raises:
            ConfigurationError: as the class.
        """
        self.workers[0].spawn()
        self.workers[0].await_ready()

    def _data_folder(self, name: str) -> Path:
        # The path of its socket may have 100 characters.
        return Path(self._folder.name) / ("data" if name == HOME else name)


@contextmanager
def private_redis(*, append_only: bool) -> Iterator[str]:
    """Yield the URL of a server on a unix socket, which ends with this process, however that ends.

    Args:
        append_only: write the append-only file every second, as a deployment does; False for memory only.
    """
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, EmbeddedRedis.start(Path(folder)) as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendonly", "yes" if append_only else "no")
            # A rewrite would fork and use a core during measurements.
            client.config_set("auto-aof-rewrite-percentage", 0)
        life_line = LifeLine(_redis_pid(Path(folder)))
        try:
            yield server.url
        finally:
            life_line.release()


def _redis_pid(data_folder: Path) -> int:
    return int((data_folder / "redis" / "redis.pid").read_text())
