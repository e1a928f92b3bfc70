"""What a fleet looks at: the queue of its model, and the engines that serve it."""

from __future__ import annotations

import msgspec

from ...shared.connection import CommandConnection
from ...shared.deployment.heartbeats import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.keys import Keys
from ...shared.metrics import SERVING
from ...shared.partitions import open_queue
from ...shared.queue.stats import QueueStats
from .scaling import Load


class Seen(msgspec.Struct, frozen=True):
    """One look: the queue, and the heartbeats of all engines of the model that serve."""

    queue: QueueStats
    serving: list[EngineHeartbeat]

    def num_held_by(self, worker_prefix: str) -> int:
        """How many requests the engines of one worker have."""
        own = (beat for beat in self.serving if beat.worker_id.startswith(worker_prefix))
        return sum(beat.num_running_reqs + beat.num_waiting_reqs for beat in own)


class Demand:
    """Looks at one model's queue and engines.

    Args:
        max_num_seqs: most requests in an engine's batch.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, max_num_seqs: int) -> None:
        self._connection = connection
        self._keys = keys
        self._model = model
        self._max_num_seqs = max_num_seqs
        # Of one engine, as it was last known: it counts while none serves.
        self._engine_tokens_per_s: float | None = None

    async def look(self) -> Seen:
        """Read both now.

        Raises:
            RedisUnavailableError: Redis stays away for longer than the connection retries.
        """
        queue = await (await open_queue(self._connection, self._keys, self._model)).stats()
        beats = await read_heartbeats(self._connection.execute, self._keys)
        return Seen(queue, [beat for beat in beats if beat.model == self._model and beat.state in SERVING])

    def load(self, seen: Seen, own_prefixes: list[str]) -> Load:
        """Return what the scaling rule wants to know; engines of workers with these prefixes are the fleet's own."""
        queue, serving = seen.queue, seen.serving
        if queue.engine_tokens_per_s is not None:
            self._engine_tokens_per_s = queue.engine_tokens_per_s
        speed = self._engine_tokens_per_s
        own = tuple(own_prefixes)
        use = (max(beat.kv_cache_usage, beat.num_running_reqs / self._max_num_seqs) for beat in serving)
        return Load(
            # While it is paused more engines would serve nothing.
            num_waiting=0 if queue.is_paused else queue.depth,
            num_running=queue.num_running,
            backlog_s=queue.num_tokens / speed if speed else None,
            num_serving=len(serving),
            num_others=sum(not beat.worker_id.startswith(own) for beat in serving) if own else len(serving),
            busy=sum(min(1.0, share) for share in use),
        )
