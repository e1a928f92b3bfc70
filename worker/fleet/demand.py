"""The demand of a fleet: the queue of its model, and the engines that serve it."""

from __future__ import annotations

import msgspec

from ...shared.connection import CommandConnection
from ...shared.deployment.presence import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.keys import Keys
from ...shared.metrics import SERVING
from ...shared.partitions import open_queue
from ...shared.queue.stats import QueueStats
from .scaling import Load


class DemandSnapshot(msgspec.Struct, frozen=True):
    """The queue and the heartbeats of all serving engines of the model, at one time."""

    queue: QueueStats
    serving: list[EngineHeartbeat]

    def num_held_by(self, worker_prefix: str) -> int:
        """Return how many requests the engines of one worker have."""
        own = (heartbeat for heartbeat in self.serving if heartbeat.worker_id.startswith(worker_prefix))
        return sum(heartbeat.num_running_reqs + heartbeat.num_waiting_reqs for heartbeat in own)


class Demand:
    """Reader of one model's queue and engines.

    Args:
        max_num_seqs: largest number of requests in an engine's batch.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, max_num_seqs: int) -> None:
        self._connection = connection
        self._keys = keys
        self._model = model
        self._max_num_seqs = max_num_seqs
        # Last known speed of one engine, used while none serves.
        self._engine_tokens_per_s: float | None = None

    async def read(self) -> DemandSnapshot:
        """Read queue and heartbeats.

        Raises:
            RedisUnavailableError: Redis is unreachable for longer than the connection retries.
        """
        queue = await (await open_queue(self._connection, self._keys, self._model)).stats()
        heartbeats = await read_heartbeats(self._connection.execute, self._keys)
        return DemandSnapshot(
            queue, [beat for beat in heartbeats if beat.model == self._model and beat.state in SERVING]
        )

    def load(self, snapshot: DemandSnapshot, own_prefixes: list[str]) -> Load:
        """Return the input of the scaling rule; engines of workers with ``own_prefixes`` belong to the fleet."""
        queue, serving = snapshot.queue, snapshot.serving
        if queue.engine_tokens_per_s is not None:
            self._engine_tokens_per_s = queue.engine_tokens_per_s
        speed = self._engine_tokens_per_s
        own = tuple(own_prefixes)
        use = (max(beat.kv_cache_usage, beat.num_running_reqs / self._max_num_seqs) for beat in serving)
        return Load(
            # More engines could not serve a paused queue.
            num_waiting=0 if queue.is_paused else queue.depth,
            num_running=queue.num_running,
            backlog_s=queue.num_tokens / speed if speed else None,
            num_serving=len(serving),
            num_others=sum(not beat.worker_id.startswith(own) for beat in serving) if own else len(serving),
            busy=sum(min(1.0, share) for share in use),
        )
