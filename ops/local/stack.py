"""A whole deployment of one's own for as long as a ``with`` block lasts: a private Redis and `worker start`."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ...shared.redis_access.embedded import EmbeddedRedis
from ...shared.shards import HOME, shards_text
from .life_line import LifeLine, unwind_on_sigterm
from .worker import LocalWorker


class LocalStack:
    """Starts Redis and `worker start` in processes of their own and waits until the model is served.

    Args:
        model: folder or hub name.
        worker_options: further options of `worker start`.
        num_workers: how many times `worker start` is run.
        redis_url: a Redis that runs already, instead of a private one; its owner stops it.
        shards: names of further private servers, which hold the models. The processes are told of them.
        of_each: further options of each worker.
        log_path: where the workers' logs go; a temporary file when None, shown if the start fails.

    Raises:
        ConfigurationError: a worker ended, or was not ready in time; the message has its own words.
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
    ) -> None:
        self._model = str(model)
        self._worker_options = list(worker_options)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._shard_names = shards
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
        """URLs of the servers that hold the models, by name; empty where the private Redis does."""
        return {name: self._servers[name].url for name in self._shard_names}

    @property
    def server_urls(self) -> dict[str, str]:
        """URLs of all servers, by name."""
        return {HOME: self.url, **self.shards}

    @property
    def ready_time_s(self) -> float:
        """How long the first worker took to serve, the last time that it was started."""
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
            # Redis last: a worker hands back to it.
            supervisors = [worker.pid for worker in self.workers]
            self._life_lines = [LifeLine(self.redis_pid(name), supervisors) for name in self._servers]
            for worker in self.workers:
                worker.await_ready()
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
        return int((self._data_folder(name) / "redis" / "redis.pid").read_text())

    def kill_redis(self, name: str = HOME) -> None:
        """kill -9 of the server; ``restart_redis`` brings it back with its data."""
        os.kill(self.redis_pid(name), signal.SIGKILL)

    def delete_data(self) -> None:
        """Delete what a server that was killed has written down; the next one begins with nothing."""
        folder = self._data_folder(HOME) / "redis"
        # A folder from Redis 7 on.
        shutil.rmtree(folder / "appendonlydir", ignore_errors=True)
        (folder / "appendonly.aof").unlink(missing_ok=True)

    def restart_redis(self, name: str = HOME) -> None:
        """Start the server again after it was killed, on the same socket and append-only file."""
        before, self._servers[name] = self._servers[name], EmbeddedRedis.start(self._data_folder(name))
        before.close()

    def stop(self) -> None:
        """Stop everything this stack started; twice does nothing."""
        for worker in self.workers:
            worker.stop()
        for line in self._life_lines:
            line.release()
        self._life_lines = []
        while self._servers:
            self._servers.popitem()[1].close()
        self._folder.cleanup()

    def stop_worker(self) -> None:
        """Stop the first worker alone, in order, and wait for its end; requests stay in Redis."""
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
