"""A whole deployment of one's own for as long as a ``with`` block lasts: a private Redis and `worker start`."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..shared.embedded import EmbeddedRedis
from .local_worker import LocalWorker
from .sentinel_trio import SentinelTrio


class LocalStack:
    """Starts Redis and `worker start` in processes of their own and waits until the model is served.

    Args:
        model: folder or hub name.
        worker_options: further options of `worker start`.
        num_workers: how many times `worker start` is run.
        trio: what runs instead of a private Redis; its owner stops it.
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
        trio: SentinelTrio | None = None,
    ) -> None:
        self._model = str(model)
        self._worker_options = list(worker_options)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._data_folder = Path(self._folder.name) / "data"
        self.log_path = log_path or Path(self._folder.name) / "worker.log"
        self._num_workers = num_workers
        self._trio = trio
        self._redis: EmbeddedRedis | None = None
        self.workers: list[LocalWorker] = []

    @property
    def url(self) -> str:
        """Where the private Redis listens."""
        if self._trio is not None:
            return self._trio.url
        assert self._redis is not None
        return self._redis.url

    @property
    def ready_time_s(self) -> float:
        """How long the first worker took to serve, the last time that it was started."""
        return self.workers[0].ready_time_s

    def __enter__(self) -> LocalStack:
        try:
            if self._trio is None:
                self._redis = EmbeddedRedis.start(self._data_folder)
            self.workers = [
                LocalWorker(self._model, self.url, self._worker_options, self.log_path)
                for _ in range(self._num_workers)
            ]
            for worker in self.workers:
                worker.spawn()
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

    def redis_pid(self) -> int:
        """Process id of the private Redis."""
        return int((self._data_folder / "redis" / "redis.pid").read_text())

    def kill_redis(self) -> None:
        """kill -9 of the server; ``restart_redis`` brings it back with its data."""
        os.kill(self.redis_pid(), signal.SIGKILL)

    def delete_data(self) -> None:
        """Delete what a server that was killed has written down; the next one begins with nothing."""
        folder = self._data_folder / "redis"
        # A folder from Redis 7 on.
        shutil.rmtree(folder / "appendonlydir", ignore_errors=True)
        (folder / "appendonly.aof").unlink(missing_ok=True)

    def restart_redis(self) -> None:
        """Start the server again after it was killed, on the same socket and append-only file."""
        before, self._redis = self._redis, EmbeddedRedis.start(self._data_folder)
        if before is not None:
            before.close()

    def stop(self) -> None:
        """Stop everything this stack started; twice does nothing."""
        for worker in self.workers:
            worker.stop()
        if self._redis is not None:
            self._redis.close()
            self._redis = None
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
